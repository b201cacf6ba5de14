"""Work of emulated GPU processes: training, ranks of a synchronous job, and serving.

Work is an immutable value that time advances. It has a demand, it gets a speed, and it finishes
units. The host's part of a step runs at the speed of the socket's CPUs (1.0, unless a package's
power limit slows them). A slow GPU lengthens the GPU's part of a step and leaves the host's part
as it is, so a cap shows as longer steps, to the nanosecond.

Ranks of a synchronous job end every step together: each computes its part, then waits for the
slowest, as in data parallelism with an all-reduce at the end of a step. The ranks do not know one
another: the owner of the boards finds out when all have arrived, and releases them from exactly
that moment.

``WorkLog`` holds the finished units and their exact times: the truth for spans and tests.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from wattspan.emulation.boards import Kernel, ModelKernel

_SECOND = 1_000_000_000
TRAIN = ModelKernel(compute=0.7)
DECODE = ModelKernel(compute=0.2, activity=0.45)  # memory-bound: no cap binds, a clock lock saves
PREFILL = ModelKernel(compute=0.55, activity=0.95)  # between the two: a cap shows in latency
LARGE_MODEL = ModelKernel(compute=0.57, activity=1.05)
"""Training of a large model. On the emulated H100 it comes close to what is known second-hand of
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

    ``computed``: the end of its own part, if it then waited for others. ``ideal`` is its duration
    at full speed, 0 if unknown.
    """

    began: float
    computed: float
    ended: float
    ideal: float
    work: int = 1


class GpuWork(Protocol):
    """A process's work on a GPU: an immutable value."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def demand(self) -> float:
        """The share of the GPU it wants now, 0 to 1."""
        ...

    @property
    def done(self) -> float:
        """Units of work finished since it began."""
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
class MemoryResident:
    """Holds memory and does nothing."""

    kernel: Kernel = TRAIN
    demand: float = 0.0
    done: float = 0.0
    finished: tuple[FinishedUnit, ...] = ()

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> MemoryResident:
        del elapsed, speed, host
        return self

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del speed, host
        return FOREVER


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """Wants the same share for ever; a unit of work is a second at full speed."""

    demand: float = 1.0
    kernel: Kernel = TRAIN
    done: float = 0.0
    finished: tuple[FinishedUnit, ...] = ()

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> SteadyLoad:
        del host
        return replace(self, done=self.done + self.demand * speed * elapsed / _SECOND)

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del speed, host
        return FOREVER


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The duration and the amount of work of each training step.

    ``step`` is a step's seconds at full speed, ``host`` the host's share of them; ``noise`` is
    the coefficient of variation from step to step, drawn from ``seed``. The work of a step is
    ``samples``, give or take ``spread`` of it, and its time is in proportion.
    """

    step: float = 0.25
    host: float = 0.1
    noise: float = 0.0
    seed: int = 0
    samples: int = 256
    spread: float = 0.0

    def seconds(self, step: int, *, computing: bool) -> float:
        """The seconds at full speed of one part of step number ``step``."""
        share = (1.0 - self.host) if computing else self.host
        amount = self.work(step) / self.samples
        return max(1e-6, self.step * amount * share * self.variation(step))

    def whole(self, step: int) -> float:
        """The seconds at full speed of step number ``step``."""
        return self.seconds(step, computing=False) + self.seconds(step, computing=True)

    def variation(self, step: int) -> float:
        if not self.noise:
            return 1.0
        draw = random.Random(self.seed * 1_000_003 + step).gauss(0.0, 1.0)  # noqa: S311
        return math.exp(self.noise * draw)

    def work(self, step: int) -> int:
        """The number of samples in step number ``step``."""
        if not self.spread:
            return self.samples
        draw = random.Random(self.seed * 1_000_033 + step).uniform(-1.0, 1.0)  # noqa: S311
        return max(1, round(self.samples * (1.0 + self.spread * draw)))


class _StepPart(NamedTuple):
    """A position inside one training step."""

    timing: StepTiming
    number: int
    paused: bool
    computing: bool
    left: float | None  # of the present phase: host seconds, or GPU seconds at full speed
    since: float  # seconds since the step began

    def advanced(self, time: float, speed: float, host: float) -> tuple[float, _StepPart, bool]:
        """The seconds of ``time`` that are left, the position then, and whether the step ended."""
        _, _, paused, computing, left, since = self
        while time > 0.0:
            if left is None:
                if paused and not computing:
                    return 0.0, self._replace(left=None, since=0.0), False
                left = self.timing.seconds(self.number, computing=computing)
            rate = speed if computing else host
            if left > time * rate:
                left, since, time = left - time * rate, since + time, 0.0
                break
            time, since, left = time - left / rate, since + left / rate, None
            if computing:
                return time, self._replace(computing=False, left=None, since=since), True
            computing = True
        return 0.0, self._replace(computing=computing, left=left, since=since), False


@dataclass(frozen=True, slots=True)
class Training:
    """Steps, one after the other: the host prepares, then the GPU computes.

    While it is ``paused`` no step begins; the present one is finished first.
    """

    timing: StepTiming = field(default_factory=StepTiming)
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

    @property
    def done(self) -> float:
        whole = self.timing.seconds(self.steps, computing=True)
        left = whole if self.left is None or not self.computing else self.left
        return self.steps + 1.0 - left / whole

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Training:
        time, since = elapsed / _SECOND, self.since
        steps, computing, left = self.steps, self.computing, self.left
        ended: list[tuple[float, float, int]] = []  # seconds left then, seconds it took, number
        while time > 0.0:
            part = _StepPart(self.timing, steps, self.paused, computing, left, since)
            time, part, done = part.advanced(time, speed, host)
            since, computing, left = part.since, part.computing, part.left
            if done:
                ended.append((time, since, steps))
                steps, since = steps + 1, 0.0
        finished = tuple(
            FinishedUnit(ago + took, ago, ago, self.timing.whole(step), self.timing.work(step))
            for ago, took, step in ended
        )
        return replace(
            self, steps=steps, computing=computing, left=left, since=since, finished=finished
        )

    def lasts(self, speed: float, host: float = 1.0) -> float:
        if self.left is None and self.paused and not self.computing:
            return FOREVER
        left = self.timing.seconds(self.steps, computing=self.computing)
        return (left if self.left is None else self.left) / (speed if self.computing else host)


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank of ``ranks``: the host prepares, the GPU computes, then it waits for the others.

    A waiting GPU spins: it wants ``spinning`` of the board, though it does nothing of use.
    """

    group: str
    rank: int
    ranks: int
    timing: StepTiming = field(default_factory=StepTiming)
    load: float = 1.0
    spinning: float = 0.25
    kernel: Kernel = TRAIN
    paused: bool = False
    steps: int = 0
    computing: bool = False
    left: float | None = None
    since: float = 0.0  # seconds from the begin of the step to where it has come
    arrived: float | None = None  # seconds ago that it began to wait; None: it does not
    late: float = 0.0  # seconds by which the release came late, to be made up for
    finished: tuple[FinishedUnit, ...] = ()

    @property
    def demand(self) -> float:
        if self.arrived is not None:
            return self.spinning
        return self.load if self.computing else 0.0

    @property
    def done(self) -> float:
        return float(self.steps)

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> RankWork:
        time = elapsed / _SECOND
        if self.arrived is not None:
            return replace(self, arrived=self.arrived + time, finished=())
        part = _StepPart(
            self.timing, self.steps, self.paused, self.computing, self.left, self.since
        )
        time, part, done = part.advanced(time + self.late, speed, host)
        return replace(
            self, since=part.since, computing=part.computing, left=part.left,
            arrived=time if done else None, late=0.0, finished=(),
        )  # fmt: skip

    def lasts(self, speed: float, host: float = 1.0) -> float:
        if self.arrived is not None or (self.left is None and self.paused and not self.computing):
            return FOREVER
        left = self.timing.seconds(self.steps, computing=self.computing)
        left = left if self.left is None else self.left
        return max(0.0, left / (speed if self.computing else host) - self.late)

    def released(self, ago: float) -> RankWork:
        """The rank after a step that all had finished ``ago`` seconds before now."""
        if self.arrived is None:
            raise ValueError("a rank that does not wait cannot be released")
        ended = min(ago, self.arrived)
        done = FinishedUnit(
            self.since + self.arrived, self.arrived, ended,
            self.timing.whole(self.steps), self.timing.work(self.steps),
        )  # fmt: skip
        return replace(
            self, steps=self.steps + 1, since=0.0, arrived=None, late=ended, finished=(done,)
        )


def all_arrived(ranks: Sequence[RankWork]) -> bool:
    """True if all the ranks of a job wait for one another."""
    return len(ranks) == ranks[0].ranks and all(rank.arrived is not None for rank in ranks)


def waiting_time(rank: RankWork) -> int:
    """Nanoseconds for which a rank has been waiting."""
    return round((rank.arrived or 0.0) * _SECOND)


MAX_UNITS = 20_000  # units of work by process: forty minutes of steps of 0.12 s


class CompletedUnit(NamedTuple):
    """A finished unit of work, in nanoseconds of the monotonic clock.

    ``computed``: the end of its own part, if it then waited for other ranks. ``ideal`` is its
    duration at full speed, 0 if unknown.
    """

    began: int
    computed: int
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
        self.work = 0

    def record(self, at: int, finished: Iterable[FinishedUnit]) -> None:
        """Remember what was finished up to the time ``at``."""
        for one in finished:
            began, computed, ended = (
                at - round(ago * _SECOND) for ago in (one.began, one.computed, one.ended)
            )
            unit = CompletedUnit(began, computed, ended, round(one.ideal * _SECOND), one.work)
            self._finished.append(unit)
            self.units += 1
            self.took += ended - began
            self.ideal += unit.ideal
            self.work += unit.work

    def since(self, number: int) -> tuple[CompletedUnit, ...]:
        """The units from number ``number`` on, as far as they are remembered."""
        wanted = min(max(0, self.units - number), len(self._finished))
        return tuple(self._finished)[len(self._finished) - wanted :] if wanted else ()

    def summary(self, number: int | None) -> dict[str, Any]:
        """As an answer of the engine: the sums, and what is new since ``number``."""
        return {
            "finished": [] if number is None else [list(unit) for unit in self.since(number)],
            "units": self.units,
            "took": self.took,
            "ideal": self.ideal,
            "work": self.work,
        }


_SECOND = 1_000_000_000
_EPSILON = 1e-9  # seconds of work that are none: roundings


@dataclass(frozen=True, slots=True)
class RequestServing:
    """Requests arrive in bursts and are served in order. A unit of work is a request.

    ``rate`` is the mean number of requests a second, ``cost`` the GPU seconds of one at full
    speed, ``burst`` how many arrive together on average. While any waits, it wants ``load``.
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
    def done(self) -> float:
        return self.served + (1.0 - self.left / self.cost if self.queue else 0.0)

    @property
    def backlog(self) -> float:
        """GPU seconds that wait."""
        return self.left + self.cost * (len(self.queue) - 1) if self.queue else 0.0

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> RequestServing:
        del host
        time = elapsed / _SECOND
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
            finished=tuple(FinishedUnit(time - a, time - b, time - b, 0.0) for a, b in ended),
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


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Requests are served side by side, as by continuous batching; each slows the others a little.

    They come one by one, ``rate`` a second; alone at full speed one takes ``cost`` seconds, give
    or take ``spread`` of it. Each companion makes it longer by ``crowding``; beyond ``most`` they
    wait. The fuller the batch, the more of the board it wants: from ``least_load`` to all.
    """

    rate: float = 8.0
    cost: float = 0.4
    spread: float = 0.3
    crowding: float = 0.05
    most: int = 16
    least_load: float = 0.75
    seed: int = 0
    kernel: Kernel = PREFILL
    came: int = 0
    until_next: float = 0.0
    active: tuple[tuple[float, float], ...] = ()  # seconds since it came, seconds left alone
    waiting: tuple[tuple[float, float], ...] = ()
    served: int = 0
    finished: tuple[FinishedUnit, ...] = ()

    @property
    def demand(self) -> float:
        full = len(self.active) / self.most
        return self.least_load + (1.0 - self.least_load) * full if self.active else 0.0

    @property
    def done(self) -> float:
        return float(self.served)

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> ContinuousBatching:
        del host
        time, came, wait = elapsed / _SECOND, self.came, self.until_next
        active, waiting = list(self.active), list(self.waiting)
        ended: list[tuple[float, float]] = []  # how long it took, seconds left then
        while time > _EPSILON:
            rate = self._rate(len(active)) * speed
            first = min((left for _, left in active), default=math.inf) / rate
            stretch = min(time, wait, first)
            time, wait = time - stretch, wait - stretch
            active = [(ago + stretch, left - stretch * rate) for ago, left in active]
            waiting = [(ago + stretch, left) for ago, left in waiting]
            ended = [(took, after + stretch) for took, after in ended]
            ended += [(ago, 0.0) for ago, left in active if left <= _EPSILON]
            active = [one for one in active if one[1] > _EPSILON]
            if wait <= _EPSILON:
                cost, wait = self._request(came)
                came += 1
                waiting.append((0.0, cost))
            room = self.most - len(active)
            active, waiting = active + waiting[:room], waiting[room:]
        return replace(
            self,
            came=came,
            until_next=wait,
            active=tuple(active),
            waiting=tuple(waiting),
            served=self.served + len(ended),
            finished=tuple(FinishedUnit(took + ago, ago, ago, 0.0) for took, ago in ended),
        )

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del host
        rate = self._rate(len(self.active)) * speed
        first = min((left for _, left in self.active), default=math.inf) / rate
        return min(first, self.until_next)

    def _rate(self, companions: int) -> float:
        """The speed of each of so many requests, relative to one alone."""
        return 1.0 / (1.0 + self.crowding * max(0, companions - 1))

    def _request(self, index: int) -> tuple[float, float]:
        """The duration of request ``index`` alone, and the seconds until the next one."""
        draw = random.Random(self.seed * 1_000_003 + index)  # noqa: S311
        cost = self.cost * (1.0 + self.spread * draw.uniform(-1.0, 1.0))
        return cost, max(1e-6, draw.expovariate(self.rate))
