"""Schedule of calls into a driver: less often if they are expensive."""

from __future__ import annotations

from collections import deque

from wattspan.model import SECOND
from wattspan.ports import Clock

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
