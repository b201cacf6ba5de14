"""The speed of a command in the first and in the second half of a window.

Consecutive units of work are averaged in batches, which makes their errors nearly independent (the
method of batch means; Law, Simulation Modeling and Analysis, chapter 9). The variance of a batch
comes from differences of neighbours (von Neumann 1941), so that a trend does not count as noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, inf, log, sqrt

from wattspan.frontier.student_t import upper_tail

SIGNIFICANCE = 0.001
"""Probability that a steady window is called unsteady: studies have up to hundreds of them."""

LEAST_CHANGE = 0.01
"""Relative change of the time per unit that does not matter."""

_BATCHES = 8
"""Batches of a half at most."""


def change_of_speed(completions: Sequence[tuple[int, float]], start: int, end: int) -> str:
    """A sentence if the time per unit of work changed beyond noise, else "".

    ``completions`` are monotonic times in ascending order and the work that was completed at each.
    The window begins and ends with one. Fewer than two completions in a half tell nothing: "".
    """
    middle = (start + end) / 2
    first: list[tuple[int, float]] = []
    second: list[tuple[int, float]] = []
    inside = [one for one in completions if start <= one[0] <= end]
    for (before, _), (at, work) in pairwise(inside):
        (first if at <= middle else second).append((at - before, work))
    one, two = _batches(first), _batches(second)
    if min(len(one), len(two)) < 2:
        return ""
    change = sum(two) / len(two) - sum(one) / len(one)
    if abs(change) <= LEAST_CHANGE:
        return ""
    squares = sum((b - a) ** 2 for half in (one, two) for a, b in pairwise(half))
    variance = squares / 2 / (len(one) + len(two) - 2)
    error = sqrt(variance * (1 / len(one) + 1 / len(two)))
    t = abs(change) / error if error else inf
    if 2 * upper_tail(t, _freedom(len(one)) + _freedom(len(two))) > SIGNIFICANCE:
        return ""
    return f"A unit of work took {exp(change) - 1:+.1%} in the second half of the window."


def _batches(gaps: Sequence[tuple[int, float]]) -> list[float]:
    """Logarithms of the time per unit of work, in batches of consecutive units."""
    count = min(_BATCHES, len(gaps))
    bounds = [n * len(gaps) // count for n in range(count + 1)] if count else []
    return [
        log(sum(gap for gap, _ in gaps[low:high]) / sum(work for _, work in gaps[low:high]))
        for low, high in pairwise(bounds)
    ]


def _freedom(count: int) -> float:
    """Degrees of freedom of a variance from the differences of ``count`` neighbours."""
    differences = count - 1
    return 2 * differences**2 / (3 * differences - 1)
