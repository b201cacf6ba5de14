"""What a job has earned and cost, over all the tuners that it had.

One job on its way through tuning: its units, its devices, and what was decided about it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from wattspan import tuning
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
    Nanoseconds,
    Payer,
    TuningRow,
    TuningState,
)
from wattspan.ports import EnergyQueries
from wattspan.spans.values import Span
from wattspan.tuning import (
    CertifiedLevels,
    Fingerprint,
    KnobRange,
    Observation,
    TunerPolicy,
    TunerReport,
    WorkloadKind,
    WorkUnit,
)
from wattspan.tuning.host_view import DeviceSampler, DeviceUsers, HostView
from wattspan.tuning.job_policy import JobPolicy, knobs_usable
from wattspan.tuning.work_units import ReceivedSpans, WorkCounter
from wattspan.util.backoff import RetryBackoff


@dataclass(slots=True)
class CumulativeSavings:
    """What outlives one tuner of the job: a new one begins with nothing."""

    decisions: Counter[tuple[Move, DecisionReason]] = field(default_factory=Counter)
    surely: int = 0  # microjoules
    before: int = 0  # of tuners before the present one
    exploration: int = 0
    exploration_before: int = 0
    units: int = 0
    units_before: int = 0

    def take(self, report: TunerReport) -> None:
        self.exploration = max(self.exploration, self.exploration_before + report.exploration)
        self.units = max(self.units, self.units_before + report.units)
        if report.saved_low is not None:
            self.surely = max(self.surely, self.before + report.saved_low)

    def close(self) -> None:
        self.before, self.exploration_before = self.surely, self.exploration
        self.units_before = self.units


_MAX_COMPUTE_SPANS = 4096
"""Spans of a rank's own computing that wait for the unit they are part of."""

_MAX_RECENT_UNITS = 2048
"""Units that are known again: some batches of a usual sender."""

_MAX_FUTURE = SECOND
"""How far the end of a unit may lie ahead, for clocks that are corrected."""

_FINAL_REASONS = frozenset(
    {
        DecisionReason.INERT,
        DecisionReason.NO_SAVING,
        DecisionReason.NO_ROOM,
        DecisionReason.NO_DEVICE,
        DecisionReason.NOT_MONOTONE,
    }
)
"""Why another knob may do where this one does not."""

_FAMILY_INTERVAL = 5 * SECOND

_FORGET_REFUSALS = 3600 * SECOND
"""After this time without a refusal of the capper, delays begin at the shortest again."""

_MIN_DEVICE_SHARE = 0.7
"""The part of the CPU time of a package that must be the job's for its cap to be its affair."""


class TuningJob:
    """Belongs to the tuner's thread."""

    def __init__(
        self,
        name: str,
        service: str,
        span: str,
        job: TunedJobSettings,
        terms: JobPolicy,
        *,
        kind: WorkloadKind,
        found: bool,
        now: Instant,
        earned: CumulativeSavings | None = None,
    ) -> None:
        self.name, self.service, self.span = name, service, span
        self.job, self.found, self.kind = job, found, kind
        self._terms = terms
        self.ranks: dict[Consumer, int] = {}
        self._work = WorkCounter(job.work)
        self._computed: OrderedDict[bytes, int] = OrderedDict()
        self._kin: dict[Payer, int] = {}  # every process of the job's families, and its rank
        self._kin_at = 0
        self._units: list[WorkUnit] = []
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._knob = self._first = 0  # the present one, and the first that is worth trying
        self._rounds = self._round_ends = 0  # how often no knob was of use, and until when
        self.decided = self.knob  # which knob the decision is about
        self._refusals = RetryBackoff(10 * SECOND, 600 * SECOND)
        self._core: tuning.TunerState | None = None
        self._policy = TunerPolicy()
        self._ranges: tuple[KnobRange, ...] = ()
        self._ceilings: tuple[int | None, ...] = ()
        self._gauges = DeviceSampler(self.knob, (), now.mono, 0)
        self.earned = earned or CumulativeSavings()
        self._report = tuning.TunerReport(exploring=False)
        self._began = now
        self._since = now
        self.fingerprint: Fingerprint | None = None
        self.ended = False
        self.decision = Decision(
            Move.DECLINE,
            DecisionReason.NO_SIGNAL,
            f"Nothing is known of {name} yet; its units come first.",
        )

    # ------------------------------------------------------------------------- what is heard

    def take(self, handed: ReceivedSpans, now: int) -> None:
        """Learn of spans of one of its processes: units of work, and parts of units.

        What ended before it began, or ends only later, is none; what comes again counts once.
        """
        rank = self.ranks.setdefault(handed.consumer, 1 + max(self.ranks.values(), default=-1))
        unit, part = self.span, self.job.compute
        if part:  # a batch may tell of a unit before it tells of what is part of it
            for span in handed.spans:
                if span.name == part:
                    self._compute(span)
        for span, told in zip(handed.spans, handed.told, strict=True):
            if span.name == unit:
                if not span.start < span.end <= now + _MAX_FUTURE or self._again(span):
                    continue
                work = self._work.of(span, told)
                if work is not None:
                    compute = self._computed.pop(span.id, None) if part else None
                    self._units.append(WorkUnit(span.start, span.end, work, rank, compute))

    def _compute(self, span: Span) -> None:
        """Keep how long a rank computed until the unit comes that this is part of."""
        self._computed[span.parent] = self._computed.pop(span.parent, 0) + span.end - span.start
        if len(self._computed) > _MAX_COMPUTE_SPANS:
            self._computed.popitem(last=False)

    def _again(self, span: Span) -> bool:
        """Whether it has come before: a sender that got no answer sends once more."""
        key = hash((span.trace, span.id))
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _MAX_RECENT_UNITS:
            self._seen.popitem(last=False)
        return False

    def keep_only(self, living: Collection[Consumer]) -> None:
        """Let go of processes that have ended; the others keep their ranks."""
        self.ranks = {one: rank for one, rank in self.ranks.items() if one in living}

    @property
    def heard(self) -> bool:
        """Whether units of work wait to be looked at."""
        return bool(self._units)

    # ---------------------------------------------------------------------------- what is done

    @property
    def knob(self) -> Knob:
        return self._terms.settings.knobs[self._knob]

    @property
    def exploring(self) -> bool:
        """Whether it needs the host's turn."""
        return self._core is not None and self._report.exploring

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(one.device for one in self._ranges)

    @property
    def applies(self) -> bool:
        """Whether the configuration lets its devices be turned."""
        mode = self.job.mode or self._terms.settings.mode
        return mode == "apply" and (not self.found or self._terms.settings.apply_found)

    @property
    def applied(self) -> bool:
        """Whether what is decided is carried out, and not advice."""
        return self._policy.apply and self._core is not None

    def caps(self) -> dict[CapKey, int]:
        """What is to be held now."""
        if not self._policy.apply:
            return {}
        return {CapKey(self.knob, one): value for one, value in self.decision.caps.items()}

    def turn(
        self,
        sight: HostView,
        past: EnergyQueries,
        tenants: DeviceUsers,
        *,
        may_explore: bool,
        remembered: Callable[[TuningJob], CertifiedLevels | None],
        barred: str = "",
    ) -> Decision:
        """One look at the job; the decision that holds from now on.

        ``barred`` says in a sentence why the job may not be tuned at all.
        """
        refusal: Decision | None = None
        if not self.ended:
            self._look_at_families(sight.now.mono, past)
            refusal = self._bar(barred, sight) or self._prepare(sight, tenants, remembered)
        if refusal is not None or self._core is None:
            self._units.clear()  # nobody will look at them
            return self._decide(refusal or self.decision, sight.now)
        self._core, decision = tuning.step(
            self._core, self._observe(sight, past, tenants, may_explore=may_explore)
        )
        self._report = tuning.report(self._core)
        self.earned.take(self._report)
        if decision.reason is DecisionReason.ADVICE:
            decision = self._why_advice(decision, sight)
        return self._decide(decision, sight.now)

    def remember(self) -> CertifiedLevels | None:
        """What another run of the same job should begin with."""
        return tuning.certified_levels(self._core) if self._core is not None else None

    def failed(
        self, reason: DecisionReason, sentence: str, now: Instant, *, rest: bool = False
    ) -> None:
        """What was decided could not be carried out: begin anew, after a ``rest`` if need be."""
        self._drop()
        if rest:
            if now.mono - self._refusals.retry_at >= _FORGET_REFUSALS:
                self._refusals.reset()
            self._refusals.failed(now.mono)
        self._decide(Decision(Move.DECLINE, reason, sentence), now)

    # ------------------------------------------------------------------------------- beginning

    def _bar(self, barred: str, sight: HostView) -> Decision | None:
        """Why the job is left alone before anything is asked about its devices."""
        if barred:
            self._drop()
            return Decision(Move.DECLINE, DecisionReason.NOT_ALLOWED, barred)
        if sight.now.mono < self._refusals.retry_at:
            return self.decision
        if 0 < self._round_ends <= sight.now.mono:
            self._go_to(0)  # what a job draws may have changed since
        return None

    def _prepare(
        self,
        sight: HostView,
        tenants: DeviceUsers,
        remembered: Callable[[TuningJob], CertifiedLevels | None],
    ) -> Decision | None:
        """See to it that there is a tuner for the job's devices; or why there is none."""
        if self._core is None and not self.ranks:
            return self.decision
        used = tenants.used_by(self._kin, sight.now.mono)
        position, devices = self._choose(sight, used)
        knob = self._terms.settings.knobs[position]
        if not devices:
            return self._no_device(knob)
        refused = [d for d in devices if not sight.allowed(d, self._terms.settings.gpus)]
        if refused:
            self._drop()
            return Decision(
                Move.DECLINE,
                DecisionReason.NOT_ALLOWED,
                f"{self.name} uses {sight.called(refused[0])}, which [autotune] gpus does not name "
                f"({', '.join(self._terms.settings.gpus)}).",
            )
        holder = next((one for d in devices if (one := self._held_by(sight, knob, d))), "")
        if holder:
            self._drop()
            return Decision(
                Move.DECLINE,
                DecisionReason.HELD,
                f"{self.name} is left alone: {holder} holds the cap of a device that it uses; "
                "`wattspan caps status` says more.",
            )
        apply = self.applies and sight.trouble is None and knobs_usable(sight, knob, devices)
        same = (
            self._core is not None
            and position == self._knob
            and tuple(devices) == self.devices
            and apply == self._policy.apply
            and self._terms.ceilings(sight, knob, devices) == self._ceilings
        )
        if same:
            return None
        ranges = self._terms.ranges(sight, knob, devices, used, self._kin)
        if ranges is None:
            self._drop()
            return self._no_device(knob)
        self._drop()
        self._knob, self._ranges = position, ranges
        self._ceilings = self._terms.ceilings(sight, knob, devices)
        self._policy = self._terms.policy(self.job, self.kind, knob, ranges, apply=apply)
        self._gauges = DeviceSampler(knob, ranges, sight.now.mono, sight.settled)
        self._core = tuning.begin(
            self._policy, ranges, now=sight.now.mono, remembered=remembered(self)
        )
        return None

    def _look_at_families(self, now: int, past: EnergyQueries) -> None:
        """A server's spans come from one process, and its work on the GPU from another's."""
        if now - self._kin_at >= _FAMILY_INTERVAL or not self.ranks.keys() <= self._kin.keys():
            self._kin_at = now
            self._kin = dict(self.ranks.items())
            for leader, rank in self.ranks.items():
                for one in past.family(leader):
                    self._kin.setdefault(one, rank)

    def _choose(self, sight: HostView, used: Mapping[str, set[Payer]]) -> tuple[int, list[str]]:
        """The first knob worth trying that the job's devices have, by its position.

        A job that rests, and so uses them not just now, keeps its devices.
        """
        knobs = self._terms.settings.knobs
        for position in range(self._first, len(knobs)):
            devices = sight.devices_of(knobs[position], used)
            if devices:
                return position, devices
            if position == self._knob and self.devices:
                break
        return self._knob, list(self.devices)

    def _held_by(self, sight: HostView, knob: Knob, device: str) -> str:
        """Which other tuner holds the cap of a device; "" for none."""
        row = sight.rows.get(CapKey(knob, device))
        if row is None or row.expires is None or row.holder in ("", self.name):
            return ""
        return row.holder

    def _no_device(self, knob: Knob) -> Decision:
        return Decision(
            Move.DECLINE,
            DecisionReason.NO_DEVICE,
            f"{self.name} uses no device with the knob {knob} whose range can be read; "
            "`wattspan doctor` says what can be turned here.",
        )

    def _drop(self) -> None:
        """Let go of the present tuner, and keep what it has earned."""
        self._core = None
        self.earned.close()

    # ---------------------------------------------------------------------------- observing

    def _observe(
        self, sight: HostView, past: EnergyQueries, tenants: DeviceUsers, *, may_explore: bool
    ) -> Observation:
        units, self._units = sorted(self._units, key=lambda unit: unit.end), []
        vetoes = set(sight.vetoes(self.knob, self.devices))
        if self._work.bad:
            vetoes.add(DecisionReason.BAD_WORK)
        if self._shared(sight, tenants):
            vetoes.add(DecisionReason.SHARED)
        if self.applies and self._policy.apply and sight.trouble is not None:
            vetoes.add(sight.trouble)
        self._gauges.look_at_caps(sight)
        draws = {one: draw for one in self.devices if (draw := sight.draw(one)) is not None}
        return Observation(
            now=sight.now.mono,
            units=tuple(units),
            energy=self._gauges.spent(sight, past),
            in_force=self._gauges.in_force,
            since=self._gauges.changed,
            draw=draws,
            binding=self._gauges.binding(sight),
            vetoes=frozenset(vetoes),
            may_explore=may_explore,
            ended=self.ended,
        )

    def _shared(self, sight: HostView, tenants: DeviceUsers) -> bool:
        """Whether a cap would slow down others unseen: who else uses a GPU, or much of the CPUs."""
        now = sight.now.mono
        for device in self.devices:
            resource = sight.domains[device].resource if device in sight.domains else None
            if resource is None:
                continue
            if self.knob is Knob.CPU_POWER:
                if tenants.share(resource, self._kin, now) < _MIN_DEVICE_SHARE:
                    return True
            elif tenants.of(resource, now) - self._kin.keys():
                return True
        return False

    # ------------------------------------------------------------------------------- deciding

    def _decide(self, decision: Decision, now: Instant) -> Decision:
        if decision.same_as != self.decision.same_as:
            self._since = now
            self.earned.decisions[decision.move, decision.reason] += 1
            self.decided = self.knob
            self._round_ends = 0
            if (
                decision.move is Move.DECLINE
                and decision.reason in _FINAL_REASONS
                and self._core is not None
            ):
                self._try_next(now.mono)
        self.decision = decision
        return decision

    def _why_advice(self, advice: Decision, sight: HostView) -> Decision:
        """Advice that nobody asked for: what keeps it from being carried out."""
        if (self.job.mode or self._terms.settings.mode) != "apply":
            return advice
        rows = [sight.rows.get(CapKey(self.knob, one)) for one in self.devices]
        trouble = next((row.trouble for row in rows if row is not None and not row.usable), "")
        if not self.applies:
            reason, why = DecisionReason.NOT_CHOSEN, "the job was found by itself, and is not named"
        elif sight.trouble is not None:
            denied = sight.trouble is DecisionReason.NO_PERMISSION
            why = "this agent may not ask the capper" if denied else "no capper answers"
            reason = sight.trouble
        elif trouble:
            reason, why = DecisionReason.NO_PERMISSION, trouble.removesuffix(".")
        else:
            reason, why = (
                DecisionReason.LOST_DEVICE,
                "the capper does not know a device that it uses",
            )
        sentence = f"{advice.sentence} Nothing is turned, for {why}."
        return replace(advice, reason=reason, sentence=sentence)

    def _try_next(self, now: int) -> None:
        """The present knob is of no use: go on to the next, or begin again after a long while."""
        knobs = self._terms.settings.knobs
        if self._knob + 1 < len(knobs):
            self._go_to(self._knob + 1)
        elif len(knobs) > 1:
            self._rounds += 1
            self._round_ends = now + (self._terms.settings.dwell << min(self._rounds, 6))

    def _go_to(self, position: int) -> None:
        self._drop()
        self._knob = self._first = position
        self._ranges = ()
        self._round_ends = 0

    def row(self) -> TuningRow:
        """The job as everybody is shown it."""
        report, earned = self._report, self.earned
        return TuningRow(
            job=self.name,
            service=self.service,
            span=self.span,
            knob=self.knob,
            state=self._state(),
            decision=self.decision,
            since=self._since,
            budget=self._terms.budget(self.job),
            confidence=self._terms.settings.confidence,
            devices=self.devices,
            applied=self.applied,
            slowdown=report.slowdown,
            slowdown_bound=report.slowdown_bound,
            held_slowdown=report.held_slowdown,
            held_bound=report.held_bound,
            saving=report.saving,
            saved=_energy(report.saved),
            saved_low=_energy(report.saved_low),
            saved_high=_energy(report.saved_high),
            saved_surely=Microjoules(earned.surely),
            exploration=Nanoseconds(earned.exploration),
            pairs=report.pairs,
            units=earned.units,
            committed=Nanoseconds(report.committed) if report.committed is not None else None,
            decisions=dict(earned.decisions),
            tried=report.tried,
            lost=Nanoseconds(report.lost) if report.lost is not None else None,
            allowance=Nanoseconds(report.allowance) if report.allowance is not None else None,
            original={one.device: one.original for one in self._ranges},
        )

    def _state(self) -> TuningState:
        if self.ended:
            return TuningState.ENDED
        match self.decision.move:
            case Move.PROBE:
                return TuningState.EXPLORING
            case Move.HOLD:
                return TuningState.HOLDING
            case Move.RELEASE:
                return TuningState.RELEASED
            case Move.DECLINE:
                waits = self.decision.reason in {DecisionReason.WAITING, DecisionReason.NO_SIGNAL}
                return TuningState.WAITING if waits else TuningState.DECLINED

    def identify(self, fingerprint: Fingerprint) -> None:
        """Know it again by this."""
        self.fingerprint = replace(fingerprint, service=self.service, span=self.span)


def _energy(value: int | None) -> Microjoules | None:
    return Microjoules(value) if value is not None else None
