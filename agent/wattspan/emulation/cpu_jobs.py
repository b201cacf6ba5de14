"""Work of processes that need no GPU: steps whose host's part is as fast as their socket's CPUs.

The CPU time of such a process is real and is what its energy follows; how far its steps come is
the emulated host's to say, for only there a package's power limit slows a CPU down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from wattspan.emulation.deeds import DeedLog
from wattspan.emulation.gpu_work import Work


class CpuJobs:
    """Work by process. Stepped by whoever steps the counters; asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, tuple[Work, int]] = {}
        self._deeds: dict[int, DeedLog] = {}
        self._at: int | None = None

    def attach(self, pid: int, work: Work, socket: int) -> None:
        """Let a process work on the CPUs of ``socket``."""
        with self._lock:
            self._works[pid] = (work, socket)
            self._deeds[pid] = DeedLog()

    def detach(self, pid: int) -> None:
        """Its work is over; what it finished stays known."""
        with self._lock:
            self._works.pop(pid, None)

    def work_of(self, pid: int) -> Work:
        """How far a process has come; LookupError if it does not work here."""
        with self._lock:
            if pid not in self._works:
                raise LookupError(f"process {pid} has no work on the CPUs")
            return self._works[pid][0]

    def change_work(self, pid: int, change: Callable[[Work], Work]) -> None:
        """Let a process do something else from now on; LookupError if it does not work here."""
        work = self.work_of(pid)
        with self._lock:
            self._works[pid] = (change(work), self._works[pid][1])

    def deeds(self, pid: int) -> DeedLog:
        """What a process has finished."""
        with self._lock:
            return self._deeds.get(pid) or DeedLog()

    def step(self, at: int, speeds: Sequence[float]) -> None:
        """Time has come to ``at``, and until then the sockets were as fast as ``speeds``."""
        with self._lock:
            elapsed = 0 if self._at is None else at - self._at
            self._at = at
            for pid, (work, socket) in self._works.items():
                # Its "GPU" part is what waits for memory, and does not mind the clock.
                moved = work.after(elapsed, 1.0, speeds[socket])
                self._deeds[pid].note(at, moved.finished)
                self._works[pid] = (moved, socket)
