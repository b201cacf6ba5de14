"""The recent attributions of all domains, bounded in time and bytes.

Shares are kept as flat arrays of integers (16 bytes a share), because a busy host produces
thousands of shares a second. Entries that are removed for want of room are counted.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from wattspan.model import Attribution, Instant, Interval, Microjoules, Payer


class HistoryEntry(NamedTuple):
    """One settled interval: ``shares`` alternates payer number and microjoules."""

    interval: Interval
    idle: Microjoules
    unattributed: Microjoules
    shares: array[int]
    withheld: Microjoules = Microjoules(0)


_ENTRY_BYTES = 600  # an entry, its Interval and its two Instants, measured by sys.getsizeof
_PAYER_BYTES = 250


class AttributionHistory:
    """The last attributions of each domain, within ``span`` nanoseconds and ``limit`` bytes."""

    def __init__(self, span: int, limit: int) -> None:
        self._span = span
        self._limit = limit
        self._entries: dict[str, deque[HistoryEntry]] = {}
        self._numbers: dict[Payer, int] = {}
        self._payers: dict[int, Payer] = {}
        self._uses: dict[int, int] = {}
        self._next = 0
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    @property
    def size(self) -> int:
        """The approximate memory in bytes."""
        return self._bytes + _PAYER_BYTES * len(self._payers)

    def watermark(self, domain_id: str) -> Instant | None:
        """The time up to which the domain is settled; None without an entry."""
        entries = self._entries.get(domain_id)
        return entries[-1].interval.end if entries else None

    def add(self, attribution: Attribution) -> None:
        """Append the next settled interval of its domain; remove entries beyond the bounds."""
        shares = array("q")
        for payer, energy in attribution.shares:
            shares.append(self._number(payer))
            shares.append(energy)
        interval = attribution.interval
        entry = HistoryEntry(
            interval, attribution.idle, attribution.unattributed, shares, attribution.withheld
        )
        self._entries.setdefault(interval.domain_id, deque()).append(entry)
        self._bytes += _ENTRY_BYTES + 8 * len(shares)
        self._trim(interval.end.mono)

    def entries(self, domain_id: str, start: int, end: int) -> list[HistoryEntry]:
        """The entries that overlap the monotonic period, in order of time."""
        found: list[HistoryEntry] = []
        for entry in reversed(self._entries.get(domain_id, ())):
            if entry.interval.end.mono <= start:
                break
            if entry.interval.start.mono < end:
                found.append(entry)
        found.reverse()
        return found

    def numbers(self, payers: Iterable[Payer]) -> set[int]:
        """The numbers of these payers in entries; payers without an entry have none."""
        return {number for one in payers if (number := self._numbers.get(one)) is not None}

    def _number(self, payer: Payer) -> int:
        number = self._numbers.get(payer)
        if number is None:
            number = self._numbers[payer] = self._next
            self._payers[number] = payer
            self._uses[number] = 0
            self._next += 1
        self._uses[number] += 1
        return number

    def _trim(self, now: int) -> None:
        for entries in self._entries.values():
            while entries and now - entries[0].interval.end.mono > self._span:
                self._release(entries.popleft())
        while self.size > self._limit:
            oldest = min(
                (entries for entries in self._entries.values() if len(entries) > 1),
                key=lambda entries: entries[0].interval.start.mono,
                default=None,
            )
            if oldest is None:
                return
            self._release(oldest.popleft())
            self.dropped += 1

    def _release(self, entry: HistoryEntry) -> None:
        self._bytes -= _ENTRY_BYTES + 8 * len(entry.shares)
        for number in entry.shares[::2]:
            self._uses[number] -= 1
            if not self._uses[number]:
                payer = self._payers.pop(number)
                del self._uses[number], self._numbers[payer]
