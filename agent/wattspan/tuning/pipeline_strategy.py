"""Tuning of pipelines: each rank's GPU has its own clock, planned on this or another host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattspan.config.tuning_settings import REPLICA_KEY
from wattspan.fleet.job_records import (
    MAX_SENTENCE,
    HostPlan,
    JobRecord,
    JobView,
    PlannedRanks,
    SeenRecord,
)
from wattspan.model import Decision, DecisionReason, JobPartner, Move, TuningFigures, TuningRow
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.report import cause_text
from wattspan.tuning.decisions.values import KnobRange
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job import TuningJob
from wattspan.tuning.pipeline.control import PipelineObservation
from wattspan.tuning.pipeline.remote_ranks import (
    EXCHANGE_LAG,
    GatheredRanks,
    RankHistory,
    lost_contact,
    unready,
    unused,
)
from wattspan.tuning.pipeline.replicas import NO_PARTNERS, judged, summarized
from wattspan.tuning.pipeline_sessions import (
    OwnRanks,
    PipelineSessions,
    pipeline_trouble,
    range_trouble,
)

_ALONE: Final = "its ranks run on several hosts, and [fleet] names no service for their records"
_ADVICE: Final = 'A pipeline on several hosts is planned with mode = "apply" only.'
_ONLY: Final = ""
"""The name of the only pipeline."""


class LocalPlanner:
    """Plans the pipelines of this host; if they are named, other hosts may have further ones."""

    def __init__(self, job: TuningJob, ranks: OwnRanks) -> None:
        self._job, self.ranks = job, ranks
        self.sessions = PipelineSessions(job, ranks.pipelines, apply=ranks.apply)
        self._partners = NO_PARTNERS

    @staticmethod
    def refusal(job: TuningJob, ranks: OwnRanks) -> tuple[DecisionReason, str] | None:
        """The reason and the sentence against planning these ranks; None for none."""
        for name, by_rank in ranks.pipelines.items():
            if trouble := pipeline_trouble(tuple(by_rank.values())):
                subject = f"pipeline {name}" if name else "the pipeline"
                sentence = f"{job.name} is not tuned: {subject} has {trouble}"
                return DecisionReason.NO_DEVICE, sentence
        return None

    @property
    def partners(self) -> tuple[JobPartner, ...]:
        """The figures of the other hosts."""
        return self._partners.beside(self.sessions.group.followed)

    @property
    def explores(self) -> bool:
        """True if this host measures lower clocks, or wants to."""
        return self.sessions.group.explores

    def step(self, host: HostView) -> tuple[Decision, JobRecord | None]:
        """The clocks of this host's ranks, and the record for the other hosts."""
        job, ranks, sessions, now = self._job, self.ranks, self.sessions, host.now.mono
        observations, refusal = ranks.observe(host), ranks.refusal(host)
        named = REPLICA_KEY in job.settings.pipeline
        records = job.context.records if named and ranks.apply and not job.ended else None
        self._partners = NO_PARTNERS
        if records is not None:
            own = summarized(sessions.group.controls)
            self._partners = judged(records.view(job.name), own, now)
        decision = sessions.step(observations, refusal, partners=self._partners)
        return decision, sessions.group.record(ranks.session, now) if records is not None else None

    def clock_of(self, one: KnobRange) -> int | None:
        """The clock of a rank's device in MHz."""
        return self.ranks.clock_of(one)


class SpreadPlanner:
    """Plans one pipeline with its ranks on several hosts, or uses the plan of another host.

    The host with the turn to explore plans for all. The others publish their iterations, and give
    their ranks the clocks of its latest record.
    """

    explores = True

    def __init__(self, job: TuningJob, ranks: OwnRanks) -> None:
        self._job, self.ranks, self._own = job, ranks, ranks.pipelines[_ONLY]
        self._session = f"{ranks.session}-{job.context.seed}"  # no other host has the same
        self._history = RankHistory()
        self.partners: tuple[JobPartner, ...] = ()
        # Of the host that plans, for the ranks of all hosts; ``_ordered`` are the lower clocks.
        self.sessions: PipelineSessions | None = None
        self._gathered: GatheredRanks | None = None
        self._ordered: Mapping[str, int] = {}

    @staticmethod
    def refusal(job: TuningJob, ranks: OwnRanks) -> tuple[DecisionReason, str] | None:
        """The reason and the sentence against planning these ranks; None for none."""
        if not job.terms.may_apply:
            return DecisionReason.ADVICE, _ADVICE
        if job.context.records is None:
            return DecisionReason.WAITING, f"{job.name} is not tuned: {_ALONE}."
        return None

    def step(self, host: HostView) -> tuple[Decision, JobRecord | None]:
        """The clocks of this host's ranks, and its plan or its ranks as a record."""
        job, records, now = self._job, self._job.context.records, host.now.mono
        assert records is not None  # noqa: S101 - it does not begin without
        view, observation = records.view(job.name), self.ranks.observe(host)[_ONLY]
        refusal = self.ranks.refusal(host)
        self._history = self._history.add(observation)
        if refusal is None and not self.ranks.apply:
            refusal = host.trouble or DecisionReason.NO_PERMISSION
        if view.contact and view.may_explore and not job.ended:
            decision = self._plan(host, view, observation, refusal)
            record = JobRecord(session=self._session, sent=now, plan=self._host_plan(decision))
        else:
            self._end_plan()
            decision = self._use_plan(view, refusal, now)
            stages = self._history.record(self._own, host.now, refusal)
            record = JobRecord(session=self._session, sent=now, stages=stages)
        if job.ended:
            self.partners = ()
            return decision, None
        problems = [unused(seen, now) for seen in view.records]
        self.partners = view.figures(problems, _does, now)
        return decision, record

    def clock_of(self, one: KnobRange) -> int | None:
        """The clock of a rank's device in MHz, also on another host."""
        if self._gathered is not None and one.rank in self._gathered.ranges:
            return self._gathered.clocks.get(one.device)
        return self.ranks.clock_of(one)

    # ------------------------------------------------------------------- the host that plans

    def _plan(
        self,
        host: HostView,
        view: JobView,
        observation: PipelineObservation,
        refusal: DecisionReason | None,
    ) -> Decision:
        """The clocks of this host's ranks, and ``_ordered`` for all, by the iterations of all."""
        job, gathered, where = self._job, self._gathered, ""
        trouble = unready(view, job.settings.hosts, host.now)
        if gathered is not None:
            trouble = trouble or gathered.changed(view.records, host.now)
        if trouble:
            self._end_plan()
            return Decision(Move.DECLINE, DecisionReason.WAITING, _keep(trouble))
        sessions = self.sessions
        if gathered is None or sessions is None:
            gathered = GatheredRanks.begin(view.records)
            ranges = {**self._own, **gathered.ranges}
            if trouble := pipeline_trouble(tuple(ranges.values())):
                sentence = f"{job.name} is not tuned: the pipeline has {trouble}"
                return Decision(Move.DECLINE, DecisionReason.NO_DEVICE, sentence)
            sessions = PipelineSessions(job, {_ONLY: ranges}, apply=True, lag=EXCHANGE_LAG)
            self.sessions = sessions
        self._gathered, whole = gathered.gather(observation, view.records, host.now)
        if refusal is None and self._gathered.refusal is not None:
            other, refusal = self._gathered.refusal
            where = f"on {other}, "
        decision = sessions.step({_ONLY: whole}, refusal, where=where)
        self._ordered, devices = decision.caps, job.devices.names
        caps = {device: mhz for device, mhz in decision.caps.items() if device in devices}
        return replace(decision, caps=caps)

    def _end_plan(self) -> None:
        """Keep nothing of this host's plan but the account."""
        if self.sessions is not None:
            self._job.keep_account()
        self.sessions, self._gathered, self._ordered = None, None, {}

    # -------------------------------------------------------------------- the other hosts

    def _use_plan(self, view: JobView, refusal: DecisionReason | None, now: int) -> Decision:
        """The clocks of this host's ranks by the plan of another host."""
        if refusal is not None:
            move = Move.RELEASE if self.ranks.requested else Move.DECLINE
            if self._job.decision.reason is refusal:
                move = self._job.decision.move
            sentence = f"The ranks have the original clocks: {cause_text(refusal)}."
            return Decision(move, refusal, sentence)
        plan = _plan_of(view, now)
        if plan is None:
            return Decision(Move.DECLINE, DecisionReason.WAITING, _keep(_why_none(view)))
        clocks, sentence = plan.clocks(self._session), f"{view.explorer} plans: {plan.sentence}"
        if clocks is None:  # it does not know this host's ranks yet
            return Decision(Move.DECLINE, DecisionReason.WAITING, sentence)
        self._continue_account(plan)
        caps = {
            one.device: max(clocks[rank], one.floor)
            for rank, one in self._own.items()
            if clocks.get(rank, one.original) < one.original
        }
        return Decision(plan.move, plan.reason, sentence, caps)

    def _continue_account(self, plan: HostPlan) -> None:
        """Use the account of the run, which the planning host keeps."""
        known = self._job.account
        if known is None or plan.elapsed > known.elapsed:
            self._job.keep_account(
                SlowdownAccount(
                    elapsed=plan.elapsed,
                    units=plan.units,
                    closed_lost=plan.lost,
                    closed_bound=plan.lost_bound,
                )
            )

    # ---------------------------------------------------------------------------- records

    def _host_plan(self, decision: Decision) -> HostPlan:
        """The plan of this host for the others, with the account of the run."""
        planned = None if self.sessions is None else self.sessions.group.closed_account
        account = planned or self._job.account or SlowdownAccount()
        return HostPlan(
            move=decision.move,
            reason=decision.reason,
            sentence=decision.sentence[:MAX_SENTENCE],
            hosts=() if self._gathered is None else self._planned(self._gathered),
            elapsed=account.elapsed,
            units=account.units,
            lost=account.closed_lost,
            lost_bound=account.closed_bound,
        )

    def _planned(self, gathered: GatheredRanks) -> tuple[PlannedRanks, ...]:
        return tuple(
            PlannedRanks(
                session,
                tuple(
                    (rank, self._ordered[device])
                    for (place, rank), number in gathered.numbers.items()
                    if place == host and (device := gathered.ranges[number].device) in self._ordered
                ),
            )
            for host, session in gathered.sessions.items()
        )


def _keep(trouble: str) -> str:
    return f"Keep the original clocks. {trouble}"


def _plan_of(view: JobView, now: int) -> HostPlan | None:
    """The plan in the fresh record of the host whose turn it is; None without one."""
    if not view.contact:
        return None
    records = (seen for seen in view.records if seen.host == view.explorer)
    found = next((seen for seen in records if not seen.unused(now)), None)
    return None if found is None or found.record is None else found.record.plan


def _why_none(view: JobView) -> str:
    """The reason why there is no plan for this host, as a sentence."""
    if not view.contact:
        return lost_contact(view)
    if not view.explorer:
        return "No host plans the clocks of this pipeline yet."
    return f"The record of {view.explorer}, which plans this pipeline, is not known yet."


def _does(seen: SeenRecord) -> str:
    record = seen.record
    if record is not None and record.stages is not None:
        count = len(record.stages.ranks)
        ranks = f"{count} rank{'s' * (count != 1)} of this pipeline"
        refusal = record.stages.refusal
        return f"It has {ranks}{f', and {cause_text(refusal)}' if refusal else ''}."
    return "It plans the clocks of this pipeline."


class PipelineStrategy:
    """The strategy of ``pipeline``. It explores at any time, without the host's permission.

    The profile of a pipeline is measured in each run: nothing of it is stored.
    """

    clock_only = True
    state = None
    exploring = False

    def __init__(self, job: TuningJob) -> None:
        self._job = job
        self._planner: LocalPlanner | SpreadPlanner | None = None  # while it runs

    @property
    def running(self) -> bool:
        return self._planner is not None

    @property
    def applied(self) -> bool:
        return self._planner is not None and self._planner.ranks.apply

    @property
    def account(self) -> SlowdownAccount | None:
        """The account of the run; of another host's plan, as it was published last."""
        sessions = None if self._planner is None else self._planner.sessions
        planned = None if sessions is None else sessions.group.closed_account
        return planned or self._job.account

    def begin(self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool) -> Decision | None:
        job, replicas = self._job, self._replicas
        trouble = range_trouble(job, ranges)
        if trouble:
            return job.decline(DecisionReason.NO_DEVICE, f"{job.name} is not tuned: {trouble}")
        if not replicas.keys() >= set(job.ranks.values()):
            attribute = job.settings.pipeline[REPLICA_KEY]
            return job.decline(
                DecisionReason.NO_SIGNAL,
                f"The tuner waits for an instruction of each rank of {job.name} with the "
                f"attribute {attribute}, which names its pipeline.",
            )
        pipelines: dict[str, dict[int, KnobRange]] = {}
        for one in sorted(ranges, key=lambda one: (replicas[one.rank], one.rank)):
            pipelines.setdefault(replicas[one.rank], {})[one.rank] = one
        ranks = OwnRanks(job, host, pipelines, apply=apply)
        kind: type[LocalPlanner | SpreadPlanner] = LocalPlanner
        if job.settings.hosts > 1:
            kind = SpreadPlanner
        refused = kind.refusal(job, ranks)
        if refused is not None:
            return job.decline(*refused)
        self._planner = kind(job, ranks)
        return None

    @property
    def _replicas(self) -> Mapping[int, str]:
        """The name of each rank's pipeline; ranks that have reported none are missing."""
        if REPLICA_KEY in self._job.settings.pipeline:
            return self._job.work.instructions.replicas
        return dict.fromkeys(self._job.ranks.values(), _ONLY)

    def step(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        job, planner = self._job, self._planner
        assert planner is not None  # noqa: S101 - it is running
        if not job.ended and self._is_regrouped(planner.ranks):
            job.stop()
            declined = self.begin(host, job.ranges, apply=planner.ranks.apply)
            if declined is not None:
                job.discard_work()
                return declined, job.report
            planner = self._planner or planner
        decision, record = planner.step(host)
        if record is None:
            self._withdraw()
        elif job.context.records is not None:
            job.context.records.publish(job.name, record, explores=planner.explores)
        planner.ranks.request(decision.caps, host.now.mono)
        sessions = planner.sessions
        return decision, TuningFigures() if sessions is None else sessions.figures()

    def stop(self, *, forget: bool = False) -> None:
        self._planner = None
        self._withdraw()

    def describe(self, row: TuningRow) -> TuningRow:
        planner, pipelines = self._planner, row.pipelines
        if planner is None or self._job.ended:
            return row
        if planner.sessions is not None:
            pipelines = planner.sessions.row_figures(planner.clock_of)
        return replace(row, pipelines=pipelines, partners=planner.partners)

    def store(self, decision: Decision | None) -> None:
        """Nothing: see the class."""

    def _withdraw(self) -> None:
        if self._job.context.records is not None:
            self._job.context.records.withdraw(self._job.name)

    def _is_regrouped(self, ranks: OwnRanks) -> bool:
        """True if a rank has another pipeline than when the strategy began."""
        replicas = self._replicas
        return any(
            replicas.get(rank, name) != name
            for name, by_rank in ranks.pipelines.items()
            for rank in by_rank
        )
