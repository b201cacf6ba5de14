"""Telling whether two zones show one and the same hardware counter.

Some processors have one energy counter for the package and let every die read it; the kernel
then shows a zone a die, and summing them counts everything twice or four times. Names do not
tell these from dies that have counters of their own. Values do: read in turns, a, b, a, b, a,
one counter gives one non-decreasing sequence, within the joule it can gain meanwhile. Two
counters of 262 kJ do so by chance about once in a hundred thousand hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from wattspan.sources.zones import Kind, Place, Zone

Pair = tuple[str, str]  # ids of two domains; the first stands for both

_SLACK = 1_000_000  # microjoules: some 3 ms at 350 W, far longer than the rounds take


def one_counter(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether samples taken in turns (first, second, first, second, ...) are of one counter.

    One undisturbed stretch a <= b <= a' is enough: a writer that is not atomic over both zones
    (an emulated host) may spoil one. A counter that still stands at zero proves nothing.
    """
    turns = [value for pair in zip(first, second, strict=False) for value in pair]
    return any(
        0 < low <= between <= high <= low + _SLACK
        for low, between, high in zip(turns, turns[1:], turns[2:], strict=False)
    )


def find_mirrors(zones: Iterable[tuple[str, Place, Zone]]) -> frozenset[Pair]:
    """The pairs among ``zones`` (domain id, place, zone) whose counters are one.

    Only what stands in different dies of one socket under the same name is compared: nothing
    else is ever built that way, and every comparison is a chance to be wrong.
    """
    ordered = sorted(
        (entry for entry in zones if entry[1].die is not None),
        key=lambda entry: (entry[1].socket, entry[1].die, entry[1].path),
    )
    return frozenset(
        (identity, other_identity)
        for (identity, place, zone), (other_identity, other_place, other) in combinations(
            ordered, 2
        )
        if _comparable(place, other_place) and one_counter(zone.samples, other.samples)
    )


def _comparable(one: Place, other: Place) -> bool:
    return (
        one.socket == other.socket
        and one.die != other.die
        and one.kind is other.kind
        and one.kind in {Kind.DIE, Kind.DRAM}
    )
