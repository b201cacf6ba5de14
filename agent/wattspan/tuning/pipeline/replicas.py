"""Data-parallel pipelines of one job: each has a session, and all share the slowdown budget.

All pipelines wait for the slowest one at the end of each iteration. If pipeline i takes T_i at its
original clocks and d_i more at its present ones, the job loses max(T_i + d_i) - max(T_i), at most
the largest d_i. So an iteration of the job is charged with the largest loss among its pipelines,
and no session uses lower clocks unless that account permits it. An iteration of a pipeline that
ends before a slower one would at its original clocks loses nothing.

Pipelines on other hosts are known by their records: what they have lost more is added (`losses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from wattspan.fleet.job_records import JobRecord
from wattspan.tuning.decisions.blocks import LevelTime
from wattspan.tuning.decisions.budget import SlowdownAccount, lost_part
from wattspan.tuning.decisions.sequential_test import NO_EVIDENCE, Evidence
from wattspan.tuning.pipeline.assembly import MOST_AHEAD, IterationTimes
from wattspan.tuning.pipeline.control import (
    ChargedIteration,
    PipelineControl,
    PipelineObservation,
)
from wattspan.tuning.pipeline.partners import NO_PARTNERS, JobPartners, LossHistory, summarized
from wattspan.tuning.pipeline.session import without_straggler
from wattspan.tuning.pipeline.session_state import (
    DEVIATIONS,
    JobLoss,
    PipelinePhase,
    PipelineState,
    closed_session_account,
)

_MOST_COMBINATIONS = 1024
"""Combinations of levels after which their losses become final figures."""

_Levels = tuple[int, ...]
"""The level of each pipeline in one iteration of the job; 0 for one that took no part."""


@dataclass(frozen=True, slots=True)
class ReplicaAccount:
    """The slowdown account of a job of several pipelines, which are numbered from 0.

    ``combinations`` are the levels that the pipelines had at the same time; their numbers from 1
    are the levels of ``account``. ``slower`` has the latest estimate of each level of each
    pipeline. ``waiting`` are the iterations of each pipeline whose partners are not known yet.
    """

    waiting: tuple[tuple[ChargedIteration, ...], ...]
    account: SlowdownAccount = field(default_factory=SlowdownAccount)
    combinations: tuple[_Levels, ...] = ()
    slower: tuple[Mapping[int, Evidence], ...] = ()

    @classmethod
    def begin(cls, pipelines: int, account: SlowdownAccount) -> ReplicaAccount:
        return cls(((),) * pipelines, account, slower=({},) * pipelines)

    def add(
        self,
        charged: Sequence[Sequence[ChargedIteration]],
        sessions: Sequence[PipelineState],
    ) -> ReplicaAccount:
        """Add the latest iterations of each pipeline, and use the estimates of its session."""
        waiting = [[*of, *new] for of, new in zip(self.waiting, charged, strict=True)]
        slower = [
            {one.level: one.slower for one in new if one.level} | dict(known)
            for known, new in zip(self.slower, charged, strict=True)
        ]
        one = replace(self, slower=tuple(slower))
        while levels := _next_levels(waiting):
            one = one.charge(*levels)
        one = replace(one, waiting=tuple(map(tuple, waiting)))
        restarted = any(  # it numbers its levels anew
            known.keys() - session.slower.keys()
            for known, session in zip(slower, sessions, strict=True)
        )
        if restarted or len(one.combinations) > _MOST_COMBINATIONS:
            one = ReplicaAccount.begin(len(waiting), one.closed())
        return replace(one, slower=tuple(session.slower for session in sessions))

    def charge(self, levels: _Levels, lasted: int) -> ReplicaAccount:
        """Add an iteration of the job, of so many nanoseconds."""
        combinations = self.combinations
        number = 0
        if any(levels):
            if levels not in combinations:
                combinations = (*combinations, levels)
            number = combinations.index(levels) + 1
        account = self.account.add_time(LevelTime(number, lasted, 1), number, 0, held=False)
        return replace(self, account=account, combinations=combinations)

    @property
    def loss(self) -> JobLoss:
        """The loss of the whole job so far, without the iterations that wait for others."""
        return JobLoss(
            self.account.lost(lambda number: self._largest(number, 0)),
            self.account.bound(lambda number: self._largest(number, DEVIATIONS)),
        )

    def _largest(self, number: int, deviations: float) -> float:
        """The largest log ratio of time among the pipelines in a combination."""
        return max(
            self.slower[pipeline].get(level, NO_EVIDENCE).likely(deviations)
            for pipeline, level in enumerate(self.combinations[number - 1])
        )

    def closed(self) -> SlowdownAccount:
        """The account of the run with its present estimates as final figures."""
        lost, bound = self.loss
        for pipeline, iterations in enumerate(self.waiting):
            for one in iterations:
                known = self.slower[pipeline].get(one.level, one.slower)
                lost += one.lasted * max(lost_part(known.mean), 0.0)
                bound += one.lasted * max(lost_part(known.likely(DEVIATIONS)), 0.0)
        return replace(self.account, levels={}, closed_lost=lost, closed_bound=bound)


def _next_levels(waiting: Sequence[list[ChargedIteration]]) -> tuple[_Levels, int] | None:
    """Take the next iteration of the job: the levels of its pipelines, and its nanoseconds.

    A pipeline without iterations for as long as others have MOST_AHEAD of them takes no part.
    """
    if not all(waiting) and max(map(len, waiting)) <= MOST_AHEAD:
        return None
    heads = [of[0].iteration for of in waiting if of]
    first = min(heads, key=lambda one: one.end)
    times = IterationTimes(first.start, first.end, first.end)
    levels, lasted = [0] * len(waiting), 0
    for pipeline, of in enumerate(waiting):
        if of and times.coincides(of[0].iteration.start, of[0].iteration.end):
            one = of.pop(0)
            levels[pipeline], lasted = one.level, max(lasted, one.lasted)
    return tuple(levels), lasted


@dataclass(frozen=True, slots=True)
class PipelineGroup:
    """The controls of all pipelines of a job on this host by name, and the account that they share.

    ``losses`` are the recent ones, and those of pipelines on other hosts.
    """

    controls: Mapping[str, PipelineControl]
    account: ReplicaAccount
    losses: LossHistory = field(default_factory=LossHistory)

    @classmethod
    def begin(
        cls, sessions: Mapping[str, PipelineState], account: SlowdownAccount | None
    ) -> PipelineGroup:
        """The group before the first iteration, with the closed ``account`` of the run so far."""
        controls = {name: PipelineControl(session) for name, session in sessions.items()}
        return cls(controls, ReplicaAccount.begin(len(controls), account or SlowdownAccount()))

    def step(
        self,
        observations: Mapping[str, PipelineObservation],
        partners: JobPartners = NO_PARTNERS,
    ) -> PipelineGroup:
        """Add an observation of each pipeline, and every complete iteration to its session."""
        received = {
            name: replace(one.receive(observations[name]), session=_beside(one.session, partners))
            for name, one in self.controls.items()
        }
        several = len(received) > 1
        times = {name: one.times() for name, one in received.items()} if several else {}
        decided = {
            name: one.decide(
                [of for other, of in times.items() if other != name], partners.pipelines
            )
            for name, one in received.items()
        }
        now = max(one.now for one in observations.values())
        losses = self.losses.charge(decided).receive(partners.records, now)
        return _charged(decided, self.account, losses)

    def with_sessions(self, sessions: Mapping[str, PipelineState]) -> PipelineGroup:
        """The group whose sessions have used the results of searches."""
        if all(one.session is sessions[name] for name, one in self.controls.items()):
            return self
        controls = {
            name: replace(one, session=sessions[name], charged=())
            for name, one in self.controls.items()
        }
        return _charged(controls, self.account, self.losses)

    def ended(
        self,
        sessions: Mapping[str, PipelineState],
        observations: Mapping[str, PipelineObservation] = MappingProxyType({}),
    ) -> PipelineGroup:
        """The group whose sessions were ended.

        The iterations in the ``observations`` are known to other hosts, and to no session.
        """
        controls = {}
        for name, one in self.controls.items():
            control = PipelineControl(sessions[name], statistics=one.statistics)
            if name in observations:
                control = replace(
                    control, assembly=one.assembly, clocks=one.clocks, recent=one.recent
                ).receive(observations[name]._replace(energy={}))
            controls[name] = replace(control, waiting=())
        return _charged(controls, self.account, self.losses)

    @property
    def followed(self) -> frozenset[str]:
        """The pipelines of other hosts that sessions wait for."""
        sessions = (one.session for one in self.controls.values())
        return frozenset(
            one.partner for one in sessions if one.phase is PipelinePhase.STRAGGLE and one.partner
        )

    @property
    def explores(self) -> bool:
        """True if a session measures lower clocks, or wants to."""
        phases = [one.session.phase for one in self.controls.values()]
        return PipelinePhase.PROFILE in phases

    def record(self, session: str, now: int) -> JobRecord:
        """The record of this host for the other ones; ``session`` is that of its tuner."""
        return JobRecord(
            session=session,
            sent=now,
            covered=min(self.losses.covered, now),
            pipelines=summarized(self.controls),
            losses=self.losses.runs,
        )

    @property
    def closed_account(self) -> SlowdownAccount:
        """The account of the run with its present estimates as final figures."""
        only, *others = self.controls.values()
        closed = self.account.closed() if others else closed_session_account(only.session)
        lost, bound = JobLoss(closed.closed_lost, closed.closed_bound).plus(self.losses.elsewhere)
        return replace(closed, closed_lost=lost, closed_bound=bound)

    @property
    def running_account(self) -> tuple[SlowdownAccount, JobLoss]:
        """The account of the run, and its loss by now."""
        only, *others = self.controls.values()
        if others:
            return self.account.account, self.account.loss.plus(self.losses.elsewhere)
        return only.session.account, JobLoss(only.session.lost, only.session.lost_bound)


def _beside(session: PipelineState, partners: JobPartners) -> PipelineState:
    """The session with what is known of other hosts now: nothing is lowered for a lost one."""
    turn = partners.explorer, partners.may_explore
    if (session.explorer, session.may_explore) != turn:
        session = replace(session, explorer=turn[0], may_explore=turn[1])
    lost = session.partner and not partners.pipelines
    follows = session.phase is PipelinePhase.STRAGGLE
    return without_straggler(session) if lost and follows else session


def _charged(
    controls: Mapping[str, PipelineControl], account: ReplicaAccount, losses: LossHistory
) -> PipelineGroup:
    """The group after the charge of each control's latest iterations."""
    if losses.elsewhere != next(iter(controls.values())).session.elsewhere:
        controls = {
            name: replace(one, session=replace(one.session, elsewhere=losses.elsewhere))
            for name, one in controls.items()
        }
    if len(controls) < 2:
        return PipelineGroup(controls, account, losses)
    sessions = [one.session for one in controls.values()]
    account = account.add([one.charged for one in controls.values()], sessions)
    loss = account.loss
    lossy = {
        name: replace(one, session=replace(one.session, job=loss)) for name, one in controls.items()
    }
    return PipelineGroup(lossy, account, losses)
