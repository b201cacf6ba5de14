"""Credible intervals of idle powers that are extrapolated from loads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from wattspan.attribution.power_curve import Extrapolation, PowerCurve, largest_idle

IDLE, ACTIVE = 42_000, 72_000

LAWS: dict[str, Callable[[float], float]] = {
    "straight line": lambda load: load,
    "Fan et al.": lambda load: 2 * load - load**1.4,
    "saturating": lambda load: (1 - math.exp(-1.5 * load)) / (1 - math.exp(-1.5)),
}


def watched(law: Callable[[float], float], seed: int, *, drift: int = 0) -> Extrapolation:
    """A minute of a load around 60 %, with correlated deviations of the power if it drifts."""
    chance, curve = random.Random(seed), PowerCurve()
    varied = shifted = 0.0
    for tick in range(600):
        varied = 0.9 * varied + math.sqrt(0.19) * chance.gauss(0, 0.1)
        shifted = 0.99 * shifted + 0.14 * chance.gauss(0, drift)
        load = min(1.0, max(0.0, 0.6 + varied))
        curve.add(load, IDLE + ACTIVE * law(load) + chance.gauss(0, 250) + shifted, 0.1)
        if tick % 10 == 9:
            found = curve.extrapolate()
    assert found is not None
    return found


def coverage(law: str, *, drift: int = 0) -> float:
    """The fraction of intervals that contain the idle power."""
    found = [watched(LAWS[law], seed, drift=drift) for seed in range(20)]
    return sum(abs(one.idle - IDLE) <= one.half_width for one in found) / len(found)


@pytest.mark.parametrize("law", LAWS)
def test_interval_contains_the_idle_power_of_laws_with_other_curvatures(law: str) -> None:
    assert coverage(law) >= 0.9


def test_interval_contains_the_idle_power_of_a_drifting_device() -> None:
    assert coverage("straight line", drift=1_000) >= 0.9


def test_narrow_variation_leaves_the_curvature_unknown() -> None:
    curve = PowerCurve()
    for tick in range(20_000):
        load = 0.6 + 0.02 * math.sin(tick)
        curve.add(load, IDLE + ACTIVE * load, 0.1)
    found = curve.extrapolate()
    assert not found.narrow
    assert abs(found.idle - IDLE) <= found.half_width


def test_slope_of_a_single_distant_sample_is_ignored() -> None:
    curve = PowerCurve()
    for _ in range(60):
        curve.add(0.6, IDLE + ACTIVE * 0.6, 1.0)
    curve.add(0.9, IDLE + ACTIVE * 0.9, 1.0)
    assert curve.extrapolate() is None
    for _ in range(5):
        curve.add(0.9, IDLE + ACTIVE * 0.9, 1.0)
    assert curve.extrapolate() is not None


def test_curve_without_samples_has_no_idle_power() -> None:
    curve = PowerCurve()
    assert not curve.observed
    assert curve.extrapolate() is None
    curve.add(0.5, 50_000, 0.1)
    assert curve.observed
    assert curve.extrapolate() is None


def test_largest_idle_power_is_below_the_power_under_load() -> None:
    assert largest_idle(0.0, 50_000) == 50_000
    assert 0.9 * 50_000 < largest_idle(1.0, 50_000) < 50_000
