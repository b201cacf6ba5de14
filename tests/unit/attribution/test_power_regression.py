"""The joint regression of idle power and of the powers of consumers."""

import random
from collections.abc import Callable, Sequence

import pytest

from wattspan.attribution.power_regression import (
    BEND,
    COMMON,
    FIRST,
    IDLE,
    REST,
    NormalPrior,
    PowerRegression,
)

REST_POWER = 30.0
AT_REST = NormalPrior(REST_POWER, 0.5)


def row(power: float, uses: Sequence[float], bent: float = 0.0) -> list[float]:
    return [power, 1.0, sum(uses), bent, 0.0, *uses]


def learned(
    costs: Sequence[float],
    steady: Sequence[int] = (),
    *,
    windows: int = 60,
    idle: NormalPrior | None = AT_REST,
    noise: float = 0.2,
    law: Callable[[float], float] = lambda power: power,
    cpus: int = 16,
    seed: int = 1,
) -> PowerRegression:
    """A regression after windows with uses of 0.1 to 1 CPU; those of ``steady`` are 0.6."""
    chance, found = random.Random(seed), PowerRegression()
    for _ in costs:
        found.admit()
    for _ in range(windows):
        uses = [0.6 if place in steady else chance.uniform(0.1, 1.0) for place in range(len(costs))]
        active = law(sum(cost * use for cost, use in zip(costs, uses, strict=True)))
        total = sum(uses)
        bent = total * (1 - total / cpus)
        found.add(row(REST_POWER + active + chance.gauss(0, noise), uses, bent), 1.0)
        found.solve(idle)
    return found


def powers(found: PowerRegression) -> list[float]:
    """The powers of consumers for a busy CPU, at the mean load."""
    fit, means = found.fit, found.means
    assert fit is not None
    common = fit.values[COMMON] + fit.values[BEND] * means[BEND] / means[COMMON]
    return [common + difference for difference in fit.values[FIRST:]]


def deviation(found: PowerRegression, place: int) -> float:
    assert found.fit is not None
    return float(found.fit.covariances[place][place] ** 0.5)


def test_powers_of_varying_consumers_and_idle_power_are_found() -> None:
    found = learned([9.0, 22.5], idle=None)
    assert found.fit is not None
    assert powers(found) == pytest.approx([9.0, 22.5], rel=0.02)
    assert found.fit.values[IDLE] == pytest.approx(REST_POWER, abs=0.5)
    assert found.fit.trust > 0.9


def test_steady_consumer_keeps_the_prior_uncertainty() -> None:
    found = learned([10.0, 20.0, 12.0, 18.0], steady=(2, 3))
    assert deviation(found, FIRST + 2) > 0.3 * found.fit.values[COMMON]  # type: ignore[union-attr]
    assert sum(powers(found)[2:]) == pytest.approx(30.0, rel=0.1)  # their sum is identified


def test_equal_powers_are_not_told_apart() -> None:
    trusts = [learned([15.0] * 6, seed=seed).fit for seed in range(10)]
    assert sum(fit is not None and fit.trust > 0 for fit in trusts) <= 1


def test_curve_of_power_is_found() -> None:
    found = learned([10.0, 20.0], law=lambda power: power * (1.6 - power / 60), cpus=4)
    assert found.fit is not None
    assert found.fit.values[BEND] > deviation(found, BEND)


def test_outlier_has_no_effect() -> None:
    found = learned([9.0, 22.5])
    before = powers(found)
    found.add(row(900.0, [0.5, 0.5], 0.9), 1.0)
    found.solve(AT_REST)
    assert powers(found) == pytest.approx(before, rel=0.01)


def test_moderate_outlier_has_less_weight() -> None:
    found = learned([9.0, 22.5])
    weight = found.windows
    found.add(row(REST_POWER + 15.75 + 0.9, [0.5, 0.5], 0.9), 1.0)
    assert weight * 0.98 < found.windows < weight * 0.98 + 1.0


def test_change_of_a_consumer_is_followed() -> None:
    found, chance = learned([9.0, 22.5]), random.Random(2)
    for _ in range(25):
        uses = [chance.uniform(0.1, 1.0), chance.uniform(0.1, 1.0)]
        power = REST_POWER + 25.0 * uses[0] + 22.5 * uses[1] + chance.gauss(0, 0.2)
        found.add(row(power, uses, sum(uses) * (1 - sum(uses) / 16)), 1.0)
        found.solve(AT_REST)
    assert powers(found) == pytest.approx([25.0, 22.5], rel=0.05)


def test_removed_consumer_leaves_the_others_as_they_were() -> None:
    found = learned([9.0, 22.5, 15.0])
    before = powers(found)
    found.remove(FIRST + 1)
    assert powers(found) == pytest.approx([before[0], before[2]], rel=0.05)
    found.solve(AT_REST)
    assert powers(found) == pytest.approx([before[0], before[2]], rel=0.05)


def test_consumer_without_windows_may_be_removed() -> None:
    found = PowerRegression()
    found.admit()
    found.remove(FIRST)
    found.solve()
    assert found.fit is None


def test_admitted_consumer_begins_with_the_common_power() -> None:
    found = learned([9.0, 22.5])
    found.admit()
    assert found.fit is not None
    assert found.fit.values[-1] == 0
    assert deviation(found, FIRST + 2) == pytest.approx(0.4 * found.fit.values[COMMON])


@pytest.mark.parametrize(("power", "use"), [(0.0, 1.0), (30.0, 0.0)])
def test_nothing_is_learned_without_power_or_use(power: float, use: float) -> None:
    found = PowerRegression()
    found.admit()
    found.add(row(power, [use]), 1.0)
    found.solve()
    assert found.fit is None


def test_exact_powers_are_learned_without_noise() -> None:
    found = learned([10.0, 20.0], noise=0.0, windows=30)
    assert powers(found) == pytest.approx([10.0, 20.0], rel=0.01)


@pytest.mark.parametrize("alike", [True, False])
def test_errors_of_uses_tell_no_equal_uses_apart(alike: bool) -> None:
    """Ticks of the kernel make two equal uses look different."""
    chance, found, error = random.Random(3), PowerRegression(), 0.01
    found.admit()
    found.admit()
    for _ in range(60):
        uses = [chance.uniform(0.1, 1.0) for _ in range(2)]
        if alike:
            uses[1] = uses[0]
        power = REST_POWER + 10 * uses[0] + 25 * uses[1] + chance.gauss(0, 0.05)
        seen = [use + chance.gauss(0, error) for use in uses]
        found.add(row(power, seen), 1.0, [0.0] * FIRST + [error**2] * 2)
        found.solve(AT_REST)
    assert found.fit is not None
    stated = found.stated(found.fit)
    apart = [0.0] * FIRST + [1.0, -1.0]
    if alike:
        assert stated.spread(apart) > 1.5 * found.fit.spread(apart)
    else:
        assert stated.spread(apart) == pytest.approx(found.fit.spread(apart), rel=0.05)
    assert stated.values == found.fit.values


def test_correlated_residuals_widen_the_deviations() -> None:
    chance, drift = random.Random(3), 0.0
    drifting, independent = PowerRegression(), PowerRegression()
    for one in (drifting, independent):
        one.admit()
        one.admit()
    for _ in range(80):
        uses = [chance.uniform(0.1, 1.0), chance.uniform(0.1, 1.0)]
        drift = 0.9 * drift + chance.gauss(0, 0.2)
        spread = chance.gauss(0, 0.45)
        for one, error in ((drifting, drift), (independent, spread)):
            one.add(row(REST_POWER + 10 * uses[0] + 20 * uses[1] + error, uses), 1.0)
            one.solve(AT_REST)
    assert deviation(drifting, REST + 1) > 1.5 * deviation(independent, REST + 1)
