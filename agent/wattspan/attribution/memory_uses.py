"""The use of memory by each payer: its misses where performance counters count them.

CPU time is a proxy only: of two processes with equal CPU time, one may cause all traffic. The
stated error of a share by CPU time is therefore the whole, and so is that of a payer without
counts. A miss moves one line of the cache, but counters leave out prefetches and the lines that are
written back, so two misses cost between 1 : 3 and 3 : 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from functools import partial
from math import inf
from typing import cast

from wattspan.attribution.counted_uses import (
    EDGES,
    LEAST_COUNTED,
    CounterTime,
    Division,
    credible,
)
from wattspan.attribution.parts import possible_energies
from wattspan.model import Microjoules, Payer, Usage

MISS_SPREAD = 3.0
"""The largest ratio of the energies of two misses."""

FLOOR = 0.02
"""The part of the energy that is divided by CPU time beside misses, for traffic without them."""


class MemoryUses:
    """The uses of the memory of one socket."""

    def __init__(self) -> None:
        self.counters = CounterTime()

    def divided(self, usage: Usage) -> Division:
        """``usage`` by the misses of its payers, with the same sum; by CPU time without counters.

        A payer without counts has the mean misses of a CPU-second. Counts of less than the CPU
        time, as of multiplexed counters, stand for the whole.
        """
        spent = usage.spent
        misses = {
            payer: one.misses * max(1.0, used / (one.time + EDGES))
            for payer, one in (usage.counts or {}).items()
            if (used := spent.get(payer, 0)) > 0 and credible(used, one)
        }
        known, whole = sum(map(spent.__getitem__, misses)), sum(misses.values())
        counted = whole > 0 and known >= LEAST_COUNTED * sum(spent.values())
        self.counters.pass_by(usage, counted=counted)
        if not counted:
            return Division(usage, 0, _unknown)
        scale = (1 - FLOOR) * known / whole
        divided = {
            payer: round(FLOOR * used + scale * misses[payer]) if payer in misses else used
            for payer, used in spent.items()
        }
        return Division(replace(usage, spent=divided), 0, partial(_doubts, misses.keys()))


def _unknown(active: int, shares: Iterable[tuple[Payer, int]]) -> list[Microjoules]:
    """The errors without counts, as `_doubts` finds them; each tick has many."""
    errors = [
        energy if 2 * energy > active else active - energy if energy else 0 for _, energy in shares
    ]
    if active in errors:  # of a sole user
        errors = [0] * len(errors)
    return cast("list[Microjoules]", errors)


def _doubts(
    counted: Set[Payer], active: int, shares: Iterable[tuple[Payer, int]]
) -> list[Microjoules]:
    """The largest possible errors of ``shares`` of ``active`` microjoules."""
    found = []
    for payer, energy in shares:
        spread = MISS_SPREAD if payer in counted else inf
        least, most = possible_energies(energy, active, spread)
        found.append(Microjoules(max(energy - least, most - energy)))
    return found
