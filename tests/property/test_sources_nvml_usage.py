"""For any samples of a driver, a GPU's time has neither gap nor excess."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import Consumer, Instant
from wattspan.sources.energy_meter import MAX_GAP, PowerIntegral
from wattspan.sources.nvml.processes import MAX_SAMPLE_PERIOD, ProcessSample, UsageMeter

START = 10**12
A, B = Consumer(1, 1), Consumer(2, 2)
PAYERS = {1: A, 2: B, 3: None}
MILLI = 10**6

samples = st.lists(
    st.tuples(st.integers(-2000, 12_000), st.sampled_from([1, 2, 3]), st.integers(0, 100)),
    max_size=40,
)
ends = st.lists(st.integers(-500, 12_000), min_size=1, max_size=12)
loads = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 100)), max_size=12)


def instant(milliseconds: int) -> Instant:
    return Instant(START + milliseconds * MILLI, milliseconds * MILLI)


def fed(made: list[tuple[int, int, int]], load: list[tuple[int, int]]) -> UsageMeter:
    meter = UsageMeter("gpu:x", instant(0))
    meter.add_samples(
        [ProcessSample(instant(at).mono, pid, PAYERS[pid], share) for at, pid, share in made]
    )
    at = 0
    for step, percent in load:
        at += step
        meter.observe_device(instant(at).mono, percent)
    return meter


@given(samples, loads, ends, st.booleans())
def test_records_tile_time_and_are_never_negative(
    made: list[tuple[int, int, int]], load: list[tuple[int, int]], until: list[int], named: bool
) -> None:
    meter = fed(made, load)
    at = instant(0)
    for end in until:
        usages = meter.usages(instant(end), frozenset(), named=named)
        if not usages:
            assert instant(end).mono <= at.mono
            continue
        for usage in usages:
            assert usage.start == at
            assert usage.capacity == usage.end.mono - usage.start.mono > 0
            assert usage.unclaimed >= 0
            assert all(amount > 0 for amount in usage.spent.values())
            assert usage.spent or len(usages) == 1
            at = usage.end
        assert at == instant(end)
    last = meter.usages(instant(max(0, *until) + 1), frozenset(), named=named)
    assert last[0].start == at


@given(samples, loads, st.integers(1, 12_000))
def test_process_share_is_at_most_all_of_the_time(
    made: list[tuple[int, int, int]], load: list[tuple[int, int]], end: int
) -> None:
    for usage in fed(made, load).usages(instant(end), frozenset(), named=True):
        assert usage.capacity is not None
        # One period before a process's first sample may overlap nothing else of the same process.
        assert all(amount <= usage.capacity for amount in usage.spent.values())


@given(samples, loads, ends)
def test_sums_do_not_depend_on_record_boundaries(
    made: list[tuple[int, int, int]], load: list[tuple[int, int]], until: list[int]
) -> None:
    end = max(*until, 1)
    whole = fed(made, load).usages(instant(end), frozenset(), named=False)
    meter = fed(made, load)
    parts = [
        usage
        for cut in sorted({*until, end})
        for usage in meter.usages(instant(cut), frozenset(), named=False)
    ]
    for payer in (A, B):
        total, amount = (sum(u.spent.get(payer, 0) for u in usages) for usages in (whole, parts))
        # Each record rounds each stretch down to the nanosecond.
        assert abs(total - amount) <= (len(whole) + len(parts)) * len(made)


def test_processes_that_share_a_gpu_have_a_record_for_each_sample_period() -> None:
    made = [(at, 1, share) for at, share in ((200, 50), (400, 0), (600, 0), (800, 80))]
    made += [(at, 2, 25) for at in range(200, 1000, 200)]
    usages = fed(made, []).usages(instant(1000), frozenset(), named=True)
    shares = [
        {payer: round(amount / (usage.end.mono - usage.start.mono), 2)
         for payer, amount in usage.spent.items()}
        for usage in usages
    ]  # fmt: skip
    # The last period has no sample: it is added to the one before it.
    assert shares == [{A: 0.5, B: 0.25}, {B: 0.25}, {B: 0.25}, {A: 0.4, B: 0.12}]


@given(loads, ends)
def test_unclaimed_time_is_at_most_the_busy_time(
    load: list[tuple[int, int]], until: list[int]
) -> None:
    meter = fed([], load)
    unclaimed = sum(
        usage.unclaimed
        for end in sorted(until)
        for usage in meter.usages(instant(end), frozenset(), named=True)
    )
    busy = sum(step * MILLI * (percent if step <= 2000 else 100) // 100 for step, percent in load)
    assert unclaimed <= busy


@given(
    st.lists(st.tuples(st.integers(1, 2 * MAX_GAP), st.integers(0, 10**6)), min_size=1, max_size=50)
)
def test_integrated_energy_never_falls_and_lies_between_its_extremes(
    steps: list[tuple[int, int]],
) -> None:
    integral = PowerIntegral()
    mono = bridged = 0
    before = 0
    powers = []
    for elapsed, power in steps:
        mono += elapsed
        first = not powers
        if integral.feed(Instant(mono, mono), power, None) and not first:
            bridged += elapsed
        powers.append(power)
        assert integral.energy >= before
        before = integral.energy
    assert min(powers) * bridged // 10**6 <= before <= max(powers) * bridged // 10**6
    assert MAX_SAMPLE_PERIOD <= MAX_GAP
