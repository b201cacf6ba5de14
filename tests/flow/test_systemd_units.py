"""systemd's verdict on the shipped units equals the reference."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from testbed.requirements import ROOT, find_program
from testbed.systemd_host import SystemdHost
from testbed.systemd_wattspan import AGENT, CAPPER, COUNTERS, SHIPPED, SHIPPED_PROGRAM, UNITS

pytestmark = pytest.mark.needs_systemd

REFERENCE = (ROOT / "docs" / "reference" / "units.md").read_text(encoding="utf-8")
MOST = 2.0


def _analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _exposure(unit: str) -> float:
    threshold = f"--threshold={round(MOST * 10)}"
    done = _analyze("security", "--offline=true", threshold, SHIPPED / unit)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def _directives(unit: str) -> list[str]:
    lines = (SHIPPED / unit).read_text(encoding="utf-8").splitlines()
    return [line.partition("=")[0] for line in lines if re.match(r"[A-Z]\w+=", line)]


@pytest.mark.parametrize("unit", [AGENT, CAPPER, COUNTERS])
def test_unit_exposure_matches_the_reference(unit: str) -> None:
    measured = _exposure(unit)
    assert measured <= MOST
    row = re.search(rf"^\| `{re.escape(unit)}` \| \*\*([\d.]+)\*\* \|", REFERENCE, re.MULTILINE)
    assert row is not None, f"the reference has no row of {unit}"
    if " 252 " in _analyze("--version").stdout:  # the weights are another version's own
        assert float(row[1]) == measured


def test_unit_that_is_looser_is_found(tmp_path: Path) -> None:
    loose = re.sub(r"(?m)^(Protect|Private|Restrict|Capability|System)\w+=.*$", "", _text(AGENT))
    (tmp_path / AGENT).write_text(loose)
    done = _analyze("security", "--offline=true", "--threshold=20", tmp_path / AGENT)
    assert done.returncode != 0


def test_systemd_verify_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit).write_text(_text(unit).replace(SHIPPED_PROGRAM, "/bin/true"))
    done = _analyze("verify", *(tmp_path / unit for unit in UNITS))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_systemd_would_find_something_wrong(tmp_path: Path) -> None:
    (tmp_path / AGENT).write_text(_text(AGENT).replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    assert "NoNewPrivilege" in _analyze("verify", tmp_path / AGENT).stderr


@pytest.mark.parametrize("unit", UNITS)
def test_reference_explains_every_directive(unit: str) -> None:
    explained = set(re.findall(r"`(\w+)=", REFERENCE))
    assert [one for one in _directives(unit) if one not in explained] == []


@pytest.mark.parametrize("unit", UNITS)
def test_only_the_path_of_the_program_is_to_be_changed_elsewhere(unit: str) -> None:
    commands = re.findall(r"(?m)^Exec\w+=(.*)$", _text(unit))
    ours = [one for one in commands if "wattspan" in one]
    assert all(one.startswith(f"{SHIPPED_PROGRAM} ") for one in ours)
    assert _text(unit).count(SHIPPED_PROGRAM) == len(ours)


def test_udev_rule_grants_the_group_a_new_counter(tmp_path: Path) -> None:
    if find_program("udevadm") is None:
        pytest.skip("no udevadm; install Debian's udev")
    rule = (SHIPPED / "udev" / "60-wattspan.rules").read_text(encoding="utf-8")
    # udev looks at real devices only, and this machine may have no counter: any device will do,
    # with a file of its own for the counter's.
    device = "/sys/devices/virtual/mem/null"
    stand_in = rule.replace('"powercap"', '"mem"').replace("energy_uj", "uevent")
    with SystemdHost(tmp_path / "host") as host:
        host.inside("/etc/udev/rules.d").mkdir(parents=True, exist_ok=True)
        host.inside("/etc/udev/rules.d/60-wattspan.rules").write_text(stand_in)
        told = host.run("udevadm", "test", "--action=add", device, check=False).stdout
        other = host.run("udevadm", "test", "--action=add", "/sys/class/net/lo", check=False).stdout
    runs = re.findall(r"^run: '(.*)'", told, re.MULTILINE)
    assert f"/bin/chgrp wattspan {device}/uevent" in runs
    assert f"/bin/chmod 0440 {device}/uevent" in runs
    assert "wattspan" not in other.partition("run:")[2]


def _text(unit: str) -> str:
    return (SHIPPED / unit).read_text(encoding="utf-8")
