"""The users and roles of docs/how-to/run-a-fleet.md in a real etcd: what a host may not do."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from testbed.etcd import EtcdCluster
from testbed.requirements import ROOT, find_program

from wattspan.config import FleetSettings
from wattspan.fleet.coordination import (
    Coordination,
    CoordinationError,
    Election,
    KeyWrite,
    PermissionDeniedError,
)
from wattspan.fleet.records import FleetKeys

ETCDCTL = find_program("etcdctl")
pytestmark = [
    pytest.mark.needs_etcd,
    pytest.mark.skipif(ETCDCTL is None, reason="no etcdctl; install Debian's etcd-client"),
]

PAGE = (ROOT / "docs" / "how-to" / "run-a-fleet.md").read_text()
KEYS = FleetKeys(FleetSettings().prefix)
JOBS = "/wattspan/fleet-jobs/train/"


def commands_of_roles(endpoint: str) -> str:
    """The commands of the page, for a member without TLS and one job."""
    (block,) = re.findall(r"```sh\n(export ETCDCTL_API=3 .*?)```", PAGE, re.DOTALL)
    block = re.sub(
        r"ETCDCTL_ENDPOINTS=\S+ ETCDCTL_CACERT=\S+", f"ETCDCTL_ENDPOINTS={endpoint}", block
    )
    block = block.replace('jobs=""', 'jobs="train"')
    block = re.sub(r"user add root .*", "user add root:rootpassword", block)
    return f"set -e\n{block}"


class Users:
    """Clients of the cluster by the names of their users."""

    def __init__(self, cluster: EtcdCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    def client(self, name: str) -> Coordination:
        path = self._folder / f"{name}.password"
        path.chmod(0o600)
        return self._cluster.client(user=f"wattspan-{name}", password_file=str(path))


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    folder = tmp_path / "operator"
    folder.mkdir()
    with EtcdCluster(tmp_path) as cluster:
        assert ETCDCTL is not None
        environ = {"PATH": f"{os.environ['PATH']}:{Path(ETCDCTL).parent}"}
        subprocess.run(
            ["bash", "-c", commands_of_roles(cluster.urls[0])],
            cwd=folder, env=environ, check=True, timeout=120,
        )  # fmt: skip
        yield Users(cluster, folder)


def test_host_writes_its_own_records_only(users: Users) -> None:
    host, operator = users.client("host-3"), users.client("operator")
    operator.commit([KeyWrite(KEYS.terms("host-3"), b"{}"), KeyWrite(KEYS.book, b"{}")])
    own = [KEYS.report("host-3"), f"{JOBS}hosts/host-3", f"{JOBS}explorer"]
    for key in own:
        host.commit([KeyWrite(key, b"mine")])
        host.commit([KeyWrite(key, None)])
    lease = host.grant(60)
    foreign = [
        KEYS.report("host-1"), KEYS.report("host-33"), KEYS.report("host-3/x"), KEYS.report(""),
        KEYS.terms("host-3"), KEYS.default_terms, KEYS.book, KEYS.leader,
        KEYS.allotment("host-3"), f"{JOBS}hosts/host-1", "/wattspan/fleet-jobs/other/explorer", "x",
    ]  # fmt: skip
    for key in foreign:
        for write in (KeyWrite(key, b"1"), KeyWrite(key, None), KeyWrite(key, b"1", lease)):
            with pytest.raises(PermissionDeniedError, match="permission denied"):
                host.commit([write])
            with pytest.raises(PermissionDeniedError):
                host.commit([KeyWrite(own[0], b"mine"), write])
    stored = {entry.key: entry.value for entry in host.read(KEYS.prefix).entries}
    assert stored == {KEYS.terms("host-3"): b"{}", KEYS.book: b"{}"}
    with pytest.raises(PermissionDeniedError):
        host.read("")


def test_only_named_hosts_stand_for_election(users: Users) -> None:
    other, leader = users.client("host-3"), users.client("host-1")
    with pytest.raises(PermissionDeniedError):
        Election(other, KEYS.leader, "host-3").campaign(other.grant(60))
    lease = leader.grant(60)
    assert Election(leader, KEYS.leader, "host-1").campaign(lease)
    with suppress(CoordinationError):
        other.revoke(lease)
    assert [one.value for one in other.read(KEYS.leader).entries] == [b"host-1"]
    leader.commit([KeyWrite(KEYS.report("host-3"), None)])  # it ends silent sessions
    with pytest.raises(PermissionDeniedError):
        leader.commit([KeyWrite(KEYS.terms("host-1"), b"{}")])
