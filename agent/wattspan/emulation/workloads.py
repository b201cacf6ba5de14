"""Work of emulated GPU processes: training, serving and loads of constant size.

Work is an immutable value that time advances. It has a demand, it gets a speed, and it finishes
units. The host's part of a step runs at the speed of the socket's CPUs (1.0, unless a package's
power limit slows them). A slow GPU lengthens the GPU's part of a step and leaves the host's part
as it is, so a cap shows as longer steps, to the nanosecond.

``WorkLog`` holds the finished units and their exact times: the truth for spans and tests.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from wattspan.emulation.boards import Kernel
from wattspan.model import SECOND

TRAIN = Kernel(compute=0.7)
DECODE = Kernel(compute=0.2, activity=0.45)  # memory-bound: no cap binds, a clock lock saves
PREFILL = Kernel(compute=0.55, activity=0.95)  # between the two: a cap shows in latency
LARGE_MODEL = Kernel(compute=0.57, activity=1.05)
"""Training of a large model. On the emulated H100 it is close to second-hand figures of
Llama-3-8B on a real one (time and energy against 700 W; here, with 3 % of a step on the host):

===== ============== ==============
watts real           here
===== ============== ==============
600   1.035 / 0.945  1.031 / 0.944
500   1.093 / 0.833  1.105 / 0.843
400   1.218 / 0.744  1.215 / 0.747
300   1.68  / 0.775  1.472 / 0.676
===== ============== ==============

So five percent of slowdown buy some eight percent of energy, and no more.
"""
FOREVER = math.inf


class FinishedUnit(NamedTuple):
    """A finished unit of work; times in seconds before the present time of the work.

    ``ideal`` is its duration at full speed, 0 if unknown.
    """

    began: float
    ended: float
    ideal: float
    work: int = 1


class GpuWork(Protocol):
    """A process's work on a GPU: an immutable value."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def demand(self) -> float:
        """The share of the GPU demanded now, 0 to 1."""
        ...

    @property
    def finished(self) -> tuple[FinishedUnit, ...]:
        """The units finished by the latest ``after``."""
        ...

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> GpuWork:
        """The work ``elapsed`` nanoseconds later."""
        ...

    def lasts(self, speed: float, host: float = 1.0) -> float:
        """Seconds until its demand changes by itself, if nothing else does."""
        ...


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """A constant demand without units of work; with a demand of 0 it only holds memory."""

    demand: float = 1.0
    kernel: Kernel = TRAIN
    finished: tuple[FinishedUnit, ...] = ()

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> SteadyLoad:
        del elapsed, speed, host
        return self

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del speed, host
        return FOREVER


@dataclass(frozen=True, slots=True)
class Training:
    """Steps, one after the other: the host prepares, then the GPU computes.

    ``step`` is a step's seconds at full speed, ``host`` the host's share of them; ``noise`` is
    the coefficient of variation from step to step, drawn from ``seed``. ``samples`` is the work of
    a step. While it is ``paused`` no step begins; the present one is finished first.
    """

    step: float = 0.25
    host: float = 0.1
    noise: float = 0.0
    seed: int = 0
    samples: int = 256
    load: float = 1.0  # demand while computing
    kernel: Kernel = TRAIN
    paused: bool = False
    steps: int = 0
    computing: bool = False
    left: float | None = None  # of the present phase: host seconds, or GPU seconds at full speed
    since: float = 0.0  # seconds since the present step began
    finished: tuple[FinishedUnit, ...] = ()

    @property
    def demand(self) -> float:
        return self.load if self.computing else 0.0

    def seconds(self, number: int, *, computing: bool) -> float:
        """The seconds at full speed of one part of step ``number``."""
        share = (1.0 - self.host) if computing else self.host
        return max(1e-6, self.step * share * self.variation(number))

    def whole(self, number: int) -> float:
        """The seconds at full speed of step ``number``."""
        return self.seconds(number, computing=False) + self.seconds(number, computing=True)

    def variation(self, number: int) -> float:
        if not self.noise:
            return 1.0
        draw = random.Random(self.seed * 1_000_003 + number).gauss(0.0, 1.0)  # noqa: S311
        return math.exp(self.noise * draw)

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Training:
        time, since = elapsed / SECOND, self.since
        steps, computing, left = self.steps, self.computing, self.left
        ended: list[tuple[float, float, int]] = []  # seconds left then, seconds it took, number
        while time > 0.0:
            if left is None:
                if self.paused and not computing:
                    since = 0.0
                    break
                left = self.seconds(steps, computing=computing)
            rate = speed if computing else host
            if left > time * rate:
                left, since = left - time * rate, since + time
                break
            time, since, left = time - left / rate, since + left / rate, None
            if computing:
                ended.append((time, since, steps))
                steps, since = steps + 1, 0.0
            computing = not computing
        finished = tuple(
            FinishedUnit(ago + took, ago, self.whole(step), self.samples)
            for ago, took, step in ended
        )
        return replace(
            self, steps=steps, computing=computing, left=left, since=since, finished=finished
        )

    def lasts(self, speed: float, host: float = 1.0) -> float:
        if self.left is None and self.paused and not self.computing:
            return FOREVER
        left = self.seconds(self.steps, computing=self.computing)
        return (left if self.left is None else self.left) / (speed if self.computing else host)


MAX_UNITS = 20_000  # units of work by process: forty minutes of steps of 0.12 s


class CompletedUnit(NamedTuple):
    """A finished unit of work, in nanoseconds of the monotonic clock.

    ``ideal`` is its duration at full speed, 0 if unknown.
    """

    began: int
    ended: int
    ideal: int
    work: int


class WorkLog:
    """The units that one process has finished: the latest in full, all of them in sums."""

    def __init__(self, kept: int = MAX_UNITS) -> None:
        self._finished: deque[CompletedUnit] = deque(maxlen=kept)
        self.units = 0
        self.took = 0
        self.ideal = 0

    def record(self, at: int, finished: Iterable[FinishedUnit]) -> None:
        """Record the units that were finished up to the time ``at``."""
        for one in finished:
            began, ended = at - round(one.began * SECOND), at - round(one.ended * SECOND)
            unit = CompletedUnit(began, ended, round(one.ideal * SECOND), one.work)
            self._finished.append(unit)
            self.units += 1
            self.took += ended - began
            self.ideal += unit.ideal

    def since(self, number: int) -> tuple[CompletedUnit, ...]:
        """The units from number ``number`` on, as far as they are remembered."""
        wanted = min(max(0, self.units - number), len(self._finished))
        return tuple(self._finished)[len(self._finished) - wanted :] if wanted else ()

    def summary(self, number: int | None) -> dict[str, Any]:
        """An answer of the engine: the sums, and the units from number ``number`` on."""
        return {
            "finished": [] if number is None else [list(unit) for unit in self.since(number)],
            "units": self.units,
            "took": self.took,
            "ideal": self.ideal,
        }


_EPSILON = 1e-9  # seconds of work that are none: roundings


@dataclass(frozen=True, slots=True)
class RequestServing:
    """Requests arrive in bursts and are served in order. A unit of work is a request.

    ``rate`` is the mean number of requests a second, ``cost`` the GPU seconds of one at full
    speed, ``burst`` how many arrive together on average. While any waits, the demand is ``load``.
    """

    rate: float = 5.0
    cost: float = 0.05
    burst: float = 3.0
    load: float = 0.9
    seed: int = 0
    kernel: Kernel = DECODE
    bursts: int = 0
    until_next: float = 0.0  # seconds
    queue: tuple[float, ...] = ()  # for each that is not done: seconds since it came
    left: float = 0.0  # GPU seconds of the first of the queue
    served: int = 0
    finished: tuple[FinishedUnit, ...] = ()

    @property
    def demand(self) -> float:
        return self.load if self.queue else 0.0

    @property
    def backlog(self) -> float:
        """GPU seconds that wait."""
        return self.left + self.cost * (len(self.queue) - 1) if self.queue else 0.0

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> RequestServing:
        del host
        time = elapsed / SECOND
        bursts, wait, left, served = self.bursts, self.until_next, self.left, self.served
        queue, now = [-ago for ago in self.queue], 0.0  # when they came, from here on
        ended: list[tuple[float, float]] = []
        while now < time:
            until = min(time, now + wait)
            while queue and left <= (until - now) * speed:
                now, wait = now + left / speed, wait - left / speed
                ended.append((queue.pop(0), now))
                served, left = served + 1, self.cost
            left -= (until - now) * speed if queue else 0.0
            now, wait = until, wait - (until - now)
            if wait <= _EPSILON:
                came, wait = self._burst(bursts)
                left = left if queue else self.cost
                bursts, queue = bursts + 1, queue + [now] * came
        return replace(
            self,
            bursts=bursts,
            until_next=wait,
            queue=tuple(time - came for came in queue),
            left=left if queue else 0.0,
            served=served,
            finished=tuple(FinishedUnit(time - a, time - b, 0.0) for a, b in ended),
        )

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del host
        return self.backlog / speed if self.queue else self.until_next

    def _burst(self, index: int) -> tuple[int, float]:
        """The number of requests in burst ``index``, and the seconds until the next burst."""
        draw = random.Random(self.seed * 1_000_003 + index)  # noqa: S311
        # Geometric: at least one, ``burst`` on average.
        more = 1.0 - 1.0 / max(self.burst, 1.0)
        size = 1 + (int(math.log(1.0 - draw.random()) / math.log(more)) if more else 0)
        return size, max(1e-6, draw.expovariate(self.rate / self.burst))
