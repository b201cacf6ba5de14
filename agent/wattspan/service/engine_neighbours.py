"""The readings of serving engines on common boards: the division of their energy needs all of them.

Only engines of one owner are divided by their work, which their pages tell. The energy of another
owner's engine is that of its processes, whatever its page says.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from wattspan.inference.engine_metrics import EngineReading, Progress, progress
from wattspan.model import SECOND, Payer

SIMULTANEOUS = SECOND // 2
"""Readings of two engines are of one moment if they are not further apart."""

GONE = 60 * SECOND
"""An engine is no neighbour so long after its last reading."""

_KEPT = 64  # readings of an engine


@dataclass(slots=True)
class _Neighbour:
    """The figures of one engine's scraper; ``readings`` are times and pages."""

    owner: str = ""
    members: frozenset[Payer] = frozenset()
    boards: frozenset[str] = frozenset()
    readings: deque[tuple[int, EngineReading]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def at(self, time: int) -> EngineReading | None:
        """The reading of a moment."""
        near = (page for at, page in self.readings if abs(at - time) <= SIMULTANEOUS)
        return next(near, None)


class EngineNeighbours:
    """Engines by label. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[str, _Neighbour] = {}

    def add(self, label: str, at: int, page: EngineReading) -> None:
        """Add a reading of an engine."""
        with self._lock:
            self._engines.setdefault(label, _Neighbour()).readings.append((at, page))

    def place(
        self, label: str, owner: str, members: frozenset[Payer], boards: frozenset[str]
    ) -> None:
        """Set the owner, the processes and the boards of an engine."""
        with self._lock:
            engine = self._engines.setdefault(label, _Neighbour())
            engine.owner, engine.members, engine.boards = owner, members, boards

    def remove(self, label: str) -> None:
        """Forget an engine: its processes or counters are others from now on. Idempotent."""
        with self._lock:
            self._engines.pop(label, None)

    def members(self, label: str) -> frozenset[Payer]:
        """The processes of the engines beside one."""
        with self._lock:
            found = [other.members for other in self._beside(label).values()]
        return frozenset[Payer]().union(*found)

    def late(self, label: str, at: int) -> bool:
        """True if an engine beside has no reading of a moment yet."""
        with self._lock:
            others = self._beside(label).values()
            return any(other.readings[-1][0] < at - SIMULTANEOUS for other in others)

    def work(self, label: str, start: int, end: int) -> tuple[tuple[str, Progress], ...]:
        """The work of the engines beside one in a period; none if that of one is not known."""
        with self._lock:
            pages = {
                name: (other.at(start), other.at(end))
                for name, other in self._beside(label).items()
            }
        found = {
            name: None if first is None or last is None else progress(first, last)
            for name, (first, last) in pages.items()
        }
        known = {name: done for name, done in found.items() if done is not None}
        return tuple(sorted(known.items())) if len(known) == len(found) else ()

    def _beside(self, label: str) -> dict[str, _Neighbour]:
        """The other engines of one owner on exactly the same boards; under the lock."""
        own = self._engines.get(label)
        if own is None or not own.boards or not own.readings:
            return {}
        last = own.readings[-1][0]
        return {
            name: other
            for name, other in self._engines.items()
            if name != label and other.readings and other.readings[-1][0] > last - GONE
            if (other.owner, other.boards) == (own.owner, own.boards)
            if other.members.isdisjoint(own.members)
        }
