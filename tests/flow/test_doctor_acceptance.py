"""`wattspan doctor --acceptance` on an emulated host with CPU counters and boards."""

from pathlib import Path

from wattspan.cli.doctor import Severity
from wattspan.cli.doctor.acceptance import accept
from wattspan.cli.doctor.acceptance.checks import IDLE, LIMITS, LOADS, SENSORS, STEPS
from wattspan.cli.doctor.acceptance.counters import Periods
from wattspan.cli.options import ConfigurationOptions
from wattspan.clock import SystemClock
from wattspan.config import FlagValue
from wattspan.model import MILLISECOND, SECOND

SHORT = Periods(idle=SECOND, open=2 * SECOND, steps=500 * MILLISECOND, loads=3 * SECOND)


def test_emulated_host_passes_every_test(tmp_path: Path) -> None:
    flags = {
        "emulation.profile": FlagValue("--emulate", "one-socket-h100"),
        "agent.state_dir": FlagValue("--set", str(tmp_path / "state")),
        "agent.run_dir": FlagValue("--set", str(tmp_path / "run")),
    }
    loaded = ConfigurationOptions(None, flags).load()
    told: list[int] = []
    checks, document, emulated = accept(loaded, SystemClock(), told.append, SHORT)
    assert emulated
    assert {one.test for one in checks} >= {IDLE, STEPS, SENSORS, LOADS, LIMITS}
    failed = [one for one in checks if one.finding.mark is Severity.FAIL]
    assert not failed, failed
    assert str(tmp_path) not in str(document)
    (both,) = [one for one in checks if one.device == "both"]
    assert both.figures["part_of_host"]
