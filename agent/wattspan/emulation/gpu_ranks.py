"""Ranks of a synchronous job: processes on several GPUs that end every step together.

Each computes its part, then waits for the slowest, as in data parallelism with an all-reduce at
the end of a step. The ranks do not know one another: whoever steps the boards finds out when all
have arrived, and lets them go on from exactly that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from wattspan.emulation.gpu_work import FOREVER, TRAIN, Finished, Steps
from wattspan.emulation.physics import Kernel

_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of ``ranks``: the host prepares, the GPU computes, then it waits for the others.

    A waiting GPU spins: it wants ``spinning`` of the board, though it does nothing of use.
    """

    group: str
    rank: int
    ranks: int
    of: Steps = field(default_factory=Steps)
    load: float = 1.0
    spinning: float = 0.25
    kernel: Kernel = TRAIN
    paused: bool = False
    steps: int = 0
    computing: bool = False
    left: float | None = None
    since: float = 0.0  # seconds from the begin of the step to where it has come
    arrived: float | None = None  # seconds ago that it began to wait; None: it does not
    late: float = 0.0  # seconds to make up for: the others were there before anybody looked
    finished: tuple[Finished, ...] = ()

    @property
    def demand(self) -> float:
        if self.arrived is not None:
            return self.spinning
        return self.load if self.computing else 0.0

    @property
    def done(self) -> float:
        return float(self.steps)

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> Rank:
        time = elapsed / _SECOND
        if self.arrived is not None:
            return replace(self, arrived=self.arrived + time, finished=())
        time += self.late
        since, computing, left = self.since, self.computing, self.left
        arrived = None
        while time > 0.0:
            if left is None:
                if self.paused and not computing:
                    since = 0.0
                    break
                left = self.of.seconds(self.steps, computing=computing)
            rate = speed if computing else host
            if left > time * rate:
                left, since = left - time * rate, since + time
                break
            time, since, left = time - left / rate, since + left / rate, None
            if computing:
                arrived = time
                break
            computing = True
        return replace(
            self, since=since, computing=computing and arrived is None, left=left,
            arrived=arrived, late=0.0, finished=(),
        )  # fmt: skip

    def lasts(self, speed: float, host: float = 1.0) -> float:
        if self.arrived is not None or (self.left is None and self.paused and not self.computing):
            return FOREVER
        left = self.of.seconds(self.steps, computing=self.computing)
        left = left if self.left is None else self.left
        return max(0.0, left / (speed if self.computing else host) - self.late)

    def let_go(self, ago: float) -> Rank:
        """The rank after a step that all had finished ``ago`` seconds before now."""
        if self.arrived is None:
            raise ValueError("a rank that does not wait cannot be let go")
        ended = min(ago, self.arrived)
        done = Finished(
            self.since + self.arrived, self.arrived, ended,
            self.of.whole(self.steps), self.of.work(self.steps),
        )  # fmt: skip
        return replace(
            self, steps=self.steps + 1, since=0.0, arrived=None, late=ended, finished=(done,)
        )


def met(ranks: Sequence[Rank]) -> bool:
    """Whether all the ranks of a job wait for one another."""
    return len(ranks) == ranks[0].ranks and all(rank.arrived is not None for rank in ranks)


def waited(rank: Rank) -> int:
    """How many nanoseconds a rank has been waiting."""
    return round((rank.arrived or 0.0) * _SECOND)
