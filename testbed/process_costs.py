"""CPU time and memory of a process and its descendants; end of a process by its pid."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
LOOPBACK = "127.0.0.1"


def cpu_seconds(pid: int) -> float:
    """The CPU time of ``pid`` so far."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def rss_megabytes(pid: int) -> float:
    """The resident memory of ``pid``, shared pages included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6


def family(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process, politely first."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
