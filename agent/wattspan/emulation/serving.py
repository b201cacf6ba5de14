"""Serving: requests that come when they like, one after the other or side by side."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from wattspan.emulation.physics import Kernel
from wattspan.emulation.workloads import DECODE, PREFILL, FinishedUnit

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
        """How many requests burst ``index`` brings, and the seconds until the next one."""
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
        """How fast each of so many goes, compared with one alone."""
        return 1.0 / (1.0 + self.crowding * max(0, companions - 1))

    def _request(self, index: int) -> tuple[float, float]:
        """How long request ``index`` takes alone, and the seconds until the next one."""
        draw = random.Random(self.seed * 1_000_003 + index)  # noqa: S311
        cost = self.cost * (1.0 + self.spread * draw.uniform(-1.0, 1.0))
        return cost, max(1e-6, draw.expovariate(self.rate))
