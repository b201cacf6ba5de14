"""The benchmark of a day's memory: its slope with confidence interval, and its simulation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.memory_day import (
    HOUR,
    MIN_POINTS,
    SAMPLE_EVERY,
    hourly_medians,
    report,
    sen_slope,
    simulate,
)

from wattspan.model import SECOND


def day(slope: float, noise: float, seed: int = 1) -> list[tuple[float, float]]:
    """Samples every five minutes of a day."""
    draw = random.Random(seed)
    return [(n / 12, 50 + slope * n / 12 + draw.gauss(0, noise)) for n in range(1, 289)]


def test_slope_of_a_line_is_exact() -> None:
    points = [(float(n), 40 + 0.5 * n) for n in range(20)]
    assert sen_slope(points) == pytest.approx((0.5, 0.5, 0.5))


def test_slope_is_the_median_of_all_pairs_within_its_interval() -> None:
    """The median slope of 21 pairs is the eleventh; the bounds are of pairs beside it."""
    points = [(0, 10), (1, 22), (2, 21), (3, 30), (4, 22), (5, 30), (6, 40)]
    slope, low, high = sen_slope([(float(at), float(value)) for at, value in points])
    slopes = sorted((y - x) / (b - a) for a, x in points for b, y in points if b > a)
    assert slope == slopes[10]
    assert slopes[0] <= low < slope < high <= slopes[-1]


@pytest.mark.parametrize("seed", range(10))
def test_interval_of_noise_contains_zero_for_nearly_all_seeds(seed: int) -> None:
    found = [sen_slope(hourly_medians(day(0.0, 1.0, 100 * seed + n))) for n in range(20)]
    assert sum(low <= 0 <= high for _, low, high in found) >= 16


@pytest.mark.parametrize("seed", range(10))
def test_leak_of_three_megabytes_a_day_is_outside_the_interval_of_zero(seed: int) -> None:
    _, low, _ = sen_slope(hourly_medians(day(3 / 24, 0.5, seed)))
    assert low > 0
    assert "| rises |" in report(day(3 / 24, 0.5, seed), SECOND)


def test_result_of_constant_memory_is_flat() -> None:
    assert "| +0.00 (+0.00 to +0.00) | flat |" in report(day(0.0, 0.0), SECOND)


def test_short_run_has_no_result() -> None:
    assert "| too few hours | not judged |" in report(
        day(0.0, 0.0)[: 12 * (MIN_POINTS - 1)], SECOND
    )


@pytest.mark.slow
def test_simulation_joins_spans_and_samples_memory(tmp_path: Path) -> None:
    samples = list(simulate(tmp_path, SAMPLE_EVERY, SECOND, 120))
    assert [hours for hours, _ in samples] == [SAMPLE_EVERY / HOUR]
    assert samples[0][1] > 10
