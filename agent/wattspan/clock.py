"""The only module that asks the time."""

from __future__ import annotations

import time

from wattspan.model import Instant

_COARSE = 6  # CLOCK_MONOTONIC_COARSE, which moves at the kernel's tick


class SystemClock:
    """The host's clocks, those of its processes included.

    ``read_cpu_clock`` takes the id of a CPU clock and returns its nanoseconds; OSError once the
    process is gone. It is the bare C function, so that thousands a tick cost no Python frame.
    """

    read_cpu_clock = staticmethod(time.clock_gettime_ns)

    def now(self) -> Instant:
        mono = time.monotonic_ns()
        # Two clocks cannot be read at one moment; rounding to a millisecond hides the skew
        # of the two reads and still shows any suspend that matters.
        asleep = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - mono
        return Instant(mono, time.time_ns(), asleep // 1_000_000 * 1_000_000)

    def monotonic(self) -> int:
        return time.monotonic_ns()

    @staticmethod
    def tick() -> int:
        """How often the kernel brings the CPU time of whoever keeps running up to date, in ns."""
        return round(time.clock_getres(_COARSE) * 1e9)

    def sleep_until(self, mono: int) -> None:
        while (left := mono - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
