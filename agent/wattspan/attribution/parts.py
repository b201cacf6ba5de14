"""Division of a domain's energy among its parts, such as the MIG instances of a GPU, exactly.

Active energy is divided by the use of the parts, and inside each part by the use of its payers.
Idle energy is divided by the sizes of the parts. Everything else (energy without known usage,
withheld energy, the idle energy of slices without an instance) belongs to the rest, the part
without a domain. All divisions are by largest remainder in integer microjoules, so that the parts
have the whole energy, and the payers that of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from wattspan.attribution.division import split
from wattspan.model import (
    Attribution,
    IdlePolicy,
    Interval,
    Microjoules,
    PartEnergy,
    PartUsage,
    Payer,
    Share,
    Usage,
)

REST = ""
"""The domain of the part that has none."""


def usage_of_parts(whole: Usage, parts: Iterable[PartUsage], size: int) -> Usage:
    """``whole`` with the use of its parts, of which it gets the sums.

    ``size`` > 0 is that of all parts together, in the unit of theirs.
    """
    known = tuple(parts)
    spent: dict[Payer, int] = {}
    for part in known:
        for payer, amount in part.spent.items():
            spent[payer] = spent.get(payer, 0) + amount
    rest = PartUsage(REST, max(0, size - sum(part.size for part in known)), {}, whole.unclaimed)
    return Usage(
        whole.resource,
        whole.start,
        whole.end,
        spent,
        whole.unclaimed + sum(part.unclaimed for part in known),
        whole.capacity,
        whole.present.union(*(part.present for part in known)),
        whole.metered,
        (*known, rest),
    )


def attribute_parts(
    interval: Interval,
    usage: Usage,
    *,
    idle: int,
    withheld: int,
    known: int,
    policy: IdlePolicy,
) -> Attribution:
    """Divide the energy of an interval among the parts of ``usage`` and their payers.

    ``known`` microjoules are active energy with known usage; ``idle``, ``withheld`` and ``known``
    together are at most the energy of the interval. The parts are those of :func:`usage_of_parts`
    or :func:`merge_parts`: the rest is among them.
    """
    parts = usage.parts
    weights = [sum(part.spent.values()) + max(0, part.unclaimed) for part in parts]
    divided = split(known, weights) if any(weights) else [0] * len(parts)
    idles = split(idle, [part.size for part in parts])
    spread = max(part.spread for part in parts)
    shares: dict[Payer, _Charge] = {}
    rest = int(interval.energy) - sum(divided) - sum(idles)
    found: list[PartEnergy] = []
    for part, active, resting in zip(parts, divided, idles, strict=True):
        charged = _divide_part(part, active, resting, policy)
        possible = possible_energies(active, known, spread)
        for payer, (energy, idle_share) in charged.items():
            doubt = _doubt(energy - idle_share, active, possible, sole=not part.users_guessed)
            before = shares.get(payer, _NOTHING)
            shares[payer] = _Charge(before.energy + energy, before.doubt + doubt)
        paid = sum(energy for energy, _ in charged.values())
        passed = sum(idle_share for _, idle_share in charged.values())
        left = active - (paid - passed)
        if part.domain_id == REST:
            left += rest
        found.append(_energy(part.domain_id, paid, resting - passed, left))
    paid_shares = {payer: charge for payer, charge in shares.items() if charge.energy}
    doubts = tuple(Microjoules(charge.doubt) for charge in paid_shares.values())
    return Attribution(
        interval,
        tuple(Share(payer, Microjoules(one.energy)) for payer, one in paid_shares.items()),
        Microjoules(sum(part.idle for part in found)),
        Microjoules(sum(part.unattributed for part in found)),
        Microjoules(withheld),
        tuple(found),
        doubts if any(doubts) else (),
    )


def possible_energies(active: int, known: int, spread: float) -> tuple[int, int]:
    """The least and the most that a part may have used, which was charged ``active`` of ``known``.

    That is if equal use in another part draws from 1/``spread`` to ``spread`` times the power.
    """
    others = known - active
    if active == 0 or others == 0 or spread <= 1:
        return active, active
    if math.isinf(spread):
        return 0, known
    least = known * active / (active + others * spread)
    most = known * active * spread / (active * spread + others)
    return math.floor(least), math.ceil(most)


def _doubt(own: int, active: int, possible: tuple[int, int], *, sole: bool) -> int:
    """The largest possible error of a user that was charged ``own`` of the energy of its part."""
    least, most = possible
    if not sole and own != active:
        return max(own, most - own)
    off = max(active - least, most - active)
    return -(-off * own // max(1, active))


class _Charge(NamedTuple):
    energy: int
    doubt: int


_NOTHING = _Charge(0, 0)


def _energy(domain_id: str, consumers: int, idle: int, unattributed: int) -> PartEnergy:
    return PartEnergy(
        domain_id, Microjoules(consumers), Microjoules(idle), Microjoules(unattributed)
    )


def _divide_part(
    part: PartUsage, active: int, idle: int, policy: IdlePolicy
) -> Mapping[Payer, tuple[int, int]]:
    """The energy of each payer of a part, and the idle energy in it."""
    payers = [payer for payer, spent in part.spent.items() if spent > 0]
    weights = [part.spent[payer] for payer in payers]
    energies = list[int]()
    if payers:
        *energies, _ = split(active, [*weights, max(0, part.unclaimed)])
    charged = {payer: (energy, 0) for payer, energy in zip(payers, energies, strict=True)}
    if policy is IdlePolicy.SEPARATE:
        return charged
    idlers = payers
    if policy is IdlePolicy.EQUAL:
        idlers = [*payers, *sorted(part.present.difference(payers), key=repr)]
        weights = [1] * len(idlers)
    if idlers:
        for payer, share in zip(idlers, split(idle, weights), strict=True):
            energy, _ = charged.get(payer, (0, 0))
            charged[payer] = energy + share, share
    return charged


def merge_parts(inside: Sequence[tuple[Usage, int]]) -> tuple[PartUsage, ...]:
    """The parts of several usages, each counted by its overlap in nanoseconds with an interval.

    A usage without parts counts as the rest, because the mode of the device has changed.
    """
    if not any(usage.parts for usage, _ in inside):
        return ()
    size = max(sum(part.size for part in usage.parts) for usage, _ in inside)
    merged: dict[str, PartUsage] = {REST: PartUsage(REST, 0, {})}
    for usage, overlap in inside:
        whole = max(1, usage.end.mono - usage.start.mono)
        parts = usage.parts or (PartUsage(REST, size, usage.spent, usage.unclaimed, usage.present),)
        for part in parts:
            before = merged.get(part.domain_id, PartUsage(part.domain_id, 0, {}))
            spent = dict(before.spent)
            for payer, amount in part.spent.items():
                spent[payer] = spent.get(payer, 0) + amount * overlap // whole
            merged[part.domain_id] = PartUsage(
                part.domain_id,
                before.size + part.size * overlap,
                spent,
                before.unclaimed + part.unclaimed * overlap // whole,
                before.present | part.present,
                max(before.spread, part.spread),
                before.users_guessed or part.users_guessed,
            )
    return tuple(merged.values())
