"""A job whose one pipeline has its ranks on several hosts, one of which plans the clocks of all."""

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
from wattspan.model import (
    Decision,
    DecisionReason,
    JobPartner,
    Move,
    TuningFigures,
    TuningRow,
)
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.report import cause_text
from wattspan.tuning.decisions.values import KnobRange
from wattspan.tuning.host_view import HostView
from wattspan.tuning.pipeline.control import PipelineObservation
from wattspan.tuning.pipeline.remote_ranks import (
    EXCHANGE_LAG,
    GatheredRanks,
    RankHistory,
    lost_contact,
    unready,
    unused,
)
from wattspan.tuning.pipeline.session_state import PipelinePolicy
from wattspan.tuning.pipeline_job import PipelineJob, declined_session, pipeline_trouble

_ALONE: Final = "its ranks run on several hosts, and [fleet] names no service for their records"
_ADVICE: Final = 'A pipeline on several hosts is planned with mode = "apply" only.'
_ONLY: Final = ""
"""The name of the only pipeline."""


class SpreadPipelineJob(PipelineJob):
    """A job with ``pipeline`` and ``hosts``.

    The host with the turn to explore plans for all. The others tell it their iterations, and give
    their ranks the clocks of its latest record.
    """

    _history = RankHistory()
    _gathered: GatheredRanks | None = None  # by the host that plans
    _observes = False
    _ordered: Mapping[str, int] = {}  # lower clocks by device, those of other hosts included
    _figures_of_hosts: tuple[JobPartner, ...] = ()

    @property
    def _running(self) -> bool:
        return self._observes

    @property
    def applied(self) -> bool:
        return self._observes and self._apply

    def _drop_tuner(self) -> None:
        super()._drop_tuner()
        self._gathered, self._observes, self._history = None, False, RankHistory()

    def _withdraw(self) -> None:
        super()._withdraw()
        self._figures_of_hosts = ()

    def _closed_account(self) -> SlowdownAccount | None:
        """The account of the run; of another host's plan, as it was told last."""
        return super()._closed_account() or self._account

    def row(self) -> TuningRow:
        return replace(super().row(), partners=self._figures_of_hosts)

    # ---------------------------------------------------------------------------- decisions

    def _blocked(self, refusal: str, host: HostView) -> Decision | None:
        blocked = super()._blocked(refusal, host)
        if blocked is None and not self.terms.may_apply:
            return self._decline(DecisionReason.ADVICE, _ADVICE)
        if blocked is None and self._context.records is None:
            return self._decline(DecisionReason.WAITING, f"{self.name} is not tuned: {_ALONE}.")
        return blocked

    def _begin_pipelines(
        self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool
    ) -> Decision | None:
        by_rank = {one.rank: one for one in sorted(ranges, key=lambda one: one.rank)}
        self._begin_observation(host, ranges, {_ONLY: by_rank}, apply=apply)
        self._session = f"{self._session}-{self._context.seed}"  # no other host has the same
        self._observes = True
        return None

    def _pipeline_policy(self, ranges: Sequence[KnobRange]) -> PipelinePolicy:
        return replace(super()._pipeline_policy(ranges), lag=EXCHANGE_LAG)

    def _advance(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """One step: plan the clocks of all hosts, or tell the own ranks and use the plan."""
        records = self._context.records
        assert records is not None  # noqa: S101 - it is blocked otherwise
        view, now = records.view(self.name), host.now.mono
        observation = self._observations(host)[_ONLY]
        self._history = self._history.add(observation)
        refusal = self._refused(host)
        plans = view.contact and view.may_explore and not self.ended
        if plans:
            decision = self._plan(host, view, observation, refusal)
        else:
            self._end_plan()
            decision = self._use_plan(view, refusal, now)
        if self.ended:
            self._withdraw()
        else:
            record = self._record(host, decision, refusal, plans=plans)
            records.publish(self.name, record, explores=True)
            problems = [unused(seen, now) for seen in view.records]
            self._figures_of_hosts = view.figures(problems, _does, now)
        if decision.caps != self._requested:
            self._requested, self._requested_at = decision.caps, now
        group = self._group
        return decision, TuningFigures() if group is None else self._figures(group)

    def _refused(self, host: HostView) -> DecisionReason | None:
        refused = super()._refused(host)
        if refused is None and not self._apply:
            return host.trouble or DecisionReason.NO_PERMISSION
        return refused

    # ------------------------------------------------------------------- the host that plans

    def _plan(
        self,
        host: HostView,
        view: JobView,
        observation: PipelineObservation,
        refusal: DecisionReason | None,
    ) -> Decision:
        """The clocks of this host's ranks, and ``_ordered`` for all, by the iterations of all."""
        gathered, where = self._gathered, ""
        trouble = unready(view, self._settings.hosts, host.now)
        if gathered is not None:
            trouble = trouble or gathered.changed(view.records, host.now)
        if trouble:
            self._end_plan()
            return Decision(Move.DECLINE, DecisionReason.WAITING, _keep(trouble))
        if gathered is None:
            gathered = GatheredRanks.begin(view.records)
            ranks = {**self._pipelines[_ONLY], **gathered.ranges}
            trouble = pipeline_trouble(tuple(ranks.values()))
            if trouble:
                sentence = f"{self.name} is not tuned: the pipeline has {trouble}"
                return Decision(Move.DECLINE, DecisionReason.NO_DEVICE, sentence)
            self._pipelines = {_ONLY: ranks}
            self._begin_group()
        self._gathered, whole = gathered.gather(observation, view.records, host.now)
        group = self._group
        assert group is not None  # noqa: S101 - begun with the gathered ranks
        if refusal is None and self._gathered.refusal is not None:
            other, refusal = self._gathered.refusal
            where = f"on {other}, "
        if refusal is not None:
            session = declined_session(group.controls[_ONLY].session, refusal, where)
            group = group.ended({_ONLY: session}, {_ONLY: whole})
        else:
            group = group.step({_ONLY: whole})
            session = self._searched(_ONLY, group.controls[_ONLY].session)
            group = group.with_sessions({_ONLY: session})
        self._group = group
        decision = self._decision(group)
        self._ordered = decision.caps
        own = {device: mhz for device, mhz in decision.caps.items() if device in self.devices}
        return replace(decision, caps=own)

    def _end_plan(self) -> None:
        """Keep nothing of this host's plan but the account."""
        if self._gathered is not None:
            self.keep_account()
            ranks = self._pipelines[_ONLY].items()
            self._pipelines = {_ONLY: {rank: one for rank, one in ranks if rank in self._meters}}
        self._group, self._gathered, self._searches, self._ordered = None, None, {}, {}

    def _clock_of(self, one: KnobRange) -> int | None:
        if self._gathered is not None and one.rank in self._gathered.ranges:
            return self._gathered.clocks.get(one.device)
        return super()._clock_of(one)

    # -------------------------------------------------------------------- the other hosts

    def _use_plan(self, view: JobView, refusal: DecisionReason | None, now: int) -> Decision:
        """The clocks of this host's ranks by the plan of another host."""
        if refusal is not None:
            move = Move.RELEASE if self._requested else Move.DECLINE
            if self.decision.reason is refusal:
                move = self.decision.move
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
            for rank, one in self._pipelines[_ONLY].items()
            if clocks.get(rank, one.original) < one.original
        }
        return Decision(plan.move, plan.reason, sentence, caps)

    def _continue_account(self, plan: HostPlan) -> None:
        """Use the account of the run, which the planning host keeps."""
        if self._account is None or plan.elapsed > self._account.elapsed:
            self._account = SlowdownAccount(
                elapsed=plan.elapsed,
                units=plan.units,
                closed_lost=plan.lost,
                closed_bound=plan.lost_bound,
            )

    # ---------------------------------------------------------------------------- records

    def _record(
        self, host: HostView, decision: Decision, refusal: DecisionReason | None, *, plans: bool
    ) -> JobRecord:
        """The record of this host: its plan for the others, or its ranks for their plan."""
        now, own = host.now, self._pipelines[_ONLY]
        if not plans:
            stages = self._history.record(own, now, refusal)
            return JobRecord(session=self._session, sent=now.mono, stages=stages)
        account = self._closed_account() or SlowdownAccount()
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
