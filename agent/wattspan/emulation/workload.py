"""A real process that keeps one CPU busy to a given degree, until its standard input ends.

Run as ``python -m wattspan.emulation.workload NAME DUTY [CPU]``. It exists to have something
to measure: its CPU time is real, and so, by the emulated law, its energy is known.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.model import MILLISECOND

PERIOD = 40 * MILLISECOND


def call_myself(name: str) -> None:
    """Show ``name`` where the kernel shows a command; 15 bytes is all it takes."""
    Path("/proc/self/comm").write_text(name[:15])


def main(name: str, duty: float, cpu: int | None) -> None:
    """Work ``duty`` of every period, rest the rest of it."""
    call_myself(name)
    if cpu is not None and cpu in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {cpu})
    clock = SystemClock()
    start = clock.monotonic()
    while True:
        work_until = start + round(duty * PERIOD)
        total = 0
        while clock.monotonic() < work_until:
            for i in range(500):
                total += i * i
        start += PERIOD
        rest = max(0, start - clock.monotonic()) / 1e9
        if select.select([0], [], [], rest)[0] and not os.read(0, 4096):
            return


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
