"""Finished iterations of a running pipeline, and the waiting for other pipelines at their ends."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from wattspan.tuning.pipeline.observation import InstructionSpan

STRAGGLER_ITERATIONS = 20
"""Iterations in a row that wait for another pipeline, after which it counts as a straggler."""

STRAGGLER_MARGIN = 0.01
"""The part of a straggler's iteration by which a plan for it ends earlier.

The rest of the waiting shows in each iteration whether the straggler is still as slow.
"""

_LEAST_WAIT = 2 * STRAGGLER_MARGIN
_RECOVERED_WAIT = STRAGGLER_MARGIN / 4


PARTNER_GROWTH = 1.02
"""Relative growth of iterations by which clocks for a pipeline of another host were wrong."""

PARTNER_CHECKED = 5
"""Iterations at new clocks, and before them, whose means are compared for that."""


class RankEnergy(NamedTuple):
    """Energy of one rank's device in joules between two instants in seconds."""

    rank: int
    start: float
    end: float
    joules: float


class PipelineIteration(NamedTuple):
    """One finished iteration.

    ``spans`` are its instructions, ``clocks`` the SM clock of each rank in MHz, None unless they
    are known and did not change in the iteration. ``energy`` has consecutive periods of each rank
    in which the clocks did not change; the first ones may be in the iteration before. ``waited``
    are the seconds after the last instruction for which all ranks waited for other data-parallel
    pipelines, ``partner`` is the last one of these if it is on another host. ``lasted`` are the
    seconds of the units of all ranks, which end when all pipelines have exchanged their gradients.
    """

    spans: tuple[InstructionSpan, ...]
    clocks: tuple[int, ...] | None
    energy: tuple[RankEnergy, ...] = ()
    waited: float = 0.0
    partner: str = ""
    lasted: float = 0.0

    @property
    def number(self) -> int:
        return self.spans[0].iteration

    @property
    def seconds(self) -> float:
        """From the start of the first instruction to the end of the last one."""
        return max(one.end for one in self.spans) - min(one.start for one in self.spans)

    @property
    def whole(self) -> float:
        """The seconds with the waiting for other pipelines."""
        return self.seconds + self.waited

    def watts(self, ranks: int) -> float | None:
        """The mean power of ``ranks`` devices together; None unless that of each is known."""
        each = self.rank_watts(ranks)
        return None if each is None else sum(each)

    def rank_watts(self, ranks: int) -> tuple[float, ...] | None:
        """The mean power of each of ``ranks`` devices; None unless all are known."""
        joules, seconds = [0.0] * ranks, [0.0] * ranks
        for one in self.energy:
            joules[one.rank] += one.joules
            seconds[one.rank] += one.end - one.start
        if min(seconds) <= 0:
            return None
        return tuple(energy / lasted for energy, lasted in zip(joules, seconds, strict=True))


@dataclass(frozen=True, slots=True)
class StragglerWatch:
    """The iteration times of the slowest other pipeline, in the latest iterations that waited.

    ``lasted`` are the seconds of the units in these. ``partner`` is the slowest pipeline of the
    latest one, if it is on another host.
    """

    times: tuple[float, ...] = ()
    lasted: tuple[float, ...] = ()
    partner: str = ""

    def add(self, iteration: PipelineIteration, *, planned: bool = False) -> StragglerWatch:
        """Add an iteration; ``planned`` if it had the clocks of a plan for the straggler."""
        seconds, waited = iteration.seconds, iteration.waited
        if waited <= (_RECOVERED_WAIT if planned else _LEAST_WAIT) * seconds:
            return StragglerWatch()
        return StragglerWatch(
            (*self.times[1 - STRAGGLER_ITERATIONS :], seconds + waited),
            (*self.lasted[1 - STRAGGLER_ITERATIONS :], iteration.lasted),
            iteration.partner,
        )

    @property
    def usual(self) -> float:
        """The mean seconds of the latest units; at least one iteration has waited."""
        return fmean(self.lasted[-PARTNER_CHECKED:])

    @property
    def waits(self) -> bool:
        """True if the latest iteration waited for another pipeline."""
        return bool(self.times)

    @property
    def straggler(self) -> float | None:
        """The least of the straggler's iteration times in seconds; None without a straggler."""
        return min(self.times) if len(self.times) == STRAGGLER_ITERATIONS else None
