"""The frontier: the settings that no other one beats in time and in energy.

A setting is left out only if another one is faster *and* uses less energy beyond chance. Settings
whose difference may be chance are ties, and stay.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

from wattspan.frontier.estimates import SettingEstimates

SIGNIFICANCE = 0.05
"""Probability that any setting is left out by chance."""


class Dominance(NamedTuple):
    """``setting`` is slower and uses more energy than ``by``; both are numbers of settings."""

    setting: int
    by: int
    probability: float  # of chance, before the correction for many comparisons


def dominated(estimates: SettingEstimates, significance: float = SIGNIFICANCE) -> list[Dominance]:
    """The settings that are left out, each with the one that beats it most surely.

    The test of one pair is the weaker of its two one-sided t tests (Berger 1982, an
    intersection-union test). Holm's method (1979) corrects for all pairs.
    """
    time, energy = estimates.time, estimates.energy
    tests = sorted(
        (
            max(
                time.probability_of_chance(by, setting),
                energy.probability_of_chance(by, setting),
            ),
            setting,
            by,
        )
        for setting, by in permutations(estimates.measured, 2)
    )
    found: dict[int, Dominance] = {}
    for number, (probability, setting, by) in enumerate(tests):
        if probability * (len(tests) - number) > significance:
            break
        found.setdefault(setting, Dominance(setting, by, probability))
    return [found[setting] for setting in sorted(found)]


def frontier(estimates: SettingEstimates, significance: float = SIGNIFICANCE) -> list[int]:
    """The numbers of the settings that are not left out, by time."""
    out = {one.setting for one in dominated(estimates, significance)}
    remaining = [number for number in estimates.measured if number not in out]
    return sorted(remaining, key=lambda number: estimates.time.value(number).value)
