"""The effect of single wrong windows on a baseline is limited."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.watched_load import CPUS, show, watch

from wattspan.attribution.baseline import FULL_CONFIDENCE_WEIGHT, MAX_WEIGHT, LoadIntercept
from wattspan.attribution.ledger import attribute
from wattspan.model import SECOND, Instant, Interval, Microjoules, energy_at

loads = st.floats(0.0, 1.0)
idles = st.integers(1_000, 200_000)
per_cpus = st.integers(0, 20_000)
quiet = st.lists(st.floats(0.0, 0.049), min_size=round(FULL_CONFIDENCE_WEIGHT) + 10, max_size=150)
spread = st.lists(st.floats(0.1, 0.9), max_size=150)


@pytest.mark.slow
@given(quiet, spread, idles, per_cpus, loads, st.floats(0.0, 1.0), st.booleans())
def test_low_window_moves_idle_power_by_its_weight_at_most(
    rest: list[float],
    work: list[float],
    idle: int,
    per_cpu: int,
    load: float,
    shown: float,
    rest_last: bool,
) -> None:
    model = LoadIntercept()
    watch(model, [*work, *rest] if rest_last else [*rest, *work], idle, per_cpu)
    before = model.power
    truth = idle + per_cpu * CPUS * load
    # The window may be the one that makes the slope sure: nearly quiet windows are corrected then
    correction = per_cpu * CPUS * 0.05
    show(model, load, shown * truth)
    assert (
        abs(model.power - before) <= truth * (1 - shown) / FULL_CONFIDENCE_WEIGHT + correction + 2
    )


@pytest.fixture(scope="module")
def never_at_rest() -> LoadIntercept:
    model = LoadIntercept()
    watch(model, [0.2, 0.3, 0.4, 0.5, 0.6, 0.7] * 60)
    assert model.power == pytest.approx(40_000, abs=5)
    return model


@given(loads, st.floats(0.0, 1.0))
def test_busy_host_loses_little_idle_power_to_one_low_window(
    never_at_rest: LoadIntercept, load: float, shown: float
) -> None:
    model = copy.deepcopy(never_at_rest)
    truth = 40_000 + 9_000 * CPUS * load
    show(model, load, shown * truth)
    # A window at rest has a ninth of the weight of all those at work. The regression reduces the
    # weight of large deviations only, so a small one may have up to a third.
    low = truth * (1 - shown)
    assert abs(model.power - 40_000) <= min(low / 3, low / 8 + 25) + 5


@given(quiet, idles, st.lists(st.floats(0.0, 3.0), min_size=1, max_size=5))
def test_wrong_windows_at_rest_have_their_weight_in_the_mean(
    rest: list[float], idle: int, shown: list[float]
) -> None:
    model = LoadIntercept()
    watch(model, rest, idle, per_cpu=0)
    for part in shown:
        show(model, 0.0, part * idle)
    support = min(MAX_WEIGHT, len(rest) * 0.9 + len(shown))
    assert abs(model.power - idle) <= idle * sum(abs(part - 1) for part in shown) / support + 2


seconds = st.tuples(st.sampled_from([0.0, 0.02, 0.3, 0.6, 0.9]), st.integers(0, 300_000))


@given(st.lists(seconds, max_size=100), st.sampled_from([0.13, 0.47, 0.77]), st.data())
def test_idle_power_is_never_above_well_observed_power(
    past: list[tuple[float, int]], load: float, data: st.DataObject
) -> None:
    model = LoadIntercept()
    for at, power in past:
        show(model, at, power)
    seen = data.draw(st.lists(st.integers(0, 100_000), min_size=40, max_size=60))
    for power in seen:
        show(model, load, power)
    assert model.power is None or 0 <= model.power <= max(seen) + 1


@given(st.lists(seconds, max_size=100), st.integers(0, 10**9), st.integers(1, 10 * SECOND))
def test_idle_energy_is_at_most_the_measured_energy(
    past: list[tuple[float, int]], energy: int, duration: int
) -> None:
    model = LoadIntercept()
    for at, power in past:
        show(model, at, power)
    assert (model.power or 0) <= max((power for _, power in past), default=0) + 1
    interval = Interval("d", Instant(0, 0), Instant(duration, 0), Microjoules(energy))
    shared = attribute(interval, None, idle_due=energy_at(model.power or 0, duration))
    assert 0 <= shared.idle <= energy
    assert shared.idle + shared.unattributed == energy


busy_loads = st.lists(st.floats(0.3, 1.0), min_size=2, max_size=200)


@given(busy_loads, st.integers(5_000, 60_000), st.floats(-0.3, 1.0), st.sampled_from([1.4, 2.0]))
def test_unknown_idle_power_is_below_its_bound(
    work: list[float], idle: int, curvature: float, exponent: float
) -> None:
    model = LoadIntercept()
    for load in work:
        active = 60_000 * (load + curvature * (load - load**exponent))
        show(model, load, idle + active)
        if model.power is None:
            assert model.upper >= idle - 0.05 * active
        else:
            assert abs(model.power - idle) <= 0.25 * active


@given(st.floats(0.3, 0.9), st.floats(0.3, 0.9), st.integers(1, 60))
def test_load_steps_of_a_device_never_at_rest_charge_no_idle_power(
    first: float, second: float, seconds: int
) -> None:
    model = LoadIntercept()
    watch(model, [first] * seconds + [second] * seconds + [first] * seconds)
    assert model.power is None or abs(model.power - 40_000) <= 0.15 * 9_000 * CPUS * first
    assert model.upper >= 40_000 - 0.05 * 9_000 * CPUS * first


@pytest.mark.exhaustive
@given(st.integers(-20_000, 20_000))
def test_idle_power_follows_a_drift_of_a_device_never_at_rest(change: int) -> None:
    model = LoadIntercept()
    loads = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    watch(model, loads * 20)
    for second in range(1_200):  # twenty minutes, then ten at the new power
        idle = 40_000 + change * min(second, 1_200) // 1_200
        show(model, loads[second % len(loads)], idle + 9_000 * CPUS * loads[second % len(loads)])
    watch(model, loads * 100, idle=40_000 + change)
    assert abs(model.power - (40_000 + change)) <= 0.1 * abs(change) + 400


@given(quiet, idles, st.floats(0.2, 1.0))
def test_fallen_idle_power_is_bounded_by_the_new_minimum(
    rest: list[float], idle: int, part: float
) -> None:
    model = LoadIntercept()
    watch(model, rest, idle, per_cpu=0)
    lower = round(part * idle)
    watch(model, [0.5] * 40, lower, per_cpu=0)
    assert model.power <= lower + 1
