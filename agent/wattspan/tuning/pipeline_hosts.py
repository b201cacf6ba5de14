"""Tuning of one pipeline with its ranks on several hosts, one of which plans the clocks of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

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
from wattspan.tuning.pipeline_strategy import (
    OwnRanks,
    PipelineSessions,
    pipeline_trouble,
    range_trouble,
)

_ALONE: Final = "its ranks run on several hosts, and [fleet] names no service for their records"
_ADVICE: Final = 'A pipeline on several hosts is planned with mode = "apply" only.'
_ONLY: Final = ""
"""The name of the only pipeline."""


class SpreadPipelineStrategy:
    """The strategy of ``pipeline`` with ``hosts``.

    The host with the turn to explore plans for all. The others publish their iterations, and give
    their ranks the clocks of its latest record.
    """

    clock_only = True
    state = None
    exploring = False

    def __init__(self, job: TuningJob) -> None:
        self._job = job
        self._ranks: OwnRanks | None = None
        self._history = RankHistory()
        self._figures_of_hosts: tuple[JobPartner, ...] = ()
        self._session = ""  # no other host has the same
        # Of the host that plans, for the ranks of all hosts; ``_ordered`` are the lower clocks.
        self._sessions: PipelineSessions | None = None
        self._gathered: GatheredRanks | None = None
        self._ordered: Mapping[str, int] = {}

    @property
    def running(self) -> bool:
        return self._ranks is not None

    @property
    def applied(self) -> bool:
        return self._ranks is not None and self._ranks.apply

    @property
    def account(self) -> SlowdownAccount | None:
        """The account of the run; of another host's plan, as it was published last."""
        planned = None if self._sessions is None else self._sessions.group.closed_account
        return planned or self._job.account

    def begin(self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool) -> Decision | None:
        job = self._job
        if not job.terms.may_apply:
            return job.decline(DecisionReason.ADVICE, _ADVICE)
        if job.context.records is None:
            return job.decline(DecisionReason.WAITING, f"{job.name} is not tuned: {_ALONE}.")
        trouble = range_trouble(job, ranges)
        if trouble:
            return job.decline(DecisionReason.NO_DEVICE, f"{job.name} is not tuned: {trouble}")
        by_rank = {one.rank: one for one in sorted(ranges, key=lambda one: one.rank)}
        self._ranks = OwnRanks(job, host, {_ONLY: by_rank}, apply=apply)
        self._session = f"{self._ranks.session}-{job.context.seed}"
        return None

    def step(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """Plan the clocks of all hosts, or publish the own ranks and use the plan."""
        job, ranks, records = self._job, self._ranks, self._job.context.records
        assert ranks is not None  # noqa: S101 - it is running
        assert records is not None  # noqa: S101 - it does not begin without
        view, now = records.view(job.name), host.now.mono
        observation = ranks.observe(host)[_ONLY]
        self._history = self._history.add(observation)
        refusal = ranks.refusal(host)
        if refusal is None and not ranks.apply:
            refusal = host.trouble or DecisionReason.NO_PERMISSION
        plans = view.contact and view.may_explore and not job.ended
        if plans:
            decision = self._plan(host, view, observation, refusal)
        else:
            self._end_plan()
            decision = self._use_plan(view, refusal, now)
        if job.ended:
            self._withdraw()
        else:
            record = self._record(host, decision, refusal, plans=plans)
            records.publish(job.name, record, explores=True)
            problems = [unused(seen, now) for seen in view.records]
            self._figures_of_hosts = view.figures(problems, _does, now)
        ranks.request(decision.caps, now)
        sessions = self._sessions
        return decision, TuningFigures() if sessions is None else sessions.figures()

    def stop(self, *, forget: bool = False) -> None:
        """Nothing is stored: the profile of a pipeline is measured in each run."""
        self._ranks = self._sessions = self._gathered = None
        self._history = RankHistory()
        self._withdraw()

    def describe(self, row: TuningRow) -> TuningRow:
        pipelines = row.pipelines
        if self._sessions is not None and not self._job.ended:
            pipelines = self._sessions.row_figures(self._clock_of)
        return replace(row, pipelines=pipelines, partners=self._figures_of_hosts)

    def store(self, decision: Decision | None) -> None:
        """Nothing: see ``stop``."""

    def _withdraw(self) -> None:
        self._figures_of_hosts = ()
        if self._job.context.records is not None:
            self._job.context.records.withdraw(self._job.name)

    @property
    def _own(self) -> Mapping[int, KnobRange]:
        """The ranges of this host's ranks."""
        return {} if self._ranks is None else self._ranks.pipelines[_ONLY]

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
        sessions = self._sessions
        if gathered is None or sessions is None:
            gathered = GatheredRanks.begin(view.records)
            ranges = {**self._own, **gathered.ranges}
            trouble = pipeline_trouble(tuple(ranges.values()))
            if trouble:
                sentence = f"{job.name} is not tuned: the pipeline has {trouble}"
                return Decision(Move.DECLINE, DecisionReason.NO_DEVICE, sentence)
            sessions = PipelineSessions(job, {_ONLY: ranges}, apply=True, lag=EXCHANGE_LAG)
            self._sessions = sessions
        self._gathered, whole = gathered.gather(observation, view.records, host.now)
        if refusal is None and self._gathered.refusal is not None:
            other, refusal = self._gathered.refusal
            where = f"on {other}, "
        decision = sessions.step({_ONLY: whole}, refusal, where=where)
        self._ordered, devices = decision.caps, job.devices.names
        own = {device: mhz for device, mhz in decision.caps.items() if device in devices}
        return replace(decision, caps=own)

    def _end_plan(self) -> None:
        """Keep nothing of this host's plan but the account."""
        if self._sessions is not None:
            self._job.keep_account()
        self._sessions, self._gathered, self._ordered = None, None, {}

    def _clock_of(self, one: KnobRange) -> int | None:
        if self._gathered is not None and one.rank in self._gathered.ranges:
            return self._gathered.clocks.get(one.device)
        return None if self._ranks is None else self._ranks.clock_of(one)

    # -------------------------------------------------------------------- the other hosts

    def _use_plan(self, view: JobView, refusal: DecisionReason | None, now: int) -> Decision:
        """The clocks of this host's ranks by the plan of another host."""
        if refusal is not None:
            requested = self._ranks is not None and self._ranks.requested
            move = Move.RELEASE if requested else Move.DECLINE
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

    def _record(
        self, host: HostView, decision: Decision, refusal: DecisionReason | None, *, plans: bool
    ) -> JobRecord:
        """The record of this host: its plan for the others, or its ranks for their plan."""
        now = host.now
        if not plans:
            stages = self._history.record(self._own, now, refusal)
            return JobRecord(session=self._session, sent=now.mono, stages=stages)
        account = self.account or SlowdownAccount()
        plan = HostPlan(
            move=decision.move,
            reason=decision.reason,
            sentence=decision.sentence[:MAX_SENTENCE],
            hosts=() if self._gathered is None else self._planned(self._gathered),
            elapsed=account.elapsed,
            units=account.units,
            lost=account.closed_lost,
            lost_bound=account.closed_bound,
        )
        return JobRecord(session=self._session, sent=now.mono, plan=plan)

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
