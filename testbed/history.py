"""Queries of an attribution history for tests."""

from __future__ import annotations

from wattspan.attribution.packed_attributions import HistoryEntry, PackedAttributions
from wattspan.model import Payer


def shares(history: PackedAttributions, entry: HistoryEntry) -> dict[Payer, int]:
    """The shares of an entry, by payer."""
    numbers = iter(entry.shares)
    return {history.payer(number): energy for number, energy in zip(numbers, numbers, strict=True)}


def spent(history: PackedAttributions, domain_id: str, payer: Payer, start: int, end: int) -> int:
    """The energy of a payer in a period; entries at the edges count by their overlap."""
    total = 0
    for entry in history.entries(domain_id, start, end):
        interval = entry.interval
        overlap = min(end, interval.end.mono) - max(start, interval.start.mono)
        total += shares(history, entry).get(payer, 0) * overlap // interval.duration
    return total
