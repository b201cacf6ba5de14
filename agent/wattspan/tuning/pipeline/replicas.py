"""Data-parallel pipelines of one job: each has a session, and all share the slowdown budget.

All pipelines wait for the slowest one at the end of each iteration. If pipeline i takes T_i at its
original clocks and d_i more at its present ones, the job loses max(T_i + d_i) - max(T_i), at most
the largest d_i. So an iteration of the job is charged with the largest loss among its pipelines,
and no session uses lower clocks unless that account permits it. An iteration of a pipeline that
ends before a slower one would at its original clocks loses nothing.

A record of another host is used while it is fresh, and if its iterations last as long as those of
this host: all pipelines of a job wait for each other. Its figures count within the iterations that
are measured here. Records have the rates of loss of the last half minute. At each moment, the
excess of the largest rate of other hosts over that of this host is added, once all of them are
known or some time has passed. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median, pstdev
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from wattspan.fleet.job_records import (
    JobRecord,
    JobView,
    LossRun,
    PipelineSummary,
    SeenRecord,
    bounded_runs,
)
from wattspan.model import SECOND, JobPartner
from wattspan.tuning.decisions.blocks import LevelTime
from wattspan.tuning.decisions.budget import SlowdownAccount, lost_part
from wattspan.tuning.decisions.sequential_test import NO_EVIDENCE, Evidence
from wattspan.tuning.pipeline.control import ChargedIteration, PipelineControl, PipelineObservation
from wattspan.tuning.pipeline.iterations import MOST_AHEAD, IterationTimes
from wattspan.tuning.pipeline.session import without_straggler
from wattspan.tuning.pipeline.session_state import (
    DEVIATIONS,
    JobLoss,
    PipelinePhase,
    PipelineState,
    closed_session_account,
)

_SUMMARIZED: Final = 8
"""Latest iterations in a summary."""

_LEAST: Final = 4
_SAME_JOB: Final = 0.25
"""Relative difference of iteration times from which on these are not the same iterations.

A record is some iterations old, and their time may have changed since.
"""

_STATES: Final = {
    "observe": "is observed",
    "profile": "measures lower clocks",
    "hold": "holds its clocks",
    "straggle": "waits for a slower one",
    "declined": "has the original clocks",
}

_WINDOW: Final = 30 * SECOND
"""Time for which the own losses are kept and told."""

_PATIENCE: Final = 10 * SECOND
"""Longest wait for the losses of all hosts at one moment."""

_DRIFT: Final = 2_000
"""One part in so many, by which the clocks of two hosts may differ in speed at most."""


@dataclass(frozen=True, slots=True)
class JobPartners:
    """The other hosts of a job at one step.

    ``records`` are those in use, and ``pipelines`` all in these by their full names. ``explorer``
    and ``may_explore`` are those of the view. ``figures`` has a sentence for each host.
    """

    pipelines: Mapping[str, PipelineSummary] = field(default_factory=dict)
    records: tuple[SeenRecord, ...] = ()
    explorer: str = ""
    may_explore: bool = True
    figures: tuple[JobPartner, ...] = ()

    def beside(self, followed: Collection[str]) -> tuple[JobPartner, ...]:
        """The figures with the stragglers among the ``followed`` pipelines, named as in times."""
        stragglers = {
            seen.host: one.name
            for seen in self.records
            for one in _pipelines(seen)
            if _full_name(one, seen) in followed
        }
        return tuple(replace(one, straggler=stragglers.get(one.host, "")) for one in self.figures)


NO_PARTNERS: Final = JobPartners()


def judged(view: JobView, own: Sequence[PipelineSummary], now: int) -> JobPartners:
    """The partners by the present records, beside the ``own`` pipelines of this host."""
    present = [(seen, _refusal(seen, own, now)) for seen in view.records]
    names = Counter(one.name for one in own)
    for seen, refusal in present:
        if not refusal:
            names.update(one.name for one in _pipelines(seen))
    problems = [refusal or _repeated(seen, names) for seen, refusal in present]
    used = [seen for seen, problem in zip(view.records, problems, strict=True) if not problem]
    return JobPartners(
        {_full_name(one, seen): one for seen in used for one in _pipelines(seen)},
        tuple(used),
        view.explorer,
        view.may_explore,
        view.figures(problems, lambda seen: _sentence(_pipelines(seen)), now),
    )


def _pipelines(seen: SeenRecord) -> tuple[PipelineSummary, ...]:
    return () if seen.record is None else seen.record.pipelines


def _full_name(pipeline: PipelineSummary, seen: SeenRecord) -> str:
    return f"{pipeline.name} of {seen.host}"


def summarized(controls: Mapping[str, PipelineControl]) -> tuple[PipelineSummary, ...]:
    """The latest iterations of each pipeline of this host that has some."""
    return tuple(
        _summary(name, control)
        for name, control in controls.items()
        if len(control.recent) >= _LEAST
    )


def _summary(name: str, control: PipelineControl) -> PipelineSummary:
    latest = control.recent[-_SUMMARIZED:]
    computed = [(times.computed - times.start) / SECOND for times in control.times()[-_SUMMARIZED:]]
    session = control.session
    return PipelineSummary(
        name=name,
        whole=median((one.end - one.start) / SECOND for one in latest),
        computed=median(computed),
        tail=median((one.end - one.computed) / SECOND for one in latest),
        noise=min(pstdev(computed) / fmean(computed), 1.0),
        state=session.phase.value,
        waiting=tuple(round(part, 4) for part in control.statistics.waiting),
        clocks=session.decision.clocks,
    )


def _refusal(seen: SeenRecord, own: Sequence[PipelineSummary], now: int) -> str:
    """The reason not to use a record, in one sentence; "" for none."""
    record, unused = seen.record, seen.unused(now)
    if record is None or unused:
        return unused
    if not record.pipelines:
        return "It has no complete iterations yet."
    if not own:
        return "Its iterations are not compared yet: this host has none."
    here = median(one.whole for one in own)
    for one in record.pipelines:
        if abs(one.whole - here) > _SAME_JOB * here:
            return (
                f"An iteration of its pipeline {one.name} lasts {one.whole:.3g} s, and one here"
                f" {here:.3g} s: these are not the same iterations."
            )
    return ""


def _repeated(seen: SeenRecord, names: Counter[str]) -> str:
    """The sentence on a pipeline that several hosts have; "" if there is none."""
    name = next((one.name for one in _pipelines(seen) if names[one.name] > 1), None)
    if name is None:
        return ""
    return (
        f"Another host has a pipeline {name}, too: give each pipeline of the job a name of its own,"
        " and each run a service of its own; a pipeline over several hosts is not tuned."
    )


def _sentence(pipelines: Sequence[PipelineSummary]) -> str:
    slowest = max(pipelines, key=lambda one: one.computed)
    count = len(pipelines)
    state = _STATES.get(slowest.state, slowest.state)
    subject = f"Its pipeline {slowest.name}"
    if count > 1:
        subject = f"The slowest of its {count} pipelines, {slowest.name},"
    return (
        f"{subject} takes {slowest.computed:.3g} s of an iteration of {slowest.whole:.3g} s at the"
        f" original clocks, with a noise of {slowest.noise:.1%}, and {state}."
    )


# ------------------------------------------------------------------------------------------ losses


class _Offset(NamedTuple):
    """The clock of this host minus that of another one, as its records show it, at most."""

    session: str
    sent: int
    nanoseconds: int

    def next(self, seen: SeenRecord, session: str, sent: int) -> _Offset:
        """The offset after a record; the least one belongs to the fastest of the records."""
        latest = seen.seen - sent
        if session == self.session:
            drift = max(sent - self.sent, 0) // _DRIFT
            latest = min(latest, self.nanoseconds + drift)
        return _Offset(session, sent, latest)


@dataclass(frozen=True, slots=True)
class LossHistory:
    """The recent losses of this host's pipelines, and the excess of those of other hosts.

    ``own`` are the runs of each pipeline, ``covered`` is the end of the latest iteration, and
    ``added`` the time up to which other hosts are in ``elsewhere``; 0 before the first record.
    """

    own: Mapping[str, tuple[LossRun, ...]] = field(default_factory=dict)
    covered: int = 0
    added: int = 0
    offsets: Mapping[str, _Offset] = field(default_factory=dict)
    elsewhere: JobLoss = field(default_factory=JobLoss)

    def charge(self, controls: Mapping[str, PipelineControl]) -> LossHistory:
        """Add the latest iterations of this host's pipelines."""
        if not any(one.charged for one in controls.values()):
            return self
        ends = [one.iteration.end for of in controls.values() for one in of.charged]
        covered = max(self.covered, *ends)
        own = {
            name: _with_iterations(self.own.get(name, ()), one, covered - _WINDOW)
            for name, one in controls.items()
        }
        return replace(self, own=own, covered=covered)

    def receive(self, records: Sequence[SeenRecord], now: int) -> LossHistory:
        """Add the excess of other hosts, as far as their records reach."""
        offsets, runs, known = {}, [], [now, self.covered]
        for seen in records:
            record = seen.record
            if record is None:
                continue
            before = self.offsets.get(seen.host, _Offset("", 0, 0))
            offset = offsets[seen.host] = before.next(seen, record.session, record.sent)
            known.append(record.covered + offset.nanoseconds)
            runs.append([_moved(run, offset.nanoseconds) for run in record.losses])
        if not offsets:
            return self
        until = max(min(known), now - _PATIENCE)
        if not self.added:  # earlier losses of other hosts are not those of this run
            return replace(self, added=until, offsets=offsets)
        since = max(self.added, until - _WINDOW)
        if since >= until:
            return replace(self, offsets=offsets)
        others = [run for of in runs for run in of]
        own = [run for of in self.own.values() for run in of]
        elsewhere = self.elsewhere.plus(_excess(others, own, since, until))
        return replace(self, added=until, offsets=offsets, elsewhere=elsewhere)

    @property
    def runs(self) -> tuple[LossRun, ...]:
        """The runs for the records of this host."""
        return bounded_runs([run for of in self.own.values() for run in of])


def _with_iterations(
    runs: Sequence[LossRun], control: PipelineControl, since: int
) -> tuple[LossRun, ...]:
    """The runs of one pipeline that end after ``since``, with its latest iterations."""
    kept = [run for run in runs if run.end > since]
    for charged in control.charged:
        run = _run_of(charged, control.session)
        if not run.bound or run.start >= run.end:
            continue
        last = kept[-1] if kept else None
        joins = last is not None and run.start - last.end < run.end - run.start
        if last is not None and joins and (last.mean, last.bound) == (run.mean, run.bound):
            kept[-1] = LossRun(last.start, run.end, run.mean, run.bound)
        else:
            kept.append(run)
    return tuple(kept)


def _run_of(charged: ChargedIteration, session: PipelineState) -> LossRun:
    slower = session.slower.get(charged.level, charged.slower) if charged.level else NO_EVIDENCE
    mean = max(lost_part(slower.mean), 0.0)
    bound = max(lost_part(slower.likely(DEVIATIONS)), mean)
    return LossRun(charged.iteration.start, charged.iteration.end, mean, bound)


def _moved(run: LossRun, offset: int) -> LossRun:
    return LossRun(run.start + offset, run.end + offset, run.mean, run.bound)


def _excess(others: Sequence[LossRun], own: Sequence[LossRun], since: int, until: int) -> JobLoss:
    """The nanoseconds that ``others`` have lost more than ``own``, between two times."""
    edges = {edge for run in (*others, *own) for edge in (run.start, run.end)}
    inside = sorted({since, until, *(edge for edge in edges if since < edge < until)})
    lost = bound = 0.0
    for start, end in pairwise(inside):
        there, here = _rate(others, start), _rate(own, start)
        lost += (end - start) * max(there.lost - here.lost, 0.0)
        bound += (end - start) * max(there.bound - here.bound, 0.0)
    return JobLoss(lost, bound)


def _rate(runs: Iterable[LossRun], at: int) -> JobLoss:
    """The largest rate of loss at a time."""
    present = [run for run in runs if run.start <= at < run.end]
    return JobLoss(
        max((run.mean for run in present), default=0.0),
        max((run.bound for run in present), default=0.0),
    )


# ----------------------------------------------------------------------- pipelines of this host

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
        self, charged: Sequence[Sequence[ChargedIteration]], sessions: Sequence[PipelineState]
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
        return self.account.final(lost, bound)


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
        self, observations: Mapping[str, PipelineObservation], partners: JobPartners = NO_PARTNERS
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
        loss = JobLoss(closed.closed_lost, closed.closed_bound).plus(self.losses.elsewhere)
        return closed.final(*loss)

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
        controls = _with_loss(controls, elsewhere=losses.elsewhere)
    if len(controls) > 1:
        sessions = [one.session for one in controls.values()]
        account = account.add([one.charged for one in controls.values()], sessions)
        controls = _with_loss(controls, job=account.loss)
    return PipelineGroup(controls, account, losses)


def _with_loss(
    controls: Mapping[str, PipelineControl], **loss: Any
) -> Mapping[str, PipelineControl]:
    """The controls whose sessions know a loss of the job."""
    return {
        name: replace(one, session=replace(one.session, **loss)) for name, one in controls.items()
    }
