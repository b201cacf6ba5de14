"""The last hour, kept small: what was spent in each stretch of it, and every device's power.

One snapshot is kept, from which the next stretch is reckoned; behind it a few stretches of five
seconds, and behind those stretches of two minutes. Nobody's clock is asked: time is what snapshots
say. A host asleep spends no stretch and leaves a hole in the powers; a wall clock that is set
changes only how moments are labelled.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from itertools import islice
from math import isnan, nan
from typing import NamedTuple

from wattspan.model import SECOND, DomainAccount, Instant, Snapshot
from wattspan_exporters.page.snapshot_delta import (
    SnapshotDelta,
    delta_between,
    gap_time,
    limit_names,
    merge_deltas,
    settled_time,
)

STEP = 5 * SECOND
"""How often what was spent is written down, and the width of one figure of power."""

FINE_STEPS = 3
"""Steps that are kept by themselves, the newest."""

COARSE_STEP = 120 * SECOND
"""Older ones are kept together, in stretches of as much."""

MAX_DURATION = 3600 * SECOND
"""Nothing older is remembered."""

SLOTS = MAX_DURATION // STEP
"""Figures of power of one device."""

RECENT_DURATION = 10 * SECOND
"""The present is what was spent in at least this time, as far as there is as much."""


def time_since_boot(at: Instant) -> int:
    """Time since boot, asleep or not."""
    return at.mono + at.asleep


class RecentDeltas(NamedTuple):
    """What was spent up to one snapshot; None while nothing is known."""

    now: SnapshotDelta | None = None
    hour: SnapshotDelta | None = None


class PageHistory:
    """Remembers at most an hour. Safe from any thread.

    ``look`` is to be called often, with the newest snapshot: it does nothing most of the time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: Snapshot | None = None
        self._fine: deque[SnapshotDelta] = deque()
        self._coarse: deque[SnapshotDelta] = deque()
        self._older: SnapshotDelta | None = None  # all coarse ones but the last
        self._powers = PowerHistory()

    def look(self, snapshot: Snapshot) -> None:
        """Write down what was spent, if it is time."""
        base = self._base
        if (
            base is not None
            and _slot(snapshot.at) == _slot(base.at)
            and not self._begins_with(snapshot)
        ):
            return
        with self._lock:
            self._write(snapshot)

    def _begins_with(self, snapshot: Snapshot) -> bool:
        """Whether nothing is written down yet, and more devices have settled since the base.

        The first energy that an account brings is of no known time: it is better left out.
        """
        base = self._base
        return base is not None and not self._fine and _settled(base) < _settled(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        if not snapshot.domains:  # nothing is known yet: an account would seem to begin later
            return
        if self._base is not None and not self._begins_with(snapshot):
            stretch = delta_between(self._base, snapshot)
            if stretch is None:
                self._forget()
            else:
                self._fine.append(limit_names(stretch))
        self._base = snapshot
        self._powers.take(snapshot)
        self._shorten(time_since_boot(snapshot.at) - MAX_DURATION)

    def _shorten(self, oldest: int) -> None:
        while len(self._fine) > FINE_STEPS:
            step = self._fine.popleft()
            if self._coarse and self._coarse[-1].duration < COARSE_STEP:
                step = merge_deltas((self._coarse.pop(), step))
            else:
                self._older = None
            self._coarse.append(limit_names(step))
        while self._coarse and time_since_boot(self._coarse[0].start) < oldest:
            self._coarse.popleft()
            self._older = None

    def _forget(self) -> None:
        """The books are not those that were remembered."""
        self._fine.clear()
        self._coarse.clear()
        self._older = None
        self._powers = PowerHistory()

    def recent(self, snapshot: Snapshot) -> RecentDeltas:
        """What was spent of late, up to ``snapshot``."""
        with self._lock:
            if self._base is None:
                self._write(snapshot)
            if self._base is None:  # still nothing is known
                return RecentDeltas()
            # Another thread may have looked at a newer one meanwhile.
            newest = delta_between(
                self._base, max(snapshot, self._base, key=lambda one: one.at.mono)
            )
            if newest is None:
                return RecentDeltas()
            newest = limit_names(newest)
            last, length = [newest], newest.duration
            for stretch in reversed(self._fine):
                if length >= RECENT_DURATION:
                    break
                last.append(stretch)
                length += stretch.duration
            if self._older is None and len(self._coarse) > 1:
                self._older = merge_deltas(islice(self._coarse, len(self._coarse) - 1))
            older = [] if self._older is None else [self._older]
            hour = merge_deltas((*older, *islice(reversed(self._coarse), 1), *self._fine, newest))
            return RecentDeltas(merge_deltas(reversed(last)), hour)

    def powers(self, most: int) -> tuple[int, int, dict[str, list[float | None]]]:
        """See :meth:`Powers.shown`."""
        with self._lock:
            return self._powers.shown(most)


def _slot(at: Instant) -> int:
    return time_since_boot(at) // STEP


def _settled(snapshot: Snapshot) -> int:
    return sum(account.settled is not None for account in snapshot.cover)


class _PowerMark(NamedTuple):
    """A device's account when its power was last reckoned, and when that was."""

    account: DomainAccount
    at: Instant


class PowerHistory:
    """Mean power of each device in each step, in milliwatts; one array of numbers a device."""

    def __init__(self) -> None:
        self._marks: dict[str, _PowerMark] = {}
        self._rings: dict[str, array[float]] = {}
        self._first: int | None = None
        self._next = 0  # the slot that is written next

    def take(self, snapshot: Snapshot) -> None:
        """Reckon the powers of the steps that have ended by ``snapshot``."""
        at = _slot(snapshot.at)
        if self._first is None:
            self._first = self._next = at
        if at < self._next or at - self._next > SLOTS:
            self._rings.clear()
            self._marks.clear()
            self._first = self._next = at
        cover = {account.domain.id: account for account in snapshot.cover}
        for gone in self._rings.keys() - cover.keys():
            del self._rings[gone]
        for name, account in cover.items():
            ring = self._rings.get(name)
            if ring is None:
                ring = self._rings[name] = array("f", [nan]) * SLOTS
            for slot in range(self._next, at):
                ring[slot % SLOTS] = nan
            power, since = self._power(name, account, snapshot.at)
            for slot in range(max(since, at - SLOTS), at):
                ring[slot % SLOTS] = power
        self._next = at

    def _power(self, name: str, account: DomainAccount, at: Instant) -> tuple[float, int]:
        """A mean, nan if it is not known, and the first step that it is the mean of."""
        slot, old = _slot(at), self._marks.get(name)
        if account.settled is None or not account.present:
            self._marks.pop(name, None)
            return nan, slot
        if old is None:
            self._marks[name] = _PowerMark(account, at)
            return nan, slot
        passed, unknown = settled_time(old.account, account) or 0, gap_time(old.account, account)
        # What is settled late, or moves slower than the step: the next mean is that of this step
        # as well.
        if passed < SECOND or slot == _slot(old.at):
            return nan, slot
        self._marks[name] = _PowerMark(account, at)
        energy = account.energy - old.account.energy
        gaps = sum(account.gaps.values()) - sum(old.account.gaps.values())  # asleep as well
        if gaps < 0 or energy < 0 or 2 * gaps > passed + at.asleep - old.at.asleep:
            return nan, slot
        # Where the host slept, which of the steps it was awake in is known of the last only.
        return 1e6 * energy / (passed - unknown), (
            _slot(old.at) if at.asleep == old.at.asleep else slot - 1
        )

    def shown(self, most: int) -> tuple[int, int, dict[str, list[float | None]]]:
        """At most ``most`` figures of each device, oldest first.

        First how many nanoseconds each is the mean of, then when the last of them ends, in time
        since boot; where there are many, several steps are one figure, always the same ones.
        """
        if self._first is None:
            return STEP, 0, {}
        first = max(self._first, self._next - SLOTS)
        width = max(1, -(-(self._next - first) // most))
        begin, end = -(-first // width), self._next // width
        series = {
            name: [
                _mean([ring[slot % SLOTS] for slot in range(n * width, (n + 1) * width)])
                for n in range(begin, end)
            ]
            for name, ring in self._rings.items()
        }
        return width * STEP, end * width * STEP, series


def _mean(values: list[float]) -> float | None:
    """The mean of what is known, if that is at least half."""
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if 2 * len(known) > len(values) else None
