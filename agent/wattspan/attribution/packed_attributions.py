"""The recent attributions of all domains as bytes, bounded in time and size.

An entry is packed into one byte string (a tenth of a kilobyte and 8 bytes a share), because a busy
host produces thousands of shares a second and every domain ten entries. Entries that are removed
for want of room are counted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from struct import Struct
from typing import NamedTuple

from wattspan.model import Attribution, Instant, Interval, Microjoules, Payer


class HistoryEntry(NamedTuple):
    """One settled interval: ``shares`` alternates payer number and microjoules.

    ``doubts`` are the largest possible errors of the shares, in their order; empty where the
    division is no assumption.
    """

    interval: Interval
    idle: Microjoules
    unattributed: Microjoules
    shares: array[int]
    withheld: Microjoules = Microjoules(0)
    doubts: Sequence[int] = ()


class GroupStep(NamedTuple):
    """A settled counter step of a device, and the microjoules of each of some groups of processes.

    ``doubts`` are the half-widths of these, by the idle power and by the division: where its error
    is unknown, as by shares of SM time, all that others have. ``idles`` are parts of idle energy
    in proportion to the energies; what has no user is no group's. ``withheld``: a part of the
    energies is unknown, because the idle power is.
    """

    start: int
    end: int
    energies: Sequence[int]
    doubts: Sequence[float]
    idles: Sequence[int]
    withheld: bool = False


_HEAD = Struct("<10qiB")
"""Start and end (three clocks each), energy, idle, unattributed, withheld; age of the readings in
nanoseconds, -1 without one; _WIDE, _DOUBTFUL.
"""
_MAX_STALE = (1 << 31) - 1

_WIDE = 1  # shares and doubts of 8 bytes
_DOUBTFUL = 2  # a doubt for each share follows the shares

_TIMES = Struct("<q16xq")
"""The monotonic clock at the start and the end of an entry."""

# The constructors of named tuples take twice as long.
_instant = partial(tuple.__new__, Instant)
_interval = partial(tuple.__new__, Interval)
_entry = partial(tuple.__new__, HistoryEntry)

_OBJECT_BYTES = 41  # of a byte string and its place in a deque
_PAYER_BYTES = 240  # of a payer and its number, measured


def _pack(attribution: Attribution, shares: list[int]) -> bytes:
    _, start, end, energy, stale = attribution.interval
    age = -1 if stale is None or stale > _MAX_STALE else stale
    doubts = attribution.doubts
    wide = max(max(shares, default=0), max(doubts, default=0)) >> 32 > 0
    rest = attribution.idle, attribution.unattributed, attribution.withheld
    flags = _WIDE * wide | _DOUBTFUL * bool(doubts)
    head = _HEAD.pack(*start, *end, energy, *rest, age, flags)
    return head + array("q" if wide else "I", [*shares, *doubts]).tobytes()


def unpack_entry(domain_id: str, packed: bytes) -> HistoryEntry:
    """The entry of ``domain_id`` that was packed."""
    begun, began_at, asleep, ended, ended_at, slept, energy, *rest, flags = _HEAD.unpack_from(
        packed
    )
    start, end = _instant((begun, began_at, asleep)), _instant((ended, ended_at, slept))
    idle, unattributed, withheld, stale = rest
    interval = _interval((domain_id, start, end, energy, None if stale < 0 else stale))
    shares = array("q" if flags & _WIDE else "I", packed[_HEAD.size :])
    doubts: Sequence[int] = ()
    if flags & _DOUBTFUL:
        count = len(shares) // 3
        shares, doubts = shares[: 2 * count], shares[2 * count :]
    return _entry((interval, idle, unattributed, shares, withheld, doubts))


def _place(packed: bytes, number: int) -> int | None:
    """The place of a payer's share in a packed entry; None without one."""
    flags = packed[_HEAD.size - 1]
    word = array("q" if flags & _WIDE else "I", (number,))
    size = word.itemsize
    count = (len(packed) - _HEAD.size) // size
    count = count // 3 * 2 if flags & _DOUBTFUL else count
    sought, stop, at = word.tobytes(), _HEAD.size + count * size, _HEAD.size
    while (at := packed.find(sought, at, stop)) >= 0:
        place, within = divmod(at - _HEAD.size, 2 * size)
        if not within:
            return place
        at = _HEAD.size + (place + 1) * 2 * size
    return None


def _begin(packed: bytes) -> int:
    return int(_TIMES.unpack_from(packed)[0])


def _end(packed: bytes) -> int:
    return int(_TIMES.unpack_from(packed)[1])


def _entry_bytes(packed: bytes) -> int:
    return _OBJECT_BYTES + len(packed)


class PackedAttributions:
    """The last attributions of each domain, within ``span`` nanoseconds and ``limit`` bytes."""

    def __init__(self, span: int, limit: int) -> None:
        self._span = span
        self._limit = limit
        self._entries: dict[str, deque[bytes]] = {}
        self._numbers: dict[Payer, int] = {}
        # By number; the numbers of payers without an entry are used again.
        self._payers: list[Payer] = []
        self._uses = array("L")
        self._unused: list[int] = []
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    @property
    def size(self) -> int:
        """The approximate memory in bytes."""
        return self._bytes + _PAYER_BYTES * len(self._numbers)

    def watermark(self, domain_id: str) -> Instant | None:
        """The time up to which the domain is settled; None without an entry."""
        entries = self._entries.get(domain_id)
        return unpack_entry(domain_id, entries[-1]).interval.end if entries else None

    def begin(self, domain_id: str) -> int | None:
        """The monotonic time from which the domain is known; None without an entry."""
        entries = self._entries.get(domain_id)
        return _begin(entries[0]) if entries else None

    def add(self, attribution: Attribution) -> None:
        """Append the next settled interval of its domain; remove entries beyond the bounds."""
        shares: list[int] = []
        for payer, energy in attribution.shares:
            shares += (self._number(payer), energy)
        packed = _pack(attribution, shares)
        interval = attribution.interval
        self._entries.setdefault(interval.domain_id, deque()).append(packed)
        self._bytes += _entry_bytes(packed)
        self._trim(interval.end.mono)

    def entries(self, domain_id: str, start: int, end: int) -> list[HistoryEntry]:
        """The entries that overlap the monotonic period, in order of time."""
        return [unpack_entry(domain_id, packed) for packed in self.packed(domain_id, start, end)]

    def packed(self, domain_id: str, start: int, end: int) -> list[bytes]:
        """These entries for ``unpack_entry``, which takes twenty times as long.

        They are searched by halves: a lock is held, and the history has thousands.
        """
        entries = self._entries.get(domain_id, ())
        first = bisect_right(entries, start, key=_end)
        last = bisect_left(entries, end, first, key=_begin)
        return [entries[i] for i in range(first, last)]

    def shares(
        self, payers: Iterable[Payer], domain_id: str, start: int, end: int
    ) -> list[tuple[int, int, int]]:
        """The shares of some payers together: end of the entry, microjoules, doubt.

        Entries of the period without a share of theirs are left out, at a fraction of their cost.
        """
        numbers = self.numbers(payers)
        found: list[tuple[int, int, int]] = []
        for packed in self.packed(domain_id, start, end) if numbers else ():
            places = [at for number in numbers if (at := _place(packed, number)) is not None]
            if places:
                entry = unpack_entry(domain_id, packed)
                energy = sum(entry.shares[2 * at + 1] for at in places)
                doubt = sum(entry.doubts[at] for at in places) if entry.doubts else 0
                found.append((entry.interval.end.mono, energy, doubt))
        return found

    def numbers(self, payers: Iterable[Payer]) -> set[int]:
        """The numbers of these payers in present entries; payers without an entry have none."""
        return {number for one in payers if (number := self._numbers.get(one)) is not None}

    def payer(self, number: int) -> Payer:
        """The payer with a number of present entries."""
        return self._payers[number]

    def _number(self, payer: Payer) -> int:
        number = self._numbers.get(payer)
        if number is None:
            number = self._numbers[payer] = self._new_number(payer)
        self._uses[number] += 1
        return number

    def _new_number(self, payer: Payer) -> int:
        if self._unused:
            number = self._unused.pop()
            self._payers[number] = payer
            return number
        self._payers.append(payer)
        self._uses.append(0)
        return len(self._payers) - 1

    def _trim(self, now: int) -> None:
        oldest = now - self._span
        for entries in self._entries.values():
            while entries and _end(entries[0]) < oldest:
                self._release(entries.popleft())
        while self.size > self._limit:
            first = min(
                (entries for entries in self._entries.values() if len(entries) > 1),
                key=lambda entries: _end(entries[0]),
                default=None,
            )
            if first is None:
                return
            self._release(first.popleft())
            self.dropped += 1

    def _release(self, packed: bytes) -> None:
        self._bytes -= _entry_bytes(packed)
        for number in unpack_entry("", packed).shares[::2]:
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._numbers[self._payers[number]]
                self._unused.append(number)


_FEW = 4  # for fewer payers, a search for each is faster


def share_of(entry: HistoryEntry, numbers: set[int]) -> int:
    """The sum of some payers' shares; each payer has at most one."""
    payers, energies = entry.shares[::2], entry.shares[1::2]
    if len(numbers) > _FEW:
        return sum(energy for one, energy in zip(payers, energies, strict=True) if one in numbers)
    return sum(energies[payers.index(one)] for one in numbers.intersection(payers))


def doubt_of(entry: HistoryEntry, numbers: set[int]) -> int:
    """The sum of the largest possible errors of some payers' shares."""
    pairs = zip(entry.shares[::2], entry.doubts, strict=True)
    return sum(doubt for one, doubt in pairs if one in numbers)


def share_error(own: int, divided: int, doubt: int, idle: float) -> float:
    """The half-width of a share ``own`` of ``divided`` energy; ``idle`` is that of idle energy.

    Too much or too little idle energy is an error of the payers by their shares. ``doubt`` is the
    error where the division is an assumption; the energy of all others is the rest, so the error is
    never larger than that in one direction and ``own`` in the other.
    """
    found = idle * own / max(1, divided)
    return found + min(doubt, max(own, divided - own)) if doubt and own < divided else found


def group_step(entry: HistoryEntry, groups: Sequence[set[int]], error: float) -> GroupStep:
    """The energy of some groups of payers; ``error`` is the idle power's, in milliwatts."""
    (_, start, end, energy, _), idle = entry.interval, error * entry.interval.duration / 1e6
    divided = energy - entry.idle - entry.withheld
    energies = [share_of(entry, numbers) for numbers in groups]
    doubts = [divided - own for own in energies]
    if entry.doubts:
        doubts = [doubt_of(entry, numbers) for numbers in groups]
    pairs = zip(energies, doubts, strict=True)
    errors = [share_error(own, divided, doubt, idle) if own else 0.0 for own, doubt in pairs]
    idles = [entry.idle * own // divided if divided else 0 for own in energies]
    return GroupStep(start.mono, end.mono, energies, errors, idles, entry.withheld > 0)
