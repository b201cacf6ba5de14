"""Properties of the accumulator, of the usage and of the session of AMD GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from testbed.amd_boards import ScriptedAmdSmi
from testbed.gpu_sessions import amdsmi_session

from wattspan.emulation.amdsmi import AmdSmiLibraryException
from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.model import SECOND, Consumer, Instant
from wattspan.ports import SourceContext
from wattspan.sources.amdsmi.device import AmdSmiSettings
from wattspan.sources.energy_meter import EnergyAccumulator
from wattspan.sources.gpu.usage import ActivityMeter, ProcessActivity
from wattspan.testing import FakeDirectory, ManualClock

STEP = 15.300000190734863
MAX_POWER = 1_500_000
MOST = 40 * 10**9 // 15_300  # steps of 40 J, in 100 ms at most 150 J


@given(
    start=st.integers(0, (1 << 32) - 1),
    changes=st.lists(st.integers(0, MOST), min_size=1, max_size=60),
    width=st.sampled_from([32, 64]),
)
def test_accumulated_energy_is_that_of_the_steps_through_every_wrap(
    start: int, changes: list[int], width: int
) -> None:
    accumulator, total = EnergyAccumulator(), start if width == 32 else (1 << 64) - 1 - start % MOST
    first, last = total, 0
    for tick, change in enumerate([0, *changes]):
        total += change
        told = accumulator.advance(
            Instant(tick * SECOND // 10, 0), total % (1 << width), STEP, MAX_POWER
        )
        assert told is not None
        last = told
    assert last == total * 15_300_000 // 1_000_000
    assert accumulator.epoch == 0
    assert total >= first


processes = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(0, 3 * SECOND),
        st.one_of(st.none(), st.integers(0, 304)),
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda process: process[0],
)


@given(
    records=st.lists(
        st.tuples(st.integers(1, 2 * SECOND), st.one_of(st.none(), st.integers(0, 100)), processes),
        max_size=12,
    )
)
def test_records_tile_time_and_charge_at_least_the_busy_time(
    records: list[tuple[int, int | None, list[tuple[int, int, int | None, bool]]]],
) -> None:
    now = 0
    meter = ActivityMeter("gpu:x", Instant(0, 0))
    for duration, busy, listed in records:
        start, now = now, now + duration
        meter.observe_device(now, busy)
        usage = meter.usage(
            Instant(now, 0),
            [
                ProcessActivity(pid, Consumer(pid, 0) if known else None, engine, units)
                for pid, engine, units, known in listed
            ],
        )
        assert (usage.start.mono, usage.end.mono) == (start, now)
        assert all(spent > 0 for spent in usage.spent.values())
        assert usage.unclaimed >= 0
        assert usage.present == {Consumer(pid, 0) for pid, _, _, known in listed if known}
        if busy is None:
            assert usage.busy >= duration


CALLS = (
    "amdsmi_get_gpu_device_bdf", "amdsmi_get_gpu_device_uuid", "amdsmi_get_gpu_asic_info",
    "amdsmi_get_gpu_driver_info", "amdsmi_get_gpu_compute_partition", "amdsmi_get_energy_count",
    "amdsmi_get_power_info", "amdsmi_get_gpu_activity", "amdsmi_get_clock_info",
    "amdsmi_get_temp_metric", "amdsmi_get_gpu_memory_total", "amdsmi_get_gpu_memory_usage",
    "amdsmi_get_gpu_process_list", "amdsmi_get_power_cap_info",
)  # fmt: skip
KEYS = (
    "energy_accumulator", "counter_resolution", "current_socket_power", "gfx_activity", "pid",
    "engine_usage", "gfx", "cu_occupancy", "clk", "power_cap", "vendor_id", "market_name",
)  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.just("N/A"),
)
answers = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=8,
)
scripts = st.lists(
    st.dictionaries(
        st.sampled_from(CALLS), st.one_of(answers, st.integers(1, 60).map(AmdSmiLibraryException))
    ),
    max_size=8,
)


@given(script=scripts)
def test_no_answer_of_the_library_ends_the_session(script: list[dict[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        clock = ManualClock()
        with EmulatedGpus(Path(directory) / "gpus", [MI300X], clock) as gpus:
            smi = ScriptedAmdSmi(gpus.path, clock)
            session = amdsmi_session(
                smi, AmdSmiSettings(), SourceContext(clock, FakeDirectory(), emulated=True)
            )
            for replies in [*script, {}, {}]:
                smi.replies = {name: said(reply) for name, reply in replies.items()}
                gpus.run(1.0, every=1.0)
                batch = session.sample()
                for status in batch.gpus:
                    figures = (status.memory_used, status.temperature_celsius, status.sm_clock_hz)
                    assert all(one is None or isinstance(one, int) for one in figures)
                for reading in batch.readings:
                    assert reading.counter >= 0
            gpus.run(10.0, every=1.0)
            smi.replies = {}
            assert session.sample().domains
            session.close()


def said(reply: object) -> Callable[[object], object]:
    """An answer in place of the true one, or an error."""

    def answer(_: object) -> object:
        if isinstance(reply, AmdSmiLibraryException):
            raise reply
        return reply

    return answer
