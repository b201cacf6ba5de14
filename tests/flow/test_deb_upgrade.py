"""A newer package over an older one, and an older one back again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.debian_machine import CONFIG, CPU_MAY_BE_CAPPED, Machine
from testbed.debian_root import another_version, the_package

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_debian]


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return another_version(the_package(), "9.0", tmp_path_factory.mktemp("newer"))


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine() as machine:
        machine.install(the_package())
        yield machine


def test_upgrade_keeps_totals_and_configuration_and_restores_caps_first(
    machine: Machine, newer: Path
) -> None:
    machine.configure(CPU_MAY_BE_CAPPED)
    (machine.root.path / CONFIG.lstrip("/")).chmod(0o644)
    before = machine.measuring()
    first = machine.host.property("wattspan.service", "MainPID")
    machine.hold_a_cap()

    said = machine.install(newer)

    assert "does not run" not in said
    assert machine.restored()
    assert _version(machine) == "9.0"
    assert machine.measuring() >= before
    assert machine.host.property("wattspan.service", "MainPID") not in {"0", first}
    assert (machine.root.path / CONFIG.lstrip("/")).read_text() == CPU_MAY_BE_CAPPED
    assert machine.host.run("stat", "--format=%U:%G %a", CONFIG).stdout == "root:wattspan 644\n"
    machine.host.systemctl("reset-failed", "holder.service", check=False)
    machine.hold_a_cap()  # and the new capper caps as the old one did

    back = machine.energy()
    machine.install(the_package(), "--allow-downgrades")
    assert _version(machine) != "9.0"
    assert machine.restored()
    assert machine.measuring() >= back


def test_upgrade_keeps_stopped_and_disabled_states(machine: Machine, newer: Path) -> None:
    machine.host.systemctl("stop", "wattspan.service")
    machine.host.systemctl("disable", "wattspan-capper.socket")
    machine.install(newer)
    assert not machine.active("wattspan.service")
    assert machine.host.property("wattspan.service", "UnitFileState") == "enabled"
    assert machine.host.property("wattspan-capper.socket", "UnitFileState") == "disabled"


def _version(machine: Machine) -> str:
    return machine.host.run("dpkg-query", "--show", "--showformat=${Version}", "wattspan").stdout
