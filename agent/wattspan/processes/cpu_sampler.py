"""CPU time of a few processes, sampled more finely than the agent's ticks.

Spans are shorter than an interval. Reading the CPU clock of their process every few milliseconds
shows the part of the interval in which the process worked and its energy was spent.

The kernel updates the clock of a running process at its scheduler's ticks: a value may be one
tick old, 4 ms at the 250 Hz of most distributions.
"""

from __future__ import annotations

import threading
from array import array

from wattspan.clock import SystemClock
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.processes.table import clock_id

PERIOD = 10 * MILLISECOND

MAX_PERIOD = 100 * MILLISECOND
"""However many are watched, they are looked at this often: the agent's own usual interval."""

MAX_COST_DIVISOR = 50
"""The looking may take one part in so many of a core; beyond, it becomes less frequent."""

MAX_FAST_PROCESSES = 16
"""Of more than so many, those that have long done nothing are looked at in turns."""

_LONG = SECOND
_TURNS = 8

MAX_SAMPLES = 1024
"""Largest number of samples of a process that are not taken: 10 s at the usual period."""

_OWN_THREAD = 3  # CLOCK_THREAD_CPUTIME_ID
_INTERRUPTED = MILLISECOND // 2  # between two readings: which of both times is meant is open


class _CpuSeries:
    """The samples of one process: monotonic time and CPU time in turns."""

    __slots__ = ("clock", "consumer", "cpu", "idle", "samples", "worked")

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.clock = clock_id(consumer.pid)
        self.samples = array("q")
        self.cpu = -1  # as it was read last
        self.idle = 0  # when it was last read unchanged, if that is in no sample yet
        self.worked = 0  # when it was last seen to have worked

    def add(self, mono: int, cpu: int) -> None:
        """Record a value. Of a period without work the first and the last value are kept."""
        if cpu == self.cpu:
            self.idle = mono
            return
        self.worked = mono
        self._flush_idle()
        self.samples.append(mono)
        self.samples.append(cpu)
        self.cpu = cpu

    def is_idle(self, now: int) -> bool:
        """True if the process has not worked for a second."""
        return now - self.worked >= _LONG

    def take(self) -> array[int]:
        self._flush_idle()
        taken, self.samples = self.samples, array("q")
        return taken

    def trim(self) -> int:
        """Let the older half go if there is too much; how many samples that were."""
        if len(self.samples) <= 2 * MAX_SAMPLES:
            return 0
        del self.samples[:MAX_SAMPLES]
        return MAX_SAMPLES // 2

    def _flush_idle(self) -> None:
        if self.idle:
            self.samples.append(self.idle)
            self.samples.append(self.cpu)
            self.idle = 0


class CpuSampler:
    """Reads the CPU clocks of watched processes every ``period`` nanoseconds.

    ``watch``, ``unwatch`` and ``take`` are safe from any thread. The thread sleeps while no process
    is watched, and reads less often when reading would take more than two percent of a core. If
    there are many processes, those idle for a second are read at every eighth sweep, so the begin
    of their next work is known less finely. The last samples of an exited process remain until
    ``unwatch``.
    """

    def __init__(self, clock: SystemClock, period: int = PERIOD, most: int = 256) -> None:
        self._clock = clock
        self._least_period = period
        self._most = most
        self._lock = threading.Lock()
        self._series: dict[Consumer, _CpuSeries] = {}
        self._active: list[_CpuSeries] = []
        self._idle_groups: list[list[_CpuSeries]] = [[] for _ in range(_TURNS)]
        self._sweeps = 0
        self._wanted = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._cost = 0.0  # CPU time of one sweep, its wake-up included, smoothed
        self.rejected = 0  # processes not watched for want of room
        self.dropped = 0  # samples that were not taken in time

    @property
    def period(self) -> int:
        """The present interval of the sweeps, in nanoseconds."""
        return min(max(self._least_period, round(self._cost * MAX_COST_DIVISOR)), self._slowest)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="wattspan-fine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, consumer: Consumer) -> None:
        """Know the course of ``consumer``'s CPU time from now on; at most ``most`` are watched."""
        with self._lock:
            if consumer in self._series:
                return
            if len(self._series) >= self._most and not self._evict_exited():
                self.rejected += 1
                return
            course = self._series[consumer] = _CpuSeries(consumer)
            self._active.append(course)
            self._read([course])
            self._wanted.set()

    def unwatch(self, consumer: Consumer) -> None:
        with self._lock:
            course = self._series.pop(consumer, None)
            if course is not None:
                self._drop(course)

    def take(self, consumer: Consumer) -> list[tuple[int, int]]:
        """The samples of ``consumer`` since the last call: monotonic time, cumulative CPU time.

        Between two samples, work is assumed to be even.
        """
        with self._lock:
            course = self._series.get(consumer)
            if course is None:
                return []
            taken = course.take()
        return list(zip(taken[::2], taken[1::2], strict=True))

    def sweep(self) -> None:
        """Read every clock that is due."""
        with self._lock:
            self._sweeps += 1
            self._read(self._active)
            now = self._clock.monotonic()
            resting = self._idle_groups[self._sweeps % _TURNS]
            if resting:
                self._read(resting)
                for course in [one for one in resting if not one.is_idle(now)]:
                    resting.remove(course)
                    self._active.append(course)
            if len(self._active) > MAX_FAST_PROCESSES and self._sweeps % _TURNS == 0:
                for course in [one for one in self._active if one.is_idle(now)]:
                    self._active.remove(course)
                    self._idle_groups[course.consumer.pid % _TURNS].append(course)
            if not any(self._groups):
                self._wanted.clear()

    # ------------------------------------------------------------------------------- details

    @property
    def _slowest(self) -> int:
        return max(self._least_period, MAX_PERIOD)

    @property
    def _groups(self) -> tuple[list[_CpuSeries], ...]:
        """All watched processes, by the sweep in which they are due."""
        return (self._active, *self._idle_groups)

    def _read(self, group: list[_CpuSeries]) -> None:
        """Read each clock, stamped between the time before and the time after."""
        monotonic, read = self._clock.monotonic, self._clock.read_cpu_clock
        dead = []
        before = monotonic()
        for course in group:
            try:
                cpu = read(course.clock)
            except OSError:
                cpu = -1
            after = monotonic()
            if cpu < course.cpu or cpu < 0:  # gone; or another has its pid by now
                dead.append(course)
            elif after - before < _INTERRUPTED:
                course.add((before + after) // 2, cpu)
                if len(course.samples) > 2 * MAX_SAMPLES:
                    self.dropped += course.trim()
            before = after
        for course in dead:
            self._drop(course)

    def _drop(self, series: _CpuSeries) -> None:
        for courses in self._groups:
            if series in courses:
                courses.remove(series)

    def _evict_exited(self) -> bool:
        """Remove a process that has exited to make room; False if all are alive."""
        alive = {course.consumer for courses in self._groups for course in courses}
        dead = next((consumer for consumer in self._series if consumer not in alive), None)
        if dead is None:
            return False
        del self._series[dead]
        return True

    def _run(self) -> None:
        due = self._clock.monotonic()
        used = self._clock.read_cpu_clock(_OWN_THREAD)
        while not self._stopped:
            if not self._wanted.is_set():
                self._wanted.wait()
                due = self._clock.monotonic()
                used = self._clock.read_cpu_clock(_OWN_THREAD)
            self.sweep()
            before, used = used, self._clock.read_cpu_clock(_OWN_THREAD)
            self._cost += (used - before - self._cost) / 16
            due = max(due + self.period, self._clock.monotonic())
            self._clock.sleep_until(due)
