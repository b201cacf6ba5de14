"""Language-model servers in virtual time, with the true energy of each request."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from testbed.continuous_batching import (
    ContinuousBatching,
    EmulatedRequest,
    EngineIteration,
    ModelCosts,
)
from testbed.queueing import repeated
from wattspan.inference.division import RequestDivision, RequestEnergy
from wattspan.inference.requests import InferenceRequest, work_in
from wattspan.inference.token_power import TokenPowerModel
from wattspan.model import MILLISECOND, SECOND
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.values import InferenceDetails

STEP = 100 * MILLISECOND
EDGE_ERROR = 2 * MILLISECOND
EXPORT = 5 * SECOND
IDLE = 70.0  # watts of a board, which the ledger knows
REST = 25.0  # watts of a board more, while its engines have no requests: not known to the ledger
BEGIN = 1_000  # seconds: the time of the first arrival


class _Curve:
    """The cumulative energy of one engine on one board above the board's idle energy, joules."""

    def __init__(self) -> None:
        self.times, self.sums = [0.0], [0.0]
        self.busy: list[tuple[float, float]] = []

    def add(self, end: float, energy: float) -> None:
        if energy:
            start = self.times[-1]
            if self.busy and self.busy[-1][1] == start:
                start, _ = self.busy.pop()
            self.busy.append((start, end))
        self.times.append(end)
        self.sums.append(self.sums[-1] + energy)

    def at(self, time: float) -> float:
        i = bisect_right(self.times, time)
        if i == len(self.times):
            return self.sums[-1]
        start, end = self.times[i - 1], self.times[i]
        part = (time - start) / (end - start)
        return self.sums[i - 1] + part * (self.sums[i] - self.sums[i - 1])


@dataclass
class ServingEngine:
    """One engine, its arrivals, the boards that it uses, and what it has done."""

    model: str
    batching: ContinuousBatching
    boards: tuple[str, ...]
    arrivals: Iterator[EmulatedRequest]
    curve: _Curve = field(default_factory=_Curve)
    done: list[EmulatedRequest] = field(default_factory=list)
    iterations: list[EngineIteration] = field(default_factory=list)
    next: EmulatedRequest | None = None

    def __post_init__(self) -> None:
        self.next = next(self.arrivals, None)
        self.batching.now = float(BEGIN)
        self.curve.add(BEGIN, 0.0)

    @property
    def ready(self) -> float | None:
        """The time of the next iteration; None after the last one."""
        if self.batching.busy:
            return self.batching.now
        return None if self.next is None else max(self.batching.now, self.next.arrived)

    def advance(self, slowdown: float) -> None:
        """Run the next iteration."""
        batching = self.batching
        if not batching.busy:
            start = max(batching.now, self.next.arrived)
            if start > batching.now:
                self.curve.add(start, 0.0)
            batching.now = start
        while self.next is not None and self.next.arrived <= batching.now:
            batching.add(self.next)
            self.next = next(self.arrivals, None)
        iteration = batching.iterate(slowdown)
        self.curve.add(iteration.end, iteration.energy)
        self.done += iteration.finished
        self.iterations.append(iteration)


def run_engines(engines: Sequence[ServingEngine]) -> None:
    """Run all engines to their end; those with a board in common take turns."""
    while ready := [(at, i) for i, one in enumerate(engines) if (at := one.ready) is not None]:
        at, i = min(ready)
        engine = engines[i]
        rivals = [
            other
            for other in engines
            if other is not engine and set(other.boards) & set(engine.boards)
            if other.ready is not None and other.ready <= at + 0.05 and other.batching.busy
        ]
        engine.advance(1.0 + len(rivals))


def arrivals(
    count: int, speed: float, *, cached: float, seed: int, rest: float = 0.0
) -> Iterator[EmulatedRequest]:
    """The trace's requests, after ``rest`` seconds.

    A part ``cached`` of them has half of the prompt in the cache.
    """
    chance = random.Random(seed)
    for number, request in enumerate(islice(repeated(speed), count)):
        hit = request.prompt // 2 if chance.random() < cached else 0
        output = max(1, request.generated)
        at = BEGIN + rest + request.at / SECOND
        yield EmulatedRequest(number, at, max(1, request.prompt), output, cached=hit)


def at_rest(curves: Sequence[_Curve]) -> _Curve:
    """The energy of a board while none of its engines has a request."""
    rest, until = _Curve(), float(BEGIN)
    rest.add(until, 0.0)
    for start, end in sorted(period for curve in curves for period in curve.busy):
        if start > until:
            rest.add(start, REST * (start - until))
        if end > until:
            rest.add(end, 0.0)
        until = max(until, end)
    return rest


def counter_steps(
    curves: Sequence[_Curve], until: float, seed: int
) -> tuple[list[CounterStep], int]:
    """The steps of a board above its idle energy; the counter's microjoules in all of them."""
    chance = random.Random(seed)
    steps, before, counted = [], None, 0
    for number in range(int((until - BEGIN) * SECOND) // STEP + 2):
        edge = BEGIN * SECOND + number * STEP
        at = edge / SECOND + chance.gauss(0.0, EDGE_ERROR / SECOND)
        value = int(1_000 * (IDLE * (at - BEGIN) + sum(curve.at(at) for curve in curves))) * 1_000
        if before is not None:
            rest = round(IDLE * 1e6 * STEP / SECOND)
            steps.append(CounterStep(edge - STEP, edge, max(0, value - before - rest), False))
            counted += value - before
        before = value
    return steps, counted


def reported(request: EmulatedRequest, model: str, ident: int) -> InferenceRequest:
    """The span that vLLM sends for the request."""

    def since(time: float) -> int:
        return round((time - request.arrived) * SECOND)

    details = InferenceDetails(
        model,
        request.cached,
        queue=since(request.scheduled),
        first_token=since(request.first_token),
    )
    start, end = round(request.arrived * SECOND), round(request.ended * SECOND)
    tokens = request.prompt, request.output
    return InferenceRequest.of(ident.to_bytes(8, "big"), start, end, tokens, details)


class RequestOutcome(NamedTuple):
    """A request's energy, and its true energy in microjoules."""

    found: RequestEnergy
    truth: float
    whole: float  # by TGI's method
    equal: float  # divided equally among active requests


@dataclass
class RequestResults:
    """Sums are microjoules."""

    outcomes: list[RequestOutcome]
    counters: int
    board_idle: int
    early: int  # above the idle energy, in steps known before the first request
    requests: int
    engine_idle: int
    by_model: dict[str, float]  # error of each model's sum

    @property
    def remainder(self) -> int:
        """The energy of the counters that no account has."""
        accounts = self.board_idle + self.early + self.requests + self.engine_idle
        return self.counters - accounts


def run(engines: Sequence[ServingEngine], *, seed: int = 0) -> RequestResults:
    """Run the engines, and divide the energy of their boards."""
    run_engines(engines)
    until = max(one.done[-1].ended for one in engines)
    boards = sorted({board for one in engines for board in one.boards})
    steps, counters = {}, 0
    for i, board in enumerate(boards):
        curves = [one.curve for one in engines if board in one.boards]
        steps[board], counted = counter_steps([*curves, at_rest(curves)], until, seed + i)
        counters += counted
    spans: list[tuple[InferenceRequest, ServingEngine, EmulatedRequest]] = []
    for engine in engines:
        for request in engine.done:
            spans.append((reported(request, engine.model, len(spans)), engine, request))
    models: dict[str, TokenPowerModel] = {}
    division = RequestDivision(lambda board: models.setdefault(board, TokenPowerModel()))
    for engine in engines:
        division.assign(id(engine), frozenset(engine.boards))
    found: dict[bytes, RequestEnergy] = {}
    first: int | None = None  # the earliest start in the first batch, or the last steps before it
    idle = 0
    waiting = sorted(spans, key=lambda each: each[0].end)
    now, sent, at = BEGIN * SECOND, 0, dict.fromkeys(boards, 0)
    last = round(until * SECOND)
    while True:
        now += EXPORT
        batch = []
        while sent < len(waiting) and waiting[sent][0].end <= now:
            batch.append(waiting[sent])
            sent += 1
        for engine in engines:
            own = [one[0] for one in batch if one[1] is engine]
            if own and first is None:
                first = max(now - EXPORT, min(each.start for each in own))
            division.add(own, now, engine=id(engine))
        for board in boards:
            new = at[board]
            while at[board] < len(steps[board]) and steps[board][at[board]].end <= now:
                at[board] += 1
            division.add_steps({board: steps[board][new : at[board]]})
        ended = now > last + EXPORT
        settled = division.settle(now + SECOND) if ended else division.settle(now, held=True)
        idle += settled.idle
        found |= {each.request.id: each for each in settled.requests}
        if ended:
            break
    active_steps = [step for each in steps.values() for step in each]
    board_idle = counters - sum(step.energy for step in active_steps)
    early = sum(step.energy for step in active_steps if first is None or step.end <= first)
    total = sum(each.energy for each in found.values())
    equal = _equal(spans, steps)
    outcomes = [
        RequestOutcome(
            found[one.id], 1e6 * request.energy, _whole(engine, engines, request), equal[one.id]
        )
        for one, engine, request in spans
    ]
    by_model = {}
    for model in dict.fromkeys(one.model for one in engines):
        of_model = [each for each in outcomes if each.found.request.model == model]
        truth = sum(each.truth for each in of_model)
        by_model[model] = sum(each.found.energy for each in of_model) / truth - 1
    return RequestResults(outcomes, counters, board_idle, early, total, idle, by_model)


def _whole(
    engine: ServingEngine, engines: Sequence[ServingEngine], request: EmulatedRequest
) -> float:
    """The whole energy of the boards during the request, as TGI's pull request 3315 has it."""
    start, end = request.scheduled, request.ended
    total = 0.0
    for board in engine.boards:
        curves = [one.curve for one in engines if board in one.boards]
        total += IDLE * (end - start) + sum(one.at(end) - one.at(start) for one in curves)
    return 1e6 * total


def _equal(
    spans: Sequence[tuple[InferenceRequest, ServingEngine, EmulatedRequest]],
    steps: dict[str, list[CounterStep]],
) -> dict[bytes, float]:
    """The energy of each step divided equally among the active requests of its board."""
    energies = {one.id: 0.0 for one, _, _ in spans}
    for board, of_board in steps.items():
        own = sorted(
            (one for one, engine, _ in spans if board in engine.boards), key=lambda r: r.start
        )
        first, opened = 0, []
        for step in of_board:
            while first < len(own) and own[first].start < step.end:
                opened.append(own[first])
                first += 1
            opened = [one for one in opened if one.end >= step.start]
            active = [work.active for work in work_in([(opened, float)], step.start, step.end)[0]]
            whole = sum(active)
            for one, part in zip(opened, active, strict=True):
                energies[one.id] += step.energy * part / whole if whole else 0.0
    return energies


def single(
    slots: int,
    speed: float,
    count: int,
    *,
    boards: int = 1,
    mixed: bool = True,
    rest: float = 0.0,
    costs: ModelCosts | None = None,
) -> list[ServingEngine]:
    """One engine on one board, or on several by tensor parallelism."""
    made = costs or ModelCosts()
    batching = ContinuousBatching(made, slots, boards=boards, mixed=mixed, seed=slots)
    names = tuple(f"gpu-{i}" for i in range(boards))
    requests = arrivals(count, speed, cached=0.3, seed=slots, rest=rest)
    return [ServingEngine("8b", batching, names, requests)]


def pair(
    count: int, speed: float, boards: tuple[str, str], *, rest: float = 0.0
) -> list[ServingEngine]:
    """Two models of different size with different arrivals, on these boards."""
    small = ContinuousBatching(ModelCosts().scaled(0.4), slots=16, seed=1)
    large = ContinuousBatching(ModelCosts(), slots=16, seed=2)
    every = arrivals(2 * count, speed, cached=0.0, seed=4, rest=rest)
    one = arrivals(count, 0.8 * speed, cached=0.3, seed=3, rest=rest)
    return [
        ServingEngine("3b", small, boards[:1], one),
        ServingEngine("8b", large, boards[1:], (one for one in every if one.number % 2)),
    ]


def errors(outcomes: Sequence[RequestOutcome], energy: str = "found") -> list[float]:
    """The relative errors of requests."""
    values = {
        "found": lambda each: each.found.energy,
        "whole": lambda each: each.whole,
        "equal": lambda each: each.equal,
    }[energy]
    return [values(each) / each.truth - 1 for each in outcomes]


def quantile(values: Sequence[float], part: float) -> float:
    """The quantile of the absolute values."""
    ordered = sorted(map(abs, values))
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
