"""Facts of a real NVIDIA GPU that no emulation can vouch for. Reads only; changes nothing.

Run with ``WATTSPAN_HARDWARE=1`` on a host with an NVIDIA driver (``-s`` shows the figures, and
``--junit-xml`` keeps them). Written for an H200; nothing but the expectations about fields, which
are noted, is particular to it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
from testbed.gpu_sessions import nvml_session

from wattspan.clock import SystemClock
from wattspan.model import Provenance, Trouble
from wattspan.ports import Batch, SourceContext
from wattspan.sources.nvml.device import EMULATED_UUID, NvmlSettings
from wattspan.testing import FakeDirectory

pytestmark = pytest.mark.exhaustive

CLOCK = SystemClock()
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def nvml() -> Iterator[Any]:
    """The binding, initialised, on a host with at least one real GPU."""
    if not os.environ.get("WATTSPAN_HARDWARE"):
        pytest.skip("real hardware is read only where WATTSPAN_HARDWARE=1 asks for it")
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no real NVML device: {error}")
    try:
        if not pynvml.nvmlDeviceGetCount():
            pytest.skip("no real NVML device: the driver knows no GPU")
        first = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
        if str(first).startswith(EMULATED_UUID):
            pytest.skip("no real NVML device: the library is the emulated one")
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture
def gpu(nvml: Any) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(0)


def limits(nvml: Any, gpu: Any) -> tuple[int, ...]:
    return (
        nvml.nvmlDeviceGetPowerManagementLimit(gpu),
        nvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
        *nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu),
    )


@pytest.fixture(autouse=True)
def unchanged(nvml: Any, gpu: Any) -> Iterator[None]:
    before = limits(nvml, gpu)
    yield
    assert limits(nvml, gpu) == before


def noted(record_property: Record, name: str, value: object) -> None:
    record_property(name, value)
    print(f"{name}: {value}")


def cost(call: Callable[[], object], times: int = 50) -> dict[str, float]:
    """Microseconds of wall time one call takes."""
    taken = []
    for _ in range(times):
        began = CLOCK.monotonic()
        call()
        taken.append((CLOCK.monotonic() - began) / 1000)
    return {"median_us": round(median(taken), 1), "worst_us": round(max(taken), 1)}


def test_energy_counter_moves_in_steps_of_at_most_a_second(
    nvml: Any, gpu: Any, record_property: Record
) -> None:
    changes, last = [], nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    end = CLOCK.monotonic() + 5 * 10**9
    while (now := CLOCK.monotonic()) < end:
        value = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        assert value >= last
        if value != last:
            changes.append(now)
            last = value
        CLOCK.sleep_until(now + 500_000)
    steps = sorted((b - a) / 1e6 for a, b in itertools.pairwise(changes))
    assert steps
    noted(record_property, "counter_step_ms_median", round(median(steps), 2))
    noted(record_property, "counter_step_ms_extremes", (round(steps[0], 2), round(steps[-1], 2)))
    assert median(steps) < 1000


CALLS: dict[str, tuple[Any, ...]] = {
    "nvmlDeviceGetTotalEnergyConsumption": (),
    "nvmlDeviceGetPowerUsage": (),
    "nvmlDeviceGetUtilizationRates": (),
    "nvmlDeviceGetMemoryInfo": (),
    "nvmlDeviceGetFieldValues": ([185, 186],),
    "nvmlDeviceGetComputeRunningProcesses": (),
    "nvmlDeviceGetGraphicsRunningProcesses": (),
    "nvmlDeviceGetMPSComputeRunningProcesses": (),
    "nvmlDeviceGetCurrentClocksEventReasons": (),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_returns_well_within_the_deadline(
    nvml: Any, gpu: Any, name: str, record_property: Record
) -> None:
    arguments = CALLS[name]
    try:
        taken = cost(lambda: getattr(nvml, name)(gpu, *arguments))
    except nvml.NVMLError as error:
        pytest.skip(f"{name}: {error}")
    noted(record_property, name, taken)
    assert taken["worst_us"] * 1000 < NvmlSettings().deadline


def test_power_fields_answer_by_scope(nvml: Any, gpu: Any, record_property: Record) -> None:
    """On H100 and H200: the GPU's both, the memory's average, nothing for the module."""
    asked = [(field, scope) for field in (185, 186) for scope in (0, 1, 2, 3)]
    entries = list(nvml.nvmlDeviceGetFieldValues(gpu, asked))
    for (field, scope), entry in zip(asked, entries, strict=True):
        answer = entry.value.uiVal if entry.nvmlReturn == 0 else f"error {entry.nvmlReturn}"
        noted(record_property, f"field_{field}_scope_{scope}", answer)
        assert entry.nvmlReturn in {0, 2, 3, 6, 13, 25, 26}
    assert entries[0].nvmlReturn == 0


def test_source_reads_the_board_without_failures(nvml: Any, record_property: Record) -> None:
    context = SourceContext(CLOCK, FakeDirectory())
    session = nvml_session(nvml, NvmlSettings(), context)
    batches: list[Batch] = []
    due, taken = CLOCK.monotonic(), []
    for _ in range(100):
        CLOCK.sleep_until(due)
        began = CLOCK.monotonic()
        batches.append(session.sample())
        taken.append((CLOCK.monotonic() - began) / 1000)
        due += 100_000_000
    session.close()
    noted(record_property, "turn_us_median", round(median(taken)))
    noted(record_property, "failures", [str(failure) for failure in batches[-1].failures])
    (status, *_) = [status for batch in batches for status in batch.gpus][::-1]
    noted(record_property, "integrated_uj", status.integrated_energy)
    noted(record_property, "counted_uj", status.counter_energy)
    domain = batches[-1].domains[0]
    noted(record_property, "resolution_ms", domain.resolution / 1e6)
    assert domain.provenance in {Provenance.MEASURED, Provenance.DERIVED}
    assert Trouble.MALFORMED not in {f.trouble for f in batches[-1].failures}
    assert all(batch.readings for batch in batches)
    used = [u for batch in batches for u in batch.usages if u.resource == domain.id]
    assert all(a.end == b.start for a, b in itertools.pairwise(used))
