"""The counter steps of engines' processes that wait for their division among requests."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from wattspan.spans.interval_pool import CounterStep

_MAX_UNUSED = 1024  # periods of a counter


@dataclass(slots=True)
class StepQueue:
    """The steps of one counter that wait, and the last periods without a step or a request.

    ``began``, ``received`` and ``divided`` are times: of the first step, and up to which steps were
    added and taken.
    """

    began: int
    received: int
    divided: int
    steps: deque[CounterStep] = field(default_factory=deque)
    unused: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MAX_UNUSED))

    @classmethod
    def since(cls, steps: Sequence[CounterStep], first: int) -> StepQueue:
        """An empty queue that begins with the step in which the time ``first`` is."""
        at = bisect_right(steps, first, key=itemgetter(1))
        begin = steps[at].start if at < len(steps) else first
        return cls(begin, begin, begin)

    @property
    def waiting(self) -> int:
        """The microjoules of the waiting steps."""
        return sum(step.energy for step in self.steps)

    def add(self, steps: Sequence[CounterStep]) -> int:
        """Append the steps that are not known, in order of time; returns their microjoules."""
        new = steps[bisect_left(steps, self.received, key=itemgetter(0)) :]
        self.steps += new
        if new:
            self.received = new[-1].end
        return sum(step.energy for step in new)

    def ready(self, until: int) -> bool:
        """True if a waiting step ends by ``until``."""
        return bool(self.steps) and self.steps[0].end <= until

    def take(self, until: int) -> list[CounterStep]:
        """Remove and return the steps that end by ``until``."""
        found = []
        while self.ready(until):
            found.append(self.steps.popleft())
        if found:
            self.divided = found[-1].end
        return found

    def front(self, lost: int) -> int:
        """The time up to which all is divided; ``lost`` if no step has come since then."""
        return self.divided if self.steps else max(self.divided, lost)

    def leave(self, start: int, end: int) -> None:
        """Note a period without a step or without requests."""
        if self.unused and self.unused[-1][1] == start:
            start, _ = self.unused.pop()
        self.unused.append((start, end))

    def missing(self, start: int, end: int) -> int:
        """The nanoseconds of a period of which no request has the energy."""
        found = max(0, min(end, self.began) - start) + max(0, end - max(start, self.divided))
        for since, until in reversed(self.unused):
            if until <= start:
                break
            found += max(0, min(end, until) - max(start, since))
        return found
