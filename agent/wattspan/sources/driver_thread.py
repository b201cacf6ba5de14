"""A source whose driver is called by a thread, less often if its calls are expensive.

A call into a driver can hang and cannot be ended from outside. One daemon thread makes all calls
of a session; ``read`` returns its results since the last call, and reports a call that takes too
long. Where a driver permits calls of several threads, another thread then goes on without that
device: there is at most one thread for each hung device, and one for the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    Failure,
    GpuStatus,
    Reading,
    Trouble,
    Usage,
)
from wattspan.ports import Batch, Clock
from wattspan.util.process import run_again

MAX_QUEUED = 4096  # readings, or usages, that wait for a reader: some minutes of eight GPUs
MAX_STATUSES = 3  # status intervals
LEAST_PAUSE = MILLISECOND
"""Between two turns of a thread: no session makes it busy, whatever time it returns."""

MAX_DUTY_DIVISOR = 50  # a call that takes long is not repeated before 50 times as long has passed
MAX_CALL_INTERVAL = 30 * SECOND
HANG_THRESHOLD, HANG_BACKOFF = 2 * SECOND, 5 * SECOND
"""A call that took longer did hang: its duration does not predict the cost of the next call."""
COST_SAMPLES = 3
"""Calls: where other work keeps the caller from the CPU, any may seem to have taken long. Only one
that takes long every time is expensive."""


class CallInterval:
    """Schedule of one kind of call: every ``period``, or less often if the call is expensive.

    On some drivers a list of processes takes milliseconds under a lock that all users of all GPUs
    share. A sample that comes early by up to a twentieth of the period is on time: otherwise the
    jitter of a timer would delay the call by a whole period.

    Used as a context manager around the calls, it measures their cost.
    """

    def __init__(self, period: int, clock: Clock, longest: int = MAX_CALL_INTERVAL) -> None:
        self._period = period
        self._longest = longest
        self._clock = clock
        self._due: int | None = None
        self._began = self._asked = 0
        self._costs: deque[int] = deque([0] * COST_SAMPLES, maxlen=COST_SAMPLES)

    @property
    def due(self) -> int:
        """The time of the next call; 0 before the first."""
        return self._due or 0

    def due_after(self, least: int) -> int:
        """The time of the next call, ``least`` nanoseconds after the start of the last or later."""
        return max(self.due, self._began + least)

    def begin(self, now: int, *, forced: bool = False) -> bool:
        """True if the call is due at ``now``, or ``forced``."""
        if forced or self._due is None:
            self._due = now
        elif now < self._due - self._period // 20:
            return False
        self._began = now
        return True

    def __enter__(self) -> None:
        self._asked = self._clock.monotonic()

    def __exit__(self, *_: object) -> None:
        self._costs.append(self._clock.monotonic() - self._asked)
        cost = min(self._costs)
        due = self._began if self._due is None else self._due
        most = HANG_BACKOFF if cost > HANG_THRESHOLD else MAX_CALL_INTERVAL
        rest = min(cost * MAX_DUTY_DIVISOR, max(min(most, self._longest), self._period))
        self._due = max(due + self._period, self._began + rest)
        if self._due <= self._began:  # turns were missed: they are not made up for
            self._due = self._began + self._period


class DriverIntervals(Protocol):
    """Settings of a source: the intervals of its calls, and the longest duration of one."""

    @property
    def interval(self) -> int: ...

    @property
    def longest(self) -> int:
        """The longest interval of samples, however seldom they are read."""
        ...

    @property
    def status_interval(self) -> int: ...

    @property
    def deadline(self) -> int: ...


class DriverSession(Protocol):
    """All devices of one driver. Its calls block; ``sample`` does not raise."""

    @property
    def current_call(self) -> tuple[str, int] | None:
        """The call under way and the time of its start; other threads may read it."""
        ...

    def sample(self, interval: int = 0) -> Batch:
        """Make all calls that are due; samples are ``interval`` nanoseconds apart now."""
        ...

    def next_read(self, now: int) -> int | None:
        """The time of the next read of a counter or a power between samples; None without one."""
        ...

    def read_between(self, now: int) -> Sequence[Reading]:
        """Make the reads between samples that are due. The next sample has their other results."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...


class CallGivenUpError(BaseException):
    """A call of a device has returned after it was given up: its thread makes no further ones.

    A BaseException, which ends the thread: nothing in between continues after it.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.device = device


class HangIsolation(Protocol):
    """Methods of a session that goes on in another thread while the call of one device hangs."""

    def give_up(self) -> bool:
        """Leave a device to the thread whose call of it is stuck; False without such a call."""
        ...

    def take_back(self, device: str) -> None:
        """Use a device again: its call has returned. In the thread of the call, which ends."""
        ...

    @property
    def hung(self) -> Sequence[tuple[str, str, int]]:
        """Name of each device that was left, the call, and the time of its start."""
        ...


class DriverThreadSource:
    """A ``CounterSource`` with a thread of its own."""

    def __init__(
        self,
        name: str,
        session: DriverSession,
        clock: Clock,
        settings: DriverIntervals,
        library: str,
        advice: str,
        *,
        restart_wait: Callable[[float], bool] | None = None,
        follow_cover: Callable[[frozenset[str]], None] = lambda _: None,
        isolation: HangIsolation | None = None,
    ) -> None:
        """``library`` is its name in failures, ``advice`` a clause on how to examine a hang.

        ``restart_wait`` is the ``wait`` of `run_again`; ``follow_cover`` as in `CoverFollower`.
        ``isolation`` is the session if several threads may call its driver.
        """
        self.name = name
        self.follow_cover = follow_cover
        self._session, self._isolation = session, isolation
        self._clock = clock
        self._settings = settings
        self._interval = settings.interval
        self._library = library
        self._advice = advice
        self._stop, self._woken = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._domains: tuple[Domain, ...] = ()
        self._failures: tuple[Failure, ...] = ()
        self._gpus: dict[str, GpuStatus] = {}
        self._calls: int | None = None
        self._readings: deque[Reading] = deque(maxlen=MAX_QUEUED)
        self._usages: deque[Usage] = deque(maxlen=MAX_QUEUED)
        self._restart_wait = restart_wait
        self._thread: threading.Thread | None = None
        self._refused = False  # a device was given up, and no other thread could be started

    def start(self) -> None:
        """Start a thread that makes the calls; RuntimeError if the system permits no more."""
        thread = threading.Thread(target=self._run, name=f"wattspan-{self.name}", daemon=True)
        thread.start()
        self._thread = thread

    def pace(self, interval: int) -> None:
        """Sample every ``interval`` nanoseconds from now on, within the bounds of the settings.

        The samples are a whole number of the settings' intervals apart, which may be their rhythm.
        """
        step = self._settings.interval
        bounded = max(1, min(interval, self._settings.longest) // step) * step
        if bounded != self._interval:
            self._interval = bounded
            self._woken.set()

    def integrates_power(self) -> bool:
        """False: the thread integrates, and ``read`` need not be called for it."""
        return False

    def read(self) -> Batch:
        """All results since the last call; never waits for the driver.

        Failures and statuses are those in force. A status that was not renewed in time (its GPU is
        lost, a call is stuck) is omitted.
        """
        oldest = self._clock.monotonic() - MAX_STATUSES * self._settings.status_interval
        self._go_on()
        faults = (*self._stuck(), *self._dead())
        with self._lock:
            readings, usages = tuple(self._readings), tuple(self._usages)
            self._readings.clear()
            self._usages.clear()
            gpus = tuple(s for s in self._gpus.values() if s.at.mono >= oldest)
            failures = (*self._failures, *faults)
            return Batch(self._domains, readings, failures, usages, gpus, self._calls)

    def _go_on(self) -> None:
        """Start another thread if the session has none because a call of the last one hangs."""
        if self._isolation is None or self._stop.is_set():
            return
        if self._refused or self._isolation.give_up():
            try:
                self.start()
                self._refused = False
            except RuntimeError:  # too many threads: tried again by the next read
                self._refused = True

    def close(self) -> None:
        """End the thread, which releases the GPUs. A stuck thread is left running."""
        self._stop.set()
        if self._refused:
            self._session.close()
        self._woken.set()
        if self._thread is not None and self._late_call is None:
            self._thread.join(self._settings.deadline / 1e9)

    def _keep(self, batch: Batch) -> None:
        """Keep the results of a sample for the next ``read``."""
        with self._lock:
            self._domains = batch.domains
            self._failures, self._calls = batch.failures, batch.calls
            self._readings.extend(batch.readings)
            self._usages.extend(batch.usages)
            self._gpus.update((status.domain_id, status) for status in batch.gpus)

    @property
    def _late_call(self) -> tuple[str, int] | None:
        """The call under way, if it takes too long."""
        call = self._session.current_call
        elapsed = 0 if call is None else self._clock.monotonic() - call[1]
        return call if elapsed > self._settings.deadline else None

    def _stuck(self) -> Sequence[Failure]:
        """The failures of calls that take too long."""
        late = self._late_call
        calls = [] if late is None else [(self._library, *late)]
        calls += [] if self._isolation is None else self._isolation.hung
        now = self._clock.monotonic()
        remedy = f"{self._advice}; a driver call cannot be ended from outside."
        return [
            Failure(
                self.name,
                thing,
                Trouble.STUCK,
                f"{call} has not returned for {(now - since) / 1e9:.0f} s",
                remedy,
            )
            for thing, call, since in calls
        ]

    def _dead(self) -> Sequence[Failure]:
        """The failure of a thread that ended by itself, or that could not be started."""
        if self._refused:
            cause = "a call hangs, and the system permits no other thread for the other GPUs"
            remedy = "Raise the limit of tasks of the agent (TasksMax, pids.max)."
            return [Failure(self.name, self._library, Trouble.STUCK, cause, remedy)]
        if self._thread is None or self._thread.is_alive() or self._stop.is_set():
            return ()
        cause = "the thread that calls it has ended"
        remedy = "This is a bug; restart the agent to read GPUs again."
        return [Failure(self.name, self._library, Trouble.MALFORMED, cause, remedy)]

    def _run(self) -> None:
        end: Callable[[], None] = self._session.close
        try:
            run_again(lambda _: self._work(), self._stop, wait=self._restart_wait)
        except CallGivenUpError as error:  # another thread has gone on
            if self._isolation is not None:
                end = partial(self._isolation.take_back, error.device)
        finally:
            end()

    def _work(self) -> None:
        try:
            self._make_calls()
        except Exception as error:
            cause = f"its thread raised {type(error).__name__}: {str(error)[:200]}"
            remedy = "This is a bug; report it. The calls are tried again."
            failure = Failure(self.name, self._library, Trouble.MALFORMED, cause, remedy)
            with self._lock:
                self._failures = (failure,)
            raise

    def _make_calls(self) -> None:
        last = self._clock.monotonic() - self._interval  # the newest sample's time, as planned
        while not self._stop.is_set():
            interval, now = self._interval, self._clock.monotonic()
            late = now - last - interval
            if late >= 0:
                self._keep(self._session.sample(interval))
                last = now if late >= interval else last + interval  # missed samples are skipped
            elif readings := self._session.read_between(now):
                with self._lock:
                    self._readings.extend(readings)
            now = self._clock.monotonic()
            between = self._session.next_read(now)
            due = last + interval if between is None else min(last + interval, between)
            self._woken.wait(max(LEAST_PAUSE, due - now) / 1e9)
            self._woken.clear()
