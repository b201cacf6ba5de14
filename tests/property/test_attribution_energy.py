"""Invariant 2: never a spike, never silence."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.metering import CounterMeter, energy_between
from wattspan.model import (
    SECOND,
    Domain,
    Gap,
    GapReason,
    HwType,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    Provenance,
    Reading,
    energy_at,
)

MODULUS = 65_533 * 10**6
CEILING = 400_000  # mW


def domain(modulus: int | None = MODULUS, max_power: int = CEILING) -> Domain:
    return Domain(
        "rapl:package-0",
        HwType.CPU,
        "package-0",
        "rapl",
        Provenance.MEASURED,
        max_power=Milliwatts(max_power),
        modulus=None if modulus is None else Microjoules(modulus),
    )


def reading(mono: int, counter: int, *, epoch: int = 0, asleep: int = 0, wall: int = 0) -> Reading:
    return Reading("rapl:package-0", Instant(mono, wall, asleep), Microjoules(counter), epoch)


elapsed = st.integers(1, 100 * SECOND)
counters = st.integers(0, MODULUS - 1)


@given(
    dt=st.integers(SECOND // 100, 100 * SECOND),
    power=st.integers(1000, CEILING),
    before=st.integers(0, 100),
)
def test_wrapped_counter_counts_forward(dt: int, power: int, before: int) -> None:
    spent = energy_at(power, dt)
    start = MODULUS - 1 - spent * before // 100  # the wrap lies inside the interval
    assert start + spent >= MODULUS or before == 100
    result = energy_between(domain(), reading(0, start), reading(dt, (start + spent) % MODULUS))
    assert result == Interval("rapl:package-0", Instant(0, 0), Instant(dt, 0), Microjoules(spent))


@given(a=counters, b=counters, dt=elapsed, epochs=st.tuples(st.integers(0, 1), st.integers(0, 1)))
def test_interval_energy_is_at_most_maximum_power_times_time(
    a: int, b: int, dt: int, epochs: tuple[int, int]
) -> None:
    one = domain()
    result = energy_between(one, reading(0, a, epoch=epochs[0]), reading(dt, b, epoch=epochs[1]))
    if isinstance(result, Interval):
        assert 0 <= result.energy <= energy_at(one.max_power, dt + 2 * one.resolution)
        assert epochs[0] == epochs[1]
    else:
        assert result.duration == dt


@given(a=st.integers(0, 10**15), b=st.integers(0, 10**15), dt=elapsed)
def test_falling_counter_without_modulus_is_a_reset(a: int, b: int, dt: int) -> None:
    result = energy_between(domain(modulus=None), reading(0, a), reading(dt, b))
    if b < a:
        assert isinstance(result, Gap)
        assert result.reason is GapReason.RESET


@given(
    step=st.integers(-(10**18), 10**18),
    dt=st.integers(SECOND // 100, 60 * SECOND),
    power=st.integers(0, CEILING),
)
def test_step_of_the_wall_clock_changes_no_energy(step: int, dt: int, power: int) -> None:
    spent = energy_at(power, dt)
    start, end = reading(0, 5), reading(dt, 5 + spent, wall=step)
    result = energy_between(domain(), start, end)
    assert isinstance(result, Interval)
    assert result.energy == spent


@given(asleep=st.integers(SECOND, 10**15), dt=elapsed, a=counters, b=counters)
def test_suspend_is_a_gap_of_its_duration(asleep: int, dt: int, a: int, b: int) -> None:
    result = energy_between(domain(), reading(0, a), reading(dt, b, asleep=asleep))
    assert isinstance(result, Gap)
    assert result.reason is GapReason.SUSPEND
    assert result.duration == dt + asleep


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.integers(0, 40 * SECOND), counters, st.integers(0, 1)),
            st.tuples(
                st.sampled_from(["absent", "suspended"]),
                st.integers(0, 40 * SECOND),
                counters,
                st.just(0),
            ),
        ),
        max_size=40,
    )
)
def test_meter_tiles_time_with_intervals_and_gaps(steps: list[tuple[str, int, int, int]]) -> None:
    meter = CounterMeter(domain(), patience=10 * SECOND)
    now, first, covered, last_end = 0, None, 0, None
    for what, dt, counter, epoch in steps:
        now += dt
        if what == "read":
            stretch = meter.advance(reading(now, counter, epoch=epoch))
            first = now if first is None else first
        else:
            meter.redefine(replace(domain(), suspended=what == "suspended"))
            stretch = meter.absent(Instant(now, 0))
            if stretch is not None and what == "suspended":
                assert isinstance(stretch, Gap)
                assert stretch.reason is GapReason.SUSPEND
        if stretch is not None:
            assert last_end is None or stretch.start.mono == last_end
            last_end = stretch.end.mono
            covered += stretch.end.mono - stretch.start.mono
    if first is not None and last_end is not None:
        assert covered == last_end - first
