"""Division of a domain's energy among its parts, such as the MIG instances of a GPU, exactly.

Active energy is divided by the use of the parts, and inside each part by the use of its payers.
Idle energy is divided by the sizes of the parts. Everything else (energy without known usage,
withheld energy, the idle energy of slices without an instance) belongs to the rest, the part
without a domain. All divisions are by largest remainder in integer microjoules, so that the parts
have the whole energy, and the payers that of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from wattspan.attribution.division import divide_among_payers, split
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
    weights = [part.used for part in parts]
    divided = split(known, weights) if any(weights) else [0] * len(parts)
    idles = split(idle, [part.size for part in parts])
    shares: dict[Payer, _Charge] = {}
    rest = int(interval.energy) - sum(divided) - sum(idles)
    found: list[PartEnergy] = []
    for part, active, resting in zip(parts, divided, idles, strict=True):
        payers, energies, idle_shares = divide_among_payers(part, active, resting, policy)
        possible = possible_energies(active, known, part.spread)
        charged = zip(payers, energies, idle_shares or repeat(0), strict=False)
        for payer, own, idle_share in charged:
            doubt = _doubt(own, active, possible, sole=not part.users_guessed)
            before = shares.get(payer, _NOTHING)
            shares[payer] = _Charge(before.energy + own + idle_share, before.doubt + doubt)
        paid, passed = sum(energies), sum(idle_shares)
        left = active - paid
        if part.domain_id == REST:
            left += rest
        found.append(_energy(part.domain_id, paid + passed, resting - passed, left))
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
    """The least and the most energy that a part which was charged ``active`` of ``known`` may have.

    Equal use in another part draws from 1/``spread`` to ``spread`` times the power.
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
