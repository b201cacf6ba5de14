"""CPU time of a few processes, sampled more finely than the agent's ticks.

Spans are shorter than an interval. Reading the CPU clock of their process every few milliseconds
shows the part of the interval in which the process worked and its energy was spent.

The kernel updates the clock of a running process at its scheduler's ticks: a value may be one
tick old, 4 ms at the 250 Hz of most distributions.
"""

from __future__ import annotations

import threading
from array import array
from contextlib import suppress
from dataclasses import dataclass, field

from wattspan.clock import OWN_THREAD_CLOCK, SystemClock
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.processes.table import clock_id
from wattspan.util.process import run_again

PERIOD = 10 * MILLISECOND

MAX_PERIOD = 100 * MILLISECOND
"""Longest period for any number of processes: the default interval of the agent."""

MAX_COST_DIVISOR = 50
"""Sampling takes at most one part in this of a core; the period becomes longer if needed."""

MAX_FAST_PROCESSES = 16
"""Of more processes than this, those without work for a second are read in turns."""

_LONG = SECOND
_TURNS = 8
_FEW = 4  # processes that often all pause together

MAX_SAMPLES = 1024
"""Limit of waiting samples of a process: 10 s at the default period."""

_FOREVER = 1 << 62  # nanoseconds

_INTERRUPTED = MILLISECOND // 2  # a longer read has no exact time


@dataclass(slots=True, eq=False)
class _CpuSeries:
    """The samples of one process: monotonic time and CPU time alternate."""

    consumer: Consumer
    clock: int
    samples: array[int] = field(default_factory=lambda: array("q"))
    cpu: int = -1  # last value
    idle: int = 0  # time of the last unchanged value, unless it is in a sample
    worked: int = 0  # time of the last changed value
    until: int = 0  # end of the lease

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

    def end(self) -> None:
        """Record that no more work follows: otherwise the rate of the samples would go on."""
        if self.cpu >= 0:
            self._flush_idle()
            self.samples.append(_FOREVER)
            self.samples.append(self.cpu)

    def is_idle(self, now: int) -> bool:
        """True if the process has not worked for a second."""
        return now - self.worked >= _LONG

    def take(self) -> array[int]:
        self._flush_idle()
        taken, self.samples = self.samples, array("q")
        return taken

    def _flush_idle(self) -> None:
        if self.idle:
            self.samples.append(self.idle)
            self.samples.append(self.cpu)
            self.idle = 0


class CpuSampler:
    """Reads the CPU clocks of watched processes every ``period`` nanoseconds.

    A process is watched until ``lease`` nanoseconds after the last call of ``watch`` for it.
    ``watch``, ``unwatch`` and ``take`` are safe from any thread. The thread sleeps while no process
    is watched, and reads less often when reading would take more than two percent of a core. If
    there are many processes, those idle for a second are read at every eighth sweep, so the time
    of their next work is less exact. The last samples of an exited process remain until
    ``unwatch``.
    """

    def __init__(
        self, clock: SystemClock, period: int = PERIOD, most: int = 256, lease: int = _FOREVER
    ) -> None:
        self._clock = clock
        self._least_period = period
        self._most, self._lease = most, lease
        self._lock = threading.Lock()
        self._series: dict[Consumer, _CpuSeries] = {}  # in order of their leases
        self._active: list[_CpuSeries] = []
        self._idle_groups: list[list[_CpuSeries]] = [[] for _ in range(_TURNS)]
        self._sweeps = self._version = 0
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._cost = 0.0  # CPU time of one sweep, its wake-up included, smoothed

    @property
    def period(self) -> int:
        """The present interval of the sweeps, in nanoseconds."""
        least = self._least_period
        return min(max(least, round(self._cost * MAX_COST_DIVISOR)), max(least, MAX_PERIOD))

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=run_again,
            args=(lambda _: self._run(), self._stop),
            name="wattspan-fine",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._version += 1
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, consumer: Consumer) -> bool:
        """Sample the CPU time of ``consumer``; False if ``most`` processes are watched."""
        with self._lock:
            self._version += 1
            series = self._series.pop(consumer, None)
            if series is None:
                if len(self._series) >= self._most and not self._evict_exited():
                    return False
                series = _CpuSeries(consumer, clock_id(consumer.pid))
                self._active.append(series)
                self._read([series])
                self._wanted.set()
            series.until = self._clock.monotonic() + self._lease
            self._series[consumer] = series
            return True

    def unwatch(self, consumer: Consumer) -> None:
        with self._lock:
            self._forget(consumer)

    def take(self, consumer: Consumer) -> list[tuple[int, int]]:
        """The samples of ``consumer`` since the last call: monotonic time, cumulative CPU time.

        Between two samples, work is assumed to be even. The last sample of an exited process is in
        the far future.
        """
        with self._lock:
            series = self._series.get(consumer)
            if series is None:
                return []
            taken = series.take()
        return list(zip(taken[::2], taken[1::2], strict=True))

    def sweep(self) -> None:
        """Read every clock that is due."""
        with self._lock:
            self._sweeps += 1
            self._read(self._active)
            now = self._clock.monotonic()
            idle = self._idle_groups[self._sweeps % _TURNS]
            if idle:
                self._read(idle)
                for series in [one for one in idle if not one.is_idle(now)]:
                    idle.remove(series)
                    self._active.append(series)
            if len(self._active) > MAX_FAST_PROCESSES and self._sweeps % _TURNS == 0:
                for series in [one for one in self._active if one.is_idle(now)]:
                    self._active.remove(series)
                    self._idle_groups[series.consumer.pid % _TURNS].append(series)
            while (oldest := next(iter(self._series.values()), None)) and oldest.until <= now:
                self._forget(oldest.consumer)
            if not self._active and not any(self._groups):
                self._wanted.clear()

    # ------------------------------------------------------------------------------- details

    @property
    def _groups(self) -> tuple[list[_CpuSeries], ...]:
        """All running watched processes, by the sweep that reads them."""
        return (self._active, *self._idle_groups)

    def _read(self, group: list[_CpuSeries]) -> None:
        """Read each clock, stamped between the time before and the time after."""
        monotonic, read = self._clock.monotonic, self._clock.read_cpu_clock
        ended = []
        before = monotonic()
        for series in group:
            try:
                cpu = read(series.clock)
            except OSError:
                cpu = -1
            after = monotonic()
            if cpu < series.cpu or cpu < 0:  # it has ended; its pid may be reused
                ended.append(series)
            elif after - before < _INTERRUPTED:
                series.add((before + after) // 2, cpu)
                if len(series.samples) > 2 * MAX_SAMPLES:
                    del series.samples[:MAX_SAMPLES]
            before = after
        for series in ended:
            series.end()
            self._drop(series)

    def _forget(self, consumer: Consumer) -> None:
        self._version += 1
        series = self._series.pop(consumer, None)
        if series is not None:
            self._drop(series)

    def _drop(self, series: _CpuSeries) -> None:
        for group in self._groups:
            if series in group:
                group.remove(series)

    def _evict_exited(self) -> bool:
        """Remove a process that has exited to make room; False if all are alive."""
        alive = {series.consumer for group in self._groups for series in group}
        ended = next((consumer for consumer in self._series if consumer not in alive), None)
        if ended is None:
            return False
        del self._series[ended]
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wanted.wait()
            began, swept = self._clock.read_cpu_clock(OWN_THREAD_CLOCK), self._sweeps
            self.sweep()
            self._rest()
            cost = self._clock.read_cpu_clock(OWN_THREAD_CLOCK) - began
            self._cost += (cost / (self._sweeps - swept) - self._cost) / _TURNS

    def _rest(self) -> None:
        """Sleep until the next sweep has something to do: a period, and on while no clock moves.

        A process rarely works in each period. Without work, two calls in C and no lock are a sweep.
        """
        with self._lock:
            version, few = self._version, 0 < len(self._active) <= _FEW
            pauses = few and not self._stop.is_set() and not any(self._idle_groups)
            quiet = tuple(self._active) if pauses else ()
            until = next((one.until for one in self._series.values()), 0) if pauses else 0
        clocks, values = [one.clock for one in quiet], [one.cpu for one in quiet]
        monotonic, read, period = self._clock.monotonic, self._clock.read_cpu_clock, self.period
        now = monotonic()
        with suppress(OSError):  # of a process that has ended
            while True:
                self._clock.sleep_until(now + period)
                now = monotonic()
                if self._version != version or now >= until or list(map(read, clocks)) != values:
                    return
                self._sweeps += 1
                for one in quiet:
                    one.idle = now
