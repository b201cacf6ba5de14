"""The energy of an engine's processes beyond its GPUs, divided among its requests.

The CPU and the memory of an engine serve all its requests: they read prompts, schedule, sample and
send tokens. No token explains a part of that, so the energy of an instant is divided equally among
the requests that are active then. Time without requests has the mean power of earlier such time,
which is energy of the engine. The engine's part of the idle energy of devices is divided in the
same way.

The energy of each counter is divided exactly, in integer microjoules. It is that of the processes
by the attribution, so it is unknown where a counter is lost, or its idle power is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.attribution.division import split
from wattspan.inference.requests import ActiveClock, InferenceRequest
from wattspan.inference.step_queue import StepQueue
from wattspan.model import SECOND, HwType
from wattspan.spans.interval_pool import CounterStep

MOST_MISSING = 20
"""One part in so many of the time of a request of which the energy is known."""

_MEMORY = 600.0  # seconds to which earlier time without requests fades
_RESOLUTION = 1 << 10  # parts of a microjoule in the weights of a division


class HostCounter(NamedTuple):
    """A counter and the part of a request's energy that it has: a hardware type, or ``idle``."""

    domain: str
    part: str


class HostShare(NamedTuple):
    """The microjoules of a request by part. ``known`` is False if some of them are unknown."""

    energy: Mapping[str, int]
    known: bool


NO_SHARE = HostShare({}, False)


@dataclass(slots=True)
class _WaitingPower:
    """The mean power of an engine without requests, in microjoules a second."""

    energy: float = 0.0
    seconds: float = 0.0

    def add(self, energy: int, seconds: float) -> None:
        kept = max(0.0, 1 - seconds / _MEMORY)
        self.energy = self.energy * kept + energy
        self.seconds = self.seconds * kept + seconds

    @property
    def power(self) -> float:
        return self.energy / self.seconds if self.seconds else 0.0


class EngineHost:
    """The steps of one engine's processes, and the energy of its requests that are not final.

    A step that is ``blurred`` has an unknown part.
    """

    def __init__(self) -> None:
        self._queues: dict[HostCounter, StepQueue] = {}
        self._waiting: dict[HostCounter, _WaitingPower] = {}
        self._energies: dict[str, dict[int, int]] = {}  # by part and identity of the request
        self._left: Collection[str] = ()  # domains

    def add_steps(
        self,
        counters: Mapping[HostCounter, Sequence[CounterStep]],
        first: int,
        left: Collection[str] = (),
    ) -> None:
        """Add the newest steps, in order of time; those from before ``first`` are not divided.

        Others measure the same as the domains in ``left`` by now: their steps are not missing.
        """
        self._left = left
        for counter, steps in counters.items():
            queue = self._queues.get(counter)
            if queue is None or queue.received == queue.began:  # it has had no step
                queue = self._queues[counter] = StepQueue.since(steps, first)
                self._waiting.setdefault(counter, _WaitingPower())
            queue.add(steps)

    @property
    def _expected(self) -> dict[HostCounter, StepQueue]:
        """The counters that are to have all the time of a request.

        The queue of one that has left remains: its steps are not divided twice.
        """
        return {
            counter: queue
            for counter, queue in self._queues.items()
            if queue.steps or counter.domain not in self._left
        }

    def restart(self) -> None:
        """Forget the counters of which no step was divided: their steps are to be added again."""
        for counter, queue in tuple(self._queues.items()):
            if queue.divided == queue.began:
                del self._queues[counter]

    def rewind(self) -> None:
        """Forget all steps that wait: they are to be added again."""
        for queue in self._queues.values():
            queue.steps.clear()
            queue.received = queue.divided

    def merge(self, part: EngineHost) -> None:
        """Add the requests of an engine that is a part of this one. All steps are rewound."""
        for name, energies in part._energies.items():
            self._energies.setdefault(name, {}).update(energies)
        self.rewind()

    def front(self, lost: int) -> int | None:
        """The time up to which all counters are divided; None without any.

        A counter without steps since ``lost`` is not waited for.
        """
        return min((queue.front(lost) for queue in self._expected.values()), default=None)

    def settle(self, until: int, requests: Iterable[InferenceRequest]) -> Counter[str]:
        """Divide the steps that end by ``until``; returns the engine's energy without requests."""
        idle = Counter[str]()
        if not any(queue.ready(until) for queue in self._queues.values()):
            return idle
        clock = ActiveClock(requests)
        found: dict[tuple[int, int], list[tuple[InferenceRequest, float]]] = {}
        for counter, queue in self._queues.items():
            reached = queue.divided
            for step in queue.take(until):
                period = step.start, step.end
                if period not in found:
                    found[period] = clock.parts(*period)
                edge = step.start if found[period] and not step.blurred else step.end
                if reached < edge:
                    queue.leave(reached, edge)
                reached = step.end
                idle[counter.part] += self._divide(counter, step, found[period])
        return idle

    def _divide(
        self,
        counter: HostCounter,
        step: CounterStep,
        parts: Sequence[tuple[InferenceRequest, float]],
    ) -> int:
        """Divide a step by the nanoseconds of each request; returns the engine's own energy."""
        length, waiting = step.end - step.start, self._waiting[counter]
        active = sum(part for _, part in parts)
        if active <= 0:
            waiting.add(step.energy, length / SECOND)
            return step.energy
        rest = min(float(step.energy), waiting.power * max(0.0, length - active) / SECOND)
        scale = (step.energy - rest) / active
        weights = [round(each * _RESOLUTION) for each in (rest, *(scale * p for _, p in parts))]
        if not any(weights):
            return step.energy
        own, *shares = split(step.energy, weights)
        energies = self._energies.setdefault(counter.part, {})
        for (request, _), share in zip(parts, shares, strict=True):
            key = id(request)
            energies[key] = energies.get(key, 0) + share
        return own

    def take(self, request: InferenceRequest) -> HostShare:
        """Remove and return the share of a request. It is known if that of the CPU is.

        A request without duration has no part of any step: its share is unknown. Memory without a
        counter is in no part: its energy is not in that of the host either.
        """
        start, end = request.start, request.end
        expected = self._expected
        parts = {counter.part for counter in expected}
        known = (
            start < end
            and HwType.CPU in parts
            and all(
                queue.missing(start, end) * MOST_MISSING <= end - start
                for queue in expected.values()
            )
        )
        energy = {
            part: self._energies.get(part, {}).pop(id(request), 0)
            for part in sorted(parts | self._energies.keys())
        }
        return HostShare(energy, known)
