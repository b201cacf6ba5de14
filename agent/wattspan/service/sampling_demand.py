"""The sampling interval: fine while a consumer of the figures needs it, coarse at rest; its ticks.

Ten samples a second cost several times as much as one, and the energy by device is the same. Only
the energy of a short period depends on them: of a span, a window, a step that the tuner compares,
or a sample of the idle power while it is learned. Each of these consumers asks for the fine
interval, for a time that it renews. The poller reads the interval at each tick, and a consumer that
comes while the agent rests wakes it at once.

A consumer that is a process keeps the fine interval only while it lives. The poller looks for one
that does, ends the others on its way, and begins the next check behind it: a check costs one lookup
and one for each that has ended, and no process that has ended keeps its place behind a living one.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND, Consumer, TickCounts
from wattspan.ports import Clock
from wattspan.sharing.fair_pool import FairCache, FairPool, Overflow, share_path
from wattspan.sharing.pools import PoolName, Pools

REST, FINE = SECOND, 100 * MILLISECOND
"""The intervals of ``[agent] interval = "auto"``."""

START = 10 * SECOND
"""The fine interval holds for this long after the start of the agent: first figures come soon."""

ASKED_FOR = 2 * SECOND + SECOND // 2
"""A part of the agent that asks for fine samples once a second or more often does so for this."""

QUERY_TIME = 3 * SECOND
"""A query for a period that has just ended waits for one or two readings after it."""

WINDOW_EXPIRY = 900 * SECOND
"""A process that has registered for windows is expected to open more of them for this long; the
SDK registers it anew every five minutes."""

SPAN_EXPIRY, MAX_SPAN_EXPIRY = 15 * SECOND, 600 * SECOND
"""More spans of a process are expected within three of its learned periods, between these."""

_CHECK_EVERY = SECOND
_CHECKED_AT_ONCE = 64  # processes that are looked up in one check, at most


class Reason(StrEnum):
    """The kind of a consumer: a label of a metric."""

    START = "start"  # the first seconds of the agent
    IDLE_POWER = "idle_power"  # that is still learned
    INTEGRATION = "integration"  # of a device whose energy is the integral of its power
    QUERY = "query"  # for a period that has just ended
    SIDE_CHANNEL = "side_channel"  # connected processes
    SPANS = "spans"  # sent by a process, within its learned period
    TUNING = "tuning"  # a job whose settings are compared
    WINDOWS = "windows"  # of a process that has registered


class Intervals(NamedTuple):
    """The two intervals in nanoseconds; equal if the interval is fixed."""

    rest: int = REST
    fine: int = FINE


@dataclass(slots=True)
class _Registered:
    """A process: the time of its last registration, and the time until which that holds."""

    owner: Hashable
    seen: int
    until: int
    gap: int = 0  # between its registrations, decaying by an eighth of the time


Registration = tuple[Reason, Consumer]


class SamplingDemand:
    """The consumers of fine samples. Thread-safe, except ``interval`` and ``sleep_until``.

    These two are for the poller's thread. ``ended`` tells whether a process has ended.
    """

    def __init__(
        self,
        clock: Clock,
        intervals: Intervals,
        ended: Callable[[Consumer], bool] = lambda _: False,
        pools: Pools | None = None,
    ) -> None:
        self._clock, self._ended = clock, ended
        self.intervals = intervals
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._holds: dict[Reason, int] = {}
        self._pool: FairPool[Registration] = (pools or Pools()).make(PoolName.SAMPLING)
        self._registered: dict[Registration, _Registered] = {}
        # Expired ones, whose gap is still to learn; they take no place of those that hold.
        self._quiet = FairPool[Registration](self._pool.limit, Overflow.REPLACE, MAX_SPAN_EXPIRY)
        self._paused: FairCache[Registration, _Registered] = FairCache(self._quiet)
        self._next_check = self._fine_until = 0
        self.hold(Reason.START, START)

    # ------------------------------------------------------------------------------ any thread

    def hold(self, reason: Reason, duration: int) -> None:
        """Sample finely for at least ``duration`` nanoseconds from now on."""
        now = self._clock.monotonic()
        with self._lock:
            self._holds[reason] = max(self._holds.get(reason, 0), now + duration)
            resting = now >= self._fine_until
        if resting:
            self._woken.set()

    def register(self, reason: Reason, process: Consumer, owner: Hashable) -> None:
        """Sample finely while ``process`` lives and its registration holds.

        ``owner`` has a share of the places for all its processes: a new one displaces the longest
        unseen. A registration for spans holds as long as more are expected by the times of the
        earlier ones.
        """
        now, key = self._clock.monotonic(), (reason, process)
        with self._lock:
            known = self._registered.pop(key, None)
            if known is None and self._quiet.remove(key):
                known = self._paused.pop(key)
            admission = self._pool.admit(key, share_path(owner))
            for displaced in admission.displaced:
                del self._registered[displaced]
            if not admission:
                return
            since = 0 if known is None else now - known.seen
            gap = since if known is None else max(since, known.gap - since // 8)
            lasts = WINDOW_EXPIRY
            if reason is Reason.SPANS:
                lasts = min(MAX_SPAN_EXPIRY, max(SPAN_EXPIRY, 3 * gap))
            self._registered[key] = _Registered(owner, now, now + lasts, gap)
            resting = now >= self._fine_until
        if resting:
            self._woken.set()

    def wake(self) -> None:
        """End the present sleep of the poller."""
        self._woken.set()

    def reasons(self) -> dict[str, int]:
        """The consumers by reason; processes whose end was not noticed yet are included."""
        now = self._clock.monotonic()
        with self._lock:
            counts = Counter(one.value for one, until in self._holds.items() if until > now)
            counts.update(reason.value for reason, _ in self._registered)
        return {reason.value: counts[reason.value] for reason in Reason}

    @property
    def learns(self) -> bool:
        """True at the start and while an idle power is learned, which needs the load of ticks."""
        now = self._clock.monotonic()
        with self._lock:
            return any(self._holds.get(one, 0) > now for one in (Reason.START, Reason.IDLE_POWER))

    # ----------------------------------------------------------------------- the poller's thread

    def interval(self, now: int) -> int:
        """The time from a tick to the next one, in nanoseconds."""
        fine = self.intervals.fine
        with self._lock:
            if now >= self._fine_until or now >= self._next_check:
                self._next_check = now + _CHECK_EVERY
                self._fine_until = max(self._held_until(now), self._awaited_until(now))
            return fine if now < self._fine_until else self.intervals.rest

    def sleep_until(self, mono: int) -> None:
        """Return at the monotonic time ``mono``, or when a consumer has come."""
        left = mono - self._clock.monotonic()
        if left > 0:
            self._woken.wait(left / 1e9)
        self._woken.clear()

    def _held_until(self, now: int) -> int:
        for reason in [one for one, until in self._holds.items() if until <= now]:
            del self._holds[reason]
        return max(self._holds.values(), default=0)

    def _awaited_until(self, now: int) -> int:
        """The time until which a registered process keeps the fine interval, if it lives on."""
        for key in self._quiet.expire(now):
            del self._paused[key]
        for key in [*itertools.islice(self._registered, _CHECKED_AT_ONCE)]:
            one = self._registered.pop(key)
            lives = not self._ended(key[1])
            if lives and one.until > now:
                self._registered[key] = one  # the others are first in the next check
                self._pool.touch(key)
                return one.until
            self._pool.remove(key)
            if lives and key[0] is Reason.SPANS:
                self._paused.store(key, one, one.owner, one.seen)
        return now + _CHECK_EVERY if self._registered else 0


def fixed(clock: Clock, interval: int) -> SamplingDemand:
    """A demand that never changes the interval."""
    return SamplingDemand(clock, Intervals(interval, interval))


# -------------------------------------------------------------------------------------------- ticks


MAX_SLEEP = SECOND
"""The longest sleep, after which a watchdog is told that the poller lives."""


class Ticker:
    """Wakes at absolute deadlines; missed ticks are counted and never replayed.

    ``interval`` returns the time between two ticks at a monotonic time. A change to a shorter one
    counts at once: the next tick is due that long after the last one, and now if that has passed.
    A longer one counts from the next tick on. ``sleep`` returns at a monotonic time, or earlier
    when the interval may have changed.
    """

    def __init__(
        self,
        clock: Clock,
        interval: Callable[[int], int],
        sleep: Callable[[int], None] | None = None,
    ) -> None:
        self._clock = clock
        self._interval_at = interval
        self._sleep = sleep or clock.sleep_until
        self._next = clock.monotonic()
        self.interval = interval(self._next)
        self.ticks = 0
        self.missed = 0

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return at the next deadline, at once if it has just passed, or soon after ``stopped``."""
        now, last, before = self._clock.monotonic(), self._next, self.interval
        self.interval = self._interval_at(now)
        # A poll that began at a longer interval has skipped ticks of that one only.
        longer = max(before, self.interval)
        skipped = max(0, (now - last) // longer - 1)
        self.missed += skipped
        self._next += self.interval + skipped * longer
        if self.interval < before:
            self._next = max(now, self._next)
        while (now := self._clock.monotonic()) < self._next and not stopped():
            self._sleep(min(self._next, now + MAX_SLEEP))
            now = self._clock.monotonic()
            if (interval := self._interval_at(now)) < self.interval:
                self.interval = interval
                self._next = min(self._next, max(now, last + interval))
        self.ticks += 1


RECENT = 60 * SECOND


@dataclass(slots=True)
class _Cell:
    """The ticks of one second."""

    second: int
    done: int = 0
    missed: int = 0
    longest: int = 0


class RecentTicks:
    """Counts ticks by seconds of monotonic time. For one thread."""

    def __init__(self) -> None:
        self._cells: deque[_Cell] = deque()

    def add(self, now: int, missed: int, duration: int) -> None:
        """Add a poll of ``duration`` nanoseconds and the ticks that were missed after it."""
        second = now // SECOND
        if not self._cells or self._cells[-1].second != second:
            self._cells.append(_Cell(second))
        cell = self._cells[-1]
        cell.done += 1
        cell.missed += missed
        cell.longest = max(cell.longest, duration)

    def counts(self, now: int) -> TickCounts:
        """The ticks of the minute before ``now``."""
        while self._cells and self._cells[0].second < (now - RECENT) // SECOND:
            self._cells.popleft()
        missed = sum(cell.missed for cell in self._cells)
        due = sum(cell.done for cell in self._cells) + missed
        return TickCounts(due, missed, max((cell.longest for cell in self._cells), default=0))
