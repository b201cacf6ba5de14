"""The comparison of the two halves of a window."""

from __future__ import annotations

import random

import pytest

from wattspan.frontier.statistics import change_of_speed
from wattspan.frontier.work import Completion
from wattspan.model import MILLISECOND, SECOND


def completions(
    count: int, *, noise: float = 0.0, drift: float = 0.0, step: float = 0.0, seed: int = 0
) -> list[Completion]:
    """Units of 50 ms; ``drift`` is the change up to the end, ``step`` one in the middle."""
    rng, now = random.Random(seed), 0
    found = [Completion(0, 1.0)]
    for number in range(count):
        slower = (1 + drift * number / count) * (1 + step * (number >= count / 2))
        now += round(50 * MILLISECOND * slower * (1 + rng.gauss(0, noise)))
        found.append(Completion(now, 1.0))
    return found


def change(found: list[Completion]) -> str:
    return change_of_speed(found, found[0].at, found[-1].at)


def test_steady_windows_are_called_unsteady_in_one_of_a_thousand() -> None:
    marked = sum(bool(change(completions(60, noise=0.05, seed=seed))) for seed in range(1000))
    assert marked <= 3


@pytest.mark.parametrize(("drift", "step"), [(0.1, 0.0), (-0.1, 0.0), (0.0, 0.05), (0.0, -0.05)])
def test_change_beyond_noise_is_found(drift: float, step: float) -> None:
    found = [
        change(completions(200, noise=0.02, drift=drift, step=step, seed=seed))
        for seed in range(50)
    ]
    assert all(found)
    slower = drift + step > 0
    assert all(("took +" if slower else "took -") in sentence for sentence in found)


def test_change_without_noise_has_its_size() -> None:
    found = [Completion(50 * MILLISECOND * n, 1.0) for n in range(241)]
    found += [Completion(12 * SECOND + 60 * MILLISECOND * n, 1.0) for n in range(1, 201)]
    assert change(found) == "A unit of work took +20.0% in the second half of the window."


def test_small_change_does_not_matter() -> None:
    assert change(completions(400, step=0.005)) == ""


def test_periodic_work_is_steady() -> None:
    found, now = [Completion(0, 1.0)], 0
    for number in range(400):
        now += (50 if number % 10 else 500) * MILLISECOND  # a checkpoint every ten steps
        found.append(Completion(now, 1.0))
    assert change(found) == ""


def test_completions_of_unequal_work_are_compared_by_unit() -> None:
    found, now = [Completion(0, 1.0)], 0
    for number in range(200):
        work = 1.0 if number < 100 else 4.0
        now += round(work * 50 * MILLISECOND)
        found.append(Completion(now, work))
    assert change(found) == ""


def test_work_outside_the_window_is_ignored() -> None:
    found = completions(200, step=3.0)
    assert change_of_speed(found, found[0].at, found[90].at) == ""


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_units_tell_nothing(count: int) -> None:
    assert change(completions(count, drift=5.0)) == ""
