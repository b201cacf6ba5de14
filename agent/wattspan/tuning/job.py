"""A tuning job: its units of work, its devices, its tuner's state and its decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Protocol

from wattspan.config import TunedJobSettings
from wattspan.model import (
    SECOND,
    CapKey,
    Consumer,
    Decision,
    DecisionReason,
    Instant,
    Knob,
    Microjoules,
    Move,
    Payer,
    TuningFigures,
    TuningRow,
    TuningState,
)
from wattspan.ports import ProcessDirectory
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.load_tracking import TrackingEvidence, TrackingPolicy
from wattspan.tuning.decisions.report import certified_levels, report
from wattspan.tuning.decisions.search import TunerState, closed_account, searches_without_result
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.tenants import follow
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    Fingerprint,
    KnobRange,
    Objective,
    Observation,
    TunerPolicy,
    WorkloadKind,
)
from wattspan.tuning.host_view import DeviceSampler, HostView
from wattspan.tuning.job_owners import JobOwner
from wattspan.tuning.permissions import JobTerms, slowdown_budget
from wattspan.tuning.work_units import AnnouncedSpans, JobUnits, ReceivedSpans
from wattspan.util.throttle import RetryBackoff

if TYPE_CHECKING:
    from wattspan.fleet.job_records import JobRecord, JobView
    from wattspan.tuning.pipeline.plan import ClockPlan
    from wattspan.tuning.pipeline.session_state import PlanTask

_FINAL_REASONS = frozenset(
    {
        DecisionReason.NOT_BINDING,
        DecisionReason.INERT,
        DecisionReason.NO_SAVING,
        DecisionReason.NO_ROOM,
        DecisionReason.NO_DEVICE,
        DecisionReason.NOT_MONOTONE,
    }
)
"""Reasons against one knob that need not hold for another."""

_FAILURES = frozenset({DecisionReason.OVER_BUDGET, DecisionReason.TAIL})
"""Reasons of a release by which a certified setting fails."""

PROCESS_GONE_AFTER = 5 * SECOND
"""Time after the end of its last process at which a job has ended: its last spans have arrived."""

_REQUEST_BLOCKS = 20, 5 * SECOND, 8, 2 * SECOND
"""Least units and time of a block of requests, and of their settling: arrivals are random."""

_FAMILY_INTERVAL = 5 * SECOND

_FORGET_REFUSALS = 3600 * SECOND
"""After this time without a refusal of the capper, delays begin at the shortest again."""

_STATES = {
    Move.PROBE: TuningState.EXPLORING,
    Move.HOLD: TuningState.HOLDING,
    Move.RELEASE: TuningState.RELEASED,
    Move.DECLINE: TuningState.DECLINED,
}
_WAITING_REASONS = frozenset({DecisionReason.WAITING, DecisionReason.NO_SIGNAL})


class CertifiedStore(Protocol):
    """Stores certified settings by fingerprint."""

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None: ...

    def certified(self, fingerprint: Fingerprint, knob: Knob, setting: CertifiedLevels) -> None: ...

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> None: ...


class AccountStore(Protocol):
    """Stores the closed slowdown accounts of running jobs by name and processes."""

    def recall(self, job: str, processes: Collection[Consumer]) -> SlowdownAccount | None: ...

    def store(
        self, job: str, processes: Collection[Consumer], account: SlowdownAccount
    ) -> None: ...


class PlanSearches(Protocol):
    """Searches clocks for the ranks of pipelines, which takes up to seconds each."""

    def submit(self, task: PlanTask) -> Future[ClockPlan | None]: ...


class JobRecords(Protocol):
    """Records of jobs that run on several hosts. No call waits for another host."""

    def view(self, job: str) -> JobView: ...

    def publish(self, job: str, record: JobRecord, *, explores: bool) -> None: ...

    def withdraw(self, job: str) -> None: ...


class EvidenceStore(Protocol):
    """Stores the evidence about the loads of running servers by name and processes."""

    def recall(
        self, job: str, processes: Collection[Consumer], policy: TrackingPolicy
    ) -> TrackingEvidence | None: ...

    def store(
        self,
        job: str,
        processes: Collection[Consumer],
        policy: TrackingPolicy,
        evidence: TrackingEvidence,
    ) -> None: ...


ACCOUNT_INTERVAL = 10 * SECOND
"""Interval of storing a job's account, and the time of work that a crash can lose from it."""


@dataclass(frozen=True, slots=True)
class TuningContext:
    """Services of all jobs of this host.

    ``command`` identifies the program of a process. No cap of any kind is lower than ``floor``, in
    milliwatts.
    """

    certified: CertifiedStore
    accounts: AccountStore | None
    evidence: EvidenceStore | None
    plans: PlanSearches | None
    command: Callable[[Consumer], str]
    owner_of: Callable[[Consumer], JobOwner | None]
    floor: int
    seed: int
    records: JobRecords | None = None


@dataclass(slots=True)
class CumulativeSavings:
    """Totals of a job over all of its tuners; they never fall."""

    decisions: Counter[tuple[Move, DecisionReason]] = field(default_factory=Counter)
    saved: int = 0  # microjoules, lower bound
    exploration: int = 0
    units: int = 0
    _closed: tuple[int, int, int] = (0, 0, 0)  # of the tuners before the present one

    def update(self, report: TuningFigures) -> None:
        saved, exploration, units = self._closed
        self.saved = max(self.saved, saved + (report.saved_low or 0))
        self.exploration = max(self.exploration, exploration + report.exploration)
        self.units = max(self.units, units + report.units)

    def close(self) -> None:
        """Continue with the reports of a new tuner."""
        self._closed = self.saved, self.exploration, self.units


class TuningJob:
    """Belongs to the tuner's thread.

    ``owner`` is that of all of its processes.
    """

    def __init__(
        self,
        name: str,
        service: str,
        span: str,
        terms: JobTerms,
        context: TuningContext,
        *,
        kind: WorkloadKind,
        now: Instant,
        owner: JobOwner,
        savings: CumulativeSavings | None = None,
    ) -> None:
        self.name, self.service, self.span, self.owner = name, service, span, owner
        self._kind, self._context, self.terms = kind, context, terms
        self._leader: TuningJob | None = None  # whose search sets the devices that this job shares
        self._tenants: tuple[TuningJob, ...] = ()  # whose evidence counts in this job's search
        self._set_terms(terms)
        self.ranks: dict[Consumer, int] = {}
        self._members: dict[Payer, int] = {}  # every process of the job's families, and its rank
        self._members_read_at = 0
        # In ``knobs``: the present one, the first worth trying.
        self._position = self._first = self._preferred_knob
        self._rounds = self._round_ends = 0  # rounds in which no knob was of use
        self._passed: dict[Knob, DecisionReason] = {}
        self.decided_knob = self.knob
        self._refusals = RetryBackoff(10 * SECOND, 600 * SECOND)
        self._state: TunerState | None = None
        self._ranges: tuple[KnobRange, ...] = ()
        self._ceilings: tuple[int | None, ...] = ()
        self._vetoed = False  # at the latest step of its tuner
        self._sampler = DeviceSampler(self.knob, (), now.mono, 0)
        # The account of the run's earlier tuners, and the searches in a row without a result.
        self._account: SlowdownAccount | None = None
        self._fruitless = 0
        self._account_stored_at = now.mono
        self.savings = savings or CumulativeSavings()
        self.savings.close()
        self._report = TuningFigures()
        self._since = now
        self._last_alive = now.mono
        self.held: dict[CapKey, int] = {}  # by the capper, for this job
        self._fingerprint: Fingerprint | None = None
        self._partition_modes: Mapping[str, str] = {}  # of the devices, in all of the evidence
        self.ended = False
        self.decision = Decision(
            Move.DECLINE,
            DecisionReason.NO_SIGNAL,
            f"The tuner waits for units of work of {self.name}.",
        )

    # ------------------------------------------------------------------------------- terms

    def use(self, terms: JobTerms) -> None:
        """Continue under ``terms``; with a new tuner if they differ in more than their reason."""
        present = self.terms
        if (terms.host, terms.job, terms.mode, terms.floor) == (
            present.host,
            present.job,
            present.mode,
            present.floor,
        ):
            self.terms = terms
            return
        self._set_terms(terms)
        self._use_knob(self._preferred_knob)

    def _set_terms(self, terms: JobTerms) -> None:
        self.terms = terms
        self._settings = terms.job or TunedJobSettings(service=self.service, span=self.span)
        self._host_settings = terms.host
        self.units = JobUnits(self.span, self._settings)

    # ------------------------------------------------------------------------------- units

    def add_spans(self, received: ReceivedSpans, now: int) -> None:
        """Add the units of work among the spans of one of the job's processes."""
        rank = self.ranks.setdefault(received.consumer, 1 + max(self.ranks.values(), default=-1))
        self.units.add(received, rank, now)
        if self.units:
            self._last_alive = now

    def add_announced(self, announced: AnnouncedSpans, now: int) -> None:
        """Add announced starts and ends of spans, which only a tracked job needs."""

    def update_living(self, directory: ProcessDirectory, now: int) -> None:
        """Remove the ranks of ended processes; the others keep their numbers."""
        living = [one for one in self.ranks if directory.identify(one.pid) == one]
        self.ranks = {one: self.ranks[one] for one in living}
        if living:
            self._last_alive = now
        if not self.ended and now - self._last_alive > PROCESS_GONE_AFTER:
            self.ended = True
            self.store_certified()

    # ----------------------------------------------------------------------------- tenants

    @property
    def members(self) -> Collection[Payer]:
        """Every process of the job, as last read."""
        return self._members

    @property
    def knobs(self) -> tuple[Knob, ...]:
        return self._host_settings.knobs

    @property
    def budget(self) -> float:
        """The slowdown budget."""
        return slowdown_budget(self._host_settings, self._settings)

    @property
    def _everyone(self) -> tuple[TuningJob, ...]:
        return (self, *self._tenants)

    def may_share(self, refusal: str, now: int) -> bool:
        """True if it can be tuned together with other jobs; ``refusal`` as in ``decide``."""
        declared = self.terms.declared
        forbidden = refusal or (declared is not None and declared.given.mode == "off")
        return bool(self.ranks) and not self.ended and not forbidden and self._refusals.is_due(now)

    def share(self, leader: TuningJob | None, tenants: Sequence[TuningJob]) -> None:
        """Be tuned by the search of ``leader``, or tune the devices of ``tenants`` as well.

        None and no tenants: be tuned alone.
        """
        if leader is self._leader and tuple(tenants) == self._tenants:
            return
        self._drop_tuner()
        if leader is not None:
            self._ranges = ()
        self._leader, self._tenants = leader, tuple(tenants)

    def _follow(self, leader: TuningJob, now: Instant) -> None:
        """Report the leader's decision as this job's, with this job's figures."""
        state = leader.tenant_state(self)
        if state is not None:
            # The energy of the devices is saved once, by the leader.
            self._report = replace(report(state), saved=None, saved_low=None, saved_high=None)
            self.savings.update(self._report)
            self.store_account(now.mono)
        sentence = f"Tuned with {leader.name}, which shares its devices: {leader.decision.sentence}"
        self._set_decision(replace(leader.decision, sentence=sentence, caps={}), now)

    def tenant_state(self, tenant: TuningJob) -> TunerState | None:
        """The state of one of its tenants in its search; None while it has no tuner."""
        if self._state is None or tenant not in self._tenants:
            return None
        return follow(self._state.tenants[self._tenants.index(tenant)], self._state)

    # ------------------------------------------------------------------------------- state

    @property
    def knob(self) -> Knob:
        if self._leader is not None:
            return self._leader.knob
        return self._host_settings.knobs[self._position]

    @property
    def _preferred_knob(self) -> int:
        """The position of the knob to try first."""
        return 0

    @property
    def _clock_knob(self) -> int:
        """The position of the knob of GPU clocks; 0 if it is not configured."""
        knobs = self._host_settings.knobs
        return knobs.index(Knob.GPU_CLOCK) if Knob.GPU_CLOCK in knobs else 0

    @property
    def exploring(self) -> bool:
        """True if it needs the host's permission to explore, and nothing else prevents that."""
        state = self._state
        return state is not None and state.exploring and state.policy.apply and not self._vetoed

    @property
    def claim(self) -> int:
        """Its claim to explore beside the other jobs of this host: the highest one does, 0 none."""
        return int(self.exploring and not self.ended)

    @property
    def _running(self) -> bool:
        """True while a tuner decides for the job's devices."""
        return self._state is not None

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(one.device for one in self.ranges)

    @property
    def ranges(self) -> tuple[KnobRange, ...]:
        """The permitted settings of the devices."""
        return self._ranges if self._leader is None else self._leader.ranges

    @property
    def applied(self) -> bool:
        """True if decisions are applied; else they are advice."""
        if self._leader is not None:
            return self._leader.applied
        return self._state is not None and self._state.policy.apply

    @property
    def caps(self) -> dict[CapKey, int]:
        """The caps to hold now."""
        if not self.applied:
            return {}
        return {CapKey(self.knob, one): value for one, value in self.decision.caps.items()}

    def row(self) -> TuningRow:
        """The job's state for exporters, the API and the page."""
        waits = self.decision.move is Move.DECLINE and self.decision.reason in _WAITING_REASONS
        state = TuningState.WAITING if waits else _STATES[self.decision.move]
        figures = {one.name: getattr(self._report, one.name) for one in fields(TuningFigures)}
        return TuningRow(
            job=self.name,
            service=self.service,
            span=self.span,
            knob=self.knob,
            state=TuningState.ENDED if self.ended else state,
            decision=self.decision,
            since=self._since,
            budget=self.budget,
            confidence=self._host_settings.confidence,
            devices=self.devices,
            applied=self.applied,
            saved_surely=Microjoules(self.savings.saved),
            decisions=dict(self.savings.decisions),
            original={one.device: one.original for one in self.ranges},
            passed_knobs=dict(self._passed),
            declared=self.terms.declared,
            **figures | {"exploration": self.savings.exploration, "units": self.savings.units},
        )

    # ---------------------------------------------------------------------------- decisions

    def decide(
        self,
        host: HostView,
        *,
        may_explore: bool,
        refusal: str = "",
    ) -> None:
        """Take the next step of the tuner.

        ``refusal`` is a sentence why the job must not be tuned.
        """
        declined: Decision | None = None
        if not self.ended:
            self._update_members(host)
            if self._leader is not None:  # the leader reads the units of this job
                self._follow(self._leader, host.now)
                return
            self._check_partition_modes(host)
            declined = self._blocked(refusal, host) or self._prepare(host)
        if declined is not None or not self._running:
            self._discard_work()
            self._set_decision(declined or self.decision, host.now)
            return
        decision, self._report = self._advance(host, may_explore=may_explore)
        self.savings.update(self._report)
        self.store_account(host.now.mono)
        if decision.reason is DecisionReason.ADVICE:
            decision = self._explain_advice(decision, host)
        self._set_decision(decision, host.now)

    def _advance(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """One step of the running tuner: its decision and its figures."""
        assert self._state is not None  # noqa: S101 - it is running
        self._state, decision = step(self._state, self._observe(host, may_explore=may_explore))
        return decision, report(self._state)

    def _discard_work(self) -> None:
        for one in self._everyone:
            one.units.drain()

    def fail(
        self, reason: DecisionReason, sentence: str, now: Instant, *, back_off: bool = False
    ) -> None:
        """Restart, because a decision could not be applied; ``back_off`` delays the start."""
        if back_off:
            if now.mono - self._refusals.retry_at >= _FORGET_REFUSALS:
                self._refusals.reset()
            self._refusals.failed(now.mono)
        self._set_decision(self._decline(reason, sentence), now)

    def _check_partition_modes(self, host: HostView) -> None:
        """Begin again if a device has another partition mode: none of the evidence applies to it.

        The delay covers units of work that began before the change.
        """
        former = self._partition_modes
        known = {one: former[one] for one in self.devices if one in former}
        present = host.partition_modes(self.devices)
        self._partition_modes = known | present
        changed = [one for one, mode in present.items() if known.get(one, mode) != mode]
        if changed:
            device = changed[0]
            modes = f"{known[device]} to {present[device]}"
            sentence = (
                f"{self.name} is measured again: the partition mode of "
                f"{host.display_name(device)} has changed from {modes}."
            )
            self._forget_evidence()
            self.fail(DecisionReason.CHANGED, sentence, host.now, back_off=True)

    def _forget_evidence(self) -> None:
        """Forget what another tuner of the same processes would continue with, but the account."""
        self._fingerprint = None

    def _set_decision(self, decision: Decision, now: Instant) -> None:
        if decision.same_as != self.decision.same_as:
            self._since = now
            self.savings.decisions[decision.move, decision.reason] += 1
            self.decided_knob = self.knob
            self._round_ends = 0
            if (
                decision.move is Move.DECLINE
                and decision.reason in _FINAL_REASONS
                and self._state is not None
            ):
                self._try_next_knob(decision.reason, now.mono)
        self.decision = decision

    def _decline(self, reason: DecisionReason, sentence: str) -> Decision:
        self._drop_tuner()
        return Decision(Move.DECLINE, reason, sentence)

    def _drop_tuner(self) -> None:
        """The next tuner continues the account: the budget is the run's."""
        for one in self._everyone:
            one.keep_account()
        if self._state is not None:
            self._fruitless = searches_without_result(self._state)
        self._state = None

    def keep_account(self) -> None:
        """Keep the account of the present tuner, if there is one, for the next one."""
        self._account = self._closed_account() or self._account

    def _closed_account(self) -> SlowdownAccount | None:
        """The account of the run with the present estimates; None if no tuner keeps one."""
        state = self._state if self._leader is None else self._leader.tenant_state(self)
        return None if state is None else closed_account(state)

    def _recalled_account(self) -> SlowdownAccount | None:
        """The account of the run's earlier tuners, also of those before a restart of the agent."""
        if self._account is None and self._context.accounts is not None:
            self._account = self._context.accounts.recall(self.name, self.ranks)
        return self._account

    def store_account(self, now: int) -> None:
        """Store the account at intervals, so that it survives the agent."""
        accounts = self._context.accounts
        if accounts is None or not self.ranks or now - self._account_stored_at < ACCOUNT_INTERVAL:
            return
        account = self._closed_account()
        if account is not None:
            self._account_stored_at = now
            accounts.store(self.name, self.ranks, account)

    def _explain_advice(self, advice: Decision, host: HostView) -> Decision:
        """The advice with its cause, where the configuration asks for more than advice."""
        if self.terms.configured_mode != "apply":
            return advice
        rows = [host.rows.get(CapKey(self.knob, one)) for one in self.devices]
        trouble = next((row.trouble for row in rows if row is not None and not row.usable), "")
        if not self.terms.may_apply:
            found = "detected" if self.terms.declared is None else "declared"
            reason, cause = DecisionReason.NOT_CHOSEN, f"the job was {found} and is not configured"
        elif host.trouble is not None:
            denied = host.trouble is DecisionReason.NO_PERMISSION
            cause = "the capper refuses this agent" if denied else "no capper answers"
            reason = host.trouble
        elif trouble:
            reason, cause = DecisionReason.NO_PERMISSION, trouble.removesuffix(".")
        else:
            reason, cause = DecisionReason.LOST_DEVICE, "the capper lacks one of its devices"
        sentence = f"{advice.sentence} The advice is not applied: {cause}."
        return replace(advice, reason=reason, sentence=sentence)

    # ------------------------------------------------------------------- choice of devices

    def _blocked(self, refusal: str, host: HostView) -> Decision | None:
        """The decision, if it does not depend on the job's devices."""
        declared = self.terms.declared
        if declared is not None and declared.given.mode == "off":
            refusal = refusal or declared.reason
        if refusal:
            return self._decline(DecisionReason.NOT_ALLOWED, refusal)
        if not self._refusals.is_due(host.now.mono):
            return self.decision
        if 0 < self._round_ends <= host.now.mono:
            self._use_knob(self._preferred_knob)  # the job's power may have changed since
        return None

    def _prepare(self, host: HostView) -> Decision | None:
        """Create a tuner for the job's devices, if they have changed; or the reason against it."""
        if not self._running and not self.ranks:
            return self.decision
        settings = self._host_settings
        used = host.users.used_by(self._members, host.now.mono)
        position, devices = self._choose_devices(host, used)
        keys = [CapKey(settings.knobs[position], one) for one in devices]
        refused = [one for one in devices if not host.allowed(one, settings.gpus)]
        if refused:
            return self._decline(
                DecisionReason.NOT_ALLOWED,
                f"{self.name} uses {host.display_name(refused[0])}, which is not in [autotune] "
                f"gpus ({', '.join(settings.gpus)}).",
            )
        holder = next(filter(None, (host.other_holder(key, self.name) for key in keys)), "")
        if holder:
            return self._decline(
                DecisionReason.HELD,
                f"{self.name} is not tuned: {holder} holds the cap of one of its devices; see "
                "`wattspan caps status`.",
            )
        permitted = all(one.terms.may_apply for one in self._everyone)
        apply = permitted and host.trouble is None and all(map(host.is_usable, keys))
        ceilings = tuple(map(host.imposed_limit, keys))
        chosen = position, tuple(devices), apply, ceilings
        present = self._position, self.devices, self.applied, self._ceilings
        if devices and self._running and chosen == present:
            return None
        known = [self._range(host, key, used) for key in keys]
        ranges = tuple(one for one in known if one is not None)
        if not ranges or len(ranges) < len(known):
            return self._decline(
                DecisionReason.NO_DEVICE,
                f"{self.name} uses no device with a readable range of the knob "
                f"{settings.knobs[position]}; `wattspan doctor` lists the knobs of this host.",
            )
        self._drop_tuner()
        self._position, self._ranges, self._ceilings = position, ranges, ceilings
        now, settled = host.now.mono, host.energies.settled()
        self._sampler = DeviceSampler(self.knob, ranges, now, settled)
        return self._begin(host, ranges, apply=apply)

    def _begin(
        self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool
    ) -> Decision | None:
        """Start a tuner for the present devices; or the reason against it."""
        policy = self._policy(ranges, apply=apply)
        self._state = begin(
            policy,
            ranges,
            now=host.now.mono,
            remembered=None if self._tenants else self._recall(host),
            account=self._recalled_account(),
            searches=self._fruitless,
            tenants=[one.begin_as_tenant(ranges, host.now, apply=apply) for one in self._tenants],
        )
        return None

    def begin_as_tenant(
        self, ranges: Sequence[KnobRange], now: Instant, *, apply: bool
    ) -> TunerState:
        """A new state of this job in the search of another one over the same devices."""
        policy = self._policy(ranges, apply=apply)
        return begin(policy, ranges, now=now.mono, account=self._recalled_account())

    def _range(
        self, host: HostView, key: CapKey, used: Mapping[str, set[Payer]]
    ) -> KnobRange | None:
        """The range of a device, with the lowest rank of the job's processes that use it."""
        domain = host.domains.get(key.device)
        users = used.get(domain.resource or "", ()) if domain is not None else ()
        rank = min((self._members[one] for one in users), default=0)
        floor = self._context.floor
        if key.knob is Knob.GPU_POWER:
            floor = max(floor, self.terms.floor)
        return host.range(key, self._host_settings.floor, floor, rank)

    def _policy(self, ranges: Sequence[KnobRange], *, apply: bool) -> TunerPolicy:
        job, settings = self._settings, self._host_settings
        least = _REQUEST_BLOCKS if self._kind is WorkloadKind.REQUESTS else (0, 0, 0, 0)
        return TunerPolicy(
            knob=self.knob,
            kind=self._kind,
            max_slowdown=slowdown_budget(settings, job),
            confidence=settings.confidence,
            objective=Objective(settings.objective),
            eta=settings.eta,
            max_power=sum(one.original for one in ranges),
            latency=job.latency or None,
            percentile=job.percentile,
            apply=apply,
            slack=bool(job.compute),
            block_units=max(settings.block_units, least[0]),
            block_time=max(settings.block, least[1]),
            settle_units=max(settings.settle_units, least[2]),
            settle_time=max(settings.settle, least[3]),
            dwell=settings.dwell,
            seed=self._context.seed,
        )

    def _update_members(self, host: HostView) -> None:
        """Update the processes of the job's families.

        The GPU work of a server may be done by another process than the one that sends spans.
        """
        now = host.now.mono
        if now - self._members_read_at >= _FAMILY_INTERVAL or not (
            self.ranks.keys() <= self._members.keys()
        ):
            self._members_read_at = now
            self._members = dict(self.ranks.items())
            for leader, rank in self.ranks.items():
                for one in filter(self._is_own, host.energies.family(leader)):
                    self._members.setdefault(one, rank)

    def _is_own(self, payer: Payer) -> bool:
        """True if a descendant of the job's processes is its owner's.

        Root may start processes of other users; others may have started a setuid program.
        """
        if self.owner.principal.is_host_root or not isinstance(payer, Consumer):
            return True
        owner = self._context.owner_of(payer)
        return owner is not None and owner.principal == self.owner.principal

    def _choose_devices(
        self, host: HostView, used: Mapping[str, set[Payer]]
    ) -> tuple[int, list[str]]:
        """Position of the first knob that the job's devices have, and these devices.

        A job that uses no device at the moment keeps its devices.
        """
        knobs = self._host_settings.knobs
        for position in range(self._first, len(knobs)):
            devices = host.devices_of(knobs[position], used)
            if devices:
                return position, devices
            if position == self._position and self.devices:
                break
        return self._position, list(self.devices)

    def _try_next_knob(self, reason: DecisionReason, now: int) -> None:
        """Use the next knob; after the last one, the first again after a long time."""
        settings = self._host_settings
        if self._position + 1 < len(settings.knobs):
            passed = {**self._passed, self.knob: reason}
            self._use_knob(self._position + 1)
            self._passed = passed
        elif len(settings.knobs) > 1:
            self._rounds += 1
            self._round_ends = now + (settings.dwell << min(self._rounds, 6))

    def _use_knob(self, position: int) -> None:
        self._drop_tuner()
        self._position = self._first = position
        self._passed = {}
        self._ranges = ()
        self._round_ends = 0

    # ------------------------------------------------------------------ certified settings

    def _recall(self, host: HostView) -> CertifiedLevels | None:
        """The setting that was certified for the same job before, or that it asks to try first."""
        if self._fingerprint is None:
            gpus = [one for one in host.snapshot.gpus if one.domain_id in self.devices]
            hardware = (gpus[0].model, gpus[0].partition_mode) if gpus else ()
            leader = next(iter(self.ranks), None)
            self._fingerprint = Fingerprint(
                command=self._context.command(leader) if leader is not None else "",
                model=" ".join(filter(None, hardware)),
                driver=gpus[0].driver if gpus else "",
                devices=len(self.devices),
                service=self.service,
                span=self.span,
            )
        setting = self._context.certified.recall(self._fingerprint, self.knob)
        original = max(one.original for one in self._ranges)
        if setting is None and self.knob is Knob.GPU_POWER and 0 < self.terms.first < original:
            setting = CertifiedLevels(self.terms.first, original, slowdown=0, saving=0, pairs=0)
        return setting

    def store_certified(self) -> None:
        """Store the certified setting, if there is one, for the next run of the same job.

        A setting that is certified for several jobs together is not stored.
        """
        if self._state is None or self._tenants:
            return
        setting = certified_levels(self._state)
        if setting is not None and self._fingerprint is not None:
            self._context.certified.certified(self._fingerprint, self.knob, setting)

    def store_result(self) -> None:
        """Store the success or failure of a certified setting that a new decision reports."""
        move, reason = self.decision.move, self.decision.reason
        if reason is DecisionReason.CERTIFIED:
            self.store_certified()
        failed = move is Move.RELEASE and reason in _FAILURES
        if failed and self._fingerprint is not None:
            self._context.certified.failed(self._fingerprint, self.knob)

    # --------------------------------------------------------------------------- observation

    def _vetoes(self, host: HostView) -> set[DecisionReason]:
        """External reasons not to tune the job's devices now."""
        vetoes = host.vetoes(self.knob, self.devices)
        if self.terms.declared is not None and self._has_whole_boards(host):
            vetoes.discard(DecisionReason.MIG)
        keys = [CapKey(self.knob, one) for one in self.devices]
        members = {one for job in self._everyone for one in job.members}
        if any(host.is_shared(key, members) for key in keys):
            vetoes.add(DecisionReason.SHARED)
        if self.terms.may_apply and self.applied and host.trouble is not None:
            vetoes.add(host.trouble)
        return vetoes

    def _has_whole_boards(self, host: HostView) -> bool:
        """True if all tenants of the devices' MIG instances belong to this job."""
        divided = [one for one in self.devices if (gpu := host.gpu(one)) and gpu.mig]
        return all(host.is_whole(one, self._members) for one in divided)

    def _observe(self, host: HostView, *, may_explore: bool) -> Observation:
        vetoes = self._vetoes(host)
        if any(one.units.invalid for one in self._everyone):
            vetoes.add(DecisionReason.BAD_WORK)
        self._vetoed = bool(vetoes)
        self._sampler.read_caps(host)
        return Observation(
            now=host.now.mono,
            units=tuple(self.units.drain()),
            tenants=tuple(tuple(one.units.drain()) for one in self._tenants),
            energy=self._sampler.read_energy(host, comparing=self.decision.move is Move.PROBE),
            in_force=self._sampler.in_force,
            since=self._sampler.changed,
            draw={one: draw for one in self.devices if (draw := host.draw(one)) is not None},
            vetoes=frozenset(vetoes),
            may_explore=may_explore,
            ended=self.ended,
        )
