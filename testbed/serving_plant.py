"""An emulated server of a language model in virtual time, fast enough for hours of requests.

It has the scheduler and the costs of :class:`testbed.continuous_batching`'s engine, at a
clock that may change (:mod:`testbed.clock_scaling`) and under a power cap. Iterations
without a prompt differ only by their growing contexts, so that all of them up to the next arrival
or end are one step. A test compares both engines request by request.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from testbed.clock_scaling import costs_at_clock
from testbed.continuous_batching import ModelCosts
from wattspan.emulation.boards import H100, Silicon

IDLE_WATTS = 70.0
CLOCK_DELAY = 0.2
"""Seconds until a clock is in force: published figures range from 0.01 to 0.2."""


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A request and its times in seconds; 0 before they are known."""

    arrived: float
    prompt: int
    output: int
    first_token: float = 0.0
    ended: float = 0.0
    computed: int = 0

    @property
    def to_first(self) -> float:
        """Seconds until the first token."""
        return self.first_token - self.arrived

    @property
    def between(self) -> float:
        """Mean seconds between two tokens; 0 for a single token."""
        return (self.ended - self.first_token) / max(1, self.output - 1)


@dataclass
class VirtualServer:
    """One engine on one board; ``advance`` runs it up to a time.

    ``energy`` is in joules, idle power included; ``in_flight`` is the integral of the number of
    requests over time, in seconds. ``limit`` is the power cap in watts, ``delay`` the time until a
    clock is in force.
    """

    requests: Iterable[tuple[float, int, int]]  # arrival, prompt tokens, output tokens
    costs: ModelCosts = field(default_factory=ModelCosts)
    silicon: Silicon = H100.silicon
    slots: int = 64
    budget: int = 2048
    limit: float = 700.0
    delay: float = CLOCK_DELAY
    now: float = 0.0
    energy: float = 0.0
    in_flight: float = 0.0
    arrivals: int = 0
    tokens: int = 0  # generated
    finished: list[ServedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._coming = deque(self.requests)
        self._tables: dict[int, ModelCosts] = {}
        self._mhz = self.silicon.max_mhz
        self._at = self._costs(self._mhz)
        self._pending: tuple[float, int] | None = None
        self._waiting: deque[ServedRequest] = deque()
        self._prefilling: list[ServedRequest] = []
        self._decoding: list[tuple[int, int, ServedRequest]] = []  # heap by the last generation
        self._generation = self._number = 0
        self._contexts = 0

    @property
    def clock(self) -> int:
        """The clock in force in MHz."""
        return self._mhz

    @property
    def present(self) -> int:
        """Number of requests in flight."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def generating(self) -> list[ServedRequest]:
        """The requests that have their first token and no end."""
        return [one for _, _, one in self._decoding]

    @property
    def exhausted(self) -> bool:
        """True if no request is in flight and none will arrive."""
        return not self._coming and not self.present

    def add(self, arrival: float, prompt: int, output: int) -> None:
        """Add a request behind all others; it arrives at ``arrival`` or at once."""
        self._coming.append((arrival, prompt, output))

    def set_clock(self, mhz: int) -> None:
        """Lock the clock; it is in force after ``CLOCK_DELAY``."""
        if mhz != (self._pending[1] if self._pending else self._mhz):
            self._pending = self.now + self.delay, mhz

    def advance(self, until: float) -> None:
        """Run iterations until ``until``; the last one may end later."""
        while self.now < until:
            if self._pending is not None and self.now >= self._pending[0]:
                self._mhz = self._pending[1]
                self._at = self._costs(self._mhz)
                self._pending = None
            self._admit()
            if not self.present:
                target = min(until, self._coming[0][0]) if self._coming else until
                self.energy += IDLE_WATTS * (target - self.now)
                self.now = target
                continue
            self._iterate(until)

    def _costs(self, mhz: int) -> ModelCosts:
        table = self._tables.get(mhz)
        if table is None:
            table = self._tables[mhz] = costs_at_clock(self.costs, self.silicon, mhz)
        return table

    def _admit(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            at, prompt, output = self._coming.popleft()
            self._waiting.append(ServedRequest(at, max(1, prompt), max(1, output)))
            self.arrivals += 1

    def _iterate(self, until: float) -> None:
        decoding = len(self._decoding)
        room = self.budget - decoding
        chunks: list[tuple[ServedRequest, int]] = []
        for one in self._prefilling:
            if room <= 0:
                break
            size = min(room, one.prompt - one.computed)
            chunks.append((one, size))
            room -= size
        while self._waiting and room > 0 and len(self._prefilling) + decoding < self.slots:
            one = self._waiting.popleft()
            self._prefilling.append(one)
            size = min(room, one.prompt)
            chunks.append((one, size))
            room -= size
        size = sum(size for _, size in chunks)
        pairs = sum(size * (one.computed + size / 2) for one, size in chunks)
        count, contexts = 1, float(self._contexts)
        if not chunks:
            first = self._cost(self._at, decoding, 0.0, contexts)[0]
            horizon = until
            if self._coming and len(self._decoding) < self.slots:
                horizon = min(horizon, self._coming[0][0])
            if self._pending is not None:
                horizon = min(horizon, self._pending[0])
            count = max(1, math.ceil((horizon - self.now) / first))
            count = min(count, self._decoding[0][0] - self._generation)
            contexts += decoding * (count - 1) / 2
        time, energy = self._capped(decoding + size, pairs, contexts)
        present = self.present
        self.now += count * time
        self.energy += count * (energy + IDLE_WATTS * time)
        self.in_flight += present * count * time
        for one, part in chunks:
            one.computed += part
        self._finish(count, chunks)
        before = len(self._waiting)
        self._admit()  # during the iteration: these are in flight from their arrival on
        for one in islice(self._waiting, before, None):
            self.in_flight += self.now - one.arrived

    def _finish(self, count: int, chunks: list[tuple[ServedRequest, int]]) -> None:
        self._generation += count
        self.tokens += count * len(self._decoding)
        self._contexts += count * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._generation:
            _, _, one = heapq.heappop(self._decoding)
            self._contexts -= one.prompt + one.output
            one.ended = self.now
            self.finished.append(one)
        for one, _ in chunks:
            if one.computed < one.prompt:
                continue
            self._prefilling.remove(one)
            one.first_token = self.now
            self.tokens += 1
            if one.output == 1:
                one.ended = self.now
                self.finished.append(one)
                continue
            self._number += 1
            entry = (self._generation + one.output - 1, self._number, one)
            heapq.heappush(self._decoding, entry)
            self._contexts += one.prompt + 1

    def _capped(self, tokens: int, pairs: float, contexts: float) -> tuple[float, float]:
        """Time and energy of an iteration at the highest clock whose power is within the cap."""
        mhz, table = self._mhz, self._at
        while True:
            time, energy = self._cost(table, tokens, pairs, contexts)
            if energy / time + IDLE_WATTS <= self.limit or mhz <= self.silicon.min_mhz:
                return time, energy
            mhz -= self.silicon.step_mhz
            table = self._costs(mhz)

    @staticmethod
    def _cost(table: ModelCosts, tokens: int, pairs: float, contexts: float) -> tuple[float, float]:
        """Seconds of an iteration, and joules above the idle energy."""
        compute = table.token_time * tokens + table.attention_time * pairs
        memory = table.weights_time + table.context_time * contexts
        time = table.overhead + (compute**4 + memory**4) ** 0.25
        energy = table.active_power * time + table.weights_energy + table.token_energy * tokens
        energy += table.attention_energy * pairs + table.context_energy * contexts
        return time, energy
