"""Division of a domain's energy among its parts, such as the MIG instances of a GPU, exactly.

Active energy is divided by the use of the parts, and inside each part by the use of its payers.
Idle energy is divided by the sizes of the parts. Everything else (energy without known usage,
withheld energy, the idle energy of slices without an instance) belongs to the rest, the part
without a domain. All divisions are by largest remainder in integer microjoules, so that the parts
have the whole energy, and the payers that of the parts.

:class:`PartPowers` learns the power of equal use in each part, by which the uses are weighted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from math import exp, hypot, inf, isfinite, sqrt
from typing import NamedTuple

from wattspan.attribution.division import divide_among_payers, split
from wattspan.model import (
    SECOND,
    Attribution,
    IdlePolicy,
    Interval,
    Microjoules,
    PartEnergy,
    PartUsage,
    Payer,
    Share,
    Usage,
    fills,
)
from wattspan.util.linear_systems import solved

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


WINDOW, LONGEST_WINDOW = SECOND, 2 * SECOND
"""The period of an equation. Energy and use have edges of their own, tenths of a second apart, so
that a window ends where the use is steady, if it is so before the longest one."""

MEMORY = 30.0
"""Windows after which older ones have a weight of 1/e."""

ENOUGH = 9.0
"""The weight of the windows from which the powers are used: some ten of them."""

MAX_PARTS = 16
"""Parts with their users of which powers are kept: the latest ones."""

_PRIOR = 0.4  # standard deviation of the powers of different work, relative to their mean
_OFFSET = 0.3  # that of power without any use, relative to the mean active power
_LARGEST_OFFSET = 0.15  # of it: more shows that power does not add up
_LEAST_NOISE = 0.005  # standard deviation of a window's power, likewise
_STATED = 3.0  # standard deviations
_SIGNIFICANT = 2.0  # standard deviations of a difference that is used
_DEVIANT = 5.0  # standard deviations of a window: the work has changed
_STEADY = 0.02  # difference of the uses of two intervals, in use of the whole device
_ROUNDS = 3  # estimates of the noise, by which the ridge is weighted

Key = tuple[str, frozenset[Payer]]


class PowerOfUse(NamedTuple):
    """The power of a unit of use in a part, relative to the mean, and its standard deviation."""

    ratio: float
    deviation: float


_UNKNOWN = PowerOfUse(1.0, _PRIOR)


class PartPowers:
    """The powers of use in the parts of one device, learned. Powers are in milliwatts.

    Use is time, not power: equally active multiprocessors draw twice as much in one instance as in
    another, by their work. The active power of the whole device is measured, and the use of each
    part is known. Where the uses vary independently, the power of a unit of use in each part
    follows by linear regression: ridge regression with forgetting, on windows of about a second,
    towards the mean power of all use. Without variation the result is that mean, and its
    uncertainty that of the prior.

    The result is not used where power does not add up, and after a window that it does not explain.
    A board at its power limit draws the same for any use: what a part would save is not what it
    draws. A part with other users has other work, and is a part of its own here.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._products: list[list[float]] = [[0.0]]  # sums of x x'; the first is the offset's
        self._rights: list[float] = [0.0]  # sums of x y
        self._squares = 0.0  # sum of y y
        self._powers: dict[Key, PowerOfUse] = {}
        self._mean = self._offset = 0.0  # power of a unit of use, and without any
        self._noise = 0.0  # standard deviation of a window's power
        self._energy = self._duration = 0  # of the present window
        self._uses: dict[Key, int] = {}
        self._rates: dict[Key, float] = {}  # of the last interval

    def power(self, part: PartUsage) -> PowerOfUse | None:
        """The power of use in ``part``; None while that of no part is known."""
        return self._power_of(_key(part)) if self._powers else None

    def _power_of(self, key: Key) -> PowerOfUse:
        return self._powers.get(key, _UNKNOWN)

    # ----------------------------------------------------------------------------------- learn

    def learn(self, energy: int, duration: int, usage: Usage) -> None:
        """Add ``energy`` microjoules of active energy in ``duration`` ns, with the use of parts.

        ``usage`` may be longer, with the same use all along. Use that is an assumption, and use
        that tells energy, teach nothing.
        """
        if not _is_activity(usage):
            self._end_window()
            return
        length = usage.end.mono - usage.start.mono
        self._energy += energy
        self._duration += duration
        before, self._rates = self._rates, {}
        for part in usage.parts:
            if use := part.used * duration // length:
                key = _key(part)
                self._uses[key] = self._uses.get(key, 0) + use
                self._rates[key] = use / duration
        steady = all(
            abs(self._rates.get(key, 0.0) - before.get(key, 0.0)) <= _STEADY
            for key in self._rates.keys() | before.keys()
        )
        if fills(WINDOW if steady else LONGEST_WINDOW, self._duration, duration):
            power = self._energy * 1e6 / self._duration
            uses = {key: use / self._duration for key, use in self._uses.items()}
            self._end_window()
            if uses:
                self._add(power, uses)

    def _end_window(self) -> None:
        self._energy = self._duration = 0
        self._uses = {}

    def _add(self, power: float, uses: Mapping[Key, float]) -> None:
        """Add an equation."""
        if self._powers and self._deviates(power, uses):
            self._forget()
        for key in uses:
            self._admit(key)
        row = [1.0, *(uses.get(key, 0.0) for key in self._keys)]
        kept = exp(-1 / MEMORY)
        self._squares = self._squares * kept + power * power
        for i, one in enumerate(row):
            self._rights[i] = self._rights[i] * kept + one * power
            products = self._products[i]
            for j, other in enumerate(row):
                products[j] = products[j] * kept + one * other
        self._solve()

    def _deviates(self, power: float, uses: Mapping[Key, float]) -> bool:
        """True if the powers do not explain a window: the work of a part has changed."""
        known = [(self._power_of(key), use) for key, use in uses.items()]
        expected = self._offset + self._mean * sum(one.ratio * use for one, use in known)
        unsure = sum((self._mean * one.deviation * use) ** 2 for one, use in known)
        return abs(power - expected) > _DEVIANT * sqrt(self._noise**2 + unsure)

    def _forget(self) -> None:
        self._squares = 0.0
        self._rights = [0.0] * len(self._rights)
        self._products = [[0.0] * len(self._rights) for _ in self._rights]

    def _admit(self, key: Key) -> None:
        """Keep sums of ``key``, instead of those of the oldest one if there are too many."""
        if key in self._keys:
            return
        if len(self._keys) >= MAX_PARTS:
            del self._keys[0], self._rights[1], self._products[1]
            for products in self._products:
                del products[1]
        self._keys.append(key)
        self._rights.append(0.0)
        for products in self._products:
            products.append(0.0)
        self._products.append([0.0] * len(self._rights))

    def _solve(self) -> None:
        """Find the powers; none before enough windows, and none if power does not add up."""
        self._powers = {}
        weight, total = self._products[0][0], self._rights[0]
        if weight < ENOUGH or total <= 0:
            return
        mean, level = total / sum(self._products[0][1:]), total / weight
        # What the mean power of use leaves unexplained is fitted.
        rights = [
            right - mean * sum(products[1:])
            for right, products in zip(self._rights, self._products, strict=True)
        ]
        squares = self._squares - mean * (sum(self._rights[1:]) + sum(rights[1:]))
        priors = [_OFFSET * level, *[_PRIOR * mean] * len(self._keys)]
        least = (_LEAST_NOISE * level) ** 2
        changes, deviations = [0.0] * len(rights), list(priors)
        variance = max(squares / weight, least)
        for _ in range(_ROUNDS):
            changes, deviations = _ridge(self._products, rights, priors, variance)
            left = squares - 2 * _dot(changes, rights)
            left += _dot(changes, [_dot(changes, row) for row in self._products])
            variance = max(left / max(weight - len(rights), weight / 4), least)
        if abs(changes[0]) > _LARGEST_OFFSET * level:
            return
        self._mean, self._offset, self._noise = mean, changes[0], sqrt(variance)
        self._powers = {
            key: _significant(change / mean, deviation / mean)
            for key, change, deviation in zip(self._keys, changes[1:], deviations[1:], strict=True)
        }

    # ---------------------------------------------------------------------------------- divide

    def weighed(self, usage: Usage) -> Usage:
        """``usage`` with the use of its parts in proportion to their powers, and its uncertainty.

        It is unchanged while the powers are unknown.
        """
        if not self._powers or not _is_activity(usage):
            return usage
        parts = usage.parts
        known = [self._power_of(_key(part)) for part in parts]
        ratios = [
            min(max(one.ratio, 1 / part.spread), part.spread)
            for one, part in zip(known, parts, strict=True)
        ]
        powers = [ratio * part.used for ratio, part in zip(ratios, parts, strict=True)]
        noise = self._noise / self._mean * (usage.end.mono - usage.start.mono)
        errors = [
            sqrt((_STATED * one.deviation * use) ** 2 + noise * noise) if (use := part.used) else 0
            for one, part in zip(known, parts, strict=True)
        ]
        return replace(
            usage,
            parts=tuple(
                part._replace(
                    spent={payer: round(spent * ratio) for payer, spent in part.spent.items()},
                    unclaimed=round(part.unclaimed * ratio),
                    spread=min(part.spread, _spread(place, powers, errors)),
                )
                for place, (part, ratio) in enumerate(zip(parts, ratios, strict=True))
            ),
        )


def _significant(difference: float, deviation: float) -> PowerOfUse:
    """The power with a ``difference`` from the mean; the mean if that is within its uncertainty."""
    if abs(difference) < _SIGNIFICANT * deviation:
        return PowerOfUse(1.0, hypot(difference, deviation))
    return PowerOfUse(1 + difference, deviation)


def _ridge(
    products: Sequence[Sequence[float]],
    rights: Sequence[float],
    priors: Sequence[float],
    variance: float,
) -> tuple[list[float], list[float]]:
    """The solution and its standard deviations, for priors with mean 0 and these deviations."""
    size = len(rights)
    matrix = [
        [each + (variance / priors[i] ** 2 if i == j else 0.0) for j, each in enumerate(row)]
        for i, row in enumerate(products)
    ]
    units = [[float(i == j) for j in range(size)] for i in range(size)]
    solution, *inverse = solved(matrix, [rights, *units])
    return solution, [sqrt(max(0.0, variance * inverse[i][i])) for i in range(size)]


def _spread(place: int, powers: Sequence[float], errors: Sequence[float]) -> float:
    """The ratio to the power of the others by which that of one part may differ."""
    own, total = powers[place], sum(powers)
    others = total - own
    if own <= 0 or others <= 0:
        return 1.0
    part = own / total
    rest = sum(error * error for error in errors) - errors[place] ** 2
    error = sqrt(((1 - part) * errors[place]) ** 2 + part * part * rest)
    return inf if error >= others else (own + error) / (others - error) * others / own


def _is_activity(usage: Usage) -> bool:
    """True if the use of all parts is known, and does not tell their energy."""
    spreads = [part.spread for part in usage.parts]
    return all(map(isfinite, spreads)) and max(spreads, default=1.0) > 1.0


def _key(part: PartUsage) -> Key:
    return part.domain_id, part.present


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
