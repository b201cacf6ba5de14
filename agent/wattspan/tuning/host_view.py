"""What the tuner sees of the host at one turn, and what of it speaks against turning anything.

Which processes use which device, as far as is told of use: the devices' own word for GPUs.

What is read of a job's devices at each turn: their caps, their energy, how caps bind.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wattspan.model import (
    MILLISECOND,
    SECOND,
    CapKey,
    CapRow,
    DecisionReason,
    Domain,
    GpuStatus,
    HwType,
    Instant,
    Knob,
    KnobState,
    Payer,
    Snapshot,
    Usage,
)
from wattspan.ports import EnergyQueries
from wattspan.tuning import EnergyPoint, KnobRange

_THERMAL_THROTTLES = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "power_brake"})
"""Throttling that has nothing to do with a power cap."""

_REFUSAL_REASONS = {
    "no_permission": DecisionReason.NO_PERMISSION,
    "not_allowed": DecisionReason.NO_PERMISSION,
    "locked": DecisionReason.NO_PERMISSION,
    "no_journal": DecisionReason.NO_CAPPER,
    "lost": DecisionReason.LOST_DEVICE,
    "unknown_device": DecisionReason.LOST_DEVICE,
    "foreign": DecisionReason.FOREIGN_WRITER,
    "not_honoured": DecisionReason.FOREIGN_WRITER,
    "held": DecisionReason.HELD,
}


def refusal_reason(refusal: str) -> DecisionReason:
    """What a refusal of the capper is to a job; silence is no capper."""
    return _REFUSAL_REASONS.get(refusal, DecisionReason.NO_CAPPER)


@dataclass(frozen=True, slots=True)
class HostView:
    """The host at ``now``. ``settled``: the energy of every device is known up to there.

    ``rows`` are the capper's, by key; empty while it does not answer, and then ``trouble`` says
    why in one word.
    """

    now: Instant
    snapshot: Snapshot
    domains: Mapping[str, Domain]
    settled: int
    rows: Mapping[CapKey, CapRow] = field(default_factory=dict)
    trouble: DecisionReason | None = None
    index: Mapping[str, int] = field(default_factory=dict)  # of GPUs, by domain id

    def gpu(self, device: str) -> GpuStatus | None:
        return next((one for one in self.snapshot.gpus if one.domain_id == device), None)

    def draw(self, device: str) -> int | None:
        """What a device draws just now, in milliwatts."""
        gpu = self.gpu(device)
        if gpu is not None and gpu.power_instant is not None:
            return gpu.power_instant
        for account in self.snapshot.domains:
            if account.domain.id == device:
                return account.power
        return None

    def knob(self, key: CapKey) -> KnobState | None:
        """One knob, from the capper or, where it is only read, from what the device shows."""
        row = self.rows.get(key)
        if row is not None:
            return row.state
        gpu = self.gpu(key.device)
        if key.knob is not Knob.GPU_POWER or gpu is None:
            return None
        limits, domain = gpu.limits, self.domains.get(key.device)
        return KnobState(
            key,
            domain.name if domain is not None else key.device,
            limits.minimum,
            limits.default,
            limits.maximum,
            limits.requested,
            limits.enforced,
        )

    def vetoes(self, knob: Knob, devices: Collection[str]) -> frozenset[DecisionReason]:
        """What the devices themselves say against it."""
        found: set[DecisionReason] = set()
        for device in devices:
            row, gpu = self.rows.get(CapKey(knob, device)), self.gpu(device)
            if row is not None and row.foreign:
                found.add(DecisionReason.FOREIGN_WRITER)
            if gpu is not None and gpu.mig:
                found.add(DecisionReason.MIG)
            if gpu is not None and _THERMAL_THROTTLES.intersection(gpu.throttling or ()):
                found.add(DecisionReason.THROTTLED)
        return frozenset(found)

    def devices_of(self, knob: Knob, used: Collection[str]) -> list[str]:
        """Of the domains whose resources are ``used``, those that have ``knob``."""
        kind = HwType.CPU if knob is Knob.CPU_POWER else HwType.GPU
        return sorted(
            one.id for one in self.domains.values() if one.hw_type is kind and one.resource in used
        )

    def allowed(self, device: str, named: Sequence[str]) -> bool:
        """Whether the configuration lets a device be capped; only GPUs are chosen from."""
        if not named or (device in self.domains and self.domains[device].hw_type is HwType.CPU):
            return True
        return bool(self._names(device).intersection(named))

    def unknown(self, named: Sequence[str]) -> tuple[str, ...]:
        """Those of the ``named`` that are no GPU of this host, by UUID or index."""
        here = set().union(*map(self._names, self.index))
        return tuple(one for one in named if one not in here)

    def called(self, device: str) -> str:
        """A device as an operator may write it: with its index, if it is a GPU."""
        at = self.index.get(device)
        name = device.removeprefix("gpu:")
        return name if at is None else f"GPU {at} ({name})"

    def _names(self, device: str) -> set[str]:
        return {device, device.removeprefix("gpu:"), str(self.index.get(device))}


def gpu_indices(domains: Mapping[str, Domain], gpus: Sequence[GpuStatus]) -> dict[str, int]:
    """The order in which the driver lists GPUs, by domain id."""
    known = [gpu.domain_id for gpu in gpus if gpu.domain_id in domains]
    return {device: at for at, device in enumerate(known)}


def cap_binding_ratio(before: GpuStatus | None, after: GpuStatus | None) -> float | None:
    """The part of the time between two looks in which a power cap held the clock down."""
    if before is None or after is None or after.at.mono <= before.at.mono:
        return None
    first, last = before.throttled.get("power_cap"), after.throttled.get("power_cap")
    if first is None or last is None:
        return None
    return min(1.0, max(0.0, (last - first) / (after.at.mono - before.at.mono)))


RECENT_USE = 10 * SECOND
"""A process that did not use a device for so long does not use it."""


@dataclass(slots=True)
class _ResourceUse:
    """Use of one resource in this stretch of ``RECENT`` and in the one before."""

    stretch: int = 0
    now: Counter[Payer] = field(default_factory=Counter)
    before: Counter[Payer] = field(default_factory=Counter)

    def turn_to(self, stretch: int) -> None:
        if stretch > self.stretch:
            self.before = self.now if stretch == self.stretch + 1 else Counter()
            self.now, self.stretch = Counter(), stretch


class DeviceUsers:
    """Fed by the poller, asked by the tuner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, _ResourceUse] = {}

    def see(self, usages: Iterable[Usage]) -> None:
        """What processes did with devices."""
        with self._lock:
            for usage in usages:
                used = self._used.setdefault(usage.resource, _ResourceUse())
                used.turn_to(usage.end.mono // RECENT_USE)
                for payer, spent in usage.spent.items():
                    if spent > 0:
                        used.now[payer] += spent

    def of(self, resource: str, now: int) -> frozenset[Payer]:
        """Who used ``resource`` of late."""
        with self._lock:
            used = self._at(resource, now)
            return frozenset(used.now.keys() | used.before.keys())

    def used_by(self, payers: Collection[Payer], now: int) -> dict[str, set[Payer]]:
        """The resources that ``payers`` used of late, and which of them did."""
        found: dict[str, set[Payer]] = {}
        with self._lock:
            for resource in self._used:
                used = self._at(resource, now)
                users = {one for one in payers if used.now[one] or used.before[one]}
                if users:
                    found[resource] = users
        return found

    def share(self, resource: str, payers: Collection[Payer], now: int) -> float:
        """The part of ``resource``'s use that was ``payers``' of late; 0 if it had none."""
        with self._lock:
            used = self._at(resource, now)
            everything = used.now + used.before
            return sum(everything[one] for one in payers) / max(1, everything.total())

    def _at(self, resource: str, now: int) -> _ResourceUse:
        used = self._used.get(resource, _ResourceUse())
        used.turn_to(now // RECENT_USE)
        return used


_MAX_HISTORY = 600 * SECOND
"""What was not asked for so long is not in the history any more."""

STALL = 2 * SECOND
"""Between two looks so far apart a lease may have lapsed at any time."""


@dataclass(slots=True)
class DeviceSampler:
    """Of the devices of one tuner. ``in_force`` has stood unchanged since ``changed``.

    A cap that is found to have gone after a stall counts as gone since the last look before it: a
    process that was stopped must not take what was done without its cap for work under it.
    """

    knob: Knob
    ranges: Sequence[KnobRange]
    changed: int
    settled: int
    in_force: Mapping[str, int] = field(default_factory=dict)
    _looked: int | None = None
    _energy: int = 0
    _gpus: dict[str, GpuStatus] = field(default_factory=dict)

    def look_at_caps(self, sight: HostView) -> None:
        """Take note of what is in force, and since when it has been."""
        looked, self._looked = self._looked, sight.now.mono
        in_force: dict[str, int] = {}
        for one in self.ranges:
            row = sight.rows.get(CapKey(self.knob, one.device))
            if row is None:
                continue
            value = row.state.requested if self.knob is not Knob.GPU_CLOCK else row.wanted
            if value is not None and value < one.original:
                in_force[one.device] = value
        if in_force != self.in_force:
            gone = looked is not None and sight.now.mono - looked > STALL and not in_force
            self.changed = looked if looked is not None and gone else sight.now.mono
            self.in_force = in_force

    def spent(self, sight: HostView, past: EnergyQueries) -> tuple[EnergyPoint, ...]:
        """One more point of what the devices have spent, if more has settled."""
        start, end = self.settled, sight.settled
        if end - start < 50 * MILLISECOND:
            return ()
        start = max(start, end - _MAX_HISTORY)
        for one in self.ranges:
            self._energy += sum(past.device(one.device, start, end).energy.values())
        self.settled = end
        return (EnergyPoint(end, self._energy),)

    def binding(self, sight: HostView) -> float | None:
        """The part of the time since the last look in which a cap held clocks down."""
        found = []
        for one in self.ranges:
            status = sight.gpu(one.device)
            part = cap_binding_ratio(self._gpus.get(one.device), status)
            if status is not None and (part is not None or one.device not in self._gpus):
                self._gpus[one.device] = status
            if part is not None:
                found.append(part)
        return sum(found) / len(found) if found else None
