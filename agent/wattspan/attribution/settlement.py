"""From an interval and what was done in it to exact shares.

Nothing is rounded away: every division is by largest remainder in integer microjoules, and the
account *unattributed* holds what nobody can be shown to have spent.

Intervals wait until it is known what was done in them.

Energy comes at once; GPU utilisation comes up to a second later. An interval is *due* when the
usage of its domain's resource reaches past its end, or when it has waited long enough. Usage
that comes after that is counted as late and charged to nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from wattspan.model import (
    Attribution,
    IdlePolicy,
    Instant,
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


class SettledInterval(NamedTuple):
    """An interval, the usage made in it, and for how many of its nanoseconds that is known."""

    interval: Interval
    usage: Usage | None
    covered: int


class Settlement:
    """The intervals of all domains and the usage of all resources, until they meet."""

    def __init__(self, patience: int, keep: int) -> None:
        """Both in nanoseconds: an interval waits ``patience`` for usage after its end.

        Usage is kept ``keep`` after *its* end, for intervals that took long to measure.
        """
        self._patience = patience
        self._keep = keep
        self._waiting: dict[str, deque[Interval]] = {}
        self._resource: dict[str, str] = {}
        self._usages: dict[str, deque[Usage]] = {}
        self._settled: dict[str, int] = {}  # resource -> latest end settled without full usage
        self.late = 0

    def pending(self, domain_id: str) -> int:
        """The microjoules of ``domain_id`` that wait."""
        return sum(interval.energy for interval in self._waiting.get(domain_id, ()))

    def await_usage(self, interval: Interval, resource: str) -> None:
        """Put an interval in the queue; those of one domain come in order of time."""
        self._waiting.setdefault(interval.domain_id, deque()).append(interval)
        self._resource[interval.domain_id] = resource

    def use(self, usage: Usage) -> None:
        """Take what was done with a resource; usages of one resource come in order of time."""
        if usage.end.mono <= usage.start.mono:
            return
        if usage.end.mono <= self._settled.get(usage.resource, -1):
            self.late += 1
            return
        self._usages.setdefault(usage.resource, deque()).append(usage)

    def due(self, now: Instant) -> list[SettledInterval]:
        """Take out every interval that can be settled now, in order of time for each domain."""
        ready: list[SettledInterval] = []
        for domain_id, queue in self._waiting.items():
            resource = self._resource[domain_id]
            usages = self._usages.get(resource, ())
            known_to = usages[-1].end.mono if usages else -1
            while queue:
                interval = queue[0]
                end = interval.end.mono
                if known_to < end and now.mono - end < self._patience:
                    break
                queue.popleft()
                settled = _usage_inside(interval, usages)
                if known_to < end:
                    self._settled[resource] = max(end, self._settled.get(resource, -1))
                ready.append(settled)
        self._forget(now.mono - self._keep)
        return ready

    def _forget(self, before: int) -> None:
        for usages in self._usages.values():
            while usages and usages[0].end.mono < before:
                usages.popleft()


def _usage_inside(interval: Interval, usages: deque[Usage] | tuple[()]) -> SettledInterval:
    """The usage inside an interval: each record counts by the part of it that lies inside."""
    start, end = interval.start.mono, interval.end.mono
    inside: list[tuple[Usage, int]] = []
    for usage in reversed(usages):
        if usage.end.mono <= start:
            break
        overlap = min(end, usage.end.mono) - max(start, usage.start.mono)
        if overlap > 0:
            inside.append((usage, overlap))
    if not inside:
        return SettledInterval(interval, None, 0)
    if len(inside) == 1:
        return SettledInterval(interval, *inside[0])
    inside.reverse()
    return SettledInterval(interval, _merge(inside), sum(overlap for _, overlap in inside))


def _merge(inside: list[tuple[Usage, int]]) -> Usage:
    spent: dict[Payer, int] = {}
    unclaimed = capacity = 0
    present: frozenset[Payer] = frozenset()
    bounded = True
    for usage, overlap in inside:
        whole = usage.end.mono - usage.start.mono
        for payer, amount in usage.spent.items():
            spent[payer] = spent.get(payer, 0) + amount * overlap // whole
        unclaimed += usage.unclaimed * overlap // whole
        if usage.capacity is None:
            bounded = False
        else:
            capacity += usage.capacity * overlap // whole
        present |= usage.present
    first, last = inside[0][0], inside[-1][0]
    # The merged record stands for the overlaps alone: its length is theirs.
    length = sum(overlap for _, overlap in inside)
    start = first.start._replace(mono=last.end.mono - length)
    return Usage(
        first.resource, start, last.end, spent, unclaimed, capacity if bounded else None, present
    )
