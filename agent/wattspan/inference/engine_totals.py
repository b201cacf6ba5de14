"""The energy of an engine's processes between readings of its page, and the engine's totals.

The energy of a counter's step in which a page is read is divided by time, in integer microjoules:
the periods between readings have the energy of the counter's steps together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.inference.engine_metrics import Figure, Progress
from wattspan.model import EngineRow, HostRequests, Microjoules


class ProcessStep(NamedTuple):
    """A counter's step: the microjoules of an engine's processes, and their half-width.

    ``known`` is False if a part of them is unknown.
    """

    start: int
    end: int
    energy: int
    doubt: float = 0.0
    known: bool = True

    def until(self, time: int) -> int:
        """The microjoules up to a time."""
        passed = min(max(time, self.start), self.end) - self.start
        return self.energy * passed // (self.end - self.start)


@dataclass(slots=True)
class CounterEnergy:
    """The steps of a counter from the last reading on."""

    steps: deque[ProcessStep] = field(default_factory=deque)
    until: int = 0  # the end of the last step
    used: bool = False

    def add(self, steps: Iterable[ProcessStep]) -> None:
        """Append steps, in order of time."""
        for step in steps:
            self.steps.append(step)
            self.until = step.end
            self.used = self.used or step.energy > 0

    def between(self, start: int, end: int) -> tuple[int, float, int]:
        """The microjoules of a period, their half-width, and the nanoseconds that are unknown."""
        total, doubt, missing = 0, 0.0, end - start
        for step in self.steps:
            overlap = min(end, step.end) - max(start, step.start)
            if overlap > 0:
                total += step.until(end) - step.until(start)
                doubt += step.doubt * overlap / (step.end - step.start)
                missing -= overlap if step.known else 0
        return total, doubt, missing

    def at(self, time: int) -> ProcessStep | None:
        """The step in which a time is."""
        return next((step for step in self.steps if step.start <= time < step.end), None)

    def trim(self, since: int) -> None:
        while self.steps and self.steps[0].end < since:
            self.steps.popleft()


class EngineTotals:
    """The totals of one model of an engine, which continue from the row of an earlier run."""

    def __init__(self, earlier: EngineRow) -> None:
        self._key, self._energy, self._requests = earlier.key, earlier.energy, earlier.requests
        self._tokens = Counter[str](earlier.tokens)
        self._parts = Counter[str](earlier.host.energy)
        self._host_tokens = Counter[str](earlier.host.tokens)
        self._host_requests = earlier.host.requests

    def add(self, energy: int, done: Progress, parts: Mapping[str, int] | None) -> None:
        """Add an interval with its GPU energy, and that of the host by part; None if unknown."""
        tokens = {way: round(count) for way, count in done.tokens.items()}
        requests = done.figures.get(Figure.REQUESTS)
        self._energy = Microjoules(self._energy + energy)
        self._tokens.update(tokens)
        if requests is not None:
            self._requests = (self._requests or 0) + round(requests)
        if parts is not None:
            self._parts.update(parts)
            self._host_tokens.update(tokens)
            self._host_requests += round(requests or 0)

    def row(self) -> EngineRow:
        """The totals, without figures of a window."""
        host = HostRequests(
            {part: Microjoules(energy) for part, energy in self._parts.items()},
            dict(self._host_tokens),
            self._host_requests,
        )
        totals = self._energy, dict(self._tokens), self._requests
        return EngineRow(*self._key, *totals, host=host)
