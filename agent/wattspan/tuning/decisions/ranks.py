"""Ranks of a synchronous job: its steps, who waits in them, and what that allows.

The ranks of such a job meet in every step, so a step takes as long as the slowest takes, and the
others wait. How long they wait only ``compute`` tells: a rank that waits in a collective spins,
and looks as busy as one that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from wattspan.tuning.decisions.values import KnobRange, WorkUnit

STEPS = 200
"""Steps that must have been seen before anybody's waiting is believed."""

MIN_SLACK = 0.05
"""A rank that waits for a smaller part of the step keeps the setting of all."""

SLACK_USED = 0.6
"""The part of its waiting that a rank's lower setting may use up."""

SLACK_CHANGE_STEPS = 20
"""Steps that are enough to see that it is no longer so."""

_AHEAD = 64  # units by which others may be ahead of a rank before it counts as gone
_TOGETHER = 0.5  # units of one step share at least this part of the shorter one's time
_DEVIATIONS = 2.0  # standard errors by which a difference must be more than chance
_EQUAL = MIN_SLACK / 4  # ranks that differ by less are equally slow
_HALVE = 2 * STEPS  # the older steps weigh half as much whenever so many have come
_NO_QUEUES: Mapping[int, tuple[WorkUnit, ...]] = MappingProxyType({})


class SynchronousStep(NamedTuple):
    """One step of the whole job: as long as the slowest rank took, the work of all of them.

    ``compute`` is each rank's own, by rank; empty unless all of several told it.
    """

    start: int
    end: int
    work: float
    compute: Mapping[int, int]

    @property
    def unit(self) -> WorkUnit:
        """As a unit of work of the job."""
        return WorkUnit(self.start, self.end, self.work)


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Puts the units of several ranks together to steps.

    Each rank's units come in order, but the ranks' may come one after the other, seconds apart.
    A unit that has no partner of the same time in each other rank is left out: a step of which
    something was lost is none. A rank that others are far ahead of is gone, until it returns.
    """

    queues: Mapping[int, tuple[WorkUnit, ...]] = field(default_factory=lambda: _NO_QUEUES)
    end: int = 0  # of the last step
    left_out: int = 0

    def add(self, units: Iterable[WorkUnit]) -> tuple[Lockstep, tuple[SynchronousStep, ...]]:
        """With more units; and the steps that they complete."""
        waiting = {rank: list(queue) for rank, queue in self.queues.items()}
        for unit in units:
            waiting.setdefault(unit.rank, []).append(unit)
        heads = dict.fromkeys(waiting, 0)
        steps: list[SynchronousStep] = []
        end, left_out = self.end, self.left_out
        while waiting:
            behind = [rank for rank, queue in waiting.items() if heads[rank] == len(queue)]
            if behind:
                if max(len(queue) - heads[rank] for rank, queue in waiting.items()) <= _AHEAD:
                    break
                for rank in behind:
                    del waiting[rank], heads[rank]
                continue
            together = [queue[heads[rank]] for rank, queue in waiting.items()]
            if _units_overlap(together):
                steps.append(_step(together, end))
                end = max(end, steps[-1].end)
                for rank in heads:
                    heads[rank] += 1
            else:
                heads[min(together, key=lambda unit: unit.end).rank] += 1
                left_out += 1
        queues = {rank: tuple(queue[heads[rank] :]) for rank, queue in waiting.items()}
        return Lockstep(MappingProxyType(queues), end, left_out), tuple(steps)


def _units_overlap(units: Sequence[WorkUnit]) -> bool:
    shared = min(unit.end for unit in units) - max(unit.start for unit in units)
    return shared >= _TOGETHER * min(unit.end - unit.start for unit in units)


def _step(units: Sequence[WorkUnit], before: int) -> SynchronousStep:
    """What begins in it while the step before goes on is time of that one."""
    end = max(unit.end for unit in units)
    start = min(max(min(unit.start for unit in units), before), end)
    told = {unit.rank: unit.compute for unit in units if unit.compute is not None}
    compute = told if len(told) == len(units) > 1 else {}
    return SynchronousStep(start, end, sum(unit.work for unit in units), compute)


class _Moments(NamedTuple):
    """The sum of values and of their squares."""

    total: float = 0.0
    squares: float = 0.0


_NO_MOMENTS = _Moments()
_NO_RANKS: Mapping[int, _Moments] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RankWaits:
    """How long each rank computes in a step, as a part of the step, of late.

    Only who waits *every* time has time to give: where chance alone decides who is slowest in a
    step, everybody waits somewhat and nobody has slack. So means are compared, not steps. Begin
    anew when a setting changes.
    """

    steps: float = 0.0
    sums: Mapping[int, _Moments] = field(default_factory=lambda: _NO_RANKS)

    def add(self, step: SynchronousStep) -> RankWaits:
        """With one step more; one that does not tell what each rank computed changes nothing."""
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
        return RankWaits(before.steps * keep + 1, MappingProxyType(sums))

    @property
    def critical(self) -> int | None:
        """The rank that the others wait for; None as long as nothing is known."""
        return max(self.sums, key=lambda rank: (self.sums[rank].total, -rank), default=None)

    def slack(self, rank: int, deviations: float = 0.0) -> float:
        """The part of a step that ``rank`` waits for the critical one, never less than 0.

        With ``deviations``, what it surely waits: so many standard errors less. LookupError for
        a rank that is not known.
        """
        own = self.sums[rank]
        critical = max(self.sums.values())
        difference = (critical.total - own.total) / self.steps
        variance = self._variance(own) + self._variance(critical)
        return max(0.0, difference - deviations * math.sqrt(variance / self.steps))

    def _variance(self, sums: _Moments) -> float:
        return max(0.0, sums.squares / self.steps - (sums.total / self.steps) ** 2)


TimeCurve = Callable[[int], float]
"""From a setting to about how much longer a step takes than at the original one; it falls."""


def propose_rank_settings(
    levels: Mapping[str, int], ranges: Sequence[KnobRange], waiting: RankWaits, curve: TimeCurve
) -> Mapping[str, int]:
    """Settings by device: as ``levels``, but lower where a rank has time to give.

    ``levels`` is what was in force while ``waiting`` was seen. The curve is of whole steps, of
    which a rank that waits computes less than the critical one, so its own step grows by less.
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
    """The lowest setting before the first at which a step would take longer than ``longest``."""
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
    """By rank that was lowered: the part of a step that it should still wait."""
    return {
        one.rank: waiting.slack(one.rank)
        - (curve(proposed[one.device]) / curve(levels[one.device]) - 1)
        for one in ranges
        if one.device in levels and proposed[one.device] < levels[one.device]
    }


def slack_changed(now: RankWaits, critical: int, left: Mapping[int, float]) -> bool:
    """Whether lower settings must be given back: ranks wait otherwise than they did.

    ``critical`` was the critical rank when they were chosen, and ``left`` what :func:`left` said
    then. It is so if that rank now surely waits itself for a part that matters, if a lowered
    one waits less than half of what it should, or if the job has other ranks. That two ranks
    which were equally slow have changed places does not matter.
    """
    if not now.sums or now.steps < SLACK_CHANGE_STEPS:
        return False
    if not {critical, *left} <= now.sums.keys():
        return True
    if now.slack(critical, _DEVIATIONS) > _EQUAL:
        return True
    return any(now.slack(rank) < expected / 2 for rank, expected in left.items())


class RankSlack(NamedTuple):
    """What was seen of waiting at ``level``, and what was made of it.

    ``lowered`` is the level at which ranks that waited have less, ``critical`` and ``left`` what
    :func:`outdated` asks for; ``tries`` counts such levels since the job last changed.
    """

    waiting: RankWaits = RankWaits()
    level: int | None = None
    lowered: int | None = None
    critical: int = 0
    left: Mapping[int, float] = MappingProxyType({})
    tries: int = 0
