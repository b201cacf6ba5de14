"""An emulated engine for language models: continuous batching, and the true energy of each request.

The engine runs *iterations*. Each computes one token of every request in decode and chunks of the
prompts of others, up to a budget of tokens, as vLLM's scheduler does. Tokens of a prompt that are
in the prefix cache are not computed. An engine that is not ``mixed``, as SGLang by default, has no
decode in an iteration with chunks.

The time of an iteration is the larger one of its compute time and its memory time, rounded at the
corner, and an overhead. Its energy is active power times its time, that of reading the weights, and
that of each token, of its attention and of reading its context. A request causes the energy of its
own tokens and contexts; what an iteration has in common is divided equally among its requests. The
sum over all requests is the energy of all iterations.

Constants are those of a model with 8 billion parameters on an H100 by its published peak rates,
with assumed efficiencies and energies; nothing here was measured.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Times in seconds, energies in joules, power in watts, of one model on one board.

    ``attention`` is per pair of a prompt token and a token of its context, ``context`` per token
    of context that a decode token reads. ``noise`` is the coefficient of variation of an
    iteration's energy, ``drift`` that of a slow variation with a period of some minutes.
    """

    overhead: float = 0.0012
    token_time: float = 32e-6
    attention_time: float = 1.0e-9
    weights_time: float = 0.0068
    context_time: float = 57e-9
    active_power: float = 110.0
    weights_energy: float = 0.55
    token_energy: float = 0.0145
    attention_energy: float = 0.5e-6
    context_energy: float = 4.2e-6
    noise: float = 0.01
    drift: float = 0.02

    def stretched(self, factor: float) -> ModelCosts:
        """The same energies, except for active power, in ``factor`` times the time."""
        return replace(
            self,
            overhead=self.overhead * factor,
            token_time=self.token_time * factor,
            attention_time=self.attention_time * factor,
            weights_time=self.weights_time * factor,
            context_time=self.context_time * factor,
        )

    def scaled(self, size: float) -> ModelCosts:
        """A model ``size`` times as large."""
        return replace(
            self,
            token_time=self.token_time * size,
            attention_time=self.attention_time * size,
            weights_time=self.weights_time * size,
            context_time=self.context_time * math.sqrt(size),
            weights_energy=self.weights_energy * size,
            token_energy=self.token_energy * size,
            attention_energy=self.attention_energy * size,
            context_energy=self.context_energy * math.sqrt(size),
        )


@dataclass(slots=True)
class EmulatedRequest:
    """A request, its progress, and its true energy above the idle energy of the board.

    Times are seconds on the engine's clock; 0 before they are known. ``cached`` tokens of the
    prompt are in the prefix cache.
    """

    number: int
    arrived: float
    prompt: int
    output: int
    cached: int = 0
    scheduled: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    computed: int = 0  # prompt tokens, cached ones included
    generated: int = 0
    energy: float = 0.0  # joules, of all boards

    @property
    def context(self) -> int:
        return self.computed + self.generated


class EngineIteration(NamedTuple):
    """One iteration: its times in seconds, its energy in joules on each board.

    ``prompts`` are the requests whose prompt it completed, ``computed`` the tokens of prompts that
    it computed, ``generated`` the tokens that it generated. ``input`` is the part of the energy
    that prompts cause.
    """

    start: float
    end: float
    energy: float
    finished: Sequence[EmulatedRequest]
    prompts: Sequence[EmulatedRequest] = ()
    computed: int = 0
    generated: int = 0
    input: float = 0.0


@dataclass
class ContinuousBatching:
    """The scheduler of an engine and its iterations; all times are seconds of one clock.

    ``slots`` is the largest number of requests in a batch, ``budget`` that of tokens in an
    iteration, ``boards`` the number of boards with equal parts of the model (tensor parallelism).
    """

    costs: ModelCosts = field(default_factory=ModelCosts)
    slots: int = 64
    budget: int = 2048
    boards: int = 1
    mixed: bool = True
    seed: int = 0
    now: float = 0.0
    waiting: deque[EmulatedRequest] = field(default_factory=deque)
    running: list[EmulatedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._phase = self._random.random()

    def add(self, request: EmulatedRequest) -> None:
        """Queue a request."""
        request.computed = min(request.cached, request.prompt - 1)
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """True if an iteration can run."""
        return bool(self.running or self.waiting)

    def iterate(self, slowdown: float = 1.0) -> EngineIteration:
        """Run one iteration from ``now`` on; there must be a request.

        ``slowdown`` is the factor of its time on a board that other engines use, too; they bear
        the rest of the active power.
        """
        start = self.now
        decoding = [one for one in self.running if one.computed >= one.prompt]
        chunks = self._chunks(self.budget - (len(decoding) if self.mixed else 0))
        if chunks and not self.mixed:
            decoding = []
        costs, part = self.costs, 1.0 / self.boards
        tokens = len(decoding) + sum(size for _, size in chunks)
        pairs = sum(size * (one.computed + size / 2) for one, size in chunks)
        contexts = sum(one.context for one in decoding)
        compute = part * (costs.token_time * tokens + costs.attention_time * pairs)
        memory = part * (costs.weights_time + costs.context_time * contexts)
        time = slowdown * (costs.overhead + (compute**4 + memory**4) ** 0.25)
        factor = self._variation(start)
        common = factor * (costs.active_power * time / slowdown + part * costs.weights_energy)
        own = {
            id(one): factor * part * (costs.token_energy + costs.context_energy * one.context)
            for one in decoding
        }
        for one, size in chunks:
            own[id(one)] = (
                factor
                * part
                * (
                    costs.token_energy * size
                    + costs.attention_energy * size * (one.computed + size / 2)
                )
            )
        self.now = start + time
        energy = common + sum(own.values())
        for one in (*decoding, *(one for one, _ in chunks)):
            one.energy += self.boards * (own[id(one)] + common / len(own))
        for one, size in chunks:
            one.computed += size
        prompts = [one for one, _ in chunks if one.computed >= one.prompt]
        finished = self._generate([*decoding, *(one for one, _ in chunks)])
        caused = sum(own[id(one)] + common / len(own) for one, _ in chunks)
        return EngineIteration(
            start,
            self.now,
            energy,
            finished,
            prompts,
            sum(size for _, size in chunks),
            len(decoding) + len(prompts),
            caused,
        )

    def _chunks(self, room: int) -> list[tuple[EmulatedRequest, int]]:
        """Prompts to compute, at most ``room`` tokens; admits requests while there is room."""
        chunks: list[tuple[EmulatedRequest, int]] = []
        for one in self.running:
            size = min(room, one.prompt - one.computed)
            if size > 0:
                chunks.append((one, size))
                room -= size
        while self.waiting and room > 0 and len(self.running) < self.slots:
            one = self.waiting.popleft()
            one.scheduled = self.now
            self.running.append(one)
            size = min(room, one.prompt - one.computed)
            chunks.append((one, size))
            room -= size
        return chunks

    def _generate(self, advanced: Sequence[EmulatedRequest]) -> list[EmulatedRequest]:
        """Add a token to each request with a whole prompt; remove and return finished ones."""
        finished = []
        for one in advanced:
            if one.computed < one.prompt:
                continue
            one.generated += 1
            if one.generated == 1:
                one.first_token = self.now
            if one.generated >= one.output:
                one.ended = self.now
                finished.append(one)
        if finished:
            gone = set(map(id, finished))
            self.running = [one for one in self.running if id(one) not in gone]
        return finished

    def _variation(self, at: float) -> float:
        drift = self.costs.drift * math.sin(2 * math.pi * (at / 240 + self._phase))
        return (1 + drift) * (1 + self._random.gauss(0.0, self.costs.noise))
