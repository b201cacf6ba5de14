"""`wattspan doctor` on a host of a fleet, with a real etcd: what it can reach, and what it may."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from testbed.certificates import Authority
from testbed.etcd import EtcdCluster
from testbed.program import options, wattspan
from testbed.reserved_port import reserved_port
from testbed.waiting import eventually

from wattspan.cli.doctor import Finding, Severity
from wattspan.cli.doctor.fleet import etcd_members, examine_fleet
from wattspan.clock import SystemClock
from wattspan.config import FleetSettings
from wattspan.fleet.coordination import UnreachableError
from wattspan.ports import CapsError

pytestmark = [pytest.mark.needs_etcd, pytest.mark.slow]

CAPPER = SimpleNamespace(state=None, error=CapsError(""))


def told(cluster: EtcdCluster, **settings: object) -> Mapping[str, Finding]:
    chosen = FleetSettings(**({"endpoints": tuple(cluster.urls), "name": "host-1"} | settings))
    clock = SystemClock()
    found = examine_fleet(chosen, "box", clock, etcd_members(chosen, clock), lambda: CAPPER)
    return {finding.what: finding for finding in found}


def test_doctor_examines_a_fleet_without_writing_to_etcd(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster, reserved_port() as port:
        lost = f"http://127.0.0.1:{port}"
        settings = {
            "fleet.endpoints": json.dumps([*cluster.urls, lost]),
            "fleet.name": "host-1",
            "agent.state_dir": tmp_path / "state",
            "agent.run_dir": tmp_path / "run",
        }
        revision = cluster.client().read("").revision
        done = wattspan("doctor", "--json", "--emulate", "laptop", *options(settings))
        assert done.returncode == 0, done.stderr
        assert cluster.client().read("").revision == revision
    sections = {one["title"]: one["findings"] for one in json.loads(done.stdout)["sections"]}
    found = {one["what"]: (one["mark"], one["detail"]) for one in sections["Fleet"]}
    assert found[f"etcd {lost}"] == ("warn", "connection refused")
    mark, detail = found[f"etcd {cluster.urls[0]}"]
    assert (mark, detail.partition(", ")[2]) == ("ok", "and permits reads and writes")
    assert found["allotment"] == ("warn", "host-1 has never joined this fleet, or was removed")
    assert found["budget"][0] == "warn"
    (capper,) = (one for one in sections["Tuning and caps"] if one["what"] == "capper")
    assert "none is needed" not in capper["detail"]


def test_doctor_names_the_fault_of_credentials(tmp_path: Path) -> None:
    def password(text: str) -> str:
        path = tmp_path / f"password-{text}"
        path.write_text(f"{text}\n")
        path.chmod(0o600)
        return str(path)

    with EtcdCluster(tmp_path) as cluster:
        cluster.enable_authentication({"root": "r00t", "fleet": "secret"}, "/w/")
        what = f"etcd {cluster.urls[0]}"
        good = {"user": "fleet", "password_file": password("secret")}
        assert told(cluster, prefix="/w/", **good)[what].mark is Severity.OK
        other = told(cluster, prefix="/other/", **good)[what]
        assert (other.mark, "permission denied" in other.detail) == (Severity.FAIL, True)
        assert "readwrite permission for the prefix" in other.remedy
        wrong = told(cluster, prefix="/w/", user="fleet", password_file=password("guess"))[what]
        assert "rejects the credentials" in wrong.detail
        assert wrong.remedy == "Correct user and password_file in [fleet]."
        none = told(cluster, prefix="/w/")[what]
        assert (none.mark, none.remedy) == (wrong.mark, wrong.remedy)
        absent = told(cluster, user="fleet", password_file=str(tmp_path / "absent"))[what]
        assert absent.remedy == "Correct password_file in [fleet]."


def test_doctor_names_the_fault_of_certificates(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server = authority.issue("server")
    tls = [f"--cert-file={server.certificate}", f"--key-file={server.key}"]
    with EtcdCluster(tmp_path, tls=tls) as cluster:
        client = cluster.client(tls_ca=str(authority.certificate))

        def answers() -> bool:
            with suppress(UnreachableError):
                client.read("k")
                return True
            return False

        eventually(answers, "the member answers")
        what = f"etcd {cluster.urls[0]}"
        assert told(cluster, tls_ca=str(authority.certificate))[what].mark is Severity.OK
        foreign = told(cluster, tls_ca=str(stranger.certificate))[what]
        assert foreign.mark is Severity.FAIL
        assert foreign.detail.startswith("its certificate is not trusted (")
        assert "TLS files" in foreign.remedy
        absent = told(cluster, tls_ca=str(tmp_path / "absent.pem"))[what]
        assert "absent.pem: no such file" in absent.detail
        plain = cluster.urls[0].replace("https", "http")
        assert told(cluster, endpoints=(plain,))[f"etcd {plain}"].mark is Severity.FAIL
