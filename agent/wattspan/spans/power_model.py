"""The mean GPU power of span names, and the division of a counter step by it.

The counter of a GPU is updated about ten times a second. One step gives one equation: its energy
is the sum, over the *activities* of the process, of mean power times time. An activity is the name
of open spans, or the time outside of all spans. Many steps give the mean powers by linear
regression: recursive least squares in information form with a ridge, solved by Gauss-Seidel sweeps
over the activities of the step, so that a step costs a few operations for any number of names.

The power of an activity varies about its mean like white noise. Its variance is estimated from the
squared residuals of steps (variance components by expectation maximisation, one step at a time:
Dempster, Laird and Rubin 1977, section 4.4). For Gaussian parts of known sum the expected energy of
each part is its mean plus the residual times its fraction of the variance, and the energy up to an
edge has the conditional variance C (V - C) / V, where V is the variance of the sum and C that of
the parts before the edge.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import sqrt
from typing import NamedTuple

from wattspan.model import MILLISECOND
from wattspan.util.linear_systems import solved

Activity = Hashable
"""A board with a span name, or with a process outside of its spans."""

STEP = 100 * MILLISECOND
"""The time to which variances refer."""

ENOUGH_STEPS = 40
"""Steps with an activity before its mean power is used: 20 spans of 0.1 s, 4 of 1 s."""

MAX_LINKS = 64
"""Other activities with which one has steps in common; further ones count as independent."""

_MEMORY = 300.0  # whole steps of an activity to which older ones fade
_RIDGE = 0.1  # weight of the first estimate, in whole steps
_SWEEPS = 2
_SEVERAL = 1.5  # the length of a whole step varies
_MOVED = 0.2  # deviation of the energy between two blurred steps, of the sum of both
_MIN_DEVIATION = 0.01  # of the mean power, over STEP


class Segment(NamedTuple):
    """A period with the same activities, and the fraction of each; fractions add up to one."""

    start: int
    end: int
    mix: Mapping[Activity, float]


class Step(NamedTuple):
    """Consecutive segments, and their energy in microjoules."""

    segments: Sequence[Segment]
    energy: float


class SegmentEnergy(NamedTuple):
    """The expected energy of a segment in microjoules, and standard deviations.

    ``before`` is that of the energy from the step's begin to the segment's, ``inside`` that of the
    segment's energy.
    """

    energy: float
    before: float
    inside: float


@dataclass(slots=True)
class _MeanPower:
    """The power of one activity: mean in uJ/ns, variance of the mean over ``STEP``."""

    power: float
    variance: float
    weight: float = _RIDGE  # whole steps; the diagonal of the normal matrix
    pull: float = 0.0  # right-hand side of the normal equations less the present solution
    steps: int = 0
    links: dict[Activity, float] = field(default_factory=dict)  # off the diagonal


class PowerModel:
    """The mean powers of at most ``limit`` activities, the most recently used ones."""

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._means: OrderedDict[Activity, _MeanPower] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def power(self, activity: Activity) -> float | None:
        """The mean power in uJ/ns; None before ``ENOUGH_STEPS``."""
        mean = self._means.get(activity)
        return None if mean is None or mean.steps < ENOUGH_STEPS else mean.power

    def links(self, activity: Activity) -> int:
        """The number of activities with which an activity has steps in common."""
        return len(self._means[activity].links)

    def forget(self, activity: Activity) -> None:
        """Remove an activity. Idempotent."""
        mean = self._means.pop(activity, None)
        if mean is None:
            return
        for other in mean.links:
            # Its steps remain with the power that they were fitted with.
            self._means[other].links.pop(activity, None)

    # ----------------------------------------------------------------------------------- learn

    def learn(self, step: Step) -> float:
        """Add a step; returns its deviation from the former estimate in standard deviations."""
        length = step.segments[-1].end - step.segments[0].start
        power, weight = step.energy / length, length / STEP
        parts: dict[Activity, float] = {}
        for start, end, mix in step.segments:
            for activity, fraction in mix.items():
                parts[activity] = parts.get(activity, 0.0) + fraction * (end - start) / length
        means = {activity: self._use(activity, power) for activity in parts}
        for activity, part in parts.items():
            # Several steps may be learned as one: the activity was in about so many of them.
            means[activity].steps += 1 + int(part * weight) if weight > _SEVERAL else 1
        residual = power - sum(part * means[one].power for one, part in parts.items())
        whole = sum(part * means[one].variance for one, part in parts.items()) / weight
        self._update_variances(parts, means, residual, weight)
        self._update_powers(parts, means, residual, weight)
        return residual / sqrt(whole) if whole > 0 else 0.0

    def _use(self, activity: Activity, power: float) -> _MeanPower:
        mean = self._means.get(activity)
        if mean is None:
            if len(self._means) >= self._limit:
                self.forget(next(iter(self._means)))
            mean = self._means[activity] = _MeanPower(power, power * power)
        self._means.move_to_end(activity)
        return mean

    def _update_variances(
        self,
        parts: Mapping[Activity, float],
        means: Mapping[Activity, _MeanPower],
        residual: float,
        weight: float,
    ) -> None:
        """One step of expectation maximisation: a part's deviation given the sum of all."""
        sums = {one: part * means[one].variance / weight for one, part in parts.items()}
        whole = sum(sums.values())
        if whole <= 0:
            return
        for activity, part in parts.items():
            mean, own = means[activity], sums[activity]
            deviation = residual * own / whole
            found = (deviation * deviation + own * (1 - own / whole)) * weight / part
            gain = part * weight / (1 + min(mean.weight, _MEMORY / 4))
            mean.variance += min(1.0, gain) * (found - mean.variance)

    def _update_powers(
        self,
        parts: Mapping[Activity, float],
        means: Mapping[Activity, _MeanPower],
        residual: float,
        weight: float,
    ) -> None:
        for activity, part in parts.items():
            mean = means[activity]
            # Scaling a row and its column keeps the solution: the weight of older steps fades.
            kept = max(0.0, 1 - part * weight / _MEMORY)
            mean.weight = max(_RIDGE, mean.weight * kept)
            for other, link in mean.links.items():
                mean.links[other] = self._means[other].links[activity] = link * sqrt(kept)
        for activity, part in parts.items():
            mean = means[activity]
            mean.weight += weight * part * part
            mean.pull += weight * part * residual
        for one, other in combinations(parts, 2):
            links, back = means[one].links, means[other].links
            if other in links or max(len(links), len(back)) < MAX_LINKS:
                link = links.get(other, 0.0) + weight * parts[one] * parts[other]
                links[other] = back[one] = link
        for _ in range(_SWEEPS):
            for mean in means.values():
                change = max(-mean.power, mean.pull / mean.weight)
                mean.power += change
                mean.pull -= mean.weight * change
                for other, link in mean.links.items():
                    self._means[other].pull -= link * change

    # ---------------------------------------------------------------------------------- divide

    def divide(
        self, steps: Sequence[Step], divided: range, persistence: float
    ) -> list[SegmentEnergy] | None:
        """The parts of the energy of the ``divided`` steps; they add up to it.

        The other steps are their neighbours. Several divided steps are blurred: each has a part of
        the energy of the next one, or the other way round. ``persistence`` is the correlation of
        deviations at a distance of ``STEP``. None before enough steps with each of the activities,
        if none ever had energy, and without energy.
        """
        means, deviations, middles, numbers = [], [], [], []
        for number, step in enumerate(steps):
            for start, end, mix in step.segments:
                power = self._mixed(mix)
                if power is None:
                    return None
                means.append(power[0] * (end - start))
                deviations.append(power[1] * (end - start))
                middles.append((start + end) / 2 / STEP)
                numbers.append(number)
        covariance = [
            [
                one * other * persistence ** abs(at - also)
                for other, also in zip(deviations, middles, strict=True)
            ]
            for one, at in zip(deviations, middles, strict=True)
        ]
        # The covariance of each segment with the energy of each step, and of the latter.
        count = len(steps)
        with_steps = [[0.0] * count for _ in means]
        residuals = [step.energy for step in steps]
        for i, number in enumerate(numbers):
            residuals[number] -= means[i]
            for j, other in enumerate(numbers):
                with_steps[i][other] += covariance[i][j]
        of_steps = [[0.0] * count for _ in steps]
        for i, number in enumerate(numbers):
            for other in range(count):
                of_steps[number][other] += with_steps[i][other]
        energy = sum(steps[number].energy for number in divided)
        if sum(of_steps[number][number] for number in divided) <= 0 or energy <= 0:
            return None
        for number in range(count):
            noise = _MIN_DEVIATION * steps[number].energy if number not in divided else 0.0
            of_steps[number][number] += noise * noise + 1e-9 * of_steps[number][number] + 1e-9
        for one, other in pairwise(divided):
            moved = (_MOVED * (steps[one].energy + steps[other].energy)) ** 2
            of_steps[one][one] += moved
            of_steps[other][other] += moved
            of_steps[one][other] -= moved
            of_steps[other][one] -= moved
        inside = [i for i, number in enumerate(numbers) if number in divided]
        gains = solved(of_steps, [with_steps[i] for i in inside])
        energies = [
            means[i] + sum(g * r for g, r in zip(gain, residuals, strict=True))
            for i, gain in zip(inside, gains, strict=True)
        ]
        energies = [max(0.0, each) for each in energies]
        scale = sum(energies)
        parts, before = [], 0.0
        for k, (i, gain) in enumerate(zip(inside, gains, strict=True)):
            known = [
                covariance[i][j] - sum(g * c for g, c in zip(gain, with_steps[j], strict=True))
                for j in inside[: k + 1]
            ]
            own = max(0.0, known[k])
            parts.append(
                SegmentEnergy(energies[k] / scale * energy, sqrt(max(0.0, before)), sqrt(own))
            )
            before += 2 * sum(known[:k]) + known[k]
        return parts

    def _mixed(self, mix: Mapping[Activity, float]) -> tuple[float, float] | None:
        """Mean and standard deviation of the power of activities; None before enough steps."""
        power = variance = 0.0
        for activity, fraction in mix.items():
            mean = self._means.get(activity)
            if mean is None or mean.steps < ENOUGH_STEPS:
                return None
            power += fraction * mean.power
            least = (_MIN_DEVIATION * mean.power) ** 2
            variance += fraction * max(mean.variance, least) * (1 + 1 / mean.weight)
        return power, sqrt(variance)
