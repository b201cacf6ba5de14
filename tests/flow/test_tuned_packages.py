"""A CPU-bound job on an emulated host without a GPU: the tuner searches its package's limit."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.emulated_faults import FaultyHost
from testbed.fixtures import entered
from testbed.stopped_holders import go_on, still_while_capped
from testbed.tuned_stack import CONFIG, Limited, Tuned
from testbed.waiting import eventually

from wattspan.emulation.control import Closeable
from wattspan.emulation.host import profile_named

PROFILE, JOB, PACKAGE = "batch", "cruncher/train_step", "rapl:package-0"
PACKAGES = CONFIG.replace('"gpu_power"', '"cpu_power"').replace('"trainer"', '"cruncher"')


class PackageHost(Limited, Closeable):
    """The emulated host; its limit is that of its one package, as the kernel shows it."""

    def __init__(self) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True)
        self.sockets = Path(self._sockets.name)
        self.emulated = FaultyHost(profile_named(PROFILE))
        zone = self.emulated.sysfs / "class/powercap/intel-rapl:0"
        self._file = zone / "constraint_0_power_limit_uw"
        self.original = self.limit
        self.emulated.start_jobs(self.sockets / "otlp.sock")

    @property
    def limit(self) -> int:
        return int(self._file.read_text()) // 1000

    def capped(self) -> bool:
        return self.limit < self.original

    def restored(self) -> bool:
        return self.limit == self.original

    def close(self) -> None:
        self.emulated.close()
        self._sockets.cleanup()


host = entered(PackageHost, "module")


@pytest.fixture
def agent(host: PackageHost, tmp_path: Path) -> Iterator[Tuned]:
    program = (sys.executable, "-m", "testbed.agent_on_quiet_host", str(host.emulated.directory))
    with Tuned(host, tmp_path, program=program, config=PACKAGES, job=JOB, profile=PROFILE) as agent:
        yield agent


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["agent", "capper", "both"])
def test_package_limit_is_restored_after_a_kill(
    victim: str, agent: Tuned, host: PackageHost
) -> None:
    agent.caps()
    capper = still_while_capped(agent)
    (entry,) = agent.journal()
    assert (entry["knob"], entry["device"]) == ("cpu_power", PACKAGE)
    assert entry["original"] == host.original
    pid = agent.process.pid
    match victim:
        case "agent":
            os.kill(pid, signal.SIGKILL)
            go_on(capper)
        case "capper":
            os.kill(capper, signal.SIGKILL)
            go_on(pid)
        case _:
            os.kill(pid, signal.SIGKILL)
            os.kill(capper, signal.SIGKILL)
            agent.ended()
            assert host.capped(), "no process has restored it"
            assert "1 limit was restored by the journal" in agent.restore()
    eventually(host.restored, "the original limit of the package")


@pytest.mark.search
def test_package_limit_is_certified_within_the_budget(agent: Tuned, host: PackageHost) -> None:
    agent.until(lambda: agent.reason() == "certified", "a setting is held", 600)
    told = agent.told()
    assert (told["knob"], told["devices"]) == ("cpu_power", [PACKAGE])
    (watts,) = told["decision"]["caps"].values()
    assert watts * 1000 < host.original
    assert told["slowdown_bound"] <= told["budget"] == 0.15
    agent.send(signal.SIGTERM)
    assert agent.ended() == 0
    assert host.restored()
