"""The counter steps of engines' processes that wait for their division among requests."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

from wattspan.model import SECOND
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.values import merged_periods

_MAX_UNUSED = 1024  # periods of a counter

MAX_LENGTH = 60 * SECOND
"""The longest step that is waited for: the longest `[agent] interval`."""


def _periods() -> deque[tuple[int, int]]:
    return deque(maxlen=_MAX_UNUSED)


@dataclass(slots=True)
class StepQueue:
    """The steps of one counter that wait, and the last periods without a step or a request.

    ``began``, ``received`` and ``divided`` are times: of the first step, and up to which steps were
    added and taken. ``length`` is that of the newest step. The steps of a ``fixed`` queue cannot be
    added again, because some of their processes are another engine's by now.
    """

    began: int
    received: int
    divided: int
    steps: deque[CounterStep] = field(default_factory=deque)
    unused: deque[tuple[int, int]] = field(default_factory=_periods)
    length: int = 0
    fixed: bool = False

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

    @property
    def has_begun(self) -> bool:
        """True if it has had a step."""
        return self.received > self.began

    @property
    def is_undivided(self) -> bool:
        """True if no step was taken, and all can be added again."""
        return self.divided == self.began and not self.fixed

    def skip(self, until: int) -> None:
        """Leave out the further steps from before ``until``."""
        self.received = max(self.received, until)

    def add(self, steps: Sequence[CounterStep]) -> int:
        """Append the steps that are not known, in order of time; returns their microjoules."""
        new = steps[bisect_left(steps, self.received, key=itemgetter(0)) :]
        self.steps += new
        if new:
            self.received = new[-1].end
            self.length = min(MAX_LENGTH, new[-1].end - new[-1].start)
        return sum(step.energy for step in new)

    def merge(self, other: StepQueue) -> int:
        """Add the steps of other processes on the same counter; returns undivided microjoules.

        Both queues have begun, and continue with the later one: of a period that was divided for
        one of them only, the energy is left. A step of one of them only has an unknown part.
        """
        reached, front = sorted((self.divided, other.divided))
        both: dict[int, list[CounterStep]] = {}
        for step in chain(self.steps, other.steps):
            both.setdefault(step.start, []).append(step)
        left = sum(one.energy for start, own in both.items() if start < front for one in own)
        self.steps = deque(
            CounterStep(
                start,
                own[0].end,
                sum(one.energy for one in own),
                len(own) == 1 or any(one.blurred for one in own),
            )
            for start, own in sorted(both.items())
            if start >= front
        )
        periods = merged_periods(self.unused, other.unused, [(reached, front)])
        self.unused.clear()
        self.unused.extend(periods)
        self.began = max(self.began, other.began)
        self.received = max(self.received, other.received)
        self.divided, self.fixed = front, True
        self.length = max(self.length, other.length)
        return left

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
        """The time up to which all is divided.

        Without a step since ``lost``, that time less the length of a step counts as divided.
        """
        return self.divided if self.steps else max(self.divided, lost - self.length)

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
