"""A tuning job whose processes are the ranks of one pipeline: each rank's GPU has its own clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from wattspan.model import Decision, DecisionReason, Knob, Move, Nanoseconds, TuningFigures
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.report import cause_text
from wattspan.tuning.decisions.safety import ENFORCEMENT_TIMEOUT
from wattspan.tuning.decisions.values import EnergyPoint, KnobRange
from wattspan.tuning.host_view import DeviceSampler, HostView
from wattspan.tuning.job import TuningJob
from wattspan.tuning.permissions import JobTerms, slowdown_budget
from wattspan.tuning.pipeline.assembly import RankUnit
from wattspan.tuning.pipeline.control import PipelineControl, PipelineObservation
from wattspan.tuning.pipeline.plan import RankClockPlan
from wattspan.tuning.pipeline.session import use_plan
from wattspan.tuning.pipeline.session_state import (
    PipelinePhase,
    PipelinePolicy,
    PipelineState,
    PlanTask,
    begin_session,
    closed_session_account,
    decline,
)
from wattspan.tuning.rank_instructions import RankInstructions
from wattspan.tuning.work_units import ReceivedSpans


class PipelineJob(TuningJob):
    """A job with ``pipeline``. It explores at any time, without the host's permission."""

    _control: PipelineControl | None = None
    _instructions: RankInstructions
    _search: tuple[PlanTask, Future[RankClockPlan | None]] | None = None
    _apply = False
    _by_rank: Mapping[int, KnobRange]
    _meters: Mapping[int, DeviceSampler]
    _requested: tuple[int, ...] = ()
    _requested_at = 0

    def _set_terms(self, terms: JobTerms) -> None:
        super()._set_terms(terms)
        self._instructions = RankInstructions()
        self._by_rank, self._meters = {}, {}

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
        return self._control is not None and self._apply

    @property
    def _running(self) -> bool:
        return self._control is not None

    @property
    def _preferred_knob(self) -> int:
        return self._clock_knob

    def _drop_tuner(self) -> None:
        super()._drop_tuner()
        self._control = self._search = None

    def _closed_account(self) -> SlowdownAccount | None:
        return None if self._control is None else closed_session_account(self._control.session)

    # ---------------------------------------------------------------------------- decisions

    def _begin(
        self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool
    ) -> Decision | None:
        trouble = self._range_trouble(ranges)
        if trouble:
            return self._decline(DecisionReason.NO_DEVICE, f"{self.name} is not tuned: {trouble}")
        policy = PipelinePolicy(
            ranges[0].original,
            max(one.floor for one in ranges),
            max(one.step for one in ranges),
            slowdown_budget(self._host_settings, self._settings),
            self._host_settings.confidence,
        )
        now, settled = host.now.mono, host.energies.settled()
        self._by_rank = {one.rank: one for one in sorted(ranges, key=lambda one: one.rank)}
        self._meters = {
            rank: DeviceSampler(self.knob, (one,), now, settled)
            for rank, one in self._by_rank.items()
        }
        self._control = PipelineControl(begin_session(policy, self._recalled_account()))
        self._apply, self._requested, self._requested_at = apply, (), now
        return None

    def _range_trouble(self, ranges: Sequence[KnobRange]) -> str:
        """The reason against the devices as a sentence; "" for none."""
        if self.knob is not Knob.GPU_CLOCK:
            return "a pipeline is tuned by the clocks of its GPUs, and they have no such knob."
        if len(ranges) < 2 or len(ranges) != len(self.ranks):
            return (
                f"{len(self.ranks)} ranks use {len(ranges)} GPUs. Each rank of a pipeline needs "
                "one of its own, and a pipeline has two ranks at least."
            )
        if {one.rank for one in ranges} != set(self.ranks.values()):
            return "two ranks use one GPU. Each rank of a pipeline needs one of its own."
        clocks = sorted({one.original for one in ranges})
        if len(clocks) > 1:
            return f"its GPUs have different clocks, from {clocks[0]} to {clocks[-1]} MHz."
        return ""

    def _advance(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """One step: complete iterations, use a finished search, and decide."""
        control, now = self._control, host.now.mono
        assert control is not None  # noqa: S101 - it is running
        units = tuple(RankUnit(one.rank, one.start, one.end) for one in self.units.drain())
        instructions = self._instructions.drain()
        self._sampler.read_caps(host)
        energy = self._read_energy(host)
        refused = self._refused(host)
        if refused is not None:
            control = PipelineControl(self._declined(control.session, refused))
        elif self._apply or control.session.dag is None:
            observation = PipelineObservation(now, units, instructions, self._clocks(host), energy)
            control = control.step(observation)
            control = replace(control, session=self._searched(control.session))
        self._control, session = control, control.session
        if session.decision.clocks != self._requested:
            self._requested, self._requested_at = session.decision.clocks, now
        return self._decision(session), _figures(session)

    def _clocks(self, host: HostView) -> Mapping[int, int | None]:
        """The clock of each rank as the capper has set it: a GPU reports no locked clocks."""
        in_force, known = self._sampler.in_force, host.trouble is None or not self._apply
        return {
            rank: in_force.get(one.device, one.original) if known else None
            for rank, one in self._by_rank.items()
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
        wanted = self._wanted(self._requested)
        since = max(self._requested_at, self._sampler.changed)
        if wanted != self._sampler.in_force and host.now.mono - since > ENFORCEMENT_TIMEOUT:
            return DecisionReason.FOREIGN_WRITER
        return None

    def _declined(self, session: PipelineState, reason: DecisionReason) -> PipelineState:
        """The session that has restored the original clocks for ``reason``."""
        if session.phase is PipelinePhase.DECLINED and session.decision.reason is reason:
            return session
        clause = cause_text(reason)
        return decline(session, reason, f"The ranks have the original clocks: {clause}.")

    def _searched(self, session: PipelineState) -> PipelineState:
        """Begin the search that the session asks for, and use its result."""
        task, searches = session.task, self._context.plans
        if task is None or searches is None:
            self._search = None
            return session
        if self._search is None or self._search[0] is not task:
            self._search = task, searches.submit(task)
        future = self._search[1]
        if not future.done():
            return session
        self._search = None
        return use_plan(session, future.result())

    def _wanted(self, clocks: Sequence[int]) -> dict[str, int]:
        """The clocks below the original by device; ``clocks`` are by rank, or empty."""
        if not clocks:
            return {}
        ranks = self._by_rank.values()
        return {
            one.device: mhz for one, mhz in zip(ranks, clocks, strict=True) if mhz < one.original
        }

    def _decision(self, session: PipelineState) -> Decision:
        found, dag = session.decision, session.dag
        shown = {"iterations": float(session.account.units)}
        if dag is not None:
            shown |= {"ranks": float(dag.rank_count), "stages": float(dag.stage_count)}
        if not self._apply and dag is not None:
            sentence = (
                f"Advice: give each of the {dag.rank_count} ranks of this pipeline a clock of its "
                "own."
            )
            return Decision(Move.DECLINE, DecisionReason.ADVICE, sentence, {}, shown)
        caps = self._wanted(found.clocks)
        return Decision(found.move, found.reason, found.sentence, caps, shown)

    # ------------------------------------------------------------------ certified settings

    def store_certified(self) -> None:
        """Nothing: the profile of a pipeline is measured in each run."""

    def store_result(self) -> None:
        """Nothing: see :meth:`store_certified`."""


def _figures(session: PipelineState) -> TuningFigures:
    account, known = session.account, bool(session.baseline)
    return TuningFigures(
        slowdown=session.slowdown if account.elapsed else None,
        slowdown_bound=account.slowdown(session.lost_bound) if account.elapsed else None,
        saving=session.saving,
        units=account.units,
        lost=Nanoseconds(round(session.lost)) if account.elapsed else None,
        allowance=Nanoseconds(round(session.allowed)),
        unit_time=Nanoseconds(round(session.original_seconds * 1e9)) if known else None,
    )
