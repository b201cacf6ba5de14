"""Strategies of tuning: by a search for one setting of all devices, and by the load of a server.

Devices are shared by several jobs in one search. By load, the setting follows the load of a server,
within its latency limits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from wattspan.model import (
    SECOND,
    Decision,
    DecisionReason,
    HwType,
    Knob,
    LoadFigures,
    Move,
    ObjectiveFigures,
    TuningFigures,
    TuningRow,
)
from wattspan.tuning.decisions.budget import SlowdownAccount
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
    certified_levels,
    load_figures,
    refused_decision,
    report,
    tracked_settings,
    tracking_decision,
    tracking_figures,
)
from wattspan.tuning.decisions.search import (
    TunerPhase,
    TunerState,
    closed_account,
    searches_without_result,
)
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    Fingerprint,
    KnobRange,
    LevelLadder,
    Objective,
    Observation,
    TunerPolicy,
    WorkloadKind,
)
from wattspan.tuning.engine_pages import TrackedWork
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job import TuningJob

_FAILURES = frozenset({DecisionReason.OVER_BUDGET, DecisionReason.TAIL})
"""Reasons of a release by which a certified setting fails."""

_REQUEST_BLOCKS = 20, 5 * SECOND, 8, 2 * SECOND
"""Least units and time of a block of requests, and of their settling: arrivals are random."""


class SearchStrategy:
    """Searches for the best setting of all devices of a job, beside its tenants if it has some.

    Certified settings are stored, and certified first in the next run of the same job, unless
    they are those of several jobs or hosts together.
    """

    clock_only = False

    def __init__(self, job: TuningJob) -> None:
        self._job = job
        self.state: TunerState | None = None
        self._vetoed = False  # at the latest step
        self._fruitless = 0  # searches in a row without a result
        self._fingerprint: Fingerprint | None = None

    @property
    def running(self) -> bool:
        return self.state is not None

    @property
    def applied(self) -> bool:
        return self.state is not None and self.state.policy.apply

    @property
    def exploring(self) -> bool:
        """True if it needs the host's permission to explore, and nothing else prevents that."""
        return self.state is not None and self.state.exploring and self.applied and not self._vetoed

    @property
    def account(self) -> SlowdownAccount | None:
        return None if self.state is None else closed_account(self.state)

    def begin(self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool) -> Decision | None:
        now, tenants = host.now.mono, self._job.tenants
        alone = not tenants and self._job.turns is None

        def begun(job: TuningJob, **more: Any) -> TunerState:
            policy = _policy(job, ranges, apply=apply)
            return begin(policy, ranges, now=now, account=job.recalled_account(), **more)

        self.state = begun(
            self._job,
            remembered=self._recall(host) if alone else None,
            searches=self._fruitless,
            tenants=list(map(begun, tenants)),
        )
        return None

    def step(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        assert self.state is not None  # noqa: S101 - it is running
        observation = self._observe(host, may_explore=may_explore)
        if self._job.turns is not None:
            return self._step_in_turn(self.state, observation)
        self.state, decision = step(self.state, observation)
        return decision, report(self.state)

    def _step_in_turn(
        self, before: TunerState, observation: Observation
    ) -> tuple[Decision, TuningFigures]:
        """As ``step``, beside the settings of other hosts."""
        job, turns = self._job, self._job.turns
        assert turns is not None  # noqa: S101 - there are other hosts
        state = turns.advance(before, observation)
        if state is None:
            sentence = "The setting is certified again: it was not compared for long."
            return job.decline(DecisionReason.CHANGED, sentence), job.report
        self.state = state
        if not self.exploring and state.search.phase in (TunerPhase.SCREEN, TunerPhase.PROVE):
            job.stop()  # other hosts may have other settings when it may continue
        elif not self.exploring and state.search.phase is not TunerPhase.HOLD:
            turns.leave()
        decision = state.decision
        if decision.reason is DecisionReason.WAITING and turns.turn.waits:
            decision = replace(decision, sentence=f"Keep the original setting: {turns.turn.waits}.")
        return decision, report(state)

    def stop(self, *, forget: bool = False) -> None:
        if forget:
            self._fingerprint = None
        if self.state is not None:
            self._fruitless = searches_without_result(self.state)
        self.state = None

    def describe(self, row: TuningRow) -> TuningRow:
        turns = self._job.turns
        if turns is None:
            return row
        return replace(row, budget=turns.part(row.budget), partners=turns.turn.figures)

    def store(self, decision: Decision | None) -> None:
        job, state = self._job, self.state
        if self._fingerprint is None:
            return
        certifies = decision is None or decision.reason is DecisionReason.CERTIFIED
        if certifies and state is not None and not job.tenants:
            setting = certified_levels(state)
            if setting is not None:
                job.context.certified.certified(self._fingerprint, job.knob, setting)
        if decision is not None and decision.move is Move.RELEASE and decision.reason in _FAILURES:
            job.context.certified.failed(self._fingerprint, job.knob)

    def _recall(self, host: HostView) -> CertifiedLevels | None:
        """The setting that was certified for the same job before, or that it asks to try first."""
        job = self._job
        if self._fingerprint is None:
            devices = job.devices.names
            gpus = [one for one in host.snapshot.gpus if one.domain_id in devices]
            hardware = (gpus[0].model, gpus[0].partition_mode) if gpus else ()
            leader = next(iter(job.ranks), None)
            self._fingerprint = Fingerprint(
                command=job.context.command(leader) if leader is not None else "",
                model=" ".join(filter(None, hardware)),
                driver=gpus[0].driver if gpus else "",
                devices=len(devices),
                service=job.service,
                span=job.span,
            )
        setting = job.context.certified.recall(self._fingerprint, job.knob)
        original = max(one.original for one in job.ranges)
        if setting is None and job.knob is Knob.GPU_POWER and 0 < job.terms.first < original:
            setting = CertifiedLevels(job.terms.first, original, slowdown=0, saving=0, pairs=0)
        return setting

    def _observe(self, host: HostView, *, may_explore: bool) -> Observation:
        job, sampler = self._job, self._job.devices.sampler
        vetoes = job.vetoes(host)
        if any(one.work.units.invalid for one in job.everyone):
            vetoes.add(DecisionReason.BAD_WORK)
        self._vetoed = bool(vetoes)
        sampler.read_caps(host)
        draws = {one: host.draw(one) for one in job.devices.names}
        return Observation(
            now=host.now.mono,
            units=tuple(job.work.units.drain()),
            tenants=tuple(tuple(one.work.units.drain()) for one in job.tenants),
            energy=sampler.read_energy(host, comparing=job.decision.move is Move.PROBE),
            in_force=sampler.in_force,
            since=sampler.changed,
            draw={one: draw for one, draw in draws.items() if draw is not None},
            vetoes=frozenset(vetoes),
            may_explore=may_explore,
            ended=job.ended,
        )


def _policy(job: TuningJob, ranges: Sequence[KnobRange], *, apply: bool) -> TunerPolicy:
    own, settings = job.settings, job.terms.host
    least = _REQUEST_BLOCKS if job.kind is WorkloadKind.REQUESTS else (0, 0, 0, 0)
    policy = TunerPolicy(
        knob=job.knob,
        kind=job.kind,
        max_slowdown=job.terms.budget,
        confidence=settings.confidence,
        objective=Objective(settings.objective),
        eta=settings.eta,
        max_power=sum(one.original for one in ranges),
        latency=own.latency or None,
        percentile=own.percentile,
        apply=apply,
        slack=bool(own.compute),
        block_units=max(settings.block_units, least[0]),
        block_time=max(settings.block, least[1]),
        settle_units=max(settings.settle_units, least[2]),
        settle_time=max(settings.settle, least[3]),
        dwell=settings.dwell,
        seed=job.context.seed,
    )
    return policy if job.turns is None else job.turns.policy(policy)


# ----------------------------------------------------------------------------------- sharing


def share_devices(jobs: Iterable[TuningJob], host: HostView) -> None:
    """Group ``jobs``, which may be tuned, by their GPUs, to be tuned by one search.

    Every process that uses the GPUs must belong to one of the jobs of a group, each of which sends
    units of its work. Otherwise they are declined as shared. Other jobs must have no tenants.
    """
    groups: dict[tuple[tuple[Knob, ...], tuple[str, ...]], list[TuningJob]] = {}
    for job in jobs:
        if gpus := _gpus(job, host):
            groups.setdefault((job.devices.knobs, gpus), []).append(job)
        else:
            job.share(None, ())
    for (_, shared), group in groups.items():
        if len(group) > 1 and _are_all(group, shared, host):
            leader = min(group, key=lambda job: (job.terms.budget, job.name))
            others = tuple(job for job in group if job is not leader)
            leader.share(None, others)
            for job in others:
                job.share(leader, ())
        else:
            for job in group:
                job.share(None, ())


def _gpus(job: TuningJob, host: HostView) -> tuple[str, ...]:
    """The GPUs of a job; those of its last use if it uses none at the moment."""
    used = host.users.used_by(job.devices.members, host.now.mono)
    found = (one.id for one in host.domains.values() if one.hw_type is HwType.GPU)
    present = tuple(sorted(one for one in found if host.domains[one].resource in used))
    kept = (one.device for one in job.ranges if one.device in host.domains)
    return present or tuple(one for one in kept if host.domains[one].hw_type is HwType.GPU)


def _are_all(group: Sequence[TuningJob], gpus: Collection[str], host: HostView) -> bool:
    """True if nothing else uses the GPUs."""
    known = {member for job in group for member in job.devices.members}
    resources = (host.domains[gpu].resource for gpu in gpus)
    return all(
        host.users.of(resource, host.now.mono) <= known for resource in resources if resource
    )


# ------------------------------------------------------------------------------------ load tracking


EVIDENCE_INTERVAL = 60 * SECOND
"""Interval of storing the evidence, and the time from which a crash can lose it."""

_TOO_FEW = "too few requests have ended to know if they are announced as they begin"
_NOT_ANNOUNCED = (
    "its requests are not announced as they begin, so its load is known too late; let the server's "
    "processes announce their spans (wattspan installed beside opentelemetry-instrument), and "
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
        load = float(self._job.work.load)
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
            period=max(job.period, owner.context.page_intervals.get(job.engine, 0)),
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
        work = job.work.read_requests(now)
        sampler = job.devices.sampler
        sampler.read_caps(host)
        energy = sampler.read_energy(host)
        ladder = LevelLadder.over(job.ranges)
        level = state.policy.settings[state.setting]
        in_force = ladder.is_in_force(level, sampler.in_force)
        refused = self._refused(host, work, in_force=in_force, changed_at=state.changed_at)
        observation = LoadObservation(
            now, work.sample, work.requests, energy, in_force, work.generated
        )
        if refused is not None:
            before, (reason, cause) = state.setting, refused
            self._tracking = release(state, observation, reason)
            decision = refused_decision(state, job.knob, before, reason, cause)
            if not before and (job.decision.move, job.decision.reason) == (Move.RELEASE, reason):
                decision = job.decision  # the release, until its reason ends
            return decision, tracking_figures(self._tracking)
        self._tracking = state = track(state, observation)
        if now - self._stored_at >= EVIDENCE_INTERVAL:
            self._stored_at = now
            self.store(None)
        load = self._load
        if self._apply:
            decision = tracking_decision(state, job.knob, ladder, load)
        else:
            sentence = (
                f"Advice: track the load, now {load.load:.1f}, with lower settings of {job.knob}."
            )
            shown = {"load": load.load}
            decision = Decision(Move.DECLINE, DecisionReason.ADVICE, sentence, {}, shown)
        if work.note:
            decision = replace(decision, sentence=f"{decision.sentence[:-1]}; {work.note}.")
        return decision, tracking_figures(state)

    def _refused(
        self, host: HostView, work: TrackedWork, *, in_force: bool, changed_at: int
    ) -> tuple[DecisionReason, str] | None:
        """An external reason for the original setting, with its clause where it is not usual."""
        job = self._job
        if (reason := job.external_reason(host, changed_at, in_force=in_force)) is not None:
            return reason, ""
        if work.note:
            return (DecisionReason.NO_SIGNAL, work.cause) if work.cause else None
        announced = job.work.in_flight.announced
        if not announced:
            cause = _TOO_FEW if announced is None else _NOT_ANNOUNCED
            return DecisionReason.NO_SIGNAL, cause
        missing = job.work.requests.missing
        return (DecisionReason.NO_SIGNAL, missing) if missing else None

    def store(self, decision: Decision | None) -> None:
        """Store the evidence of load bins at the end, which a restarted agent continues."""
        state = self._tracking
        if decision is None and state is not None and self._apply and self._job.ranks:
            self._store(state, collected_evidence(state))

    def _store(self, state: TrackingState | None, evidence: TrackingEvidence) -> None:
        job = self._job
        if state is not None:
            job.context.evidence.store(job.name, job.ranks, state.policy, evidence)
