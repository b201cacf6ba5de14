"""Ranks of a synchronous job: its steps, the slack of ranks, and lower settings from it.

All ranks meet in every step, so that the slowest rank determines its duration, and the others
wait. Only ``compute`` shows the waiting: a rank that waits in a collective spins, and looks as busy
as one that computes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from wattspan.tuning.decisions.values import KnobRange, WorkUnit

STEPS = 200
"""Steps after which slack is reliable."""

MIN_SLACK = 0.05
"""Smallest slack, relative to the step, for which a rank gets a lower setting."""

SLACK_USED = 0.6
"""The ratio of a rank's slack that its lower setting may use."""

SLACK_CHANGE_STEPS = 20
"""Steps after which a change of slack is reliable."""

_AHEAD = 64  # units of lead after which a rank counts as ended
_TOGETHER = 0.5  # overlap of the units of one step, relative to the shortest
_DEVIATIONS = 2.0  # standard errors of a significant difference
_EQUAL = MIN_SLACK / 4  # ranks with a smaller difference are equally slow
_HALVE = 2 * STEPS  # steps after which the weight of older steps is halved


class SynchronousStep(NamedTuple):
    """One step of the whole job, with the work of all ranks.

    ``compute`` is the compute time by rank; empty unless known of all of several ranks.
    """

    start: int
    end: int
    work: float
    compute: Mapping[int, int]

    @property
    def unit(self) -> WorkUnit:
        return WorkUnit(self.start, self.end, self.work)


def concurrent_units(
    waiting: dict[int, deque[WorkUnit]],
    most_ahead: int,
    overlap: Callable[[Sequence[WorkUnit]], bool],
) -> Iterator[list[WorkUnit]]:
    """Take the units of all ranks at the same time, by rank in the order of ``waiting``.

    Units that do not ``overlap`` with those of every other rank are dropped, as is a rank without
    any for as long as another one has more than ``most_ahead`` of them.
    """
    while waiting:
        behind = [rank for rank, queue in waiting.items() if not queue]
        if behind:
            if max(map(len, waiting.values())) <= most_ahead:
                return
            for rank in behind:
                del waiting[rank]
            continue
        heads = [queue[0] for queue in waiting.values()]
        if overlap(heads):
            for queue in waiting.values():
                queue.popleft()
            yield heads
        else:
            waiting[min(heads, key=lambda unit: unit.end).rank].popleft()


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Combines the units of several ranks into steps.

    Each rank's units arrive in order, but those of different ranks seconds apart. A unit without
    a concurrent unit of every other rank is ignored. A rank far behind the others counts as
    ended, until its next unit.
    """

    queues: Mapping[int, tuple[WorkUnit, ...]] = field(default_factory=dict)
    end: int = 0  # of the last step

    def add(self, units: Iterable[WorkUnit]) -> tuple[Lockstep, tuple[SynchronousStep, ...]]:
        """Add units; returns the steps that they complete too."""
        waiting = {rank: deque(queue) for rank, queue in self.queues.items()}
        for unit in units:
            waiting.setdefault(unit.rank, deque()).append(unit)
        steps: list[SynchronousStep] = []
        end = self.end
        for together in concurrent_units(waiting, _AHEAD, _units_overlap):
            steps.append(_step(together, end))
            end = max(end, steps[-1].end)
        return Lockstep({rank: tuple(of) for rank, of in waiting.items()}, end), tuple(steps)


def _units_overlap(units: Sequence[WorkUnit]) -> bool:
    shared = min(unit.end for unit in units) - max(unit.start for unit in units)
    return shared >= _TOGETHER * min(unit.end - unit.start for unit in units)


def _step(units: Sequence[WorkUnit], before: int) -> SynchronousStep:
    """A step of the units; time before ``before`` belongs to the previous step."""
    end = max(unit.end for unit in units)
    start = min(max(min(unit.start for unit in units), before), end)
    known = {unit.rank: unit.compute for unit in units if unit.compute is not None}
    compute = known if len(known) == len(units) > 1 else {}
    return SynchronousStep(start, end, sum(unit.work for unit in units), compute)


class _Moments(NamedTuple):
    """Sums of values and of their squares."""

    total: float = 0.0
    squares: float = 0.0


_NO_MOMENTS = _Moments()


@dataclass(frozen=True, slots=True)
class RankWaits:
    """Recent compute time of each rank, relative to the step.

    Means over steps are compared, not single steps: where chance decides which rank is the
    slowest, every rank waits at times, and none has slack. Start anew when a setting changes.
    """

    steps: float = 0.0
    sums: Mapping[int, _Moments] = field(default_factory=dict)

    def add(self, step: SynchronousStep) -> RankWaits:
        """Add a step; one without compute times is ignored."""
        length = step.end - step.start
        if not step.compute or length <= 0:
            return self
        before = self if step.compute.keys() == self.sums.keys() else RankWaits()
        keep = 0.5 if before.steps >= _HALVE else 1.0
        sums = {}
        for rank, compute in step.compute.items():
            total, squares = before.sums.get(rank, _NO_MOMENTS)
            part = compute / length
            sums[rank] = _Moments(total * keep + part, squares * keep + part * part)
        return RankWaits(before.steps * keep + 1, sums)

    @property
    def critical(self) -> int | None:
        """The slowest rank; None while unknown."""
        return max(self.sums, key=lambda rank: (self.sums[rank].total, -rank), default=None)

    def slack(self, rank: int, deviations: float = 0.0) -> float:
        """The ratio of a step that ``rank`` waits for the critical one, at least 0.

        ``deviations`` standard errors are subtracted for a lower bound. LookupError: unknown rank.
        """
        own = self.sums[rank]
        critical = max(self.sums.values())
        difference = (critical.total - own.total) / self.steps
        variance = self._variance(own) + self._variance(critical)
        return max(0.0, difference - deviations * math.sqrt(variance / self.steps))

    def _variance(self, sums: _Moments) -> float:
        return max(0.0, sums.squares / self.steps - (sums.total / self.steps) ** 2)


TimeCurve = Callable[[int], float]
"""Approximate duration of a step at a setting, relative to the original; it is decreasing."""


def propose_rank_settings(
    levels: Mapping[str, int], ranges: Sequence[KnobRange], waiting: RankWaits, curve: TimeCurve
) -> Mapping[str, int]:
    """Settings by device: ``levels``, but lower for ranks with slack.

    ``waiting`` was observed at ``levels``. The curve is of whole steps; the compute time of a
    waiting rank grows by less.
    """
    settings = dict(levels)
    if waiting.steps < STEPS:
        return settings
    for one in ranges:
        level = levels.get(one.device)
        if level is None or one.rank not in waiting.sums:
            continue
        slack = waiting.slack(one.rank, _DEVIATIONS)
        if slack > MIN_SLACK:
            settings[one.device] = _lowest_setting(
                one, level, curve(level) * (1 + SLACK_USED * slack), curve
            )
    return settings


def _lowest_setting(one: KnobRange, level: int, longest: float, curve: TimeCurve) -> int:
    """The lowest setting above all at which a step would exceed ``longest``."""
    while level - one.step >= one.floor and curve(level - one.step) <= longest:
        level -= one.step
    return level


def remaining_slack(
    levels: Mapping[str, int],
    proposed: Mapping[str, int],
    ranges: Sequence[KnobRange],
    waiting: RankWaits,
    curve: TimeCurve,
) -> Mapping[int, float]:
    """Expected remaining slack of the lowered ranks, by rank."""
    return {
        one.rank: waiting.slack(one.rank)
        - (curve(proposed[one.device]) / curve(levels[one.device]) - 1)
        for one in ranges
        if one.device in levels and proposed[one.device] < levels[one.device]
    }


def slack_changed(now: RankWaits, critical: int, remaining: Mapping[int, float]) -> bool:
    """True if slack has changed, so that lower settings must be released.

    ``critical`` was the critical rank when they were chosen, and ``remaining`` is the expected
    slack from :func:`remaining_slack`. Slack has changed if that rank now has significant slack,
    if a lowered rank has less than half of its expected slack, or if the job has other ranks. Two
    equally slow ranks may change places.
    """
    if not now.sums or now.steps < SLACK_CHANGE_STEPS:
        return False
    if not {critical, *remaining} <= now.sums.keys():
        return True
    if now.slack(critical, _DEVIATIONS) > _EQUAL:
        return True
    return any(now.slack(rank) < expected / 2 for rank, expected in remaining.items())


class RankSlack(NamedTuple):
    """Waiting at ``level``, and the level ``lowered`` that was derived from it.

    ``critical`` and ``remaining`` are for :func:`slack_changed`; ``tries`` counts lowered levels
    since the job last changed.
    """

    waiting: RankWaits = RankWaits()
    level: int | None = None
    lowered: int | None = None
    critical: int = 0
    remaining: Mapping[int, float] = MappingProxyType({})
    tries: int = 0
