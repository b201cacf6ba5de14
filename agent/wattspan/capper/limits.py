"""How far a knob may be turned: within hardware, operator and what stood before.

How a host's power budget is shared over the devices that can be capped.

A hard ceiling: shares are caps whose sum, with the reserve, stays within the limit, so that it
holds whatever the devices come to draw. Nothing is summed up and reacted to.

Every device has its minimum. What is left goes to the devices' wishes and then, if any is left
still, up to their maxima; both times in the order of priority, the highest first, so that the
lowest gives way first. Within one priority it is divided in proportion to the devices' ranges,
and whoever wants less than that leaves the rest to the others. The rule is that of the highest
averages (D'Hondt, Jefferson), with which a higher limit never leaves anybody with less. In the end
shares are cut to whole watts, which every device keeps as they were given; a package's register
counts in eighths of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Final, NamedTuple

from wattspan.model import Knob, KnobState

_MILLIWATTS_PER_WATT = 1_000


@dataclass(frozen=True, slots=True)
class OperatorLimits:
    """What the operator allows.

    ``floor`` and ``largest_step`` are parts of a device's default setting, ``floor_watts`` holds
    for every cap on power, whoever wants it.
    """

    floor: float = 0.0
    floor_watts: int = 0
    largest_step: float = 1.0


class CapBounds(NamedTuple):
    """The settings that may be written; the original itself is no cap and is below ``highest``."""

    lowest: int
    highest: int

    def clamp(self, value: int) -> int:
        """``value`` as near as it is allowed. Where nothing is allowed, the highest."""
        return min(max(value, self.lowest), self.highest)


def cap_bounds(
    state: KnobState, original: int | None, rules: OperatorLimits, *, tuned: bool
) -> CapBounds | None:
    """What may be written to a knob that stood at ``original``; None if that is not known.

    A clock cannot be read, so its original is no number: its highest setting stands for it. With
    ``tuned`` the tuner's floor holds beside the operator's: an operator who wants a lower cap
    says so, and a tuner never does.
    """
    highest = _lowest_setting(original, state.maximum)
    if highest is None:
        return None
    lowest = state.minimum or 0
    if state.key.knob is not Knob.GPU_CLOCK:
        lowest = max(lowest, rules.floor_watts * _MILLIWATTS_PER_WATT)
    default = reference_setting(state)
    if tuned and default is not None:
        lowest = max(lowest, math.ceil(rules.floor * default))
    return CapBounds(min(lowest, highest), highest)


def reference_setting(state: KnobState) -> int | None:
    """What parts of a setting are parts of: the default, or the highest where there is none."""
    return state.default if state.default is not None else state.maximum


def limit_step(state: KnobState, present: int | None, value: int, rules: OperatorLimits) -> int:
    """``value``, or the lowest setting on the way down to it that one move may reach."""
    whole = reference_setting(state)
    if present is None or whole is None:
        return value
    return max(value, present - max(1, math.floor(rules.largest_step * whole)))


def _lowest_setting(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


SHARE_STEP: Final = 1_000


class BudgetDevice(NamedTuple):
    """One device under the ceiling, in milliwatts.

    ``maximum`` is its original limit, beyond which it never gets anything; a device that cannot
    be capped just now has its present limit for both. ``want`` is what its holder asks for, None
    for as much as it may have: what it does not want is first offered to the others.
    """

    device: str
    minimum: int
    maximum: int
    priority: int = 100
    want: int | None = None


@dataclass(frozen=True, slots=True)
class BudgetShares:
    """The cap of each device; ``short`` is what the minimums take beyond the limit, 0 if none.

    Where it is short, every device has its minimum: less cannot be had, and the limit does not
    hold.
    """

    caps: Mapping[str, int]
    short: int = 0

    @property
    def total(self) -> int:
        return sum(self.caps.values())


class WeightedClaim(NamedTuple):
    """Who takes part in a division: up to ``most``, in proportion to ``weight``."""

    most: int
    weight: int


def share_budget(devices: Sequence[BudgetDevice], limit: int, *, reserve: int = 0) -> BudgetShares:
    """What each device may draw, so that all of them and ``reserve`` stay within ``limit``.

    The answer does not depend on the order of ``devices``.
    """
    room = limit - reserve
    ordered = sorted(devices, key=lambda sharer: (-sharer.priority, sharer.device))
    caps = {sharer.device: min(sharer.minimum, sharer.maximum) for sharer in ordered}
    left = room - sum(caps.values())
    for goal in (_demand, _highest_share):
        for _, group in groupby(ordered, key=lambda sharer: sharer.priority):
            takers = {
                s.device: WeightedClaim(goal(s) - caps[s.device], s.maximum - s.minimum)
                for s in group
            }
            for device, part in divide_by_weight(left, takers).items():
                caps[device] += part
                left -= part
    return BudgetShares(
        {s.device: _round_to_step(s, caps[s.device]) for s in ordered}, short=max(0, -left)
    )


def divide_by_weight(room: int, takers: Mapping[str, WeightedClaim]) -> dict[str, int]:
    """``room`` divided in proportion to weights; what is too much for one goes to the others."""
    takers = {name: taker for name, taker in takers.items() if taker.most > 0}
    room = min(max(room, 0), sum(taker.most for taker in takers.values()))
    parts = _rounded_down(room, takers)
    # That is never more than the rule gives, and only a few milliwatts short of the room.
    for _ in range(room - sum(parts.values())):
        open_to = (name for name, taker in takers.items() if parts[name] < taker.most)
        parts[max(open_to, key=lambda n: (Fraction(takers[n].weight, parts[n] + 1), n))] += 1
    return parts


def _rounded_down(room: int, takers: Mapping[str, WeightedClaim]) -> dict[str, int]:
    full: dict[str, int] = {}
    while True:
        open_to = {name: taker for name, taker in takers.items() if name not in full}
        rest, whole = room - sum(full.values()), sum(taker.weight for taker in open_to.values())
        parts = {name: rest * taker.weight // whole for name, taker in open_to.items()}
        more = {name: takers[name].most for name in parts if parts[name] >= takers[name].most}
        if not more:
            return full | parts
        full |= more


def _round_to_step(sharer: BudgetDevice, cap: int) -> int:
    """In whole watts, unless it is an end of the range."""
    return (
        cap
        if cap >= sharer.maximum
        else max(cap // SHARE_STEP * SHARE_STEP, min(sharer.minimum, cap))
    )


def _demand(sharer: BudgetDevice) -> int:
    if sharer.want is None:
        return sharer.maximum
    return min(max(sharer.want, sharer.minimum), sharer.maximum)


def _highest_share(sharer: BudgetDevice) -> int:
    return sharer.maximum
