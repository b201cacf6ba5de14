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

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from wattspan.attribution.division import split
from wattspan.inference.requests import ActiveClock, InferenceRequest
from wattspan.inference.step_queue import StepQueue
from wattspan.model import SECOND, HwType
from wattspan.spans.interval_pool import CounterStep

MOST_MISSING = 20
"""One part in so many of the time of a request of which the energy is known."""

_MEMORY = 600.0  # seconds to which earlier time without requests fades
_MAX_EARLY = 1024  # requests
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


class ReadMarks:
    """The times up to which the energy of processes was taken, by counter, in nanoseconds.

    An engine may be released and return, its processes may come to another engine, and counter
    steps are read again for earlier requests. A process that leaves an engine has a mark for each
    counter: the end of the last step that the engine has read. No engine takes its energy from
    before it.
    """

    def __init__(self) -> None:
        self._until: dict[Hashable, dict[Hashable, int]] = {}

    def __len__(self) -> int:
        """The number of processes with a mark."""
        return len(self._until)

    def set(self, payers: Iterable[Hashable], until: Mapping[Hashable, int]) -> None:
        """Note the times up to which the energy of some processes was taken; no mark falls."""
        for payer in payers if until else ():
            own = self._until.setdefault(payer, {})
            for counter, time in until.items():
                own[counter] = max(time, own.get(counter, time))

    def latest(self, payers: Collection[Hashable]) -> dict[Hashable, int]:
        """The latest mark of each counter among some processes."""
        found: dict[Hashable, int] = {}
        for payer in self._until.keys() & payers:
            for counter, time in self._until[payer].items():
                found[counter] = max(time, found.get(counter, time))
        return found

    def expire(self, before: int) -> None:
        """Remove the marks up to ``before``: no step from before is read again."""
        self._until = {
            payer: kept
            for payer, own in self._until.items()
            if (kept := {counter: time for counter, time in own.items() if time > before})
        }


class EngineHost:
    """The steps of one engine's processes, and the energy of its requests that are not final.

    A step that is ``blurred`` has an unknown part.
    """

    def __init__(self) -> None:
        self.members: frozenset[Hashable] = frozenset()
        """The processes of the steps that are added."""
        self._queues: dict[HostCounter, StepQueue] = {}
        self._waiting: dict[HostCounter, _WaitingPower] = {}
        self._energies: dict[str, dict[int, int]] = {}  # by part and identity of the request
        self._excluded: set[int] = set()  # identities of requests without a part of some step
        # Requests that are final before the steps of their time.
        self._early: deque[tuple[int, int]] = deque(maxlen=_MAX_EARLY)
        self._left: Collection[str] = ()  # domains

    def assign(self, members: frozenset[Hashable], marks: ReadMarks) -> None:
        """Set the processes; those that have left get ``marks`` of the steps that were added."""
        if gone := self.members - members:
            until: dict[Hashable, int] = {}
            for counter, queue in self._queues.items():
                if queue.has_begun:
                    until[counter], queue.fixed = queue.received, True
            marks.set(gone, until)
        self.members = members

    def add_steps(
        self,
        counters: Mapping[HostCounter, Sequence[CounterStep]],
        first: int,
        left: Collection[str] = (),
        marks: Mapping[Hashable, int] = MappingProxyType({}),
    ) -> None:
        """Add the newest steps, in order of time; those from before ``first`` are not divided.

        Others measure the same as the domains in ``left`` by now: their steps are not missing.
        ``marks`` are the latest of the processes: other engines have had their energy until then.
        """
        self._left = left
        for counter, steps in counters.items():
            queue, mark = self._queues.get(counter), marks.get(counter)
            if queue is None or not queue.has_begun:
                begin = first if mark is None else max(first, mark)
                queue = self._queues[counter] = StepQueue.since(steps, begin)
                self._waiting.setdefault(counter, _WaitingPower())
            if mark is not None:
                queue.skip(mark)
            queue.add(steps)

    @property
    def read_until(self) -> int:
        """The time up to which the steps of all counters were added; 0 without any."""
        return min((queue.received for queue in self._queues.values()), default=0)

    @property
    def _divided(self) -> int:
        return max((queue.divided for queue in self._queues.values()), default=0)

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

    def restart(
        self,
        kept: Collection[str] = (),
        marks: Mapping[Hashable, int] = MappingProxyType({}),
    ) -> set[str]:
        """Forget the counters of which no step was divided: their steps are to be added again.

        Returns their domains. Those in ``kept`` are not read again, nor is the time before the
        latest ``marks`` of the processes.
        """
        found = set()
        for counter, queue in tuple(self._queues.items()):
            again = counter.domain not in kept and marks.get(counter, queue.began) <= queue.began
            if again and queue.is_undivided:
                del self._queues[counter]
                found.add(counter.domain)
        return found

    def release(self, marks: ReadMarks) -> Counter[str]:
        """End the engine; returns the energy of the steps that wait. Idempotent."""
        self.assign(frozenset(), marks)
        found = Counter[str]()
        for counter, queue in self._queues.items():
            found[counter.part] += queue.waiting
            queue.steps.clear()
        return found

    def merge(self, part: EngineHost) -> Counter[str]:
        """Add the requests and the steps of an engine that is a part of this one.

        Returns the energy of the waiting steps of a period that was divided for one of them only.
        """
        left = Counter[str]()
        for counter, queue in part._queues.items():
            own = self._queues.get(counter)
            if own is None or not own.has_begun:
                self._queues[counter] = queue
            elif queue.has_begun:
                left[counter.part] += own.merge(queue)
            self._waiting.setdefault(counter, part._waiting[counter])
        for name, energies in part._energies.items():
            self._energies.setdefault(name, {}).update(energies)
        self.members |= part.members
        self._excluded |= part._excluded
        self._early += part._early
        return left

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
        self._excluded |= clock.excluded
        early = [each for each in self._early if each[1] > self._divided]
        self._early.clear()
        self._early += early
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
            if not any(start < step.end and end > step.start for start, end in self._early):
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
        if start < end and self._divided < end:
            self._early.append((start, end))
        expected = self._expected
        parts = {counter.part for counter in expected}
        known = (
            start < end
            and id(request) not in self._excluded
            and HwType.CPU in parts
            and all(
                queue.missing(start, end) * MOST_MISSING <= end - start
                for queue in expected.values()
            )
        )
        self._excluded.discard(id(request))
        energy = {
            part: self._energies.get(part, {}).pop(id(request), 0)
            for part in sorted(parts | self._energies.keys())
        }
        return HostShare(energy, known)
