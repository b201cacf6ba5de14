"""The recent past of the ledger, for everything that asks about a stretch of time.

Settled attributions of one domain follow each other in time. They are kept as flat arrays of
integers (16 bytes a share), because a busy host makes thousands of shares a second, and they are
bounded both in time and in bytes: what falls out is counted.
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


_ENTRY_BYTES = 600  # an Entry, its Interval and its two Instants, measured by sys.getsizeof
_PAYER_BYTES = 250


class AttributionHistory:
    """The last attributions of every domain, within ``span`` nanoseconds and ``limit`` bytes."""

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
        """About how many bytes are held."""
        return self._bytes + _PAYER_BYTES * len(self._payers)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def watermark(self, domain_id: str) -> Instant | None:
        """The domain is settled up to here; None if nothing of it is."""
        entries = self._entries.get(domain_id)
        return entries[-1].interval.end if entries else None

    def horizon(self, domain_id: str) -> Instant | None:
        """Nothing before this is remembered of the domain."""
        entries = self._entries.get(domain_id)
        return entries[0].interval.start if entries else None

    def add(self, attribution: Attribution) -> None:
        """Append the domain's next settled interval and let the oldest go."""
        shares = array("q")
        for payer, energy in attribution.shares:
            shares.append(self._number(payer))
            shares.append(energy)
        interval = attribution.interval
        entry = HistoryEntry(interval, attribution.idle, attribution.unattributed, shares)
        self._entries.setdefault(interval.domain_id, deque()).append(entry)
        self._bytes += _ENTRY_BYTES + 8 * len(shares)
        self._trim(interval.end.mono)

    def entries(self, domain_id: str, start: int, end: int) -> list[HistoryEntry]:
        """The entries that overlap the monotonic window, in order of time."""
        found: list[HistoryEntry] = []
        for entry in reversed(self._entries.get(domain_id, ())):
            if entry.interval.end.mono <= start:
                break
            if entry.interval.start.mono < end:
                found.append(entry)
        found.reverse()
        return found

    def spent(self, domain_id: str, payer: Payer, start: int, end: int) -> Microjoules:
        """What ``payer`` spent of the domain in a window, entries at the edges counted in part.

        Rounded down at each edge, so that windows side by side never exceed the whole.
        """
        number = self._numbers.get(payer)
        total = 0
        for interval, _, _, shares in self.entries(domain_id, start, end):
            inside = min(end, interval.end.mono) - max(start, interval.start.mono)
            for i in range(0, len(shares), 2):
                if shares[i] == number:
                    total += shares[i + 1] * inside // interval.duration
        return Microjoules(total)

    def payers(self, entry: HistoryEntry) -> list[tuple[Payer, Microjoules]]:
        """An entry's shares by name."""
        shares = entry.shares
        return [
            (self._payers[shares[i]], Microjoules(shares[i + 1])) for i in range(0, len(shares), 2)
        ]

    def numbers(self, payers: Iterable[Payer]) -> set[int]:
        """The numbers by which entries know these payers; the unknown have none."""
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
