"""What processes do on an emulated GPU: demand and progress as values that time moves on.

A piece of work is asked for its ``demand`` and told how much time passed and how fast the GPU
ran it (``speed``: 1.0 is its wish granted at the highest clock). A slow GPU makes the GPU's part
of a step longer and leaves the host's part as it is, so a cap shows as fewer steps a second.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Protocol

from wattspan.emulation.physics import Kernel, ModelKernel

_SECOND = 1_000_000_000
TRAIN = ModelKernel(compute=0.7)
DECODE = ModelKernel(compute=0.2, activity=0.45)  # memory-bound: no cap binds, a clock lock saves


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

    def after(self, elapsed: int, speed: float) -> Work:
        """The work ``elapsed`` nanoseconds later."""
        ...


@dataclass(frozen=True, slots=True)
class Resident:
    """Holds memory and does nothing."""

    kernel: Kernel = TRAIN
    demand: float = 0.0
    done: float = 0.0

    def after(self, elapsed: int, speed: float) -> Resident:
        del elapsed, speed
        return self


@dataclass(frozen=True, slots=True)
class Steady:
    """Wants the same share for ever; a unit of work is a second at full speed."""

    demand: float = 1.0
    kernel: Kernel = TRAIN
    done: float = 0.0

    def after(self, elapsed: int, speed: float) -> Steady:
        return replace(self, done=self.done + self.demand * speed * elapsed / _SECOND)


@dataclass(frozen=True, slots=True)
class Script:
    """Wants each listed share for the listed seconds, over and over, whatever the GPU does."""

    phases: tuple[tuple[float, float], ...]  # (seconds, demand)
    kernel: Kernel = TRAIN
    done: float = 0.0
    position: int = 0  # nanoseconds into the script

    @property
    def demand(self) -> float:
        left = self.position
        for seconds, demand in self.phases:
            left -= round(seconds * _SECOND)
            if left < 0:
                return demand
        return self.phases[-1][1]

    def after(self, elapsed: int, speed: float) -> Script:
        length = sum(round(seconds * _SECOND) for seconds, _ in self.phases)
        return replace(
            self,
            position=(self.position + elapsed) % length,
            done=self.done + self.demand * speed * elapsed / _SECOND,
        )


@dataclass(frozen=True, slots=True)
class Training:
    """Steps: the host prepares, then the GPU computes. A unit of work is a step.

    ``step`` is a step's seconds at full speed, ``host`` the host's share of them; ``noise`` is
    the coefficient of variation from step to step, drawn from ``seed``.
    """

    step: float = 0.25
    host: float = 0.1
    load: float = 1.0  # demand while computing
    noise: float = 0.0
    seed: int = 0
    kernel: Kernel = TRAIN
    steps: int = 0
    computing: bool = False
    left: float | None = None  # of the present phase: host seconds, or GPU seconds at full speed

    @property
    def demand(self) -> float:
        return self.load if self.computing else 0.0

    @property
    def done(self) -> float:
        whole = self._phase(self.steps, computing=True)
        left = whole if self.left is None or not self.computing else self.left
        return self.steps + (1.0 - left / whole if whole else 0.0)

    def after(self, elapsed: int, speed: float) -> Training:
        time = elapsed / _SECOND
        steps, computing = self.steps, self.computing
        left = self._phase(steps, computing=computing) if self.left is None else self.left
        while time > 0.0:
            rate = speed if computing else 1.0
            if left > time * rate:
                left -= time * rate
                break
            time -= left / rate
            steps += computing
            computing = not computing
            left = self._phase(steps, computing=computing)
        return replace(self, steps=steps, computing=computing, left=left)

    def _phase(self, step: int, *, computing: bool) -> float:
        share = (1.0 - self.host) if computing else self.host
        return max(1e-6, self.step * share * self._noise(step))

    def _noise(self, step: int) -> float:
        if not self.noise:
            return 1.0
        draw = random.Random(self.seed * 1_000_003 + step).gauss(0.0, 1.0)  # noqa: S311
        return math.exp(self.noise * draw)


@dataclass(frozen=True, slots=True)
class Serving:
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
    backlog: float = 0.0  # GPU seconds waiting
    served: float = 0.0  # GPU seconds done

    @property
    def demand(self) -> float:
        return self.load if self.backlog > 0.0 else 0.0

    @property
    def done(self) -> float:
        return self.served / self.cost

    @property
    def arrived(self) -> float:
        """Requests that have come in, served or not."""
        return (self.served + self.backlog) / self.cost

    def after(self, elapsed: int, speed: float) -> Serving:
        time = elapsed / _SECOND
        bursts, wait, backlog, served = self.bursts, self.until_next, self.backlog, self.served
        while time > 0.0:
            stretch = min(time, wait)
            work = min(backlog, stretch * speed)
            backlog, served = backlog - work, served + work
            time, wait = time - stretch, wait - stretch
            if wait <= 0.0:
                arrived, wait = self._burst(bursts)
                bursts, backlog = bursts + 1, backlog + arrived * self.cost
        return replace(self, bursts=bursts, until_next=wait, backlog=backlog, served=served)

    def _burst(self, index: int) -> tuple[int, float]:
        """How many requests burst ``index`` brings, and the seconds until the next one."""
        draw = random.Random(self.seed * 1_000_003 + index)  # noqa: S311
        # Geometric: at least one, ``burst`` on average.
        more = 1.0 - 1.0 / max(self.burst, 1.0)
        size = 1 + (int(math.log(1.0 - draw.random()) / math.log(more)) if more else 0)
        return size, max(1e-6, draw.expovariate(self.rate / self.burst))
