"""Shares of a power budget: a hard ceiling over all devices that can be capped. Pure.

Shares are caps with a sum within the limit, so the ceiling holds whatever the devices draw. Every
device has its minimum. The remainder goes to the devices' wants and then, if any is left, up to
their maxima; both times in the order of priority, so that the lowest priority is limited first.
Within one priority it is divided in proportion to the devices' ranges; what a device does not want
goes to the others. The rule is that of the highest averages (D'Hondt, Jefferson), under which a
higher limit never reduces a share. Shares are cut to whole watts, which every device keeps as
given: a package's register counts in eighths of a watt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Final, NamedTuple

from wattspan.capper.devices import matches_device
from wattspan.capper.planner import (
    ImposedLimits,
    OperatorLimits,
    cap_bounds,
    is_power_knob,
    reference_setting,
)
from wattspan.config import CapsSettings
from wattspan.model import CapKey, KnobState

SHARE_STEP: Final = 1_000
_MILLIWATTS_PER_WATT = 1_000
_DEFAULT_PRIORITY = 100
_STUCK_PRIORITY = 1_000_000
_DEFAULT_MINIMUM_DIVISOR = 4
"""A device without a known minimum, as most packages, keeps its default divided by this. With
less a host could hardly raise its limits again."""


class BudgetDevice(NamedTuple):
    """One device under the ceiling, in milliwatts.

    ``maximum`` is its original limit; a device that cannot be capped now has its present limit for
    both. ``want`` is the limit that its holder asks for, None for the maximum.
    """

    minimum: int
    maximum: int
    priority: int = _DEFAULT_PRIORITY
    want: int | None = None

    @property
    def demand(self) -> int:
        """``want`` within the range."""
        want = self.maximum if self.want is None else self.want
        return min(max(want, self.minimum), self.maximum)

    def rounded(self, cap: int) -> int:
        """``cap`` in whole watts, unless it is an end of the range."""
        if cap >= self.maximum:
            return cap
        return max(cap // SHARE_STEP * SHARE_STEP, min(self.minimum, cap))


@dataclass(frozen=True, slots=True)
class BudgetHost:
    """The knobs that a budget divides power among.

    ``originals`` are all knobs with their range and limit before the first write, ``stuck`` the
    present limits of knobs that cannot be written now, ``tuned`` the limits that tuners hold.
    """

    originals: Mapping[CapKey, KnobState]
    stuck: Mapping[CapKey, int]
    tuned: Mapping[CapKey, int]
    limits: OperatorLimits


def share_budget(devices: Mapping[CapKey, BudgetDevice], limit: int) -> dict[CapKey, int]:
    """The cap of each device. Their sum is within ``limit``, unless the minimums exceed it."""
    ordered = sorted(devices.items(), key=lambda item: (-item[1].priority, item[0]))
    caps = {key: min(device.minimum, device.maximum) for key, device in ordered}
    left = limit - sum(caps.values())
    for to_maximum in (False, True):
        for _, group in groupby(ordered, key=lambda item: item[1].priority):
            claims = {
                key: _Claim(
                    (one.maximum if to_maximum else one.demand) - caps[key],
                    one.maximum - one.minimum,
                )
                for key, one in group
            }
            for key, part in _divide(left, claims).items():
                caps[key] += part
                left -= part
    return {key: device.rounded(caps[key]) for key, device in ordered}


class _Claim(NamedTuple):
    """A part of a division: ``most`` at most, in proportion to ``weight``."""

    most: int
    weight: int


def _divide(room: int, claims: Mapping[CapKey, _Claim]) -> dict[CapKey, int]:
    """``room`` divided in proportion to weights; the excess of one goes to the others."""
    claims = {key: claim for key, claim in claims.items() if claim.most > 0}
    room = min(max(room, 0), sum(claim.most for claim in claims.values()))
    parts = _rounded_down(room, claims)
    # The parts are at most those of the rule, and a few milliwatts short of the room.
    for _ in range(room - sum(parts.values())):
        unfilled = (key for key, claim in claims.items() if parts[key] < claim.most)
        parts[max(unfilled, key=lambda k: (Fraction(claims[k].weight, parts[k] + 1), k))] += 1
    return parts


def _rounded_down(room: int, claims: Mapping[CapKey, _Claim]) -> dict[CapKey, int]:
    full: dict[CapKey, int] = {}
    while True:
        unfilled = {key: claim for key, claim in claims.items() if key not in full}
        rest, whole = room - sum(full.values()), sum(claim.weight for claim in unfilled.values())
        parts = {key: rest * claim.weight // whole for key, claim in unfilled.items()}
        more = {key: claims[key].most for key in parts if parts[key] >= claims[key].most}
        if not more:
            return full | parts
        full |= more


def imposed_limits(
    settings: CapsSettings, host: BudgetHost, configured: int | None, requested: int | None = None
) -> ImposedLimits:
    """The limits of all devices by the operator's fixed caps and the ceilings.

    ``configured`` is the ceiling of the configuration, ``requested`` the lowest of the file's and
    the users': only the first lowers a device below the tuner's floor.
    """
    fixed: dict[CapKey, int] = {}
    for one in settings.fixed:
        limit = one.watts * _MILLIWATTS_PER_WATT
        for key, state in host.originals.items():
            if key.knob is one.knob and is_power_knob(key.knob) and _is_named(one.device, state):
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
    writable = {key: share for key, share in shares.items() if key not in host.stuck}
    return ImposedLimits(fixed, writable, min(ceilings), short)


def _is_named(name: str, state: KnobState) -> bool:
    return matches_device([name], state)


def _budget_devices(
    settings: CapsSettings, host: BudgetHost, fixed: Mapping[CapKey, int]
) -> dict[CapKey, BudgetDevice]:
    devices: dict[CapKey, BudgetDevice] = {}
    for key, state in host.originals.items():
        original, stuck = state.requested, host.stuck.get(key)
        if not is_power_knob(key.knob) or original is None:
            continue
        if stuck is not None:  # the others share the rest
            devices[key] = BudgetDevice(stuck, stuck, _STUCK_PRIORITY)
            continue
        lowest = state.minimum
        if lowest is None:
            lowest = (reference_setting(state) or 0) // _DEFAULT_MINIMUM_DIVISOR
        lowest = max(lowest, settings.floor_watts * _MILLIWATTS_PER_WATT)
        wants = [limits[key] for limits in (host.tuned, fixed) if key in limits]
        named = (one.priority for one in settings.priority if _is_named(one.device, state))
        devices[key] = BudgetDevice(
            min(lowest, original),
            original,
            next(named, _DEFAULT_PRIORITY),
            min(wants, default=None),
        )
    return devices


def _limited(devices: Mapping[CapKey, BudgetDevice], limit: int) -> dict[CapKey, BudgetDevice]:
    """The devices, each with its share of ``limit`` as its maximum."""
    caps = share_budget(devices, limit)
    return {
        key: one._replace(maximum=caps[key], minimum=min(one.minimum, caps[key]))
        for key, one in devices.items()
    }


def _with_floors(
    devices: Mapping[CapKey, BudgetDevice], host: BudgetHost
) -> dict[CapKey, BudgetDevice]:
    """The devices, each with the tuner's floor as its minimum."""
    raised = {}
    for key, one in devices.items():
        state = host.originals[key]
        bounds = cap_bounds(state, state.requested, host.limits, tuned=True)
        floor = one.minimum if bounds is None else max(one.minimum, bounds.lowest)
        raised[key] = one._replace(minimum=min(floor, one.maximum))
    return raised
