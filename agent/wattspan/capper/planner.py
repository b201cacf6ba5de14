"""Plans limits: from leases, imposed limits, the power budget and device ranges. Pure.

The limit of a knob is the lowest of the tuned limit, the fixed cap and the share of the budget,
within the bounds of hardware and operator and never above the original. A plan lists the writes in
a safe order: first the limits that go down, then those that go up, last the originals. A budget
allows a raise only once other devices have released that power and were observed to obey.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from wattspan.capper.actuators import is_honoured
from wattspan.capper.journal import JournalEntry
from wattspan.config import CapsSettings
from wattspan.model import SECOND, CapKey, Knob, KnobState
from wattspan.model.settings import quoted
from wattspan.sharing.power_budget import (
    DEFAULT_PRIORITY,
    SHARE_STEP,
    BudgetClaim,
    RampAllowance,
    ramp_parts,
    share_budget,
)

_MILLIWATTS_PER_WATT = 1_000
_NO_LIMITS: Mapping[CapKey, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class OperatorLimits:
    """Bounds that the operator sets.

    ``floor`` and ``largest_step`` are fractions of a device's default setting; ``floor_watts``
    applies to every cap on power, tuned or imposed. A lease lasts for ``longest_lease`` nanoseconds
    at most. Tuners may hold ``tunable`` devices and ``knobs``; an empty collection permits all. The
    power limits of the host together change by at most ``ramp`` milliwatts per second; 0 for any.
    """

    floor: float = 0.0
    floor_watts: int = 0
    largest_step: float = 1.0
    longest_lease: int = 10 * SECOND
    tunable: Collection[str] = ()
    knobs: Collection[Knob] = ()
    ramp: int = 0


class CapBounds(NamedTuple):
    """The range of limits that may be written; ``highest`` is the original or less."""

    lowest: int
    highest: int

    def clamp(self, value: int) -> int:
        """The allowed limit next to ``value``; ``highest`` if the range is empty."""
        return min(max(value, self.lowest), self.highest)


class WriteCause(NamedTuple):
    """The job, the reason and the peer of a write."""

    job: str = ""
    why: str = ""
    pid: int | None = None
    uid: int | None = None


class TunedLimit(NamedTuple):
    """A limit that a lease holds."""

    value: int
    cause: WriteCause


@dataclass(frozen=True, slots=True)
class ImposedLimits:
    """Limits without a lease: the ``fixed`` caps, and each device's share of the budget.

    ``limit`` is the budget in milliwatts; ``short`` is the power by which the floors of the
    devices exceed it.
    """

    fixed: Mapping[CapKey, int] = field(default_factory=lambda: _NO_LIMITS)
    shares: Mapping[CapKey, int] = field(default_factory=lambda: _NO_LIMITS)
    limit: int | None = None
    short: int = 0

    @property
    def budget(self) -> int | None:
        """The sum of the shares: the limit, or more where the devices' floors exceed it."""
        return None if self.limit is None else self.limit + self.short


@dataclass(frozen=True, slots=True)
class CapDemand:
    """All wanted limits, and the bounds that the operator sets on them."""

    tuned: Mapping[CapKey, TunedLimit]
    imposed: ImposedLimits
    limits: OperatorLimits

    def cause(self, key: CapKey) -> WriteCause:
        """The cause of a cap on ``key``."""
        if key in self.tuned:
            return self.tuned[key].cause
        fixed, share = self.imposed.fixed.get(key), self.imposed.shares.get(key)
        if fixed is not None and (share is None or fixed <= share):
            return WriteCause("operator", "fixed by [caps] fixed")
        if share is not None:
            return WriteCause("budget", "its share of the host's power budget")
        return WriteCause()


class Plan(NamedTuple):
    """Writes in their order: limits to lower, limits to raise, knobs to restore."""

    lower: Mapping[CapKey, int]
    increase: Mapping[CapKey, int]
    restore: tuple[CapKey, ...]


@dataclass(frozen=True, slots=True)
class Planner:
    """Computes limits from the demand, the last observed states and the journal entries.

    ``hidden`` is True if the host has devices whose limits are unknown; ``failing`` are knobs that
    cannot be written now.
    """

    demand: CapDemand
    states: Mapping[CapKey, KnobState]
    entries: Mapping[CapKey, JournalEntry]
    hidden: bool = False
    failing: Set[CapKey] = frozenset()

    def wanted(self) -> set[CapKey]:
        """Every present knob for which a cap is wanted."""
        imposed = self.demand.imposed
        return {*self.demand.tuned, *imposed.fixed, *imposed.shares} & self.states.keys()

    def plan(self, keys: Iterable[CapKey]) -> Plan:
        """The writes that bring ``keys`` to their limits."""
        lower: dict[CapKey, int] = {}
        increase: dict[CapKey, int] = {}
        restore = []
        for key in sorted(keys):
            entry, target = self.entries.get(key), self.target(key)
            if target is None:
                if entry is not None:
                    restore.append(key)
            elif entry is None or not (entry.written and _is_at(entry, target)):
                present = self._present(key)
                (lower if present is None or target < present else increase)[key] = target
        return Plan(lower, increase, tuple(restore))

    def ramped(self, plan: Plan, allowance: RampAllowance, exempt: Set[CapKey]) -> Plan:
        """The part of ``plan`` that the ramp of the host permits now.

        A knob on its way up to its original is raised, and restored by the last step. ``exempt``
        knobs are raised and restored at once.
        """
        originals = {key: self.entries[key].original for key in plan.restore}
        upwards = {key: value for key, value in originals.items() if value is not None}
        upwards.update(plan.increase)
        up = self._changes({key: v for key, v in upwards.items() if key not in exempt})
        down = self._changes(plan.lower)
        parts = ramp_parts(up, allowance.up) | ramp_parts(down, allowance.down)
        missing = {key: change - parts[key] for key, change in (up | down).items()}
        restored = tuple(key for key in plan.restore if not missing.get(key))
        unmoved = {*restored, *(key for key, part in parts.items() if not part)}
        return Plan(
            {k: v + missing.get(k, 0) for k, v in plan.lower.items() if k not in unmoved},
            {k: v - missing.get(k, 0) for k, v in upwards.items() if k not in unmoved},
            restored,
        )

    def grant(self, key: CapKey, value: int) -> int:
        """The part of a requested limit that is granted: within bounds, one step down at most."""
        bounds = self._bounds(key, tuned=True)
        return value if bounds is None else self._step(key, bounds.clamp(value))

    def target(self, key: CapKey) -> int | None:
        """The limit of a knob; None for the original."""
        tuned, imposed = self._bounds(key, tuned=True), self._bounds(key, tuned=False)
        if tuned is None or imposed is None:
            return None
        limits = [self._step(key, value) for value in self._imposed(key, imposed)]
        if key in self.demand.tuned:
            limits.append(tuned.clamp(self.demand.tuned[key].value))
        return _below(imposed.highest, limits)

    def imposed_limit(self, key: CapKey) -> int | None:
        """The limit that remains on a knob without any lease; None for the original."""
        bounds = self._bounds(key, tuned=False)
        return None if bounds is None else _below(bounds.highest, self._imposed(key, bounds))

    def ranged(self, key: CapKey) -> KnobState:
        """The state with the range found before the first write.

        Some drivers derive the range from the present limit.
        """
        state, entry = self.states[key], self.entries.get(key)
        if entry is None:
            return state
        return replace(state, minimum=entry.minimum, default=entry.default, maximum=entry.maximum)

    def original(self, key: CapKey) -> KnobState:
        """The state before the first write."""
        entry, original = self.entries.get(key), self.states[key].requested
        if entry is not None and not entry.left_alone:
            original = entry.original
        return replace(self.ranged(key), requested=original)

    def is_stuck(self, key: CapKey) -> bool:
        """True if the limit of a knob is another program's, or cannot be written now."""
        entry = self.entries.get(key)
        return key in self.failing or (entry is not None and entry.left_alone)

    def fits(self, key: CapKey, value: int | None) -> bool:
        """True if the budget allows ``key`` to be raised to ``value``, as the others are now."""
        budget = self.demand.imposed.budget
        if budget is None or value is None or not is_power_knob(key.knob):
            return True
        others = self.states.keys() - {key}
        return not self.hidden and value + sum(map(self.power, others)) <= budget

    def power(self, key: CapKey) -> int:
        """The milliwatts that a device may draw now, its original while it shows no limit.

        0 for a knob other than power, and for a device that never had a limit.
        """
        return _power_limit(self.states[key]) or _power_limit(self.original(key))

    def retained(self, planned: Mapping[CapKey, int]) -> dict[CapKey, int]:
        """The limit of each knob that stays in force if this process ends from now on.

        ``planned`` are limits that are about to be written. Each knob keeps its present limit if
        the change of all knobs to their imposed limits at once could exceed the budget: because
        a device is not lowered yet, or hangs and is not known.
        """
        ours = {key: one for key, one in self.entries.items() if not one.left_alone}
        keys = {*ours, *planned} & self.states.keys()
        kept = {key: limit for key in keys if (limit := self.imposed_limit(key)) is not None}
        kept |= {k: e.imposed for k, e in ours.items() if k not in self.states and e.imposed}
        budget = self.demand.imposed.budget
        if budget is None:
            return kept
        total = 0
        for key in self.states:
            if is_power_knob(key.knob):
                original = ours[key].original if key in ours else None
                after = kept.get(key, original) or 0
                total += max(self.power(key), planned.get(key, 0), after)
        if total <= budget and not self.hidden:
            return kept
        values = {key: planned[key] if key in planned else ours[key].value for key in keys}
        return {key: v for key, v in values.items() if v is not None and is_power_knob(key.knob)}

    def _changes(self, targets: Mapping[CapKey, int]) -> dict[CapKey, int]:
        """The distance of each power limit from its target, where that is known and not 0."""
        presents = {key: self._present(key) for key in targets if is_power_knob(key.knob)}
        changes = {key: abs(targets[key] - one) for key, one in presents.items() if one is not None}
        return {key: change for key, change in changes.items() if change}

    def _step(self, key: CapKey, value: int) -> int:
        return limit_step(self.ranged(key), self._present(key), value, self.demand.limits)

    def _present(self, key: CapKey) -> int | None:
        """The limit from which steps are counted."""
        state, entry = self.states[key], self.entries.get(key)
        if entry is not None and entry.written and not entry.left_alone:
            return entry.value
        return state.requested if state.requested is not None else state.maximum

    def _imposed(self, key: CapKey, bounds: CapBounds) -> list[int]:
        imposed = (self.demand.imposed.fixed, self.demand.imposed.shares)
        return [bounds.clamp(limits[key]) for limits in imposed if key in limits]

    def _bounds(self, key: CapKey, *, tuned: bool) -> CapBounds | None:
        entry = self.entries.get(key)
        original = self.states[key].requested if entry is None else entry.original
        return cap_bounds(self.ranged(key), original, self.demand.limits, tuned=tuned)


def cap_bounds(
    state: KnobState, original: int | None, limits: OperatorLimits, *, tuned: bool
) -> CapBounds | None:
    """The limits that may be written to a knob with this original; None if that is not known.

    A clock has no readable original: its highest setting takes the place. With ``tuned`` the
    floor of the tuner applies beside that of the operator.
    """
    candidates = [value for value in (original, state.maximum) if value is not None]
    if not candidates:
        return None
    highest, lowest = min(candidates), state.minimum or 0
    default = reference_setting(state)
    if tuned and default is not None:
        lowest = max(lowest, math.ceil(limits.floor * default))
    if is_power_knob(state.key.knob):
        lowest = _whole_watts(lowest, limits.floor_watts)
    return CapBounds(min(lowest, highest), highest)


def _whole_watts(lowest: int, floor_watts: int) -> int:
    """The higher one of both in milliwatts, in whole watts: a device may round all others down."""
    return max(-(-lowest // SHARE_STEP) * SHARE_STEP, floor_watts * _MILLIWATTS_PER_WATT)


def reference_setting(state: KnobState) -> int | None:
    """The setting to which fractions refer: the default, or the highest where there is none."""
    return state.default if state.default is not None else state.maximum


def limit_step(state: KnobState, present: int | None, value: int, limits: OperatorLimits) -> int:
    """``value``, or the lowest setting on the way down to it that one step may reach."""
    whole = reference_setting(state)
    if present is None or whole is None:
        return value
    return max(value, present - max(1, math.floor(limits.largest_step * whole)))


def is_power_knob(knob: Knob) -> bool:
    """True if the knob counts towards a budget of watts."""
    return knob in (Knob.GPU_POWER, Knob.CPU_POWER)


def _is_at(entry: JournalEntry, target: int) -> bool:
    """True if the written value is ``target`` as the device has rounded it."""
    rounded = is_power_knob(entry.knob) and is_honoured(target, entry.value)
    return rounded or entry.value == target


def _power_limit(state: KnobState) -> int:
    """The milliwatts that a device may draw now; 0 for a knob other than power."""
    if not is_power_knob(state.key.knob):
        return 0
    return max(state.requested or 0, state.enforced or 0)


def _below(highest: int, limits: Iterable[int]) -> int | None:
    """The lowest of ``limits`` if it is below ``highest``."""
    lowest = min(limits, default=highest)
    return None if lowest >= highest else lowest


# ------------------------------------------------------------------------------ power budget

_STUCK_PRIORITY = 1_000_000
_DEFAULT_MINIMUM_DIVISOR = 4
"""A device without a known minimum, as most packages, keeps its default divided by this. With
less a host could hardly raise its limits again."""
_UNLIMITED = 1_500_000
"""Milliwatts that no device draws: firmware writes 4096 W for "unlimited"."""
_TURBO = 4
"""Such a device draws its default times this at most."""


def imposed_limits(
    settings: CapsSettings, host: Planner, configured: int | None, requested: int | None = None
) -> ImposedLimits:
    """The limits of all devices by the operator's fixed caps and the ceilings.

    ``configured`` is the ceiling of the configuration, ``requested`` the lowest of the file's and
    the users': only the first lowers a device below the tuner's floor. A tuned device keeps its
    whole share: a share that follows the tuner would change the tuner's own reference, and the
    speed of other jobs while it compares settings.
    """
    fixed: dict[CapKey, int] = {}
    for one in settings.fixed:
        limit = one.watts * _MILLIWATTS_PER_WATT
        for key, state in host.states.items():
            named = key.knob is one.knob and state.is_named([one.device])
            if named and is_power_knob(key.knob) and host.original(key).requested is not None:
                fixed[key] = min(limit, fixed.get(key, limit))
    ceilings = [one for one in (configured, requested) if one is not None]
    if not ceilings:
        return ImposedLimits(fixed)
    devices = _budget_devices(settings, host, fixed)
    if configured is not None:
        devices = _limited(devices, configured)
    if requested is not None:
        devices = _limited(_with_floors(devices, host), requested)
    shares = {key: one.maximum for key, one in devices.items()}
    short = max(0, sum(shares.values()) - min(ceilings))
    writable = {key: share for key, share in shares.items() if not host.is_stuck(key)}
    if host.failing:  # each is tried again, at the share that it has once it obeys
        obeying = replace(host, failing=frozenset())
        due = imposed_limits(settings, obeying, configured, requested).shares
        writable |= {key: due[key] for key in host.failing & due.keys()}
    return ImposedLimits(fixed, writable, min(ceilings), short)


class PowerRange(NamedTuple):
    """The sums of all devices with a power limit, in milliwatts.

    ``floor`` is the lowest sum of their limits, ``original`` that of their original ones,
    ``enforced`` that of the present ones, None if a device's is unknown. ``tuned`` has the limits
    that tuners hold, by device, each with the power by which it is below that without them.
    """

    floor: int
    original: int
    enforced: int | None
    tuned: dict[str, tuple[int, int]]


def power_range(settings: CapsSettings, host: Planner) -> PowerRange:
    """The range of the host's limits; ``enforced`` is None while no device is known."""
    devices = _budget_devices(settings, host, {})
    floor = sum(one.minimum for one in devices.values())
    original = sum(one.maximum for one in devices.values())
    is_known = all(_power_limit(host.states[key]) for key in devices) and not host.hidden
    enforced = sum(map(_power_limit, host.states.values())) if devices and is_known else None
    untuned = {key: host.imposed_limit(key) or one.maximum for key, one in devices.items()}
    tuned = devices.keys() & host.demand.tuned.keys()
    limits = {key: host.power(key) for key in tuned}
    held = {key.device: (one, max(0, untuned[key] - one)) for key, one in limits.items()}
    return PowerRange(floor, original, enforced, held)


def _budget_devices(
    settings: CapsSettings, host: Planner, fixed: Mapping[CapKey, int]
) -> dict[CapKey, BudgetClaim]:
    devices: dict[CapKey, BudgetClaim] = {}
    for key in host.states:
        state = host.original(key)
        if not is_power_knob(key.knob) or (original := state.requested) is None:
            continue
        if host.is_stuck(key):  # the others share the rest
            stuck = host.power(key)
            devices[key] = BudgetClaim(stuck, stuck, _STUCK_PRIORITY)
            continue
        lowest = state.minimum
        if lowest is None:
            lowest = (reference_setting(state) or 0) // _DEFAULT_MINIMUM_DIVISOR
        lowest = _whole_watts(lowest, settings.floor_watts)
        if original > _UNLIMITED and state.default:  # a range of 4 kW would take the budget
            original = min(original, _TURBO * state.default)
        named = (one.priority for one in settings.priority if state.is_named([one.device]))
        devices[key] = BudgetClaim(
            min(lowest, original),
            original,
            next(named, DEFAULT_PRIORITY),
            fixed.get(key),
        )
    return devices


def _limited(devices: Mapping[CapKey, BudgetClaim], limit: int) -> dict[CapKey, BudgetClaim]:
    """The devices, each with its share of ``limit`` as its maximum."""
    caps = share_budget(devices, limit)
    return {
        key: one._replace(maximum=caps[key], minimum=min(one.minimum, caps[key]))
        for key, one in devices.items()
    }


def _with_floors(devices: Mapping[CapKey, BudgetClaim], host: Planner) -> dict[CapKey, BudgetClaim]:
    """The devices, each with the tuner's floor as its minimum."""
    raised = {}
    for key, one in devices.items():
        state = host.original(key)
        bounds = cap_bounds(state, state.requested, host.demand.limits, tuned=True)
        floor = one.minimum if bounds is None else max(one.minimum, bounds.lowest)
        raised[key] = one._replace(minimum=min(floor, one.maximum))
    return raised


def unmatched_settings(
    caps: CapsSettings, states: Collection[KnobState], tunable: Collection[str] = ()
) -> Iterator[str]:
    """A sentence for each name without a device, and for a limit without its effect.

    ``states`` are those of all knobs that can be read; ``tunable`` is ``[autotune] gpus``.
    """
    for one in filter(lambda one: is_power_knob(one.knob), caps.fixed):
        setting = f"[[caps.fixed]] device = {quoted(one.device)}"
        having = [state for state in states if state.key.knob is one.knob]
        named = [state for state in having if state.is_named([one.device])]
        if not named:
            yield f"{setting} matches nothing: {_having(one.knob, having)}."
        for state in named:
            lowest = _whole_watts(state.minimum or 0, caps.floor_watts)
            if state.requested is None:
                yield (
                    f"{setting} does not limit {state.name}: it shows no limit (0 W), as in"
                    " most virtual machines, so none could be restored. Where the hardware has"
                    " limits, write one as root once."
                )
            elif one.watts * _MILLIWATTS_PER_WATT < lowest:
                yield (
                    f"{setting} sets {state.name} to {min(lowest, state.requested) / 1000:g} W"
                    f" instead of {one.watts} W, which is below its least limit or"
                    " [caps] floor_watts."
                )
    powered = [one for one in states if is_power_knob(one.key.knob) and one.requested is not None]
    for ranked in caps.priority:
        if not any(state.is_named([ranked.device]) for state in powered):
            yield (
                f"[[caps.priority]] device = {quoted(ranked.device)} matches nothing:"
                f" {_having(None, powered)}."
            )
    name = "budget_watts" if caps.budget_watts else "budget_file" if caps.budget_file else ""
    if name and not powered:
        yield (
            f"[caps] {name} limits nothing: no device here has a power limit that can be set, as is"
            " usual for laptops and virtual machines."
        )
    for state in powered if name else ():
        if state.key.knob is Knob.CPU_POWER and state.enforced is None:
            yield (
                f"[caps] {name} counts {state.name} with {(state.requested or 0) / 1000:g} W, a"
                " limit that is not known to be in force: it may draw more. Write 1 into `enabled`"
                " of its zone if that is 0."
            )
    boards = [state for state in states if state.key.knob is not Knob.CPU_POWER]
    for name in tunable:
        if not any(state.is_named([name]) for state in boards):
            yield f"[autotune] gpus: {quoted(name)} matches nothing: {_having(None, boards)}."


def _having(knob: Knob | None, states: Collection[KnobState]) -> str:
    """The devices that a name could mean."""
    kind = "knob" if knob is None else str(knob)
    if not states:
        return f"no device here has a {kind} that can be set"
    names = {state.key.device: f"{state.name} ({', '.join(state.aliases)})" for state in states}
    return f"the devices with a {kind} are {'; '.join(sorted(names.values()))}"
