"""The agent must not raise the power of an idle board. Reads only; changes nothing.

Run alone, with ``WATTSPAN_HARDWARE=1``, on a host with an NVIDIA driver, before anything else has
opened the board: ``pytest -s tests/hardware/test_idle_power.py``. It takes five minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from testbed.idle_power import CounterReading, NotIdleError, measure_idle_powers

from wattspan.clock import SystemClock
from wattspan.model import MILLISECOND, SECOND
from wattspan.ports import PacedSource, SourceContext
from wattspan.sources.nvml.device import EMULATED_UUID, NvmlSettings
from wattspan.sources.nvml.source import open_nvml
from wattspan.testing import FakeDirectory

pytestmark = pytest.mark.exhaustive

CLOCK = SystemClock()

# A process of its own: this one has nothing open but the agent's source.
_READ = """
import pynvml, time
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
energy, now = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.monotonic_ns()
busy = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
print(energy * 1000, now, busy, pynvml.nvmlDeviceGetUUID(gpu))
pynvml.nvmlShutdown()
"""


def read() -> CounterReading:
    """The counter of the first board; skips without a real one."""
    done = subprocess.run([sys.executable, "-c", _READ], capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"no real NVML device: {done.stderr.strip().splitlines()[-1:]}")
    energy, mono, busy, uuid = done.stdout.split()
    if uuid.startswith(EMULATED_UUID):
        pytest.skip("no real NVML device: the library is the emulated one")
    return CounterReading(int(energy), int(mono), int(busy))


def wait(seconds: float) -> None:
    CLOCK.sleep_until(CLOCK.monotonic() + round(seconds * 1e9))


@contextmanager
def agent(interval: int) -> Iterator[None]:
    """The source of the agent, read every ``interval`` nanoseconds by nobody else."""
    source = open_nvml(NvmlSettings(enabled=True), SourceContext(CLOCK, FakeDirectory()))
    assert isinstance(source, PacedSource)
    source.pace(interval)
    with closing(source):
        yield


def test_agent_does_not_raise_the_power_of_an_idle_board(
    record_property: Callable[[str, object], None],
) -> None:
    if not os.environ.get("WATTSPAN_HARDWARE"):
        pytest.skip("real hardware is read only where WATTSPAN_HARDWARE=1 asks for it")
    powers = None
    with suppress(NotIdleError):
        agents = [lambda: agent(SECOND), lambda: agent(100 * MILLISECOND)]
        powers = measure_idle_powers(read, wait, agents)
    if powers is None:
        pytest.skip("the board is not idle")
    for name, value in (*powers._asdict().items(), ("rise", powers.rise)):
        record_property(name, value)
        print(f"{name}: {value}")
    assert powers.rise <= powers.tolerance
