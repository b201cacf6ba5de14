"""How a host's power budget is shared over the devices that can be capped.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Final, NamedTuple

WHOLE: Final = 1_000


class Sharer(NamedTuple):
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
class Shares:
    """The cap of each device; ``short`` is what the minimums take beyond the limit, 0 if none.

    Where it is short, every device has its minimum: less cannot be had, and the limit does not
    hold.
    """

    caps: Mapping[str, int]
    short: int = 0

    @property
    def total(self) -> int:
        return sum(self.caps.values())


class Taker(NamedTuple):
    """Who takes part in a division: up to ``most``, in proportion to ``weight``."""

    most: int
    weight: int


def share(devices: Sequence[Sharer], limit: int, *, reserve: int = 0) -> Shares:
    """What each device may draw, so that all of them and ``reserve`` stay within ``limit``.

    The answer does not depend on the order of ``devices``.
    """
    room = limit - reserve
    ordered = sorted(devices, key=lambda sharer: (-sharer.priority, sharer.device))
    caps = {sharer.device: min(sharer.minimum, sharer.maximum) for sharer in ordered}
    left = room - sum(caps.values())
    for goal in (_wish, _most):
        for _, group in groupby(ordered, key=lambda sharer: sharer.priority):
            takers = {
                s.device: Taker(goal(s) - caps[s.device], s.maximum - s.minimum) for s in group
            }
            for device, part in divide(left, takers).items():
                caps[device] += part
                left -= part
    return Shares({s.device: _cut(s, caps[s.device]) for s in ordered}, short=max(0, -left))


def divide(room: int, takers: Mapping[str, Taker]) -> dict[str, int]:
    """``room`` divided in proportion to weights; what is too much for one goes to the others."""
    takers = {name: taker for name, taker in takers.items() if taker.most > 0}
    room = min(max(room, 0), sum(taker.most for taker in takers.values()))
    parts = _rounded_down(room, takers)
    # That is never more than the rule gives, and only a few milliwatts short of the room.
    for _ in range(room - sum(parts.values())):
        open_to = (name for name, taker in takers.items() if parts[name] < taker.most)
        parts[max(open_to, key=lambda n: (Fraction(takers[n].weight, parts[n] + 1), n))] += 1
    return parts


def _rounded_down(room: int, takers: Mapping[str, Taker]) -> dict[str, int]:
    full: dict[str, int] = {}
    while True:
        open_to = {name: taker for name, taker in takers.items() if name not in full}
        rest, whole = room - sum(full.values()), sum(taker.weight for taker in open_to.values())
        parts = {name: rest * taker.weight // whole for name, taker in open_to.items()}
        more = {name: takers[name].most for name in parts if parts[name] >= takers[name].most}
        if not more:
            return full | parts
        full |= more


def _cut(sharer: Sharer, cap: int) -> int:
    """In whole watts, unless it is an end of the range."""
    return cap if cap >= sharer.maximum else max(cap // WHOLE * WHOLE, min(sharer.minimum, cap))


def _wish(sharer: Sharer) -> int:
    if sharer.want is None:
        return sharer.maximum
    return min(max(sharer.want, sharer.minimum), sharer.maximum)


def _most(sharer: Sharer) -> int:
    return sharer.maximum
