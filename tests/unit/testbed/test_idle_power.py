"""The comparison of idle powers with and without the agent, on emulated boards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.gpu_sessions import nvml_session
from testbed.idle_power import (
    CounterReading,
    IdlePowers,
    NotIdleError,
    measure_idle_powers,
)

from wattspan.emulation.boards import H100
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import SteadyLoad
from wattspan.model import SECOND
from wattspan.ports import SourceContext
from wattspan.sources.gpu.session import GpuSession
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock


class Bench:
    """An emulated board, read by a library that may raise its power while it is open."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.gpus = EmulatedGpus(path, [H100], self.clock)
        self.session: GpuSession | None = None
        self.opened = 0
        self.rise = 0.0  # watts while the agent has the board open

    def read(self) -> CounterReading:
        nvml = EmulatedNvml(self.gpus.path, self.clock)
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        energy = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) * 1000
        busy = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
        nvml.nvmlShutdown()
        raised = round(self.rise * self.opened / 1000)
        return CounterReading(energy + raised, self.clock.monotonic(), busy)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.gpus.run(1.0, every=0.5)
            if self.session is not None:
                self.opened += SECOND
                assert self.session.sample(SECOND).readings

    @contextmanager
    def agent(self) -> Iterator[None]:
        nvml = EmulatedNvml(self.gpus.path, self.clock)
        context = SourceContext(self.clock, FakeDirectory(), emulated=True)
        self.session = nvml_session(nvml, NvmlSettings(), context)
        try:
            yield
        finally:
            self.session.close()
            self.session = None

    def measure(self) -> IdlePowers:
        return measure_idle_powers(self.read, self.wait, [self.agent, self.agent])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "gpus")
    yield bench
    bench.gpus.close()


def test_agent_that_raises_nothing_is_within_the_tolerance(bench: Bench) -> None:
    powers = bench.measure()
    assert powers.without[0] == pytest.approx(H100.silicon.idle / 1000, rel=0.05)
    assert abs(powers.rise) < powers.tolerance
    assert powers.tolerance < 3


def test_raised_power_is_found(bench: Bench) -> None:
    bench.rise = 20.0
    powers = bench.measure()
    assert powers.rise == pytest.approx(20, abs=1)
    assert powers.rise > powers.tolerance


def test_board_that_works_or_does_not_count_is_not_judged(bench: Bench) -> None:
    bench.gpus.attach(0, 100, SteadyLoad(0.5))
    with pytest.raises(NotIdleError, match="busy"):
        bench.measure()
    still = CounterReading(5, 0, 0)
    with pytest.raises(NotIdleError, match="does not count"):
        measure_idle_powers(lambda: still, lambda _: None, [])


def test_drift_of_the_board_is_no_rise() -> None:
    powers = IdlePowers((70.0, 75.0), [80.0])
    assert powers.rise == 7.5
    assert powers.tolerance == 10.0
