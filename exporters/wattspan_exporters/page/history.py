"""The last hour: energy of periods, and the power of every device, in bounded memory.

The newest snapshot is the base of the next period; before it there are a few periods of five
seconds, and before those periods of two minutes. Time is taken from the snapshots. A sleeping
host has no period and leaves a gap in the powers; a wall clock that is set changes labels only.
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
"""Length of a recorded period, and of one point of power."""

FINE_STEPS = 3
"""Number of the newest periods that are not merged."""

COARSE_STEP = 120 * SECOND
"""Length of a merged period."""

MAX_DURATION = 3600 * SECOND
"""Length of the history."""

SLOTS = MAX_DURATION // STEP
"""Points of power of one device."""

RECENT_DURATION = 10 * SECOND
"""Minimum length of the period that is shown as present."""


class RecentDeltas(NamedTuple):
    """The energy up to one snapshot: the present and the last hour; None while unknown."""

    now: SnapshotDelta | None = None
    hour: SnapshotDelta | None = None


class PageHistory:
    """Keeps at most an hour. Safe from any thread.

    ``record`` is called with the newest snapshot after each ``pause``, and acts at the end of a
    period.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: Snapshot | None = None
        self._fine: deque[SnapshotDelta] = deque()
        self._coarse: deque[SnapshotDelta] = deque()
        self._older: SnapshotDelta | None = None  # all coarse periods but the last
        self._powers = PowerHistory()

    def record(self, snapshot: Snapshot) -> None:
        """Record the energy since the last period, if it has ended."""
        if self.is_due(snapshot):
            with self._lock:
                self._write(snapshot)

    def is_due(self, snapshot: Snapshot) -> bool:
        """True if ``record`` would record ``snapshot``: a period has ended, or the first begins."""
        base = self._base
        return base is None or _slot(snapshot.at) != _slot(base.at) or self._begins_with(snapshot)

    def pause(self, snapshot: Snapshot) -> float:
        """Seconds from the newest ``snapshot`` to one that ``record`` records."""
        if not self._fine:
            return 1.0
        return (STEP - snapshot.at.since_boot % STEP) / SECOND + 1.0  # snapshots are that far apart

    def _begins_with(self, snapshot: Snapshot) -> bool:
        """True if no period is recorded and more devices have settled since the base.

        The time of the first energy of an account is unknown, so that energy is left out.
        """
        base = self._base
        return base is not None and not self._fine and _settled(base) < _settled(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        if not snapshot.domains:  # otherwise accounts would seem to begin later
            return
        if self._base is not None and not self._begins_with(snapshot):
            delta = delta_between(self._base, snapshot)
            if delta is None:
                self._forget()
            else:
                self._fine.append(limit_names(delta))
        self._base = snapshot
        self._powers.record(snapshot)
        self._shorten(snapshot.at.since_boot - MAX_DURATION)

    def _shorten(self, oldest: int) -> None:
        while len(self._fine) > FINE_STEPS:
            step = self._fine.popleft()
            if self._coarse and self._coarse[-1].duration < COARSE_STEP:
                step = merge_deltas((self._coarse.pop(), step))
            else:
                self._older = None
            self._coarse.append(limit_names(step))
        while self._coarse and self._coarse[0].start.since_boot < oldest:
            self._coarse.popleft()
            self._older = None

    def _forget(self) -> None:
        """Clear the history: the ledger was replaced."""
        self._fine.clear()
        self._coarse.clear()
        self._older = None
        self._powers = PowerHistory()

    def recent(self, snapshot: Snapshot) -> RecentDeltas:
        """The energy of the present and of the last hour, up to ``snapshot``."""
        with self._lock:
            if self._base is None:
                self._write(snapshot)
            if self._base is None:  # no domain is known yet
                return RecentDeltas()
            # Another thread may have recorded a newer snapshot meanwhile.
            newest = delta_between(
                self._base, max(snapshot, self._base, key=lambda one: one.at.mono)
            )
            if newest is None:
                return RecentDeltas()
            newest = limit_names(newest)
            last, length = [newest], newest.duration
            for delta in reversed(self._fine):
                if length >= RECENT_DURATION:
                    break
                last.append(delta)
                length += delta.duration
            if self._older is None and len(self._coarse) > 1:
                self._older = merge_deltas(islice(self._coarse, len(self._coarse) - 1))
            older = [] if self._older is None else [self._older]
            hour = merge_deltas((*older, *islice(reversed(self._coarse), 1), *self._fine, newest))
            return RecentDeltas(merge_deltas(reversed(last)), hour)

    def powers(self, most: int) -> tuple[int, int, dict[str, list[float | None]]]:
        """See ``PowerHistory.series``."""
        with self._lock:
            return self._powers.series(most)


def _slot(at: Instant) -> int:
    return at.since_boot // STEP


def _settled(snapshot: Snapshot) -> int:
    return sum(account.settled is not None for account in snapshot.cover)


class _PowerMark(NamedTuple):
    """The account of a device at the last computation of its power, and its time."""

    account: DomainAccount
    at: Instant


class PowerHistory:
    """Mean power of each device in each step, in milliwatts; one array of numbers a device."""

    def __init__(self) -> None:
        self._marks: dict[str, _PowerMark] = {}
        self._rings: dict[str, array[float]] = {}
        self._first: int | None = None
        self._next = 0  # the next slot to write

    def record(self, snapshot: Snapshot) -> None:
        """Compute the power of the steps that have ended by ``snapshot``."""
        at = _slot(snapshot.at)
        if self._first is None:
            self._first = self._next = at
        if at < self._next or at - self._next > SLOTS:
            self._rings.clear()
            self._marks.clear()
            self._first = self._next = at
        cover = {account.domain.id: account for account in snapshot.summed}
        for removed in self._rings.keys() - cover.keys():
            del self._rings[removed]
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
        """The mean power, nan if unknown, and the first step that it covers."""
        slot, old = _slot(at), self._marks.get(name)
        absent = account.settled is None or not account.present
        if absent or not account.domain.in_cover:
            self._marks.pop(name, None)
            return nan, slot
        if old is None:
            self._marks[name] = _PowerMark(account, at)
            return nan, slot
        passed, unknown = settled_time(old.account, account) or 0, gap_time(old.account, account)
        # Settled late, or a counter slower than the step: the next mean covers this step as well.
        if passed < SECOND or slot == _slot(old.at):
            return nan, slot
        self._marks[name] = _PowerMark(account, at)
        energy = account.counted - old.account.counted
        gaps = sum(account.gaps.values()) - sum(old.account.gaps.values())  # includes suspension
        if gaps < 0 or energy < 0 or 2 * gaps > passed + at.asleep - old.at.asleep:
            return nan, slot
        # After a suspension only the last step is known to have been awake.
        return 1e6 * energy / (passed - unknown), (
            _slot(old.at) if at.asleep == old.at.asleep else slot - 1
        )

    def series(self, most: int) -> tuple[int, int, dict[str, list[float | None]]]:
        """At most ``most`` points of each device, oldest first.

        Returns nanoseconds of a point, end of the last point in time since boot, and milliwatts by
        device. A point of a long history is the mean of several steps.
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
    """The mean of the known values, if they are at least half."""
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if 2 * len(known) > len(values) else None
