"""The host as the tuner sees it at one step: devices, caps, and the users and energy of devices."""

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
from wattspan.ports import DeviceQueries, EnergyQueries
from wattspan.tuning.decisions.values import EnergyPoint, KnobRange

_THERMAL_THROTTLES = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "power_brake"})
"""Causes of throttling other than a power cap."""

_MIN_DEVICE_SHARE = 0.7
"""Share of a package's CPU time that the job must have for the package to be capped for it."""

_KNOB_STEP = {Knob.GPU_POWER: 1_000, Knob.CPU_POWER: 1_000, Knob.GPU_CLOCK: 15}
"""The resolution of a knob, in its unit."""

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
    """The decision reason for a refusal of the capper; "" is no answer."""
    return _REFUSAL_REASONS.get(refusal, DecisionReason.NO_CAPPER)


RECENT_USE = 10 * SECOND
"""A process that has not used a device for this time is not a user of it."""


class DeviceUsers:
    """The recent users of devices. The poller adds usages, the tuner reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[str, tuple[int, Counter[Payer], Counter[Payer]]] = {}

    def add(self, usages: Iterable[Usage]) -> None:
        with self._lock:
            for usage in usages:
                present, _ = self._recent(usage.resource, usage.end.mono)
                for payer, spent in usage.spent.items():
                    if spent > 0:
                        present[payer] += spent

    def of(self, resource: str, now: int) -> frozenset[Payer]:
        """The recent users of ``resource``."""
        with self._lock:
            present, previous = self._recent(resource, now)
            return frozenset(present.keys() | previous.keys())

    def used_by(self, payers: Collection[Payer], now: int) -> dict[str, set[Payer]]:
        """The resources that ``payers`` used recently, and these users of each."""
        with self._lock:
            resources = list(self._uses)
        found = {resource: self.of(resource, now).intersection(payers) for resource in resources}
        return {resource: set(users) for resource, users in found.items() if users}

    def share(self, resource: str, payers: Collection[Payer], now: int) -> float:
        """The share of ``payers`` in the recent use of ``resource``; 0 if it had none."""
        with self._lock:
            present, previous = self._recent(resource, now)
            total = present + previous
        return sum(total[one] for one in payers) / max(1, total.total())

    def _recent(self, resource: str, now: int) -> tuple[Counter[Payer], Counter[Payer]]:
        """Use of a resource in the present period of ``RECENT_USE``, and in the one before."""
        period = now // RECENT_USE
        last, present, previous = self._uses.get(resource, (period, Counter(), Counter()))
        if period > last:
            previous, present = present if period == last + 1 else Counter(), Counter()
        self._uses[resource] = max(period, last), present, previous
        return present, previous


@dataclass(frozen=True, slots=True)
class HostView:
    """The host at ``now``; ``rows`` are the capper's, by key.

    They are empty while it does not answer; ``trouble`` is the reason then.
    """

    now: Instant
    snapshot: Snapshot
    domains: Mapping[str, Domain]
    energies: EnergyQueries
    devices: DeviceQueries
    users: DeviceUsers
    rows: Mapping[CapKey, CapRow] = field(default_factory=dict)
    trouble: DecisionReason | None = None

    def gpu(self, device: str) -> GpuStatus | None:
        return next((one for one in self.snapshot.gpus if one.domain_id == device), None)

    def partition_modes(self, devices: Collection[str]) -> dict[str, str]:
        """The partition modes of the ``devices`` that have one, and answer."""
        found = {one: gpu.partition_mode for one in devices if (gpu := self.gpu(one)) is not None}
        return {one: mode for one, mode in found.items() if mode is not None}

    def draw(self, device: str) -> int | None:
        """The present power of a device in milliwatts."""
        gpu = self.gpu(device)
        if gpu is not None and gpu.power_instant is not None:
            return gpu.power_instant
        for account in self.snapshot.domains:
            if account.domain.id == device:
                return account.power
        return None

    def knob(self, key: CapKey) -> KnobState | None:
        """A knob's state from the capper, or else from the device's own limits."""
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

    def highest(self, key: CapKey) -> int | None:
        """The setting without a tuner, in the knob's unit; None if the capper does not show it.

        It is the original one, or a lower one that the operator or the host's power budget imposes.
        """
        row = self.rows.get(key)
        if row is None:
            return None
        original = None if key.knob is Knob.GPU_CLOCK else row.original or row.state.requested
        return min((one for one in (row.ceiling, original) if one is not None), default=None)

    def range(self, key: CapKey, lowest: float, floor: int, rank: int) -> KnobRange | None:
        """The permitted settings of a device; None if they are unknown.

        ``lowest`` is the lowest setting relative to the default, ``floor`` in milliwatts.
        """
        state, row = self.knob(key), self.rows.get(key)
        if state is None:
            return None
        present = None if key.knob is Knob.GPU_CLOCK else state.requested  # a lock is a tuner's
        original = self.highest(key) or present or state.maximum or state.default
        if original is None:
            return None
        is_outside = state.enforced != state.requested and not (row is not None and row.wanted)
        if state.enforced and is_outside:  # limited from outside this operating system
            original = min(original, state.enforced)
        least, step = round(lowest * (state.default or original)), _KNOB_STEP[key.knob]
        least = max(state.minimum or 0, least)
        if key.knob is not Knob.GPU_CLOCK:  # every device keeps whole watts
            least = -(-max(least, floor) // step) * step
        return KnobRange(key.device, original, min(least, original), step, rank)

    def is_usable(self, key: CapKey) -> bool:
        """True if the capper can write the knob."""
        row = self.rows.get(key)
        return row is not None and row.usable

    def other_holder(self, key: CapKey, job: str) -> str:
        """The other tuning job that holds a cap; "" for none."""
        row = self.rows.get(key)
        if row is None or row.expires is None or row.holder == job:
            return ""
        return row.holder

    def is_shared(self, key: CapKey, job: Collection[Payer]) -> bool:
        """True if a cap would slow down others than ``job``: of a GPU, or of much of a package."""
        resource = self.domains[key.device].resource if key.device in self.domains else None
        if resource is None:
            return False
        if key.knob is Knob.CPU_POWER:
            return self.users.share(resource, job, self.now.mono) < _MIN_DEVICE_SHARE
        return not self.users.of(resource, self.now.mono).issubset(job)

    def is_whole(self, device: str, job: Collection[Payer]) -> bool:
        """True if the users of all MIG instances of a board are known, and are in ``job``.

        Its one limit slows all instances.
        """
        domain = self.domains.get(device)
        if domain is None or domain.resource is None or not domain.method.startswith("mig-"):
            return False
        users = self.users.of(domain.resource, self.now.mono)
        return bool(users) and users.issubset(job)

    def vetoes(self, knob: Knob, devices: Collection[str]) -> set[DecisionReason]:
        """Reasons in the state of the devices not to tune them."""
        reasons: set[DecisionReason] = set()
        for device in devices:
            row, gpu = self.rows.get(CapKey(knob, device)), self.gpu(device)
            if row is not None and row.foreign:
                reasons.add(DecisionReason.FOREIGN_WRITER)
            if gpu is not None and gpu.mig:
                reasons.add(DecisionReason.MIG)
            if gpu is not None and _THERMAL_THROTTLES.intersection(gpu.throttling or ()):
                reasons.add(DecisionReason.THROTTLED)
        return reasons

    def devices_of(self, knob: Knob, used: Collection[str]) -> list[str]:
        """The domains that have ``knob`` among those of the resources ``used``."""
        kind = HwType.CPU if knob is Knob.CPU_POWER else HwType.GPU
        return sorted(
            one.id for one in self.domains.values() if one.hw_type is kind and one.resource in used
        )

    def allowed(self, device: str, gpus: Sequence[str]) -> bool:
        """True if the configured ``gpus`` permit caps on a device; they only restrict GPUs.

        A device has the names that it has for the capper, while that answers. An instance of a
        divided board is permitted with its board.
        """
        domain = self.domains.get(device)
        if not gpus or (domain is not None and domain.hw_type is HwType.CPU):
            return True
        board = device if domain is None else domain.parent or device
        states = [row.state for key, row in self.rows.items() if key.device == board]
        if not states:
            names = (board.removeprefix("gpu:"), self._index(board))
            states = [KnobState(CapKey(Knob.GPU_POWER, board), board, aliases=names)]
        return any(state.is_named(gpus) for state in states)

    def display_name(self, device: str) -> str:
        """A device's name for operators: with its index, if it is a GPU."""
        index, name = self._index(device), device.removeprefix("gpu:")
        return f"GPU {index} ({name})" if index else name

    def _index(self, device: str) -> str:
        """The driver's index of a GPU as configurations name it; "" if it is unknown."""
        gpu, domain = self.gpu(device), self.domains.get(device)
        if gpu is None or gpu.index is None:
            return ""
        prefix = "amd:" if domain is not None and domain.source == "amdsmi" else ""
        return f"{prefix}{gpu.index}"


_MAX_HISTORY = 600 * SECOND
"""Energy that was not read for this time may have left the energy history."""

_MIN_SPACING = 50 * MILLISECOND
_SPACING = 100 * MILLISECOND
_MAX_POINTS = 64
"""Nanoseconds between two points of energy, and the largest number of a step."""

MAX_STALL = 2 * SECOND
"""Time between two steps in which a lease may have expired unnoticed."""


@dataclass(slots=True)
class DeviceSampler:
    """Caps and energy of one tuner's devices; ``in_force`` is unchanged since ``changed``.

    A cap that is missing after a stall counts as missing since the step before it: work of a job
    while the agent was stopped, and its cap expired, must not count as work under the cap.
    """

    knob: Knob
    ranges: Sequence[KnobRange]
    changed: int
    settled: int
    in_force: Mapping[str, int] = field(default_factory=dict)
    _read_at: int | None = None
    _energy: int = 0

    def read_caps(self, host: HostView) -> None:
        last, self._read_at = self._read_at, host.now.mono
        in_force: dict[str, int] = {}
        for one in self.ranges:
            row = host.rows.get(CapKey(self.knob, one.device))
            if row is None:
                continue
            value = row.state.requested if self.knob is not Knob.GPU_CLOCK else row.wanted
            if value is not None and value < one.original:
                in_force[one.device] = value
        if in_force != self.in_force:
            expired = last is not None and host.now.mono - last > MAX_STALL and not in_force
            self.changed = last if last is not None and expired else host.now.mono
            self.in_force = in_force

    def read_energy(self, host: HostView, *, comparing: bool = False) -> tuple[EnergyPoint, ...]:
        """Further points of the devices' cumulative energy, if more has settled.

        One point is enough unless the tuner is ``comparing`` settings: blocks may be as short as
        the time between two steps then.
        """
        start, end = self.settled, host.energies.settled()
        if end - start < _MIN_SPACING:
            return ()
        start = max(start, end - _MAX_HISTORY)
        count = min(max((end - start) // _SPACING, 1), _MAX_POINTS) if comparing else 1
        points: list[EnergyPoint] = []
        for edge in (start + (end - start) * part // count for part in range(1, count + 1)):
            spent = sum(
                sum(host.devices.device(one.device, start, edge).energy.values())
                for one in self.ranges
            )
            points.append(EnergyPoint(edge, self._energy + spent))
        self._energy, self.settled = points[-1].energy, end
        return tuple(points)
