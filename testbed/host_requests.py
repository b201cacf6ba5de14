"""A serving engine on an emulated CPU package, and the true energy of its requests.

All time is virtual. The engine's server and worker are busy by the number of its requests, beside
another program, on a package whose law the agent does not know (:mod:`testbed.cpu_plants`). The
real ledger, energy history and joiner read its counter, the CPU times, the counter of the board,
and the spans. A request owes the true energy of its tokens on the board, and an equal part of what
the engine's processes owe on the package while it is active.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from testbed.cpu_costs import LEARNING, REST, EmulatedPackage, Pattern, Process, Scenario, consumer
from testbed.cpu_plants import CpuPlant
from testbed.idle_baseline import BEGIN, STEP, Loads, observed, wandering
from testbed.serving_engines import (
    ServingEngine,
    at_rest,
    counter_steps,
    reported,
    run_engines,
    single,
)
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.inference.division import RequestEnergy
from wattspan.inference.requests import ActiveClock, InferenceRequest
from wattspan.model import (
    SECOND,
    Attribution,
    Domain,
    HwType,
    Instant,
    Interval,
    Microjoules,
    PayerInfo,
    Principal,
    Provenance,
    Share,
    Tick,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.inference_joiner import InferenceJoiner
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.values import InferenceDetails, Span, SpanColumns, TokenRole

SLOTS, SPEED = 16, 0.9
EXPORT = 5  # seconds
BOARD = Domain("gpu-0", HwType.GPU, "gpu-0", "fake", Provenance.EMULATED, resource="gpu-0")
NEIGHBOUR, SERVER, WORKER = range(3)
ENGINE = (SERVER, WORKER)
OWNER = Principal(1000)


class HostRequest(NamedTuple):
    """A request that ended at ``end``, and its true microjoules on the board and the package."""

    end: int
    found: RequestEnergy
    board: float
    package: float


class HostResult(NamedTuple):
    """``remainder`` is the energy of the engine's processes on the package that no account has."""

    requests: list[HostRequest]
    remainder: int


def run(plant: CpuPlant, count: int, seed: int) -> HostResult:
    """The energy of ``count`` requests on the host."""
    (engine,) = single(SLOTS, SPEED, count)
    run_engines([engine])
    requests = [_reported(engine, number) for number in range(len(engine.done))]
    first = min(one.start for one in requests)
    seconds = int(requests[-1].end - BEGIN) // SECOND + 3 * EXPORT
    scenario = Scenario(plant, _processes(engine, requests), ())
    package = EmulatedPackage(scenario, random.Random(seed))
    ledger = Ledger(LedgerSettings(), boot_id=str(seed), now=package.at)
    history = EnergyHistory(600 * SECOND, 10**8, baseline_errors=ledger.baseline_errors)
    settled: list[RequestEnergy] = []
    joiner = InferenceJoiner(history, settled.extend)
    until = engine.done[-1].ended
    board, _ = counter_steps([engine.curve, at_rest([engine.curve])], until, seed)
    _begin(history, package.at)
    payers = {consumer(one) for one in ENGINE}
    charged = sent = read = 0
    owed: list[tuple[int, float]] = []
    for number, (tick, truth) in enumerate(observed(package, seconds, cpus=plant.cpus)):
        now = tick.at.mono
        attributions = [*ledger.apply(tick)]
        charged += sum(
            share.energy
            for one in attributions
            if one.interval.end.mono > first
            for share in one.shares
            if share.payer in payers
        )
        while read < len(board) and board[read].end + REST * SECOND <= now:
            attributions.append(_attributed(board[read]))
            read += 1
        history.apply(tick, attributions)
        owed.append((tick.readings[0].at.mono, sum(truth.owed[one] for one in ENGINE)))
        if number % (10 * EXPORT) == 0:
            ended = [one for one in requests[sent:] if one.end <= now]
            sent += len(ended)
            if ended:
                _send(joiner, ended, now)
        joiner.turn(now)
    joiner.turn(now, wait=False)
    (row,) = joiner.rows
    remainder = charged - row.host.energy["cpu"] - joiner.host_idle["cpu"]
    return HostResult(_judged(engine, requests, settled, owed), remainder)


def _reported(engine: ServingEngine, number: int) -> InferenceRequest:
    """The span of a request, after the rest of the package."""
    one = reported(engine.done[number], engine.model, number + 1)
    later = REST * SECOND
    return one._replace(start=one.start + later, first=one.first + later, end=one.end + later)


def _processes(engine: ServingEngine, requests: Sequence[InferenceRequest]) -> list[Process]:
    """The neighbour, and the engine's processes, whose load follows the number of its requests."""
    begin = min(one.start for one in requests) // SECOND * SECOND
    changes = Counter[int]()
    for one in requests:
        changes[(one.start - begin) // STEP] += 1
        changes[(one.end - begin) // STEP] -= 1
    active, number = [], 0
    for at in range(max(changes) + 1):
        number += changes[at]
        active.append(number / SLOTS)

    def following(least: float, most: float) -> Pattern:
        def loads(chance: random.Random) -> Loads:
            noise = wandering(0.05, 0.0)(chance)
            other = wandering(0.05, 0.05)(chance)
            for each in active:
                busy = least + (most - least) * each if each else 0.0
                yield min(1.0, max(0.0, busy + next(noise) - next(other) + 0.05))
            while True:
                yield 0.0

        return loads

    return [
        Process(4.0, tuple(range(8, 14)), wandering(0.15, 0.4, 3.0)),
        Process(5.0, (0, 1), following(0.1, 0.6)),
        Process(8.0, (2, 3, 4, 5), following(0.3, 0.7)),
    ]


def _begin(history: EnergyHistory, at: int) -> None:
    parents = {NEIGHBOUR: 99, SERVER: 99, WORKER: consumer(SERVER).pid}
    births = [
        PayerInfo(consumer(one), "python", parent=parent, principal=OWNER)
        for one, parent in parents.items()
    ]
    history.apply(Tick(Instant(at, 0), {"gpu": (BOARD,)}, births=births), ())


def _attributed(step: CounterStep) -> Attribution:
    later = REST * SECOND
    start, end = Instant(step.start + later, 0), Instant(step.end + later, 0)
    energy, none = Microjoules(step.energy), Microjoules(0)
    shares = (Share(consumer(WORKER), energy),)
    return Attribution(Interval(BOARD.id, start, end, energy), shares, none, none)


def _send(joiner: InferenceJoiner, ended: Iterable[InferenceRequest], now: int) -> None:
    spans = []
    for one in ended:
        details = InferenceDetails(
            one.model, one.context - one.prefill, queue=0, first_token=one.first - one.start
        )
        tokens = one.context, one.generated
        times = one.start, one.end
        ids = one.id * 2, one.id, b""
        spans.append(Span(*ids, "llm", "request", *times, None, *tokens, TokenRole.ENGINE, details))
    joiner.add(consumer(SERVER), SpanColumns.of(spans), now, OWNER.path, principal=OWNER)


def _judged(
    engine: ServingEngine,
    requests: Sequence[InferenceRequest],
    settled: Sequence[RequestEnergy],
    owed: Sequence[tuple[int, float]],
) -> list[HostRequest]:
    """The settled requests of a host that has learned what its processes cost."""
    clock, truths = ActiveClock(requests), Counter[bytes]()
    for (start, before), (end, after) in pairwise(owed):
        for one, part in clock.parts(start, end):
            truths[one.id] += (after - before) * part / (end - start)
    found = {each.request.id: each for each in settled}
    first = requests[0].start + LEARNING * SECOND
    return [
        HostRequest(one.end, found[one.id], 1e6 * done.energy, truths[one.id])
        for one, done in zip(requests, engine.done, strict=True)
        if one.start >= first and one.id in found
    ]
