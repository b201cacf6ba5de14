"""From an interval and what was done in it to exact shares.

Nothing is rounded away: every division is by largest remainder in integer microjoules, and the
account *unattributed* holds what nobody can be shown to have spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from wattspan.model import (
    Attribution,
    IdlePolicy,
    Interval,
    Microjoules,
    Payer,
    Share,
    Usage,
)


def split(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` divided in proportion to ``weights``, by largest remainder (Hamilton's method).

    The parts are whole, never negative, add up to ``total`` exactly, and each differs from its
    exact proportion by less than one. Ties go to the earlier weight. ``sum(weights)`` must be
    positive; ValueError if a weight is negative or all are zero.
    """
    whole = sum(weights)
    if whole <= 0 or min(weights) < 0:
        raise ValueError("weights must not be negative, nor all zero")
    parts = [total * weight // whole for weight in weights]
    left = total - sum(parts)
    if left:
        remainders = [total * weight % whole for weight in weights]
        by_remainder = sorted(range(len(weights)), key=remainders.__getitem__, reverse=True)
        for i in by_remainder[:left]:
            parts[i] += 1
    return parts


def attribute(
    interval: Interval,
    usage: Usage | None,
    *,
    covered: int | None = None,
    idle_due: int = 0,
    policy: IdlePolicy = IdlePolicy.SEPARATE,
) -> Attribution:
    """Divide one interval's energy among who spent it, idle, and nobody.

    Idle takes ``idle_due`` microjoules, at most all there are; with no baseline learned there is
    no idle and all energy counts as active. Active energy goes to payers by what they spent and
    to *unattributed* by what was spent unclaimed; where ``usage`` covers only ``covered``
    nanoseconds of the interval, the rest of the active energy is unattributed as well. Idle is
    then an account of its own, or divided as ``policy`` says when there is anybody to pay it.
    """
    duration = interval.duration
    idle = min(int(interval.energy), idle_due)
    active = interval.energy - idle

    if usage is None:
        return Attribution(interval, (), Microjoules(idle), Microjoules(active))

    known = active if covered is None else active * min(covered, duration) // duration
    payers: list[Payer] = [payer for payer, spent in usage.spent.items() if spent > 0]
    weights = [usage.spent[payer] for payer in payers]
    unattributed = active - known
    if payers or usage.unclaimed > 0:
        *parts, nobody = split(known, [*weights, max(0, usage.unclaimed)])
        unattributed += nobody
    else:
        parts = []
        unattributed += known

    if idle and policy is not IdlePolicy.SEPARATE:
        idlers, idle_parts = _idle_shares(idle, usage, payers, weights, policy)
        if idlers:
            merged = dict(zip(payers, parts, strict=True))
            for payer, share in zip(idlers, idle_parts, strict=True):
                merged[payer] = merged.get(payer, 0) + share
            payers, parts, idle = list(merged), list(merged.values()), 0

    shares = tuple(map(Share._make, compress(zip(payers, parts, strict=True), parts)))
    return Attribution(interval, shares, Microjoules(idle), Microjoules(unattributed))


def _idle_shares(
    idle: int, usage: Usage, payers: list[Payer], weights: list[int], policy: IdlePolicy
) -> tuple[list[Payer], list[int]]:
    """Who pays how much of ``idle``; nobody when nobody is there."""
    if policy is IdlePolicy.EQUAL:
        everyone = list(dict.fromkeys([*payers, *sorted(usage.present - set(payers), key=repr)]))
        return everyone, split(idle, [1] * len(everyone)) if everyone else []
    return payers, split(idle, weights) if payers else []
