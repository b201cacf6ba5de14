"""Installation of the package by an administrator on a machine with counters."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.debian_machine import CONFIG, CPU_MAY_BE_CAPPED, Machine
from testbed.debian_root import the_package

pytestmark = pytest.mark.needs_debian


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as machine:
        machine.install(the_package())
        yield machine


@pytest.fixture
def config(machine: Machine) -> Iterator[Path]:
    """The configuration, which is as it was after the test, and in force."""
    path = machine.root.path / CONFIG.lstrip("/")
    before = path.read_text()
    yield path
    path.write_text(before)
    machine.host.systemctl("reset-failed", "wattspan.service", "wattspan-capper.service")
    machine.host.systemctl("stop", "wattspan-capper.service", "holder.service", check=False)
    machine.host.systemctl("restart", "wattspan.service")


def test_packaged_service_measures_after_installation_and_boot(machine: Machine) -> None:
    assert machine.active("wattspan.service")
    assert machine.host.property("wattspan.service", "UnitFileState") == "enabled"
    assert machine.host.property("wattspan-capper.socket", "UnitFileState") == "enabled"
    assert machine.host.property("wattspan-counters.socket", "UnitFileState") == "disabled"
    machine.measuring()
    shown = {name for name in machine.totals() if name.startswith("hw_energy_joules_total")}
    told = {match[1] for name in shown if (match := re.search(r'"hw_id": "([^"]*)"', name))}
    assert told == {
        "rapl:package-0",
        "rapl:package-0/dram",
        "rapl:package-1",
        "rapl:package-1/dram",
    }


def test_restarted_service_continues_its_totals(machine: Machine) -> None:
    before = machine.measuring()
    machine.host.systemctl("stop", "wattspan")
    assert machine.totals() == {}
    machine.host.systemctl("start", "wattspan")
    assert machine.measuring() >= before


def test_packaged_agent_is_unprivileged_and_reads_counters_by_group(machine: Machine) -> None:
    pid = machine.host.property("wattspan.service", "MainPID")
    status = machine.host.run("cat", f"/proc/{pid}/status").stdout
    user = machine.host.run("id", "-u", "wattspan").stdout.strip()
    assert f"Uid:\t{user}\t{user}\t{user}\t{user}\n" in status
    assert re.search(r"CapEff:\t0+\n", status)
    passwd = machine.host.run("getent", "passwd", "wattspan").stdout
    assert passwd.strip().endswith(":/usr/sbin/nologin")


FETCHED = """
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:9949/page/tuner.js", timeout=20).read().decode())
"""


def test_live_page_and_messages_name_installed_pages(machine: Machine) -> None:
    machine.measuring()
    for command in (["python3", "-c", FETCHED], ["wattspan", "report", "--by", "span"]):
        named = re.findall(r"\S*docs/\S+\.md", machine.host.run(*command).stdout)
        assert named, command
        assert [one for one in named if not one.startswith("/usr/share/doc/wattspan/")] == []
        assert [one for one in named if not (machine.root.path / one[1:]).exists()] == []


def test_configuration_and_totals_are_private(machine: Machine) -> None:
    for path in (CONFIG, "/var/lib/wattspan"):
        told = machine.host.run("stat", "--format=%a", path).stdout
        assert int(told, 8) & 0o007 == 0, path
    assert machine.host.run("stat", "--format=%U:%G", CONFIG).stdout == "root:wattspan\n"


def test_killed_packaged_capper_restores_the_original(machine: Machine, config: Path) -> None:
    machine.configure(CPU_MAY_BE_CAPPED)
    machine.hold_a_cap()
    (entry,) = machine.journal()
    assert entry["original"] * 1000 == machine.original
    machine.host.kill("wattspan-capper.service", signal.SIGKILL)
    machine.until(machine.restored, "the original is back")


def test_broken_configuration_refuses_the_start_in_a_sentence(
    machine: Machine, config: Path
) -> None:
    machine.configure('[agent]\nintervalk = "1s"\n')
    machine.host.systemctl("stop", "wattspan")
    done = machine.host.run("systemctl", "start", "wattspan", check=False)
    assert done.returncode != 0
    machine.until(lambda: "intervalk" in machine.host.journal(), "the reason is told")
    (line,) = {one for one in machine.host.journal().splitlines() if "intervalk" in one}
    assert "interval" in line.replace("intervalk", ""), line
    assert machine.host.property("wattspan.service", "ActiveState") == "failed"


def test_machine_without_counters_can_show_an_emulated_host(machine: Machine, config: Path) -> None:
    machine.configure('[emulation]\nprofile = "laptop"\n')
    machine.host.systemctl("restart", "wattspan")
    machine.measuring()
    assert all('"provenance": "emulated"' in n for n in machine.totals() if n.startswith("hw_"))
