"""Performance counters of an emulated host, which an agent reads as those of hardware.

They count the jobs only, whose CPU time is real. A power limit of a socket slows its cycles and its
instructions; misses go with CPU time, as the energy of the emulated memory does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from wattspan.clock import SystemClock
from wattspan.processes.table import ReadClock, clock_id


class CounterLaw(NamedTuple):
    """Counts in a microsecond of CPU time at full speed, of every job."""

    cycles: int = 2600
    instructions: int = 3900
    misses: int = 8


class JobCounters:
    """The counts of jobs since the last call, in the form of the helper's answers.

    ``sockets`` tells the socket of each job by its pid, ``speeds`` the speed of each socket's CPUs.
    """

    def __init__(
        self,
        law: CounterLaw,
        sockets: Callable[[], Mapping[int, int]],
        speeds: Callable[[], Sequence[float]],
        read_clock: ReadClock = SystemClock.read_cpu_clock,
    ) -> None:
        self._law, self._sockets, self._speeds = law, sockets, speeds
        self._read_clock = read_clock
        self._seen: dict[int, int] = {}  # CPU time of each job
        self.sums()

    def sums(self) -> bytes:
        """All pairs of a pid and a socket, then time, cycles, reference, instructions, misses."""
        pairs, words = array("Q"), array("Q")
        cycles, instructions, misses = self._law
        before, self._seen, speeds = self._seen, {}, self._speeds()
        for pid, socket in self._sockets().items():
            try:
                now = self._read_clock(clock_id(pid))
            except OSError:  # it has ended
                continue
            self._seen[pid] = now
            time = max(0, now - before.get(pid, 0))
            paced = round(time * speeds[socket])
            pairs.append(pid << 32 | socket)
            counts = paced * cycles, time * cycles, paced * instructions, time * misses
            words.extend((time, *(each // 1000 for each in counts)))
        return pairs.tobytes() + words.tobytes()

    def close(self) -> None:
        """Nothing is open."""
