"""One step of a pipeline's control: spans, clocks and energies become iterations of its session.

Clocks are read at each step, so that the time of a change is known only as that between two steps:
an iteration that overlaps it has unknown clocks. Energies and the spans of other data-parallel
pipelines may arrive later: an iteration waits for them for a while after its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from wattspan.fleet.job_records import PipelineSummary
from wattspan.model import SECOND, Microjoules
from wattspan.tuning.decisions.budget import lost_part
from wattspan.tuning.decisions.sequential_test import NO_EVIDENCE, Evidence
from wattspan.tuning.decisions.values import EnergyPoint, WorkUnit
from wattspan.tuning.pipeline.iterations import (
    AssembledIteration,
    ClockChange,
    IterationAssembly,
    IterationTimes,
    PipelineIteration,
    RankInstruction,
    finished,
    steady_clocks,
)
from wattspan.tuning.pipeline.session import add_iteration
from wattspan.tuning.pipeline.session_state import PipelinePhase, PipelineState

ENERGY_PATIENCE = 5 * SECOND
"""An iteration waits for its energy, and for other pipelines, for at most this time."""

_KEPT_CHANGES = 16
_KEPT_ITERATIONS = 16
_KEPT_POINTS = 512

_RECENT = 20
"""Iterations of which the time and the waiting are shown."""

_MOST_SETTINGS = 512
"""Settings of which the energy is kept; a session uses some dozens."""


class RemoteRank(NamedTuple):
    """The latest changes of a rank's clock on another host, and further points of its energy."""

    clocks: tuple[ClockChange, ...] = ()
    energy: tuple[EnergyPoint, ...] = ()


class PipelineObservation(NamedTuple):
    """Input of one step, at ``now`` in monotonic nanoseconds.

    ``clocks`` are those read back of each rank's device in MHz, None if unknown, ``energy`` further
    points of its cumulative energy. ``remote`` has both of ranks on other hosts.
    """

    now: int
    units: tuple[WorkUnit, ...] = ()
    instructions: tuple[RankInstruction, ...] = ()
    clocks: Mapping[int, int | None] = MappingProxyType({})
    energy: Mapping[int, EnergyPoint] = MappingProxyType({})
    remote: Mapping[int, RemoteRank] = MappingProxyType({})


class _SettingEnergy(NamedTuple):
    """Iterations at the same clocks, and the joules of each rank in ``metered`` ones of them."""

    iterations: int = 0
    metered: int = 0
    joules: tuple[float, ...] = ()

    def add(self, joules: tuple[float, ...] | None) -> _SettingEnergy:
        one = self._replace(iterations=self.iterations + 1)
        if joules is None:
            return one
        known = self.joules or (0.0,) * len(joules)
        summed = tuple(a + b for a, b in zip(known, joules, strict=True))
        return one._replace(metered=self.metered + 1, joules=summed)

    def mean(self, rank: int) -> float:
        return self.joules[rank] / self.metered


class _RecentIteration(NamedTuple):
    """Seconds of an iteration, without and with the waiting for other pipelines, and of work."""

    seconds: float
    whole: float
    busy: tuple[float, ...]


_SettingKey = tuple[tuple[int, ...], bool]  # clocks, and True beside a slower pipeline


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """Waiting and saved energy of each of ``ranks`` ranks: the latest iterations, and all settings.

    The energy of a rank in an iteration is its mean power in the periods of its counter that are
    known for this iteration, times the whole iteration. Iterations without such a period count with
    the mean of those at the same clocks.
    """

    ranks: int = 0
    recent: tuple[_RecentIteration, ...] = ()
    settings: Mapping[_SettingKey, _SettingEnergy] = field(default_factory=dict)

    def add(self, iteration: PipelineIteration, ranks: int, *, straggler: bool) -> RankStatistics:
        """Add an iteration; ``straggler`` if all of its ranks waited for another pipeline.

        With another number of ranks than before, only this iteration is kept.
        """
        before = self if ranks == self.ranks else RankStatistics(ranks)
        busy = [0.0] * ranks
        for span in iteration.spans:
            busy[span.rank] += span.end - span.start
        latest = _RecentIteration(iteration.seconds, iteration.whole, tuple(busy))
        recent = (*before.recent[1 - _RECENT :], latest)
        settings, clocks = before.settings, iteration.clocks
        if clocks is not None:
            watts = iteration.rank_watts(ranks)
            joules = None if watts is None else tuple(one * iteration.whole for one in watts)
            key = clocks, straggler
            known = settings.get(key)
            if known is not None or len(settings) < _MOST_SETTINGS:
                settings = {**settings, key: (known or _SettingEnergy()).add(joules)}
        return replace(before, recent=recent, settings=settings)

    @property
    def seconds(self) -> float | None:
        """The mean time of the latest iterations, without the waiting for other pipelines."""
        return fmean(one.seconds for one in self.recent) if self.recent else None

    @property
    def waiting(self) -> tuple[float, ...]:
        """The part of the latest iterations for which each rank has waited."""
        whole = sum(one.whole for one in self.recent)
        return tuple(
            min(max(1 - sum(one.busy[rank] for one in self.recent) / whole, 0.0), 1.0)
            for rank in range(self.ranks)
        )

    def saved(self, original: int) -> tuple[Microjoules, ...] | None:
        """Energy that each rank has used less than at the ``original`` clock, in all iterations.

        Iterations beside a slower pipeline are compared with each other. None before both energies
        are known.
        """
        totals, known = [0.0] * self.ranks, False
        for (_, straggler), one in self.settings.items():
            usual = self.settings.get(((original,) * self.ranks, straggler))
            if usual is None or one is usual or not (one.metered and usual.metered):
                continue
            known = True
            for rank in range(self.ranks):
                totals[rank] += one.iterations * (usual.mean(rank) - one.mean(rank))
        return tuple(Microjoules(round(one * 1e6)) for one in totals) if known else None


class ChargedIteration(NamedTuple):
    """An iteration, its charged nanoseconds, and the level that they were charged to.

    ``slower`` is the log ratio of this level's time as it was estimated then.
    """

    iteration: AssembledIteration
    lasted: int
    level: int
    slower: Evidence


@dataclass(frozen=True, slots=True)
class PipelineControl:
    """The session of one pipeline, and the spans, clocks and energies that wait for it.

    ``charged`` are the iterations that the last step added to the session, ``waiting`` complete
    ones that wait for energies or other pipelines, ``recent`` the latest ones of both. ``stepped``
    is the time of the last step, ``reported`` that of each rank's latest energy that was used.
    """

    session: PipelineState
    assembly: IterationAssembly = field(default_factory=IterationAssembly)
    clocks: Mapping[int, tuple[ClockChange, ...]] = field(default_factory=dict)
    energy: Mapping[int, tuple[EnergyPoint, ...]] = field(default_factory=dict)
    charged: tuple[ChargedIteration, ...] = ()
    recent: tuple[AssembledIteration, ...] = ()
    statistics: RankStatistics = field(default_factory=RankStatistics)
    stepped: int = 0
    reported: Mapping[int, int] = field(default_factory=dict)
    waiting: tuple[AssembledIteration, ...] = ()

    def receive(self, observation: PipelineObservation) -> PipelineControl:
        """Add the observation, without a decision."""
        assembly, found = self.assembly.add(observation.units, observation.instructions)
        clocks = {**self.clocks}
        for rank, mhz in observation.clocks.items():
            clocks[rank] = with_clock(clocks.get(rank, ()), mhz, self.stepped, observation.now)
        energy = {**self.energy}
        for rank, point in observation.energy.items():
            energy[rank] = (*energy.get(rank, ())[1 - _KEPT_POINTS :], point)
        for rank, remote in observation.remote.items():
            clocks[rank] = _with_changes(clocks.get(rank, ()), remote.clocks)
            energy[rank] = (*energy.get(rank, ()), *remote.energy)[-_KEPT_POINTS:]
        return replace(
            self,
            assembly=assembly,
            clocks=clocks,
            energy=energy,
            recent=(*self.recent, *found)[-_KEPT_ITERATIONS:],
            stepped=observation.now,
            waiting=(*self.waiting, *found),
        )

    def decide(
        self,
        others: Sequence[Sequence[IterationTimes]],
        partners: Mapping[str, PipelineSummary] = MappingProxyType({}),
    ) -> PipelineControl:
        """Add every iteration whose energy and whose ``others`` are known to the session.

        ``others`` are the recent iterations of each other data-parallel pipeline of the job,
        ``partners`` the pipelines on other hosts.
        """
        session, statistics, reported = self.session, self.statistics, {**self.reported}
        charged: list[ChargedIteration] = []
        every = tuple(one for of_pipeline in others for one in of_pipeline)
        waiting = deque(self.waiting)
        while waiting and self._ready(waiting[0], others, session):
            one = waiting.popleft()
            trusted = partners if one.number >= session.partners_from else {}
            iteration = finished(one, self.clocks, self.energy, every, reported, trusted)
            known = session.slower
            session = add_iteration(session, iteration)
            lasted, level = round(iteration.whole * SECOND), session.charged
            slower = known.get(level, NO_EVIDENCE)
            charged.append(ChargedIteration(one, lasted, level, slower))
            waits = session.watch.waits
            statistics = statistics.add(iteration, len(one.units), straggler=waits)
            for rank, points in self.energy.items():
                used = [point.at for point in points if point.at <= one.end]
                reported[rank] = max([reported.get(rank, one.start), *used[-1:]])
        return replace(
            self,
            session=session,
            statistics=statistics,
            charged=tuple(charged),
            reported=reported,
            waiting=tuple(waiting),
        )

    def _ready(
        self,
        iteration: AssembledIteration,
        others: Sequence[Sequence[IterationTimes]],
        session: PipelineState,
    ) -> bool:
        """True unless the iteration still waits for its energy or for another pipeline.

        The clocks for a straggler must end with it: their iterations wait for no energy, which
        counts with a later iteration then.
        """
        if iteration.end <= self.stepped - ENERGY_PATIENCE:
            return True
        middle = (iteration.start + iteration.end) // 2
        if any(not of_pipeline or of_pipeline[-1].end <= middle for of_pipeline in others):
            return False
        if session.phase is PipelinePhase.STRAGGLE and session.straggler_plan:
            return True
        known = min((points[-1].at for points in self.energy.values()), default=self.stepped)
        return iteration.end <= known

    def times(self) -> tuple[IterationTimes, ...]:
        """The recent iterations, as other pipelines of the job compare theirs with them.

        They end without the time that the clocks of this pipeline have cost: no other pipeline
        plans for it.
        """
        return tuple(map(self._times_of, self.recent))

    def _times_of(self, iteration: AssembledIteration) -> IterationTimes:
        """The times of an iteration, without the present estimate of its loss."""
        start, computed, session = iteration.start, iteration.computed, self.session
        level = session.charged_level(steady_clocks(iteration, self.clocks))
        if level:
            lost = (computed - start) * lost_part(session.slower[level].mean)
            computed -= round(max(lost, 0.0))
        return IterationTimes(start, iteration.end, computed)


def with_clock(
    changes: tuple[ClockChange, ...], mhz: int | None, before: int, now: int
) -> tuple[ClockChange, ...]:
    """The changes with the clock that was read ``now``, and the time of unknown clocks before."""
    if changes and changes[-1].mhz == mhz:
        return changes
    unknown = (ClockChange(before, None),) if changes else ()
    return (*changes[-_KEPT_CHANGES:], *unknown, ClockChange(now, mhz))


def _with_changes(
    changes: tuple[ClockChange, ...], latest: tuple[ClockChange, ...]
) -> tuple[ClockChange, ...]:
    """The changes of a rank on another host, whose ``latest`` replace those of the same time."""
    if not latest:
        return changes
    earlier = tuple(one for one in changes if one.since < latest[0].since)
    return (*earlier, *latest)[-_KEPT_CHANGES:]
