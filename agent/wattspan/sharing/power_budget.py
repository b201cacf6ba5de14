"""Divides a power budget among claimants by priority, and bounds its rate of change. Pure.

A claimant is a device under the ceiling of its host, or a host under the budget of its rack. Power
is in milliwatts. Limits may be nested: each group of a tree keeps its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from wattspan.model import SECOND

SHARE_STEP: Final = 1_000
DEFAULT_PRIORITY: Final = 100


class _Sortable(Hashable, Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=_Sortable)


class BudgetClaim(NamedTuple):
    """One claimant of a budget, in milliwatts.

    ``maximum`` is the limit without a budget; a claimant that cannot be limited now has its present
    limit for both. ``want`` is the limit that its holder asks for, None for the maximum.
    """

    minimum: int
    maximum: int
    priority: int = DEFAULT_PRIORITY
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
class BudgetGroup(Generic[K]):
    """The keys of claimants, and further groups, that keep one ``limit``; None for no limit."""

    limit: int | None
    members: tuple[K, ...] = ()
    groups: tuple[BudgetGroup[K], ...] = ()


def share_budget(claims: Mapping[K, BudgetClaim], limit: int) -> dict[K, int]:
    """The cap of each claimant under one limit, by the rule of `share_nested_budget`."""
    return share_nested_budget(claims, BudgetGroup(limit, tuple(claims)))


def share_nested_budget(claims: Mapping[K, BudgetClaim], root: BudgetGroup[K]) -> dict[K, int]:
    """The cap of each claimant; a group keeps its limit unless the minimums exceed it.

    So each limit holds whatever the claimants draw. Every claimant has its minimum. The remainder
    goes to the claimants' wants and then, if any is left, up to their maxima; both times in the
    order of priority, so that the lowest priority is limited first. Within one priority it is
    divided in proportion to the claimants' ranges, and among groups in proportion to the sum of the
    ranges in each; the excess of one goes to the others. The rule is that of the highest averages
    (D'Hondt, Jefferson), under which a higher limit of ``root`` never reduces a share. Caps are in
    whole watts, which every device keeps: a register counts in eighths of a watt.

    Every key of ``claims`` must be a member of exactly one group.
    """
    ordered = sorted(claims.items(), key=lambda item: (-item[1].priority, item[0]))
    caps = {key: min(claim.minimum, claim.maximum) for key, claim in ordered}
    rooms = _Rooms(root, caps, sum(claim.maximum for claim in claims.values()))
    for to_maximum in (False, True):
        for _, group in groupby(ordered, key=lambda item: item[1].priority):
            parts = {
                key: _Part(
                    (one.maximum if to_maximum else one.demand) - caps[key],
                    one.maximum - one.minimum,
                )
                for key, one in group
            }
            for key, part in rooms.divide(parts):
                caps[key] += part
    return {key: claim.rounded(caps[key]) for key, claim in ordered}


class _Part(NamedTuple):
    """A part of a division: ``most`` at most, in proportion to ``weight``."""

    most: int
    weight: int


class _Rooms(Generic[K]):
    """The power that is left in each group of a tree. Groups have numbers, parents before children.

    ``enough`` is the room of a group without a limit.
    """

    def __init__(self, root: BudgetGroup[K], caps: Mapping[K, int], enough: int) -> None:
        self._parents: list[int] = []
        self._rooms: list[int] = []
        self._homes: dict[K, int] = {}
        self._add(root, -1, caps, enough)

    def _add(self, group: BudgetGroup[K], parent: int, caps: Mapping[K, int], enough: int) -> int:
        """Number a group and those in it; the power that its members have already."""
        number = len(self._rooms)
        self._parents.append(parent)
        self._rooms.append(0)
        self._homes.update(dict.fromkeys(group.members, number))
        used = sum(caps[key] for key in group.members)
        used += sum(self._add(child, number, caps, enough) for child in group.groups)
        self._rooms[number] = enough if group.limit is None else max(0, group.limit - used)
        return used

    def divide(self, parts: Mapping[K, _Part]) -> Iterator[tuple[K, int]]:
        """The part of each claimant, which is taken from the rooms."""
        members: dict[int, list[K]] = {}
        for key, part in parts.items():
            if part.most > 0:
                members.setdefault(self._homes[key], []).append(key)
        numbers = self._with_parents(members)
        children: dict[int, list[int]] = {}
        takers: dict[int, list[_Part]] = {}
        whole: dict[int, _Part] = {}
        for number in reversed(numbers):
            own = [parts[key] for key in members.get(number, ())]
            takers[number] = own + [whole[child] for child in children.get(number, ())]
            most = min(self._rooms[number], sum(one.most for one in takers[number]))
            weight = sum(one.weight for one in takers[number] if one.most > 0)
            whole[number] = _Part(most, weight)
            children.setdefault(self._parents[number], []).append(number)
        amounts = {0: whole[0].most} if numbers else {}
        for number in numbers:
            self._rooms[number] -= amounts[number]
            divided = _divide(amounts[number], takers[number])
            own_keys = members.get(number, [])
            yield from zip(own_keys, divided, strict=False)
            amounts.update(zip(children.get(number, ()), divided[len(own_keys) :], strict=True))

    def _with_parents(self, numbers: Mapping[int, object]) -> list[int]:
        """The groups and all those above them, parents first."""
        found: set[int] = set()
        for number in numbers:
            while number >= 0 and number not in found:
                found.add(number)
                number = self._parents[number]
        return sorted(found)


def _divide(room: int, parts: Sequence[_Part]) -> list[int]:
    """``room`` divided in proportion to weights; the excess of one goes to the others.

    ``room`` is at most the sum of what the parts may have.
    """
    divided = [0] * len(parts)
    claims = [number for number, part in enumerate(parts) if part.most > 0]
    claims.sort(key=lambda number: Fraction(parts[number].most, parts[number].weight))
    left, whole = room, sum(parts[number].weight for number in claims)
    unfilled: list[int] = []
    for place, number in enumerate(claims):
        most, weight = parts[number]
        if most * whole > left * weight:
            unfilled = claims[place:]
            break
        divided[number] = most
        left, whole = left - most, whole - weight
    for number in unfilled:
        divided[number] = left * parts[number].weight // whole
    # These are at most the numbers of the rule, and a few milliwatts short of the room.
    rest = room - sum(divided)
    averages = [(Fraction(divided[n] + 1, parts[n].weight), n) for n in unfilled] if rest else []
    heapq.heapify(averages)
    for _ in range(rest):
        _, number = heapq.heappop(averages)
        divided[number] += 1
        if divided[number] < parts[number].most:
            average = Fraction(divided[number] + 1, parts[number].weight)
            heapq.heappush(averages, (average, number))
    return divided


# ----------------------------------------------------------------------------------------- ramps

_LONGEST_RAMP: Final = SECOND


class RampAllowance(NamedTuple):
    """Milliwatts by which limits may go ``up`` and ``down``, as of the monotonic time ``at``.

    Each is the rate times the time since the last change, at most a second of it. In any period of
    T seconds the limits therefore go up, and go down, by at most the rate times T + 1.
    """

    at: int
    up: int
    down: int

    @classmethod
    def full(cls, rate: int, now: int) -> RampAllowance:
        """The allowance after a second without a change; ``rate`` is in milliwatts per second."""
        return cls(now, rate, rate)

    def advanced(self, rate: int, now: int) -> RampAllowance:
        """The allowance at ``now``, at a rate in milliwatts per second."""
        elapsed = min(max(0, now - self.at), _LONGEST_RAMP)
        more = rate * elapsed // SECOND
        return RampAllowance(now, min(self.up + more, rate), min(self.down + more, rate))

    def used(self, change: int) -> RampAllowance:
        """The allowance after a change of one limit by ``change`` milliwatts."""
        if change >= 0:
            return self._replace(up=max(0, self.up - change))
        return self._replace(down=max(0, self.down + change))


def ramp_parts(changes: Mapping[K, int], allowance: int) -> dict[K, int]:
    """The part of each change, all above 0, that ``allowance`` permits now; in milliwatts.

    The parts are in proportion to the changes, and in whole watts unless a change is complete. The
    watts that are left by rounding go to the largest remaining changes, so that none waits forever.
    """
    parts = share_budget({key: BudgetClaim(0, most) for key, most in changes.items()}, allowance)
    left = allowance - sum(parts.values())
    for key in sorted(changes, key=lambda key: (parts[key] - changes[key], key)):
        rest = changes[key] - parts[key]
        more = rest if rest <= left else left // SHARE_STEP * SHARE_STEP
        parts[key] += more
        left -= more
    return parts
