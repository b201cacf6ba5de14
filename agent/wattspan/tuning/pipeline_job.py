"""A tuning job whose processes are the ranks of pipelines: each rank's GPU has its own clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from wattspan.config.tuning_settings import REPLICA_KEY
from wattspan.model import (
    SECOND,
    Decision,
    DecisionReason,
    Knob,
    Microjoules,
    Move,
    Nanoseconds,
    PipelineFigures,
    PipelineRankFigures,
    TuningFigures,
    TuningRow,
)
from wattspan.tuning.decisions.budget import SlowdownAccount, allowance
from wattspan.tuning.decisions.report import cause_text
from wattspan.tuning.decisions.safety import ENFORCEMENT_TIMEOUT
from wattspan.tuning.decisions.values import EnergyPoint, KnobRange
from wattspan.tuning.host_view import DeviceSampler, HostView
from wattspan.tuning.job import TuningJob
from wattspan.tuning.permissions import JobTerms, slowdown_budget
from wattspan.tuning.pipeline.assembly import RankUnit
from wattspan.tuning.pipeline.control import PipelineControl, PipelineObservation
from wattspan.tuning.pipeline.partners import NO_PARTNERS, JobPartners, judged, summarized
from wattspan.tuning.pipeline.plan import ClockPlan
from wattspan.tuning.pipeline.replicas import PipelineGroup
from wattspan.tuning.pipeline.session import use_plan
from wattspan.tuning.pipeline.session_state import (
    PipelinePhase,
    PipelinePolicy,
    PipelineState,
    PlanTask,
    begin_session,
    decline,
)
from wattspan.tuning.rank_instructions import RankInstructions
from wattspan.tuning.work_units import ReceivedSpans

_Search = tuple[PlanTask, Future[ClockPlan | None]]

_Value = TypeVar("_Value")

_FIRST_MOVES = Move.RELEASE, Move.PROBE, Move.HOLD, Move.DECLINE
"""Moves of pipelines in the order in which they are that of the job."""


class PipelineJob(TuningJob):
    """A job with ``pipeline``. It explores at any time, without the host's permission.

    If its pipelines are named, other hosts may have further ones of them.
    """

    _partners: JobPartners = NO_PARTNERS
    _group: PipelineGroup | None = None
    _instructions: RankInstructions
    _searches: dict[str, _Search]
    _apply = False
    _pipelines: Mapping[str, Mapping[int, KnobRange]]  # by name and rank
    _meters: Mapping[int, DeviceSampler]
    _requested: Mapping[str, int]
    _requested_at = 0
    _session = ""

    def _set_terms(self, terms: JobTerms) -> None:
        super()._set_terms(terms)
        self._instructions = RankInstructions()
        self._pipelines, self._meters, self._searches, self._requested = {}, {}, {}, {}

    # ------------------------------------------------------------------------------- spans

    def add_spans(self, received: ReceivedSpans, now: int) -> None:
        """Add the iterations and instructions among the spans of one of the ranks."""
        super().add_spans(received, now)
        self._instructions.add(received, self.ranks[received.consumer], now)

    def _discard_work(self) -> None:
        super()._discard_work()
        self._instructions.drain()

    # ------------------------------------------------------------------------------- state

    @property
    def exploring(self) -> bool:
        return False

    @property
    def applied(self) -> bool:
        return self._group is not None and self._apply

    @property
    def _running(self) -> bool:
        return self._group is not None

    @property
    def _preferred_knob(self) -> int:
        return self._clock_knob

    def _drop_tuner(self) -> None:
        super()._drop_tuner()
        self._group, self._searches = None, {}
        self._withdraw()

    def _closed_account(self) -> SlowdownAccount | None:
        return None if self._group is None else self._group.closed_account

    def row(self) -> TuningRow:
        group = self._group
        if group is None or self.ended:
            return super().row()
        return replace(
            super().row(),
            pipelines=tuple(
                self._figures_of(name, control) for name, control in group.controls.items()
            ),
            partners=self._partners.beside(group.followed),
        )

    # ---------------------------------------------------------------------------- decisions

    def _begin(
        self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool
    ) -> Decision | None:
        trouble = self._range_trouble(ranges)
        if trouble:
            return self._decline(DecisionReason.NO_DEVICE, f"{self.name} is not tuned: {trouble}")
        return self._begin_pipelines(host, ranges, apply=apply)

    def _begin_pipelines(
        self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool
    ) -> Decision | None:
        """Begin with the ``ranges`` of this host, one for each rank; or the reason against it."""
        if not self._replicas.keys() >= set(self.ranks.values()):
            attribute = self._settings.pipeline[REPLICA_KEY]
            return self._decline(
                DecisionReason.NO_SIGNAL,
                f"The tuner waits for an instruction of each rank of {self.name} with the "
                f"attribute {attribute}, which names its pipeline.",
            )
        pipelines: dict[str, dict[int, KnobRange]] = {}
        for one in sorted(ranges, key=lambda one: (self._replicas[one.rank], one.rank)):
            pipelines.setdefault(self._replicas[one.rank], {})[one.rank] = one
        for name, by_rank in pipelines.items():
            trouble = pipeline_trouble(tuple(by_rank.values()))
            if trouble:
                subject = f"pipeline {name}" if name else "the pipeline"
                sentence = f"{self.name} is not tuned: {subject} has {trouble}"
                return self._decline(DecisionReason.NO_DEVICE, sentence)
        self._begin_observation(host, ranges, pipelines, apply=apply)
        self._begin_group()
        return None

    def _begin_observation(
        self,
        host: HostView,
        ranges: Sequence[KnobRange],
        pipelines: Mapping[str, Mapping[int, KnobRange]],
        *,
        apply: bool,
    ) -> None:
        """Observe the ranks of ``pipelines``, whose devices on this host have ``ranges``."""
        now, settled = host.now.mono, host.energies.settled()
        self._pipelines = pipelines
        self._meters = {one.rank: DeviceSampler(self.knob, (one,), now, settled) for one in ranges}
        self._session = str(now)  # readers compare the times in one run of records only
        self._apply, self._requested, self._requested_at = apply, {}, now

    def _begin_group(self) -> None:
        """Begin a session for each of the pipelines."""
        account = self._recalled_account()
        sessions = {
            name: begin_session(self._pipeline_policy(tuple(by_rank.values())), account)
            for name, by_rank in self._pipelines.items()
        }
        self._group = PipelineGroup.begin(sessions, account)

    @property
    def _replicas(self) -> Mapping[int, str]:
        """The name of each rank's pipeline; ranks that have reported none are missing."""
        if REPLICA_KEY in self._settings.pipeline:
            return self._instructions.replicas
        return dict.fromkeys(self.ranks.values(), "")

    def _range_trouble(self, ranges: Sequence[KnobRange]) -> str:
        """The reason against the devices as a sentence; "" for none."""
        if self.knob is not Knob.GPU_CLOCK:
            return "a pipeline is tuned by the clocks of its GPUs, and they have no such knob."
        if len(ranges) != len(self.ranks):
            return (
                f"{len(self.ranks)} ranks use {len(ranges)} GPUs. Each rank of a pipeline needs "
                "one of its own."
            )
        if {one.rank for one in ranges} != set(self.ranks.values()):
            return "two ranks use one GPU. Each rank of a pipeline needs one of its own."
        return ""

    def _pipeline_policy(self, ranges: Sequence[KnobRange]) -> PipelinePolicy:
        return PipelinePolicy(
            ranges[0].original,
            max(one.floor for one in ranges),
            max(one.step for one in ranges),
            slowdown_budget(self._host_settings, self._settings),
            self._host_settings.confidence,
            pipelines=len(self._pipelines),
        )

    def _advance(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """One step: complete iterations, use finished searches, and decide."""
        if self._regrouped and not self.ended:
            self._drop_tuner()
            declined = self._begin(host, self.ranges, apply=self._apply)
            if declined is not None:
                self._discard_work()
                return declined, self._report
        group, now = self._group, host.now.mono
        assert group is not None  # noqa: S101 - it is running
        observations = self._observations(host)
        sessions = {name: one.session for name, one in group.controls.items()}
        refused = self._refused(host)
        self._partners = self._judged(group, now)
        if refused is not None:
            declined_sessions = {
                name: declined_session(one, refused) for name, one in sessions.items()
            }
            group = group.ended(declined_sessions, {} if self.ended else observations)
        elif self._apply or any(one.dag is None for one in sessions.values()):
            group = group.step(observations, self._partners)
            group = group.with_sessions(
                {name: self._searched(name, one.session) for name, one in group.controls.items()}
            )
        self._group = group
        self._publish(group, now)
        decision = self._decision(group)
        if decision.caps != self._requested:
            self._requested, self._requested_at = decision.caps, now
        return decision, self._figures(group)

    @property
    def _exchanges(self) -> bool:
        """True if other hosts may have pipelines of this job."""
        named = REPLICA_KEY in self._settings.pipeline
        return self._context.records is not None and named and self._apply and not self.ended

    def _judged(self, group: PipelineGroup, now: int) -> JobPartners:
        records = self._context.records
        if records is None or not self._exchanges:
            return NO_PARTNERS
        return judged(records.view(self.name), summarized(group.controls), now)

    def _publish(self, group: PipelineGroup, now: int) -> None:
        records = self._context.records
        if records is None or not self._exchanges:
            self._withdraw()
            return
        record = group.record(self._session, now)
        records.publish(self.name, record, explores=group.explores)

    def _withdraw(self) -> None:
        self._partners = NO_PARTNERS
        if self._context.records is not None:
            self._context.records.withdraw(self.name)

    @property
    def _regrouped(self) -> bool:
        """True if a rank has another pipeline than when the tuner began."""
        replicas = self._replicas
        return any(
            replicas.get(rank) != name
            for name, by_rank in self._pipelines.items()
            for rank in by_rank
            if rank in replicas
        )

    def _observations(self, host: HostView) -> Mapping[str, PipelineObservation]:
        """The spans, clocks and energies of each pipeline since the last step."""
        units = [RankUnit(one.rank, one.start, one.end) for one in self.units.drain()]
        instructions = self._instructions.drain()
        self._sampler.read_caps(host)
        in_force, known = self._sampler.in_force, host.trouble is None or not self._apply
        energy = self._read_energy(host)
        places = {rank: name for name, of in self._pipelines.items() for rank in of}
        only = next(iter(self._pipelines)) if len(self._pipelines) == 1 else None
        return {
            name: PipelineObservation(
                host.now.mono,
                # A single pipeline notices further ranks, which do not belong to it.
                tuple(one for one in units if places.get(one.rank, only) == name),
                tuple(one for one in instructions if places.get(one.rank, only) == name),
                # As the capper has set them: a GPU reports no locked clocks.
                {
                    rank: in_force.get(one.device, one.original) if known else None
                    for rank, one in by_rank.items()
                    if rank in self._meters
                },
                {rank: energy[rank] for rank in by_rank if rank in energy},
            )
            for name, by_rank in self._pipelines.items()
        }

    def _read_energy(self, host: HostView) -> Mapping[int, EnergyPoint]:
        read = {rank: meter.read_energy(host) for rank, meter in self._meters.items()}
        return {rank: points[-1] for rank, points in read.items() if points}

    def _refused(self, host: HostView) -> DecisionReason | None:
        """An external reason for the original clocks."""
        if self.ended:
            return DecisionReason.ENDED
        vetoes = self._vetoes(host)
        if vetoes:
            return min(vetoes)
        if not self._apply:
            return None
        since = max(self._requested_at, self._sampler.changed)
        late = host.now.mono - since > ENFORCEMENT_TIMEOUT
        if late and self._requested != self._sampler.in_force:
            return DecisionReason.FOREIGN_WRITER
        return None

    def _searched(self, name: str, session: PipelineState) -> PipelineState:
        """Begin the search that the session asks for, and use its result."""
        task, searches = session.task, self._context.plans
        if task is None or searches is None:
            self._searches.pop(name, None)
            return session
        present = self._searches.get(name)
        if present is None or present[0] is not task:
            present = self._searches[name] = task, searches.submit(task)
        future = present[1]
        if not future.done():
            return session
        del self._searches[name]
        return use_plan(session, future.result())

    def _wanted(self, name: str, clocks: Sequence[int]) -> dict[str, int]:
        """The clocks below the original by device; ``clocks`` are by rank, or empty."""
        if not clocks:
            return {}
        ranks = self._pipelines[name].values()
        return {
            one.device: mhz for one, mhz in zip(ranks, clocks, strict=True) if mhz < one.original
        }

    def _decision(self, group: PipelineGroup) -> Decision:
        """The decision of the pipeline that matters most, with the clocks of all pipelines."""
        sessions = {name: one.session for name, one in group.controls.items()}
        dags = [one.dag for one in sessions.values() if one.dag is not None]
        shown = {"iterations": float(max(one.account.units for one in sessions.values()))}
        if dags:
            shown |= {
                "ranks": float(sum(one.rank_count for one in dags)),
                "stages": float(dags[0].stage_count),
            }
        if not self._apply and len(dags) == len(sessions):
            sentence = (
                f"Advice: give each of the {shown['ranks']:.0f} ranks of this pipeline a clock of "
                "its own."
            )
            return Decision(Move.DECLINE, DecisionReason.ADVICE, sentence, {}, shown)
        name, session = min(sessions.items(), key=_importance)
        found, sentence = session.decision, session.decision.sentence
        if len(sessions) > 1:
            shown["pipelines"] = float(len(sessions))
            sentence = f"Pipeline {name}: {sentence}"
        caps = {
            device: mhz
            for name, one in sessions.items()
            for device, mhz in self._wanted(name, one.decision.clocks).items()
        }
        return Decision(found.move, found.reason, sentence, caps, shown)

    # ------------------------------------------------------------------------------ figures

    def _figures(self, group: PipelineGroup) -> TuningFigures:
        """The figures of the whole job."""
        account, loss = group.running_account
        sessions = [one.session for one in group.controls.values()]
        savings = [one.saving for one in sessions for _ in one.original if one.saving is not None]
        times = [one.original_seconds for one in sessions if one.baseline]
        saved = [
            one
            for control in group.controls.values()
            for one in control.statistics.saved(control.session.policy.original) or ()
        ]
        budget, known = sessions[0].policy.max_slowdown, bool(account.elapsed)
        return TuningFigures(
            slowdown=account.slowdown(loss.lost) if known else None,
            slowdown_bound=account.slowdown(loss.bound) if known else None,
            saving=fmean(savings) if savings else None,
            saved=Microjoules(sum(saved)) if saved else None,
            units=account.units,
            lost=Nanoseconds(round(loss.lost)) if known else None,
            allowance=Nanoseconds(round(allowance(budget, account.elapsed))),
            unit_time=_nanoseconds(max(times, default=None)),
        )

    def _figures_of(self, name: str, control: PipelineControl) -> PipelineFigures:
        """The figures of one pipeline and its ranks."""
        session, statistics = control.session, control.statistics
        found, by_rank = session.decision, self._pipelines[name]
        plan = session.straggler_plan or session.plan
        planned = session.settings[plan - 1] if plan else ()
        saved = statistics.saved(session.policy.original)
        return PipelineFigures(
            name,
            found.move,
            found.reason,
            found.sentence,
            _nanoseconds(statistics.seconds),
            _nanoseconds(session.original_seconds if session.baseline else None),
            _nanoseconds(session.straggler or None),
            session.saving,
            tuple(
                PipelineRankFigures(
                    one.device,
                    self._clock_of(one),
                    _at(planned, number),
                    _at(statistics.waiting, number),
                    _at(saved or (), number),
                )
                for number, one in enumerate(by_rank.values())
            ),
        )

    def _clock_of(self, one: KnobRange) -> int | None:
        """The clock of a rank's device in MHz, None if it is unknown."""
        return self._sampler.in_force.get(one.device, one.original)

    # ------------------------------------------------------------------ certified settings

    def store_certified(self) -> None:
        """Nothing: the profile of a pipeline is measured in each run."""

    def store_result(self) -> None:
        """Nothing: see :meth:`store_certified`."""


def pipeline_trouble(ranges: Sequence[KnobRange]) -> str:
    """The reason against the devices of one pipeline, as the object of "has"; "" for none."""
    if len(ranges) < 2:
        return "one rank. A pipeline has two ranks at least."
    clocks = sorted({one.original for one in ranges})
    if len(clocks) > 1:
        return f"GPUs with different clocks, from {clocks[0]} to {clocks[-1]} MHz."
    return ""


def declined_session(
    session: PipelineState, reason: DecisionReason, where: str = ""
) -> PipelineState:
    """The session that has restored the original clocks for ``reason``, as ``where`` begins it."""
    if session.phase is PipelinePhase.DECLINED and session.decision.reason is reason:
        return session
    clause = f"{where}{cause_text(reason)}"
    return decline(session, reason, f"The ranks have the original clocks: {clause}.")


def _importance(pipeline: tuple[str, PipelineState]) -> tuple[bool, int]:
    decision = pipeline[1].decision
    straggles = decision.reason is DecisionReason.STRAGGLER
    return not straggles, _FIRST_MOVES.index(decision.move)


def _nanoseconds(seconds: float | None) -> Nanoseconds | None:
    return None if seconds is None else Nanoseconds(round(seconds * SECOND))


def _at(values: Sequence[_Value], number: int) -> _Value | None:
    return values[number] if number < len(values) else None
