"""Ticks whose readings are differenced once, when somebody needs it first.

Ticks wait for the next settlement or a query: at each tick, the code and the counters would not be
in the CPU's caches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from wattspan.attribution.metering import CounterMeters, MeteredPeriod
from wattspan.model import Tick


class MeteredTick:
    """A tick and the periods that it ends."""

    __slots__ = ("_meter", "metered", "tick")

    def __init__(self, tick: Tick, meter: TickMeter) -> None:
        self.tick, self._meter = tick, meter
        self.metered: Sequence[MeteredPeriod] | None = None

    def periods(self) -> Sequence[MeteredPeriod]:
        """The periods; meters all ticks up to this one before. Safe from any thread."""
        if self.metered is None:
            self._meter.catch_up()
        return self.metered or ()


class TickMeter:
    """Meters the ticks of a host in their order."""

    def __init__(self, meters: CounterMeters) -> None:
        self._meters = meters
        self._lock = threading.Lock()
        self._waiting: deque[MeteredTick] = deque()

    def add(self, tick: Tick) -> MeteredTick:
        """Append the next tick."""
        added = MeteredTick(tick, self)
        self._waiting.append(added)
        return added

    def catch_up(self) -> None:
        """Meter all ticks."""
        with self._lock:
            while self._waiting:
                waiting = self._waiting[0]
                waiting.metered = self._meters.advance(waiting.tick)
                self._waiting.popleft()
