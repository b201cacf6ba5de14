"""The system clock: the only module that reads the time."""

from __future__ import annotations

import time

from wattspan.model import Instant

_COARSE = 6  # CLOCK_MONOTONIC_COARSE, whose step is the kernel's tick

OWN_THREAD_CLOCK = time.CLOCK_THREAD_CPUTIME_ID
"""The id of the CPU clock of the calling thread."""


class SystemClock:
    """The clocks of the host and of its processes.

    ``read_cpu_clock`` returns the nanoseconds of a CPU clock by id; OSError for an exited process.
    It and ``monotonic`` are the C functions, because they are called thousands of times a second.
    """

    read_cpu_clock = staticmethod(time.clock_gettime_ns)
    monotonic = staticmethod(time.monotonic_ns)

    def now(self) -> Instant:
        mono = time.monotonic_ns()
        # Two clocks cannot be read at one moment: rounding to a millisecond removes the skew of the
        # two reads and still shows each relevant suspend.
        asleep = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - mono
        return Instant(mono, time.time_ns(), asleep // 1_000_000 * 1_000_000)

    @staticmethod
    def tick() -> int:
        """The period in nanoseconds at which the kernel updates CPU times of running threads."""
        return round(time.clock_getres(_COARSE) * 1e9)

    def sleep_until(self, mono: int) -> None:
        while (left := mono - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
