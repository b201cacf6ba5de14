"""A tuning job whose setting follows the load of a server, within its latency limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wattspan.model import (
    SECOND,
    Decision,
    DecisionReason,
    LoadFigures,
    Move,
    ObjectiveFigures,
    TuningFigures,
    TuningRow,
)
from wattspan.ports import ProcessDirectory
from wattspan.tuning.decisions.load import bin_bound, load_bin
from wattspan.tuning.decisions.load_cells import LatencyObjective
from wattspan.tuning.decisions.load_tracking import (
    LOWERING_TIME,
    LoadObservation,
    TrackingEvidence,
    TrackingPolicy,
    TrackingState,
    begin_tracking,
    collected_evidence,
    release,
    resume_tracking,
    track,
)
from wattspan.tuning.decisions.safety import ENFORCEMENT_TIMEOUT
from wattspan.tuning.decisions.tracking_report import (
    load_figures,
    refused_decision,
    tracked_settings,
    tracking_decision,
    tracking_figures,
)
from wattspan.tuning.decisions.values import KnobRange, LevelLadder
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job import TuningJob
from wattspan.tuning.permissions import JobTerms
from wattspan.tuning.tracked_requests import InFlightRequests, JobRequests
from wattspan.tuning.work_units import AnnouncedSpans, ReceivedSpans

EVIDENCE_INTERVAL = 60 * SECOND
"""Interval of storing the evidence, and the time from which a crash can lose it."""

_TOO_FEW = "too few requests have ended to know if they are announced as they begin"
_NOT_ANNOUNCED = (
    "its requests are not announced as they begin, so its load is known too late; let the server's "
    "processes announce their spans (`pip install wattspan` beside opentelemetry-instrument), and "
    "name their outermost span as `span`"
)


class TrackedJob(TuningJob):
    """A job with ``control = "track"``. It explores at any time, without the host's permission."""

    _tracking: TrackingState | None = None
    _ended_tracking: TrackingState | None = None  # the last one that was applied
    _in_flight: InFlightRequests | None = None
    _requests: JobRequests
    _apply = False
    _stored_at = 0

    def _set_terms(self, terms: JobTerms) -> None:
        super()._set_terms(terms)
        self._requests = JobRequests(self.span, self._settings)

    # ---------------------------------------------------------------------------- requests

    def add_spans(self, received: ReceivedSpans, now: int) -> None:
        """Add the requests among the spans of one of the job's processes."""
        self.ranks.setdefault(received.consumer, 1 + max(self.ranks.values(), default=-1))
        in_flight = self._watched(now)
        in_flight.watch(received.consumer, now)
        for span in self._requests.add(received, now):
            in_flight.received(received.consumer, span)
        if self._requests:
            self._last_alive = now

    def add_announced(self, announced: AnnouncedSpans, now: int) -> None:
        """Count announced starts and ends of the job's processes."""
        self._watched(now).add(announced.consumer, announced.records, now)

    def update_living(self, directory: ProcessDirectory, now: int) -> None:
        super().update_living(directory, now)
        self._watched(now).keep(self.ranks)

    def _watched(self, now: int) -> InFlightRequests:
        if self._in_flight is None:
            self._in_flight = InFlightRequests(now)
        return self._in_flight

    def _discard_work(self) -> None:
        super()._discard_work()
        self._requests.drain()

    # ------------------------------------------------------------------------------- state

    @property
    def exploring(self) -> bool:
        return False

    @property
    def applied(self) -> bool:
        return self._tracking is not None and self._apply

    @property
    def load(self) -> LoadFigures:
        """The load and the misses; until the tracking begins, the requests in flight now."""
        objectives = self._settings.objectives
        if self._tracking is not None:
            return load_figures(self._tracking, [one.name for one in objectives])
        load = float(len(self._in_flight or ()))
        return LoadFigures(
            load,
            load_bin(load),
            bin_bound(load_bin(load)),
            objectives=tuple(
                ObjectiveFigures(one.name, one.limit / 1e9, one.allowed) for one in objectives
            ),
        )

    def row(self) -> TuningRow:
        return replace(super().row(), budget=0.0, load=self.load)

    @property
    def _running(self) -> bool:
        return self._tracking is not None

    def _drop_tuner(self) -> None:
        super()._drop_tuner()
        if self.applied:
            self._ended_tracking = self._tracking
        self._tracking = None

    def _forget_evidence(self) -> None:
        super()._forget_evidence()
        store, state = self._context.evidence, self._tracking or self._ended_tracking
        self._ended_tracking = self._tracking = None
        if store is not None and state is not None:
            store.store(self.name, self.ranks, state.policy, TrackingEvidence({}, {}, {}, 0))

    @property
    def _preferred_knob(self) -> int:
        """The position of the clock knob: a power limit rarely binds while tokens are generated."""
        return self._clock_knob

    # ---------------------------------------------------------------------------- decisions

    def _begin(
        self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool
    ) -> Decision | None:
        settings = tracked_settings(LevelLadder.over(ranges))
        if len(settings) < 2:
            return self._decline(
                DecisionReason.NO_ROOM,
                f"{self.name} is not tuned: the range of the knob {self.knob} leaves no lower "
                "setting; check `floor` in [autotune] and `floor_watts` and `fixed` in [caps].",
            )
        job, confidence = self._settings, self._host_settings.confidence
        policy = TrackingPolicy(
            tuple(LatencyObjective(*one[1:]) for one in job.objectives),
            settings if apply else settings[:1],
            period=job.period,
            confidence=confidence,
            by_length=job.classes == "length",
            dwell=min(self._host_settings.dwell, LOWERING_TIME),
        )
        now, ended = host.now.mono, self._ended_tracking
        if ended is not None and ended.policy == policy:
            self._tracking = resume_tracking(ended, now)
        else:
            store = self._context.evidence
            known = None if store is None else store.recall(self.name, self.ranks, policy)
            self._tracking = begin_tracking(policy, now, known)
        self._apply = apply
        return None

    def _advance(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """One step: observe the load, the ended requests and the energy, and decide."""
        state, now = self._tracking, host.now.mono
        assert state is not None  # noqa: S101 - it is running
        assert self._in_flight is not None  # noqa: S101 - a job begins with its first spans
        requests = self._requests.drain()
        sample = self._in_flight.sample(now, requests)
        self._sampler.read_caps(host)
        energy = self._sampler.read_energy(host)
        ladder = LevelLadder.over(self._ranges)
        level = state.policy.settings[state.setting]
        in_force = ladder.is_in_force(level, self._sampler.in_force)
        refused = self._refused(host, in_force=in_force, changed_at=state.changed_at)
        points = [(one.at, float(one.energy)) for one in energy]
        observation = LoadObservation(now, sample, requests, points, in_force)
        if refused is not None:
            before, (reason, cause) = state.setting, refused
            self._tracking = release(state, observation, reason)
            decision = refused_decision(state, self.knob, before, reason, cause)
            if not before and (self.decision.move, self.decision.reason) == (Move.RELEASE, reason):
                decision = self.decision  # the release, until its reason ends
            return decision, tracking_figures(self._tracking)
        self._tracking = state = track(state, observation)
        if now - self._stored_at >= EVIDENCE_INTERVAL:
            self._store_evidence(now)
        load = self.load
        if self._apply:
            decision = tracking_decision(state, self.knob, ladder, load)
        else:
            sentence = (
                f"Advice: track the load, now {load.load:.1f}, with lower settings of {self.knob}."
            )
            shown = {"load": load.load}
            decision = Decision(Move.DECLINE, DecisionReason.ADVICE, sentence, {}, shown)
        return decision, tracking_figures(state)

    def _refused(
        self, host: HostView, *, in_force: bool, changed_at: int
    ) -> tuple[DecisionReason, str] | None:
        """An external reason for the original setting, with its clause where it is not usual."""
        if self.ended:
            return DecisionReason.ENDED, ""
        vetoes = self._vetoes(host)
        if vetoes:
            return min(vetoes), ""
        since = max(changed_at, self._sampler.changed)
        if not in_force and host.now.mono - since > ENFORCEMENT_TIMEOUT:
            return DecisionReason.FOREIGN_WRITER, ""
        announced = self._in_flight.announced if self._in_flight is not None else None
        if not announced:
            cause = _TOO_FEW if announced is None else _NOT_ANNOUNCED
            return DecisionReason.NO_SIGNAL, cause
        missing = self._requests.missing
        return (DecisionReason.NO_SIGNAL, missing) if missing else None

    # ------------------------------------------------------------------ certified settings

    def store_certified(self) -> None:
        """Store the evidence of load bins, which a restarted agent continues."""
        self._store_evidence(self._stored_at)

    def store_result(self) -> None:
        """Nothing: see :meth:`store_certified`."""

    def _store_evidence(self, now: int) -> None:
        store, state = self._context.evidence, self._tracking
        self._stored_at = now
        if store is not None and state is not None and self._apply and self.ranks:
            store.store(self.name, self.ranks, state.policy, collected_evidence(state))
