"""Tuning by the load of a server: its setting follows the load, within its latency limits."""

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
from wattspan.tuning.decisions.report import (
    load_figures,
    refused_decision,
    tracked_settings,
    tracking_decision,
    tracking_figures,
)
from wattspan.tuning.decisions.safety import ENFORCEMENT_TIMEOUT
from wattspan.tuning.decisions.values import KnobRange, LevelLadder
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job import TuningJob

EVIDENCE_INTERVAL = 60 * SECOND
"""Interval of storing the evidence, and the time from which a crash can lose it."""

_TOO_FEW = "too few requests have ended to know if they are announced as they begin"
_NOT_ANNOUNCED = (
    "its requests are not announced as they begin, so its load is known too late; let the server's "
    "processes announce their spans (`pip install wattspan` beside opentelemetry-instrument), and "
    "name their outermost span as `span`"
)


class TrackingStrategy:
    """The strategy of ``control = "track"``. It explores at any time, without permission."""

    clock_only = True
    """A power limit rarely binds while tokens are generated."""

    state = None
    exploring = False
    account = None

    def __init__(self, job: TuningJob) -> None:
        self._job = job
        self._tracking: TrackingState | None = None
        self._ended: TrackingState | None = None  # the last one that was applied
        self._apply = False
        self._stored_at = 0

    @property
    def running(self) -> bool:
        return self._tracking is not None

    @property
    def applied(self) -> bool:
        return self._tracking is not None and self._apply

    def describe(self, row: TuningRow) -> TuningRow:
        return replace(row, budget=0.0, load=self._load)

    @property
    def _load(self) -> LoadFigures:
        """The load and the misses; until the tracking begins, the requests in flight now."""
        objectives = self._job.settings.objectives
        if self._tracking is not None:
            return load_figures(self._tracking, [one.name for one in objectives])
        load = float(len(self._job.work.in_flight))
        return LoadFigures(
            load,
            load_bin(load),
            bin_bound(load_bin(load)),
            objectives=tuple(
                ObjectiveFigures(one.name, one.limit / 1e9, one.allowed) for one in objectives
            ),
        )

    def stop(self, *, forget: bool = False) -> None:
        if self.applied:
            self._ended = self._tracking
        known, self._tracking = self._tracking or self._ended, None
        if forget:
            self._ended = None
            self._store(known, TrackingEvidence({}, {}, {}, 0))

    def begin(self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool) -> Decision | None:
        owner = self._job
        settings = tracked_settings(LevelLadder.over(ranges))
        if len(settings) < 2:
            return owner.decline(
                DecisionReason.NO_ROOM,
                f"{owner.name} is not tuned: the range of the knob {owner.knob} leaves no lower "
                "setting; check `floor` in [autotune] and `floor_watts` and `fixed` in [caps].",
            )
        job, host_settings = owner.settings, owner.terms.host
        policy = TrackingPolicy(
            tuple(LatencyObjective(*one[1:]) for one in job.objectives),
            settings if apply else settings[:1],
            period=job.period,
            confidence=host_settings.confidence,
            by_length=job.classes == "length",
            dwell=min(host_settings.dwell, LOWERING_TIME),
        )
        now, ended = host.now.mono, self._ended
        if ended is not None and ended.policy == policy:
            self._tracking = resume_tracking(ended, now)
        else:
            known = owner.context.evidence.recall(owner.name, owner.ranks, policy)
            self._tracking = begin_tracking(policy, now, known)
        self._apply = apply
        return None

    def step(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """One step: observe the load, the ended requests and the energy, and decide."""
        state, now, job = self._tracking, host.now.mono, self._job
        assert state is not None  # noqa: S101 - it is running
        requests = job.work.requests.drain()
        sample = job.work.in_flight.sample(now, requests)
        sampler = job.devices.sampler
        sampler.read_caps(host)
        energy = sampler.read_energy(host)
        ladder = LevelLadder.over(job.ranges)
        level = state.policy.settings[state.setting]
        in_force = ladder.is_in_force(level, sampler.in_force)
        refused = self._refused(host, in_force=in_force, changed_at=state.changed_at)
        observation = LoadObservation(now, sample, requests, energy, in_force)
        if refused is not None:
            before, (reason, cause) = state.setting, refused
            self._tracking = release(state, observation, reason)
            decision = refused_decision(state, job.knob, before, reason, cause)
            if not before and (job.decision.move, job.decision.reason) == (Move.RELEASE, reason):
                decision = job.decision  # the release, until its reason ends
            return decision, tracking_figures(self._tracking)
        self._tracking = state = track(state, observation)
        if now - self._stored_at >= EVIDENCE_INTERVAL:
            self._store_evidence(now)
        load = self._load
        if self._apply:
            decision = tracking_decision(state, job.knob, ladder, load)
        else:
            sentence = (
                f"Advice: track the load, now {load.load:.1f}, with lower settings of {job.knob}."
            )
            shown = {"load": load.load}
            decision = Decision(Move.DECLINE, DecisionReason.ADVICE, sentence, {}, shown)
        return decision, tracking_figures(state)

    def _refused(
        self, host: HostView, *, in_force: bool, changed_at: int
    ) -> tuple[DecisionReason, str] | None:
        """An external reason for the original setting, with its clause where it is not usual."""
        job = self._job
        if job.ended:
            return DecisionReason.ENDED, ""
        vetoes = job.vetoes(host)
        if vetoes:
            return min(vetoes), ""
        since = max(changed_at, job.devices.sampler.changed)
        if not in_force and host.now.mono - since > ENFORCEMENT_TIMEOUT:
            return DecisionReason.FOREIGN_WRITER, ""
        announced = job.work.in_flight.announced
        if not announced:
            cause = _TOO_FEW if announced is None else _NOT_ANNOUNCED
            return DecisionReason.NO_SIGNAL, cause
        missing = job.work.requests.missing
        return (DecisionReason.NO_SIGNAL, missing) if missing else None

    def store(self, decision: Decision | None) -> None:
        """Store the evidence of load bins at the end, which a restarted agent continues."""
        if decision is None:
            self._store_evidence(self._stored_at)

    def _store_evidence(self, now: int) -> None:
        self._stored_at, state = now, self._tracking
        if state is not None and self._apply and self._job.ranks:
            self._store(state, collected_evidence(state))

    def _store(self, state: TrackingState | None, evidence: TrackingEvidence) -> None:
        job = self._job
        if state is not None:
            job.context.evidence.store(job.name, job.ranks, state.policy, evidence)
