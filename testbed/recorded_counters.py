"""The port of performance counters, with recorded readings in place of those of a helper."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from wattspan.model import Failure
from wattspan.processes.performance_counters import CounterSums


class RecordedCounters:
    """Replays one reading for each request; once there are none, the sums are unknown."""

    def __init__(self) -> None:
        self.failures: tuple[Failure, ...] = ()
        self.requests = 0
        self.closed = False
        self._readings = deque[CounterSums]()
        self._asked: CounterSums | None = None

    def count(self, *rows: tuple[int, int, Sequence[int]]) -> None:
        """Append a reading: rows of a pid, a socket and the words."""
        pairs = [pid << 32 | socket for pid, socket, _ in rows]
        words = [word for *_, some in rows for word in some]
        self._readings.append(CounterSums(pairs, words))

    def request(self) -> None:
        self.requests += 1
        self._asked = self._readings.popleft() if self._readings else None

    def sample(self) -> CounterSums | None:
        return self._asked

    def close(self) -> None:
        self.closed = True
