"""Properties of the accumulator and of the usage of AMD GPUs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import SECOND, Consumer, Instant
from wattspan.sources.amdsmi.energy import EnergyAccumulator
from wattspan.sources.amdsmi.usage import ActivityMeter, ProcessActivity

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
        assert usage is not None
        assert (usage.start.mono, usage.end.mono) == (start, now)
        assert all(spent > 0 for spent in usage.spent.values())
        assert usage.unclaimed >= 0
        assert usage.present == {Consumer(pid, 0) for pid, _, _, known in listed if known}
        if busy is None:
            assert usage.busy >= duration
