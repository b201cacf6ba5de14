"""One job on its way through tuning: its units, its devices, and what was decided about it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from wattspan import tuning
from wattspan.config import Autotune, TunedJob
from wattspan.model import (
    MILLISECOND,
    SECOND,
    CapKey,
    Consumer,
    Decision,
    GpuStatus,
    Instant,
    Knob,
    Microjoules,
    Move,
    Nanoseconds,
    Payer,
    Reason,
    TuningRow,
    TuningState,
)
from wattspan.ports import Past
from wattspan.runtime.sight import Sight, binding
from wattspan.runtime.tenants import Tenants
from wattspan.runtime.units import Handed, WorkCount
from wattspan.tuning import (
    EnergyPoint,
    Fingerprint,
    Kind,
    Objective,
    Observation,
    Policy,
    Range,
    Remembered,
    Unit,
)

_COMPUTES = 4096
"""Spans of a rank's own computing that wait for the unit they are part of."""

_USELESS = frozenset(
    {Reason.INERT, Reason.NO_SAVING, Reason.NO_ROOM, Reason.NO_DEVICE, Reason.NOT_MONOTONE}
)
"""Why another knob may do where this one does not."""

_KIN_EVERY = 5 * SECOND

_OWN = 0.7
"""The part of the CPU time of a package that must be the job's for its cap to be its affair."""

_STEP = {Knob.GPU_POWER: 1_000, Knob.CPU_POWER: 1_000, Knob.GPU_CLOCK: 15}
"""The smallest move of a knob that is told apart, in its unit."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every job of this host."""

    settings: Autotune
    floor: int = 0  # milliwatts: no cap of any sort goes below
    seed: int = 0


@dataclass(slots=True)
class Earned:
    """What outlives one tuner of the job: a new one begins with nothing."""

    decisions: Counter[tuple[Move, Reason]] = field(default_factory=Counter)
    surely: int = 0  # microjoules
    before: int = 0  # of tuners before the present one
    exploration: int = 0
    exploration_before: int = 0

    def take(self, report: tuning.Report) -> None:
        self.exploration = max(self.exploration, self.exploration_before + report.exploration)
        if report.saved_low is not None:
            self.surely = max(self.surely, self.before + report.saved_low)

    def close(self) -> None:
        self.before, self.exploration_before = self.surely, self.exploration


class Course:
    """Belongs to the tuner's thread."""

    def __init__(
        self,
        name: str,
        service: str,
        span: str,
        job: TunedJob,
        terms: Terms,
        *,
        kind: Kind,
        found: bool,
        now: Instant,
        earned: Earned | None = None,
    ) -> None:
        self.name, self.service, self.span = name, service, span
        self.job, self.found, self.kind = job, found, kind
        self._terms = terms
        self.ranks: dict[Consumer, int] = {}
        self._work = WorkCount(job.work)
        self._computed: OrderedDict[bytes, int] = OrderedDict()
        self._kin: dict[Payer, int] = {}  # every process of the job's families, and its rank
        self._kin_at = 0
        self._units: list[Unit] = []
        self._knob = 0
        self._core: tuning.State | None = None
        self._policy = Policy()
        self._ranges: tuple[Range, ...] = ()
        self._energy = self._energy_to = 0
        self._gpus: dict[str, GpuStatus] = {}
        self._changed = now.mono
        self._in_force: Mapping[str, int] = {}
        self.earned = earned or Earned()
        self._report = tuning.Report(exploring=False)
        self._began = now
        self._since = now
        self.fingerprint: Fingerprint | None = None
        self.ended = False
        self.decision = Decision(
            Move.DECLINE, Reason.NO_SIGNAL, f"Nothing is known of {name} yet; its units come first."
        )

    # ------------------------------------------------------------------------- what is heard

    def take(self, handed: Handed) -> None:
        """Learn of spans of one of its processes: units of work, and parts of units."""
        rank = self.ranks.setdefault(handed.consumer, 1 + max(self.ranks.values(), default=-1))
        unit, part = self.span, self.job.compute
        for span, told in zip(handed.spans, handed.told, strict=True):
            if span.name == unit:
                work = self._work.of(span, told)
                if work is not None and span.end > span.start:
                    compute = self._computed.pop(span.id, None) if part else None
                    self._units.append(Unit(span.start, span.end, work, rank, compute))
            elif part and span.name == part:
                self._computed[span.parent] = (
                    self._computed.pop(span.parent, 0) + span.end - span.start
                )
                if len(self._computed) > _COMPUTES:
                    self._computed.popitem(last=False)

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

    def caps(self) -> dict[CapKey, int]:
        """What is to be held now."""
        if not self._policy.apply:
            return {}
        return {CapKey(self.knob, one): value for one, value in self.decision.caps.items()}

    def turn(
        self,
        sight: Sight,
        past: Past,
        tenants: Tenants,
        *,
        may_explore: bool,
        remembered: Callable[[Course], Remembered | None],
    ) -> Decision:
        """One look at the job; the decision that holds from now on."""
        if not self.ended:
            self._look_at_families(sight.now.mono, past)
            refusal = self._prepare(sight, tenants, remembered)
            if refusal is not None:
                return self._decide(refusal, sight.now)
        if self._core is None:
            return self.decision
        self._core, decision = tuning.step(
            self._core, self._observe(sight, past, tenants, may_explore=may_explore)
        )
        self._report = tuning.report(self._core)
        self.earned.take(self._report)
        return self._decide(decision, sight.now)

    def remember(self) -> Remembered | None:
        """What another run of the same job should begin with."""
        return tuning.remember(self._core) if self._core is not None else None

    def failed(self, reason: Reason, sentence: str, now: Instant) -> None:
        """What was decided could not be carried out: begin anew when it can be."""
        self._drop()
        self._decide(Decision(Move.DECLINE, reason, sentence), now)

    # ------------------------------------------------------------------------------- beginning

    def _prepare(
        self,
        sight: Sight,
        tenants: Tenants,
        remembered: Callable[[Course], Remembered | None],
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
            return Decision(
                Move.DECLINE,
                Reason.NOT_ALLOWED,
                f"{self.name} uses {refused[0]}, which [autotune] gpus does not name.",
            )
        apply = self.applies and sight.trouble is None and self._usable(sight, knob, devices)
        same = (
            self._core is not None
            and position == self._knob
            and tuple(devices) == self.devices
            and apply == self._policy.apply
        )
        if same:
            return None
        ranges = self._find_ranges(sight, knob, devices, used)
        if ranges is None:
            self._drop()
            return self._no_device(knob)
        self._drop()
        self._knob, self._ranges = position, ranges
        self._policy = self._make_policy(sight, knob, apply=apply)
        self._energy = 0
        self._energy_to = sight.settled
        self._core = tuning.begin(
            self._policy, ranges, now=sight.now.mono, remembered=remembered(self)
        )
        return None

    def _look_at_families(self, now: int, past: Past) -> None:
        """A server's spans come from one process, and its work on the GPU from another's."""
        if now - self._kin_at >= _KIN_EVERY or not self.ranks.keys() <= self._kin.keys():
            self._kin_at = now
            self._kin = dict(self.ranks.items())
            for leader, rank in self.ranks.items():
                for one in past.family(leader):
                    self._kin.setdefault(one, rank)

    def _choose(self, sight: Sight, used: Mapping[str, set[Payer]]) -> tuple[int, list[str]]:
        """The first knob from the present one on that the job's devices have, by its position.

        A job that rests, and so uses nothing just now, keeps its devices.
        """
        if not used:
            return self._knob, list(self.devices)
        knobs = self._terms.settings.knobs
        for position in range(self._knob, len(knobs)):
            devices = sight.devices_of(knobs[position], used)
            if devices:
                return position, devices
        return self._knob, []

    def _no_device(self, knob: Knob) -> Decision:
        return Decision(
            Move.DECLINE,
            Reason.NO_DEVICE,
            f"{self.name} uses no device with the knob {knob} whose range can be read; "
            "`wattspan doctor` says what can be turned here.",
        )

    def _usable(self, sight: Sight, knob: Knob, devices: list[str]) -> bool:
        rows = [sight.rows.get(CapKey(knob, device)) for device in devices]
        return all(row is not None and row.usable for row in rows)

    def _find_ranges(
        self, sight: Sight, knob: Knob, devices: list[str], used: Mapping[str, set[Payer]]
    ) -> tuple[Range, ...] | None:
        found = []
        for device in devices:
            key = CapKey(knob, device)
            state, row = sight.knob(key), sight.rows.get(key)
            if state is None:
                return None
            original = row.original if row is not None and row.original else state.requested
            original = original or state.maximum or state.default
            if original is None:
                return None
            if state.enforced and not (row is not None and row.wanted):
                original = min(original, state.enforced)
            floor = max(
                state.minimum or 0,
                round(self._terms.settings.floor * (state.default or original)),
                self._terms.floor if knob is not Knob.GPU_CLOCK else 0,
            )
            resource = sight.domains[device].resource
            ranks = [self._kin[one] for one in used.get(resource or "", ())]
            rank = min(ranks, default=0)
            found.append(Range(device, original, min(floor, original), _STEP[knob], rank))
        return tuple(found)

    def _make_policy(self, sight: Sight, knob: Knob, *, apply: bool) -> Policy:
        settings, job = self._terms.settings, self.job
        budget = job.max_slowdown if job.max_slowdown is not None else settings.max_slowdown
        return Policy(
            knob=knob,
            kind=self.kind,
            max_slowdown=budget,
            confidence=settings.confidence,
            objective=Objective(settings.objective),
            eta=settings.eta,
            max_power=sum(one.original for one in self._ranges),
            latency=job.latency or None,
            percentile=job.percentile,
            apply=apply,
            slack=bool(job.compute),
            block_units=settings.block_units,
            block_time=settings.block,
            settle_units=settings.settle_units,
            settle_time=settings.settle,
            dwell=settings.dwell,
            seed=self._terms.seed,
        )

    def _drop(self) -> None:
        """Let go of the present tuner, and keep what it has earned."""
        self._core, self._in_force = None, {}
        self.earned.close()

    # ---------------------------------------------------------------------------- observing

    def _observe(
        self, sight: Sight, past: Past, tenants: Tenants, *, may_explore: bool
    ) -> Observation:
        units, self._units = sorted(self._units, key=lambda unit: unit.end), []
        vetoes = set(sight.vetoes(self.knob, self.devices))
        if self._work.bad:
            vetoes.add(Reason.BAD_WORK)
        if self._shared(sight, tenants):
            vetoes.add(Reason.SHARED)
        if self.applies and self._policy.apply and sight.trouble is not None:
            vetoes.add(sight.trouble)
        self._look_at_caps(sight)
        draws = {one: draw for one in self.devices if (draw := sight.draw(one)) is not None}
        return Observation(
            now=sight.now.mono,
            units=tuple(units),
            energy=self._spent(sight, past),
            in_force=self._in_force,
            since=self._changed,
            draw=draws,
            binding=self._binding(sight),
            vetoes=frozenset(vetoes),
            turn=may_explore,
            ended=self.ended,
        )

    def _shared(self, sight: Sight, tenants: Tenants) -> bool:
        """Whether a cap would slow down others unseen: who else uses a GPU, or much of the CPUs."""
        now = sight.now.mono
        for device in self.devices:
            resource = sight.domains[device].resource if device in sight.domains else None
            if resource is None:
                continue
            if self.knob is Knob.CPU_POWER:
                if tenants.share(resource, self._kin, now) < _OWN:
                    return True
            elif tenants.of(resource, now) - self._kin.keys():
                return True
        return False

    def _look_at_caps(self, sight: Sight) -> None:
        """Take note of what is in force, and since when it has been."""
        in_force: dict[str, int] = {}
        for one in self._ranges:
            row = sight.rows.get(CapKey(self.knob, one.device))
            if row is None:
                continue
            value = row.state.requested if self.knob is not Knob.GPU_CLOCK else row.wanted
            if value is not None and value < one.original:
                in_force[one.device] = value
        if in_force != self._in_force:
            self._in_force, self._changed = in_force, sight.now.mono

    def _spent(self, sight: Sight, past: Past) -> tuple[EnergyPoint, ...]:
        """One more point of what the job's devices have spent, if more has settled."""
        start, end = self._energy_to, sight.settled
        if end - start < 50 * MILLISECOND:
            return ()
        if end - start > 600 * SECOND:  # what was not asked for so long is not in the history
            start = end - 600 * SECOND
        for device in self.devices:
            self._energy += sum(past.device(device, start, end).energy.values())
        self._energy_to = end
        return (EnergyPoint(end, self._energy),)

    def _binding(self, sight: Sight) -> float | None:
        found = []
        for device in self.devices:
            status = sight.gpu(device)
            part = binding(self._gpus.get(device), status)
            if status is not None and (part is not None or device not in self._gpus):
                self._gpus[device] = status
            if part is not None:
                found.append(part)
        return sum(found) / len(found) if found else None

    # ------------------------------------------------------------------------------- deciding

    def _decide(self, decision: Decision, now: Instant) -> Decision:
        if decision.same_as != self.decision.same_as:
            self._since = now
            self.earned.decisions[decision.move, decision.reason] += 1
            if (
                decision.move is Move.DECLINE
                and decision.reason in _USELESS
                and self._core is not None
                and self._knob + 1 < len(self._terms.settings.knobs)
            ):
                self._drop()
                self._knob += 1
        self.decision = decision
        return decision

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
            budget=self._policy.max_slowdown
            if self._core is not None
            else (
                self.job.max_slowdown
                if self.job.max_slowdown is not None
                else self._terms.settings.max_slowdown
            ),
            confidence=self._terms.settings.confidence,
            devices=self.devices,
            applied=self._policy.apply and self._core is not None,
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
            units=report.units,
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
                waits = self.decision.reason in {Reason.WAITING, Reason.NO_SIGNAL}
                return TuningState.WAITING if waits else TuningState.DECLINED

    def identify(self, fingerprint: Fingerprint) -> None:
        """Know it again by this."""
        self.fingerprint = replace(fingerprint, service=self.service, span=self.span)


def _energy(value: int | None) -> Microjoules | None:
    return Microjoules(value) if value is not None else None
