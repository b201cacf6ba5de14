"""What processes do on an emulated GPU: demand and progress as values that time moves on.

A piece of work is asked for its ``demand`` and told how much time passed, how fast the GPU ran it
(``speed``: 1.0 is its wish granted at the highest clock) and how fast its CPUs were (``host``:
1.0 unless a package's power limit slows them). A slow GPU makes the GPU's part of a step longer
and leaves the host's part as it is, so a cap shows as longer steps, to the nanosecond.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from wattspan.emulation.physics import Kernel, ModelKernel

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


class Finished(NamedTuple):
    """A unit of work that is done; times in seconds before the time that the work has come to.

    ``computed``: when its own part was done, where it then waited for others. ``ideal`` is how
    long it would have taken with nothing to slow it, 0 where nobody can know.
    """

    began: float
    computed: float
    ended: float
    ideal: float
    work: int = 1


class Work(Protocol):
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
    def finished(self) -> tuple[Finished, ...]:
        """What the latest ``after`` finished."""
        ...

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Work:
        """The work ``elapsed`` nanoseconds later."""
        ...

    def lasts(self, speed: float, host: float = 1.0) -> float:
        """Seconds until its demand changes by itself, if nothing else does."""
        ...


@dataclass(frozen=True, slots=True)
class Resident:
    """Holds memory and does nothing."""

    kernel: Kernel = TRAIN
    demand: float = 0.0
    done: float = 0.0
    finished: tuple[Finished, ...] = ()

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Resident:
        del elapsed, speed, host
        return self

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del speed, host
        return FOREVER


@dataclass(frozen=True, slots=True)
class Steady:
    """Wants the same share for ever; a unit of work is a second at full speed."""

    demand: float = 1.0
    kernel: Kernel = TRAIN
    done: float = 0.0
    finished: tuple[Finished, ...] = ()

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Steady:
        del host
        return replace(self, done=self.done + self.demand * speed * elapsed / _SECOND)

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del speed, host
        return FOREVER


@dataclass(frozen=True, slots=True)
class Script:
    """Wants each listed share for the listed seconds, over and over, whatever the GPU does."""

    phases: tuple[tuple[float, float], ...]  # (seconds, demand)
    kernel: Kernel = TRAIN
    done: float = 0.0
    position: int = 0  # nanoseconds into the script
    finished: tuple[Finished, ...] = ()

    @property
    def demand(self) -> float:
        return self._phase()[1]

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del speed, host
        return self._phase()[0]

    def _phase(self) -> tuple[float, float]:
        """The seconds left of the present phase, and its demand."""
        left = self.position
        for seconds, demand in self.phases:
            left -= round(seconds * _SECOND)
            if left < 0:
                return -left / _SECOND, demand
        return 0.0, self.phases[-1][1]

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Script:
        del host
        length = sum(round(seconds * _SECOND) for seconds, _ in self.phases)
        return replace(
            self,
            position=(self.position + elapsed) % length,
            done=self.done + self.demand * speed * elapsed / _SECOND,
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """How long each step of a training job takes, and how much work is in it.

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
        """How many samples are in step number ``step``."""
        if not self.spread:
            return self.samples
        draw = random.Random(self.seed * 1_000_033 + step).uniform(-1.0, 1.0)  # noqa: S311
        return max(1, round(self.samples * (1.0 + self.spread * draw)))


@dataclass(frozen=True, slots=True)
class Training:
    """Steps, one after the other: the host prepares, then the GPU computes.

    While it is ``paused`` no step begins; the present one is finished first.
    """

    of: Steps = field(default_factory=Steps)
    load: float = 1.0  # demand while computing
    kernel: Kernel = TRAIN
    paused: bool = False
    steps: int = 0
    computing: bool = False
    left: float | None = None  # of the present phase: host seconds, or GPU seconds at full speed
    since: float = 0.0  # seconds since the present step began
    finished: tuple[Finished, ...] = ()

    @property
    def demand(self) -> float:
        return self.load if self.computing else 0.0

    @property
    def done(self) -> float:
        whole = self.of.seconds(self.steps, computing=True)
        left = whole if self.left is None or not self.computing else self.left
        return self.steps + 1.0 - left / whole

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Training:
        time, since = elapsed / _SECOND, self.since
        steps, computing, left = self.steps, self.computing, self.left
        ended: list[tuple[float, float, int]] = []  # seconds left then, seconds it took, number
        while time > 0.0:
            if left is None:
                if self.paused and not computing:
                    since = 0.0
                    break
                left = self.of.seconds(steps, computing=computing)
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
            Finished(ago + took, ago, ago, self.of.whole(step), self.of.work(step))
            for ago, took, step in ended
        )
        return replace(
            self, steps=steps, computing=computing, left=left, since=since, finished=finished
        )

    def lasts(self, speed: float, host: float = 1.0) -> float:
        if self.left is None and self.paused and not self.computing:
            return FOREVER
        left = self.of.seconds(self.steps, computing=self.computing)
        return (left if self.left is None else self.left) / (speed if self.computing else host)
