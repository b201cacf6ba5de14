"""An imposed power budget outlives every end of the capper, until the operator lifts it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.capper_fixtures import host_fixture, limits_fixture
from testbed.capper_process import CapperProcess
from testbed.power_limits import PowerLimits, restore
from testbed.waiting import eventually

from wattspan.emulation.host import EmulatedHost
from wattspan.model import Knob

pytestmark = pytest.mark.exhaustive

BUDGET = 1_200
TUNED = 400_000
SETTINGS: dict[str, object] = {
    "autotune__floor": 0.1,
    "caps__budget_watts": BUDGET,
    "caps__largest_step": 1.0,
}


host = host_fixture("two-socket-h100")
limits = limits_fixture()


class Sampler:
    """Samples the sum of all limits in a thread of its own; ``highest`` is the largest sum."""

    def __init__(self, host: EmulatedHost) -> None:
        self._limits = PowerLimits(host)
        self.samples, self.highest = 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.highest = max(self.highest, self._limits.total())
            self.samples += 1

    @contextmanager
    def running(self) -> Iterator[Sampler]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()
            self._limits.close()


def test_budget_is_kept_over_kills_stops_and_restarts(
    host: EmulatedHost, tmp_path: Path, limits: PowerLimits
) -> None:
    board = min(key for key in limits.originals if key.knob is Knob.GPU_POWER)
    with CapperProcess(host, tmp_path, **SETTINGS) as capper:
        capper.ready()
        eventually(lambda: limits.total() <= BUDGET * 1000, "the budget is in force")
    # The context manager has killed it.
    with Sampler(host).running() as sampler:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
            done = restore(capper, "--tuned", "--json")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["retained"] >= 2
            with CapperProcess(host, tmp_path, **SETTINGS) as capper:
                client = capper.ready().client()
                client.hold("job", {board: TUNED}, "a test")
                eventually(lambda: limits.now({board}) == {board: TUNED}, "the tuner's cap")
                assert capper.end(number) == (0 if number is signal.SIGTERM else -number)
                client.close()
            if number is signal.SIGTERM:
                assert "stay in force" in capper.said
                assert limits.now({board})[board] != TUNED, "a tuned limit outlived its capper"
        restore(capper, "--tuned")
        assert sampler.samples > 20
        assert sampler.highest <= BUDGET * 1000
    done = restore(capper, "--json")
    assert json.loads(done.stdout)["retained"] == 0
    assert limits.restored(set(limits.originals))


def test_removed_budget_is_lifted_by_the_next_capper(
    host: EmulatedHost, tmp_path: Path, limits: PowerLimits
) -> None:
    with CapperProcess(host, tmp_path, **SETTINGS) as capper:
        capper.ready()
        eventually(lambda: limits.total() <= BUDGET * 1000, "the budget is in force")
        assert capper.end(signal.SIGTERM) == 0
    assert limits.total() <= BUDGET * 1000
    with CapperProcess(host, tmp_path, autotune__floor=0.1) as capper:
        capper.ready()
        eventually(lambda: limits.restored(set(limits.originals)), "the originals are back")
        assert capper.end(signal.SIGTERM) == 0
