"""Baselines of CPUs and GPUs."""

import random
from dataclasses import replace

import pytest
from testbed.watched_load import CPUS, show, used, watch

from wattspan.attribution.baseline import (
    LEARNING_TIME,
    LoadIntercept,
    UnusedDevicePower,
    idle_model,
)
from wattspan.model import SECOND, Consumer, HwType, Instant, Milliwatts, Usage, energy_at

QUIET = [0.0, 0.02]
BUSY = [0.3, 0.5, 0.8]


def show_sample(model: LoadIntercept, load: float, power: float) -> None:
    """A tenth of a second at ``load``, in which ``power`` mW were drawn."""
    model.observe(energy_at(round(power), SECOND // 10), SECOND // 10, used(load, 0.1))


def test_varied_load_reveals_the_idle_power_of_a_busy_host() -> None:
    model = LoadIntercept()
    watch(model, BUSY * 10)
    assert model.power == pytest.approx(40_000, rel=0.002)


def test_quiet_host_has_an_idle_power_at_once() -> None:
    model = LoadIntercept()
    watch(model, [0.0] * 3)
    assert model.power == 40_000


def test_slope_corrects_the_idle_power_of_a_nearly_quiet_host() -> None:
    model = LoadIntercept()
    watch(model, [0.03] * 3)
    assert model.power == pytest.approx(41_080, abs=5)
    watch(model, [0.9] * 5)
    assert model.power == pytest.approx(40_000, rel=0.01)


@pytest.mark.parametrize("loads", [[0.0] * 3, [0.03] * 3, QUIET * 20, BUSY * 10, [0.04, 0.5] * 10])
def test_idle_power_is_within_its_error(loads: list[float]) -> None:
    model = LoadIntercept()
    assert model.error == 0
    watch(model, loads)
    assert abs(model.power - 40_000) <= model.error + 1
    assert model.error <= 3_000


@pytest.mark.parametrize("delay", [-0.6, -0.3, 0.0, 0.3, 0.6])
def test_work_that_delays_a_reading_at_rest_leaves_the_idle_power_known(delay: float) -> None:
    """The energy is read earlier or later than the load by this part of the work of a sample."""
    model, chance, before = LoadIntercept(), random.Random(1), 0.0
    for load in [0.02] * 600 + [0.5] * 300:
        work = chance.expovariate(100)
        power = (40_000 + 9_000 * CPUS * (load + work)) * (1 + delay * (work - before))
        show_sample(model, load + work, power)
        before = work
    assert abs(model.power - 40_000) <= model.error <= 0.07 * 9_000 * CPUS * 0.5


def test_constant_full_load_gives_no_idle_power() -> None:
    model = LoadIntercept()
    watch(model, [1.0] * 100)
    assert model.power is None


def test_short_observations_are_added_up() -> None:
    model = LoadIntercept()
    for _ in range(30):
        show_sample(model, 0.0, 40_000)
    assert model.power == 40_000


def test_window_with_a_change_of_load_has_little_weight() -> None:
    model = LoadIntercept()
    for load in (0.0, 1.0):
        model.observe(energy_at(Milliwatts(40_000), SECOND // 2), SECOND // 2, used(load, 0.5))
    assert model.power is None


def test_idle_power_is_between_zero_and_the_least_observed_power() -> None:
    model = LoadIntercept()
    watch(model, [0.2, 0.3, 0.5, 0.9] * 15, idle=-20_000, per_cpu=30_000)
    assert model.power == 0
    falling = LoadIntercept()
    watch(falling, [0.0, 0.9] * 35, idle=50_000, per_cpu=-5_000)
    assert falling.power <= 50_000 - 5_000 * CPUS * 0.9 + 1


def test_high_loads_reveal_the_idle_power_with_enough_windows() -> None:
    model = LoadIntercept()
    watch(model, [0.6, 0.8, 1.0])
    assert model.power is None
    watch(model, [0.6, 0.8, 1.0] * 10)
    assert model.power == pytest.approx(40_000, rel=0.005)


def test_two_high_loads_give_an_upper_bound_without_idle_power() -> None:
    model = LoadIntercept()
    watch(model, [0.6, 0.9] * 30)
    assert model.power is None
    assert 40_000 < model.upper < 40_000 + 9_000 * CPUS * 0.4


def test_slope_from_a_single_far_window_is_ignored() -> None:
    model = LoadIntercept()
    watch(model, [0.03] * 60)
    before = model.power
    show(model, 0.3, power=150_000)  # a counter that came late, and made up for it here
    assert model.power == before


def test_single_low_window_at_another_load_has_no_effect() -> None:
    model = LoadIntercept()
    watch(model, [0.02] * 300, idle=8_739, per_cpu=0)
    show(model, 0.4, power=1_200)
    assert model.power == pytest.approx(8_739, rel=0.002)


def test_single_low_window_at_rest_is_limited_to_its_weight() -> None:
    model = LoadIntercept()
    watch(model, [0.0] * 300)
    show(model, 0.0, power=0)
    assert model.power == pytest.approx(40_000 * 119 / 120, rel=0.001)
    show(model, 0.0, power=80_000)
    assert model.power == pytest.approx(40_000, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "since", "half", "nearly"),
    [
        (QUIET, QUIET, 100, 400),
        (QUIET * 5 + BUSY * 30, QUIET * 5 + BUSY * 30, 900, 3_000),
        (BUSY, BUSY, 900, 3_000),
        (QUIET * 50 + BUSY * 50, BUSY, 3_600, 5_700),
    ],
    ids=["at rest", "at rest at times", "never at rest", "not at rest since"],
)
@pytest.mark.parametrize(
    ("old", "new"), [(40_000, 20_000), (20_000, 40_000)], ids=["falls", "rises"]
)
def test_lasting_change_is_followed_in_the_documented_time(
    old: int, new: int, before: list[float], since: list[float], half: int, nearly: int
) -> None:
    model = LoadIntercept()
    watch(model, (before * 1_000)[:1_000], idle=old)
    watch(model, (since * half)[:half], idle=new)
    assert abs(model.power - new) < 0.5 * abs(new - old)
    watch(model, (since * nearly)[half:nearly], idle=new)
    assert abs(model.power - new) < 0.1 * abs(new - old)


def test_usage_of_unknown_capacity_is_ignored() -> None:
    model = LoadIntercept()
    usage = Usage("cpu", Instant(0, 0), Instant(SECOND, 0), {}, capacity=None)
    for _ in range(10):
        model.observe(40_000_000, SECOND, usage)
    assert model.power is None


def test_remembered_idle_power_applies_until_a_new_one_is_learned() -> None:
    model = idle_model(HwType.CPU, Milliwatts(12_345))
    assert model.power == 12_345
    assert isinstance(model, LoadIntercept)
    watch(model, [0.0] * 3)
    assert model.power == 40_000
    assert idle_model(HwType.GPU, Milliwatts(70_000)).power == 70_000


def test_unused_gpu_has_its_power_as_idle_power() -> None:
    model = UnusedDevicePower()
    free = Usage("gpu:0", Instant(0, 0), Instant(SECOND, 0), {})
    for _ in range(4):
        model.observe(energy_at(70_000, SECOND), SECOND, free)
    assert model.power == 70_000


def test_used_gpu_gives_no_idle_power() -> None:
    model = UnusedDevicePower()
    held = Usage("g", Instant(0, 0), Instant(SECOND, 0), {}, present=frozenset({Consumer(1, 1)}))
    busy = Usage("g", Instant(0, 0), Instant(SECOND, 0), {}, unclaimed=5)
    free = Usage("g", Instant(0, 0), Instant(SECOND, 0), {})
    for usage in [held, busy, free, held, free, busy] * 5:
        model.observe(energy_at(110_000, SECOND), SECOND, usage)
    assert model.power is None


def test_changed_power_of_an_unused_gpu_is_followed() -> None:
    model = UnusedDevicePower()
    free = Usage("g", Instant(0, 0), Instant(2 * SECOND, 0), {})
    for watts in (70, 50, 90):
        for _ in range(400):
            model.observe(energy_at(Milliwatts(watts * 1000), 2 * SECOND), 2 * SECOND, free)
        assert model.power == pytest.approx(watts * 1000, rel=0.03)


def test_steady_load_gives_a_bound_of_the_idle_power_only() -> None:
    model = LoadIntercept()
    assert model.upper is None
    watch(model, [0.6] * 200)
    assert model.power is None
    assert model.upper == pytest.approx(40_000 + 9_000 * CPUS * 0.6, rel=0.05)
    assert model.upper < 40_000 + 9_000 * CPUS * 0.6


def test_errors_of_the_observed_load_give_no_idle_power() -> None:
    model = LoadIntercept()
    errors = random.Random(1)
    for _ in range(600):  # the load is steady, and the observed load is not
        power = 61_600 + errors.randrange(-200, 200)
        show_sample(model, 0.6 + errors.uniform(-0.02, 0.02), power)
    assert model.power is None


def test_remembered_idle_power_is_kept_under_a_steady_load() -> None:
    model = LoadIntercept(Milliwatts(40_000))
    errors = random.Random(1)
    for _ in range(1_000):
        power = 61_600 + errors.randrange(-200, 200)
        show_sample(model, 0.6 + errors.uniform(-0.02, 0.02), power)
    assert model.remembered
    assert model.power == pytest.approx(40_000, rel=0.001)


def test_remembered_idle_power_outside_of_the_credible_interval_is_corrected() -> None:
    model = LoadIntercept(Milliwatts(55_000))
    watch(model, [0.6, 0.9] * 60)
    assert model.remembered
    assert model.power < 53_000


def test_remembered_idle_power_above_the_observed_power_is_lowered() -> None:
    model = LoadIntercept(Milliwatts(90_000))
    watch(model, [0.6] * 60)
    assert model.power <= 61_600


def test_learned_idle_power_is_not_a_remembered_one() -> None:
    model = LoadIntercept(Milliwatts(12_345))
    assert model.remembered
    watch(model, [0.0] * 3)
    assert not model.remembered
    gpu = UnusedDevicePower(Milliwatts(70_000))
    assert gpu.remembered
    free = Usage("gpu:0", Instant(0, 0), Instant(2 * SECOND, 0), {})
    gpu.observe(energy_at(70_000, 2 * SECOND), 2 * SECOND, free)
    assert not gpu.remembered
    assert gpu.upper == 0


def test_falling_power_over_load_gives_no_idle_power() -> None:
    model = LoadIntercept()
    watch(model, [0.3, 0.5, 0.8] * 30, per_cpu=-5_000)
    assert model.power is None


def test_changed_device_begins_a_new_curve() -> None:
    model = LoadIntercept()
    watch(model, [0.3, 0.4, 0.5, 0.6, 0.8] * 30)
    assert model.power == pytest.approx(40_000, rel=0.01)
    watch(model, [0.3, 0.4, 0.5, 0.6, 0.8] * 30, idle=60_000)
    assert model.power == pytest.approx(60_000, rel=0.01)


def test_metered_use_is_the_load_if_it_is_known() -> None:
    model = LoadIntercept()
    for load in BUSY * 10:  # the usage of processes is late, the meter is not
        usage = replace(used(0.5), metered=round(load * CPUS * SECOND))
        model.observe(energy_at(round(40_000 + 9_000 * CPUS * load), SECOND), SECOND, usage)
    assert model.power == pytest.approx(40_000, rel=0.002)


def test_known_idle_power_is_updated_by_the_second_after_the_time_of_learning() -> None:
    model = LoadIntercept()
    for tick in range(LEARNING_TIME // (SECOND // 10)):
        load = BUSY[tick % 3]
        power = round(40_000 + 9_000 * CPUS * load)
        model.observe(energy_at(power, SECOND // 10), SECOND // 10, used(load, 0.1))
    assert model.power == pytest.approx(40_000, rel=0.01)
    watch(model, [0.0] * 60, idle=30_000)
    for tick in range(3_000):
        load = [0.0, 0.5][tick // 50 % 2]
        power = round(30_000 + 9_000 * CPUS * load)
        model.observe(energy_at(power, SECOND // 10), SECOND // 10, used(load, 0.1))
    assert model.power == pytest.approx(30_000, rel=0.02)
