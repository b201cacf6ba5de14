"""Idle power is learned, or said to be unknown."""

import pytest

from wattspan.baseline import FreeDevice, LoadIntercept, idle_model
from wattspan.model import SECOND, Consumer, HwType, Instant, Milliwatts, Usage, energy_at

CPUS = 4


def used(load: float, seconds: float = 1.0, **rest: object) -> Usage:
    span = round(seconds * SECOND)
    spent = {Consumer(1, 1): round(load * CPUS * span)}
    return Usage("cpu", Instant(0, 0), Instant(span, 0), spent, capacity=CPUS * span, **rest)  # type: ignore[arg-type]


def watch(
    model: LoadIntercept, loads: list[float], idle: int = 40_000, per_cpu: int = 9_000
) -> None:
    """A host whose power is ``idle`` mW plus ``per_cpu`` mW for each busy CPU."""
    for load in loads:
        power = round(idle + per_cpu * CPUS * load)
        model.observe(energy_at(power, SECOND), SECOND, used(load))


def test_a_line_through_varied_load_finds_the_idle_power_of_a_host_never_idle() -> None:
    model = LoadIntercept()
    watch(model, [0.3, 0.5, 0.8] * 5)
    assert model.power == pytest.approx(40_000, abs=5)


def test_a_quiet_host_shows_its_idle_power_at_once() -> None:
    model = LoadIntercept()
    watch(model, [0.0] * 3)
    assert model.power == 40_000


def test_the_line_corrects_a_host_that_was_only_nearly_quiet() -> None:
    model = LoadIntercept()
    watch(model, [0.03] * 3)
    assert model.power == pytest.approx(41_080, abs=5)
    watch(model, [0.9] * 3)
    assert model.power == pytest.approx(40_000, abs=5)


def test_constant_full_load_says_nothing_of_idle() -> None:
    model = LoadIntercept()
    watch(model, [1.0] * 100)
    assert model.power is None


def test_short_observations_are_added_up_before_they_count() -> None:
    model = LoadIntercept()
    for _ in range(30):
        model.observe(energy_at(40_000, SECOND // 10), SECOND // 10, used(0.0, 0.1))
    assert model.power == 40_000


def test_idle_power_is_never_negative_nor_above_anything_seen() -> None:
    model = LoadIntercept()
    watch(model, [0.4, 0.9] * 5, idle=-20_000, per_cpu=30_000)
    assert model.power == 0
    falling = LoadIntercept()
    watch(falling, [0.0, 0.9] * 5, idle=50_000, per_cpu=-5_000)
    assert falling.power is not None
    assert falling.power <= 50_000 - 5_000 * CPUS * 0.9 + 1


def test_usage_of_unknown_capacity_teaches_nothing() -> None:
    model = LoadIntercept()
    usage = Usage("cpu", Instant(0, 0), Instant(SECOND, 0), {}, capacity=None)
    for _ in range(10):
        model.observe(40_000_000, SECOND, usage)
    assert model.power is None


def test_what_an_earlier_life_learned_holds_until_something_is_learned() -> None:
    model = idle_model(HwType.CPU, Milliwatts(12_345))
    assert model.power == 12_345
    assert isinstance(model, LoadIntercept)
    watch(model, [0.0] * 3)
    assert model.power == 40_000
    assert idle_model(HwType.GPU, Milliwatts(70_000)).power == 70_000


def test_a_gpu_that_nobody_holds_shows_its_idle_power() -> None:
    model = FreeDevice()
    free = Usage("gpu:0", Instant(0, 0), Instant(SECOND, 0), {})
    for _ in range(4):
        model.observe(energy_at(70_000, SECOND), SECOND, free)
    assert model.power == 70_000


def test_a_gpu_that_is_held_or_busy_says_nothing_of_idle() -> None:
    model = FreeDevice()
    held = Usage("g", Instant(0, 0), Instant(SECOND, 0), {}, present=frozenset({Consumer(1, 1)}))
    busy = Usage("g", Instant(0, 0), Instant(SECOND, 0), {}, unclaimed=5)
    free = Usage("g", Instant(0, 0), Instant(SECOND, 0), {})
    for usage in [held, busy, free, held, free, busy] * 5:
        model.observe(energy_at(110_000, SECOND), SECOND, usage)
    assert model.power is None
