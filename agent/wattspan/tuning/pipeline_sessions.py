"""Sessions of a job's pipelines with their searches, and the ranks that this host observes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from statistics import fmean
from typing import TypeVar

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
)
from wattspan.tuning.decisions.budget import allowance
from wattspan.tuning.decisions.report import cause_text
from wattspan.tuning.decisions.values import KnobRange
from wattspan.tuning.host_view import DeviceSampler, HostView
from wattspan.tuning.job import TuningJob
from wattspan.tuning.pipeline.control import PipelineControl, PipelineObservation
from wattspan.tuning.pipeline.plan import ClockPlan
from wattspan.tuning.pipeline.replicas import NO_PARTNERS, JobPartners, PipelineGroup
from wattspan.tuning.pipeline.session import use_plan
from wattspan.tuning.pipeline.session_state import (
    PipelinePhase,
    PipelinePolicy,
    PipelineState,
    PlanTask,
    begin_session,
    decline,
)

Pipelines = Mapping[str, Mapping[int, KnobRange]]
"""The ranges of devices by the name of the pipeline and by rank."""

_Search = tuple[PlanTask, Future[ClockPlan | None]]

_Value = TypeVar("_Value")

_FIRST_MOVES = Move.RELEASE, Move.PROBE, Move.HOLD, Move.DECLINE
"""Moves of pipelines in the order in which they are that of the job."""


class PipelineSessions:
    """The sessions of a job's pipelines, which may have ranks on other hosts, and their searches.

    Without ``apply``, they observe until the pipelines are known.
    """

    def __init__(self, job: TuningJob, pipelines: Pipelines, *, apply: bool, lag: int = 0) -> None:
        self._job, self._pipelines, self._apply = job, pipelines, apply
        self._searches: dict[str, _Search] = {}
        account = job.recalled_account()
        sessions = {
            name: begin_session(self._policy(tuple(by_rank.values()), lag), account)
            for name, by_rank in pipelines.items()
        }
        self.group = PipelineGroup.begin(sessions, account)

    def _policy(self, ranges: Sequence[KnobRange], lag: int) -> PipelinePolicy:
        return PipelinePolicy(
            ranges[0].original,
            max(one.floor for one in ranges),
            max(one.step for one in ranges),
            self._job.terms.budget,
            self._job.terms.host.confidence,
            pipelines=len(self._pipelines),
            lag=lag,
        )

    def step(
        self,
        observations: Mapping[str, PipelineObservation],
        refusal: DecisionReason | None,
        *,
        partners: JobPartners = NO_PARTNERS,
        where: str = "",
    ) -> Decision:
        """Complete iterations, use finished searches, and decide.

        ``refusal`` is an external reason for the original clocks, which ``where`` begins.
        """
        group = self.group
        sessions = {name: one.session for name, one in group.controls.items()}
        if refusal is not None:
            declined = {
                name: _declined_session(one, refusal, where) for name, one in sessions.items()
            }
            group = group.ended(declined, {} if self._job.ended else observations)
        elif self._apply or any(one.dag is None for one in sessions.values()):
            group = group.step(observations, partners)
            group = group.with_sessions(
                {name: self._searched(name, one.session) for name, one in group.controls.items()}
            )
        self.group = group
        return self._decision()

    def _searched(self, name: str, session: PipelineState) -> PipelineState:
        """Begin the search that the session asks for, and use its result."""
        task = session.task
        if task is None:
            self._searches.pop(name, None)
            return session
        present = self._searches.get(name)
        if present is None or present[0] is not task:
            present = self._searches[name] = task, self._job.context.search_plan(task)
        future = present[1]
        if not future.done():
            return session
        del self._searches[name]
        return use_plan(session, future.result())

    def _decision(self) -> Decision:
        """The decision of the pipeline that matters most, with the clocks of all pipelines."""
        sessions = {name: one.session for name, one in self.group.controls.items()}
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

    def _wanted(self, name: str, clocks: Sequence[int]) -> dict[str, int]:
        """The clocks below the original by device; ``clocks`` are by rank, or empty."""
        if not clocks:
            return {}
        ranks = self._pipelines[name].values()
        return {
            one.device: mhz for one, mhz in zip(ranks, clocks, strict=True) if mhz < one.original
        }

    def figures(self) -> TuningFigures:
        """The figures of the whole job."""
        group = self.group
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

    def row_figures(
        self, clock_of: Callable[[KnobRange], int | None]
    ) -> tuple[PipelineFigures, ...]:
        """The figures of each pipeline and its ranks, whose clocks in MHz ``clock_of`` returns."""
        return tuple(
            self._figures_of(name, control, clock_of)
            for name, control in self.group.controls.items()
        )

    def _figures_of(
        self, name: str, control: PipelineControl, clock_of: Callable[[KnobRange], int | None]
    ) -> PipelineFigures:
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
                    clock_of(one),
                    _at(planned, number),
                    _at(statistics.waiting, number),
                    _at(saved or (), number),
                )
                for number, one in enumerate(by_rank.values())
            ),
        )


class OwnRanks:
    """The ranks of this host by the names of their pipelines: what is observed of their devices.

    Without ``apply``, no clocks are requested. ``session`` names the time for other hosts: readers
    compare the times in one run of records only.
    """

    def __init__(
        self, job: TuningJob, host: HostView, pipelines: Pipelines, *, apply: bool
    ) -> None:
        now, settled = host.now.mono, host.energies.settled()
        self._job, self.pipelines, self.apply = job, pipelines, apply
        self._meters = {
            rank: DeviceSampler(job.knob, (one,), now, settled)
            for by_rank in pipelines.values()
            for rank, one in by_rank.items()
        }
        self.requested: Mapping[str, int] = {}
        self._requested_at = now
        self.session = str(now)

    def observe(self, host: HostView) -> Mapping[str, PipelineObservation]:
        """The spans, clocks and energies of each pipeline since the last step."""
        job, sampler = self._job, self._job.devices.sampler
        units = job.work.units.drain()
        instructions = job.work.instructions.drain()
        sampler.read_caps(host)
        in_force, known = sampler.in_force, host.trouble is None or not self.apply
        read = {rank: meter.read_energy(host) for rank, meter in self._meters.items()}
        places = {rank: name for name, of in self.pipelines.items() for rank in of}
        only = next(iter(self.pipelines)) if len(self.pipelines) == 1 else None
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
                },
                {rank: read[rank][-1] for rank in by_rank if read[rank]},
            )
            for name, by_rank in self.pipelines.items()
        }

    def refusal(self, host: HostView) -> DecisionReason | None:
        """An external reason for the original clocks."""
        in_force = not self.apply or self.requested == self._job.devices.sampler.in_force
        return self._job.external_reason(host, self._requested_at, in_force=in_force)

    def request(self, caps: Mapping[str, int], now: int) -> None:
        """Note the clocks that are requested from now on, by device."""
        if caps != self.requested:
            self.requested, self._requested_at = caps, now

    def clock_of(self, one: KnobRange) -> int | None:
        """The clock of a rank's device in MHz."""
        return self._job.devices.sampler.in_force.get(one.device, one.original)


def range_trouble(job: TuningJob, ranges: Sequence[KnobRange]) -> str:
    """The reason against the devices of this host's ranks as a sentence; "" for none."""
    if job.knob is not Knob.GPU_CLOCK:
        return "a pipeline is tuned by the clocks of its GPUs, and they have no such knob."
    if len(ranges) != len(job.ranks):
        return (
            f"{len(job.ranks)} ranks use {len(ranges)} GPUs. Each rank of a pipeline needs "
            "one of its own."
        )
    if {one.rank for one in ranges} != set(job.ranks.values()):
        return "two ranks use one GPU. Each rank of a pipeline needs one of its own."
    return ""


def pipeline_trouble(ranges: Sequence[KnobRange]) -> str:
    """The reason against the devices of one pipeline, as the object of "has"; "" for none."""
    if len(ranges) < 2:
        return "one rank. A pipeline has two ranks at least."
    clocks = sorted({one.original for one in ranges})
    if len(clocks) > 1:
        return f"GPUs with different clocks, from {clocks[0]} to {clocks[-1]} MHz."
    return ""


def _declined_session(
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
