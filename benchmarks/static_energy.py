"""Static power, split and advice against known truth, on emulated boards in virtual time.

The boards are emulated H100s (wattspan.emulation.boards) whose law defines the power of each phase
of a training: the host prepares, the GPU computes, and a collective spins until the slowest rank
arrives. The truth is the power of the spinning kernel, and the energy of each phase. The real
ledger, energy history, joiner and learner read the board's counter, its utilisation and the spans.

    .venv/bin/python -m benchmarks.static_energy [--seeds N] [--seconds S]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from testbed.sending_host import BelievingResolver

from wattspan.advice.boards import StaticPowerLearner
from wattspan.advice.rules import Advice, AdviceKind, advise
from wattspan.advice.static_power import StaticPowerFit
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.config import SpansSettings
from wattspan.emulation.boards import H100, Demand, Kernel, OperatingPoint, operate
from wattspan.emulation.workloads import DECODE, TRAIN
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ExportRequest, ResourceClaim, ResourceSpans
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    Domain,
    GpuStatus,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Provenance,
    Reading,
    Snapshot,
    StaticBasis,
    Tick,
    Usage,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.span_joiner import SpanJoiner
from wattspan.spans.values import Span, SpanColumns
from wattspan.testing import ManualClock

TICK = 100 * MILLISECOND
EXPORT_EVERY = 5 * SECOND
USAGE_EVERY = 5  # ticks
WALL = 10**18  # Unix time at the zero of the monotonic clock
REST = 10  # seconds without a user, which show the idle power
SPIN = Kernel(compute=0.0, activity=0.02)
SILICON = H100.silicon
TRAINER, OTHER = Consumer(10, 1), Consumer(11, 1)
GPU = Domain(
    "gpu:0",
    HwType.GPU,
    "H100 0",
    "emulated",
    Provenance.EMULATED,
    resource="gpu:0",
    method="gpu-sm-utilisation",
    resolution=TICK,
)
SPARE = replace(GPU, id="gpu:1", name="H100 1", resource="gpu:1")


class Phase(NamedTuple):
    """A part of a step: its name as a span ("" for none), its length and the kernel that runs."""

    name: str
    length: int
    kernel: Kernel | None
    noise: float = 1.0  # of the power above idle


Phases = Iterator[Phase]


def steps(
    chance: random.Random,
    waits: Callable[[int], float],
    *,
    host: float = 0.03,
    compute: float = 0.3,
    kernel: Kernel = TRAIN,
    spin: Kernel = SPIN,
    evaluations: bool = False,
) -> Phases:
    """Endless training steps; ``waits`` gives the seconds that step waits for the slowest rank."""
    at = 0.0
    number = 0
    while True:
        number += 1
        wait = waits(number)
        yield Phase("", round(host * SECOND), None)
        yield Phase("forward", round(compute * SECOND), kernel, 1 + chance.gauss(0, 0.02))
        if wait > 0:
            yield Phase("all_reduce", round(wait * SECOND), spin, 1 + chance.gauss(0, 0.02))
        at += host + compute + wait
        if evaluations and at > 60:
            at = 0.0
            yield Phase("", 15 * SECOND, Kernel(compute=0.3, activity=0.3))


def stragglers(chance: random.Random) -> Callable[[int], float]:
    """Waits whose mean drifts from a twentieth of a second to half of one."""
    level = 0.0

    def wait(_: int) -> float:
        nonlocal level
        level = 0.97 * level + 0.25 * chance.gauss(0, 1)
        return 0.22 * math.exp(0.6 * level) * math.exp(chance.gauss(0, 0.2))

    return wait


def constant(chance: random.Random) -> Callable[[int], float]:
    return lambda _: 0.12 + chance.uniform(-0.005, 0.005)


def nothing(_: random.Random) -> Callable[[int], float]:
    return lambda _: 0.0


@dataclass
class Plant:
    """An emulated board with a training, and the truth about it. Energies in microjoules."""

    phases: Phases
    limit: Callable[[float], int] = lambda _: H100.limits[2]
    lock_mhz: int | None = None
    shared: bool = False
    at: int = 1000 * SECOND
    energy: float = 0.0
    busy: Counter[Consumer] = field(default_factory=Counter)
    phase: Phase = field(default_factory=lambda: Phase("", 0, None))
    left: int = 0
    begun: int = 0
    spans: list[Span] = field(default_factory=list)
    waited: float = 0.0  # energy while waiting
    waiting: int = 0  # time
    work: float = 0.0  # of computations, in seconds at the highest clock
    point: OperatingPoint = field(default_factory=lambda: operate(SILICON, (), H100.limits[2]))
    static: list[float] = field(default_factory=list)  # powers of waiting, as they were
    clocks: list[int] = field(default_factory=list)  # of each computation, at its end
    number: int = 0
    reported: int = 0  # busy time at the last status

    def advance(self, until: int, started: int) -> None:
        while self.at < until:
            if self.left == 0:
                self._next()
            length = min(self.left, until - self.at)
            kernel = self.phase.kernel
            demands = [Demand(1.0, kernel)] if kernel is not None else []
            if self.shared:
                demands.append(Demand(0.5, DECODE))
            limit = self.limit((self.at - started) / SECOND)
            self.point = point = operate(SILICON, demands, limit, self.lock_mhz)
            power = point.idle + (point.power - point.idle) * self.phase.noise
            spent = power * length / 1e6
            self.energy += spent
            owners = [*([TRAINER] if kernel is not None else []), *([OTHER] * self.shared)]
            for owner, grant in zip(owners, point.grants, strict=True):
                self.busy[owner] += grant.share * length // 1_000_000
            if self.phase.name == "all_reduce":
                self.waited += spent
                self.waiting += length
                self.static.append(power)
            elif kernel is not None and self.phase.name:
                self.work += kernel.speed(SILICON, point.mhz) * length / SECOND
                self.clocks.append(point.mhz)
            self.at += length
            self.left -= length
            if self.left == 0 and self.phase.name:
                self._span()

    def _next(self) -> None:
        self.phase = next(self.phases)
        self.left, self.begun = self.phase.length, self.at

    def _span(self) -> None:
        self.number += 1
        self.spans.append(
            Span(
                bytes(15) + b"\1", self.number.to_bytes(8), b"", "trainer", self.phase.name,
                self.begun + WALL, self.at + WALL,
            )
        )  # fmt: skip


@dataclass
class Outcome:
    """Results of the agent, and the truth."""

    plant: Plant
    fit: object
    fitted_after: int | None
    advice: list[Advice]
    observed: float  # part of the waiting time that had windows


def run(plant: Plant, seconds: int) -> Outcome:
    """The agent beside a plant; the spare board has no user."""
    clock = ManualClock(plant.at, plant.at + WALL)
    ledger = Ledger(LedgerSettings(), now=plant.at)
    latest: list[Snapshot] = [ledger.snapshot(clock.now(), "emulated")]
    learner = StaticPowerLearner(("all_reduce",), lambda: latest[0])
    history = EnergyHistory(60 * SECOND, 10**8, learner.powers)
    joiner = SpanJoiner(
        clock,
        history,
        BelievingResolver(),  # type: ignore[arg-type]
        SpansSettings(),
        keep=30 * SECOND,
        static_powers=learner,
    )
    started = plant.at + REST * SECOND
    begin = plant.at
    used: deque[tuple[int, dict[Consumer, int]]] = deque()
    fitted_after, domains = None, {"emulated": (GPU, SPARE)}
    spare = 0
    for tick in range(1, (REST + seconds) * SECOND // TICK + 1):
        now = clock.advance(ns=TICK)
        spare += SILICON.idle * TICK // 10**6
        if now.mono > started:
            plant.advance(now.mono, started)
        else:
            plant.energy += SILICON.idle * TICK / 1e6
            plant.at = now.mono
        readings = (
            Reading(GPU.id, now, Microjoules(int(plant.energy))),
            Reading(SPARE.id, now, Microjoules(spare)),
        )
        used.append((now.mono, dict(plant.busy)))
        usages: tuple[Usage, ...] = ()
        if tick % USAGE_EVERY == 0:
            usages = _usages(clock.now(), begin, used)
            begin = now.mono
        moment = Tick(now, domains, readings, (), usages)
        domains = {}
        settled = ledger.apply(moment)
        history.apply(moment, settled)
        learner.apply(moment, settled)
        if tick % (EXPORT_EVERY // TICK) == 0 and plant.spans:
            joiner.inbox.accept(_request(plant.spans, now.mono))
            plant.spans = []
        if tick % 5 == 0:
            joiner.turn()
        if tick % 10 == 0:
            snapshot = replace(ledger.snapshot(now, "emulated"), spans=joiner.accounts())
            latest[0] = replace(snapshot, gpus=(_status(plant, now),))
            power = learner.powers().get(GPU.id)
            if fitted_after is None and power is not None and power.basis is StaticBasis.FITTED:
                fitted_after = (now.mono - started) // SECOND
    facts = learner.facts()
    joiner.finish()
    static = dynamic = exclusive = 0
    for row in joiner.accounts().rows:
        for split in row.splits.values():
            static, dynamic = static + split.static, dynamic + split.dynamic
        exclusive += row.energy.get(HwType.GPU, 0) if row.splits else 0
    seen = sum(use.waiting for board in facts for _, use in board.uses)
    if static + dynamic not in (0, exclusive):
        raise RuntimeError(f"{static} and {dynamic} µJ are not {exclusive} µJ")
    fit = next(board.fit for board in facts if board.board == GPU.id)
    return Outcome(
        plant,
        fit,
        fitted_after,
        advise(facts),
        seen / plant.waiting if plant.waiting else 0.0,
    )


def _usages(
    now: Instant, begin: int, used: deque[tuple[int, dict[Consumer, int]]]
) -> tuple[Usage, ...]:
    """Use since the last time, in periods of ticks; each process that ever ran is present."""
    found = []
    at, before = begin, used[0][1]
    for until, busy in list(used)[1:]:
        spent = {owner: busy[owner] - before.get(owner, 0) for owner in busy}
        start = now._replace(mono=at)
        found.append(
            Usage(
                "gpu:0",
                start,
                now._replace(mono=until),
                {owner: part for owner, part in spent.items() if part > 0},
                present=frozenset(busy),
            )
        )
        at, before = until, busy
    while len(used) > 1:
        used.popleft()
    empty = Usage("gpu:1", now._replace(mono=begin), now, {})
    return (*found, empty)


def _status(plant: Plant, now: Instant) -> GpuStatus:
    used = plant.busy.total()
    utilisation = min(1.0, (used - plant.reported) / SECOND)
    plant.reported = used
    return GpuStatus(
        GPU.id,
        now,
        power_instant=Milliwatts(plant.point.power),
        sm_clock_hz=plant.point.mhz * 10**6,
        utilisation=utilisation,
        temperature_celsius=60,
        throttling=("power_cap",) if plant.point.capped else (),
    )


def _request(spans: list[Span], now: int) -> ExportRequest:
    records = SpanColumns.of(spans)
    part = ResourceSpans(ResourceClaim(service="trainer", pid=10), records)
    return ExportRequest(Peer(), now, len(spans) * 100, (part,))


# -------------------------------------------------------------------------------------- the rows


def _capped(watts: int) -> Callable[[float], int]:
    return lambda _: watts * 1000


def _static_plants(chance: random.Random) -> dict[str, Plant]:
    """Plants with waiting, by description; those after the first five have no static power."""
    drifting = stragglers(chance)
    return {
        "waiting varies": Plant(steps(chance, drifting)),
        "... under a limit of 400 W": Plant(steps(chance, drifting), _capped(400)),
        "... clock locked at 1,200 MHz": Plant(steps(chance, drifting), lock_mhz=1200),
        "... evaluations of 15 s without spans": Plant(steps(chance, drifting, evaluations=True)),
        "... steps of 3 s": Plant(steps(chance, lambda n: 10 * drifting(n), host=0.3, compute=3.0)),
        "waiting is constant": Plant(steps(chance, constant(chance))),
        "no waiting": Plant(steps(chance, nothing(chance))),
        "waiting varies, shared board": Plant(steps(chance, drifting), shared=True),
        "waiting draws as much as computing": Plant(steps(chance, drifting, spin=TRAIN)),
    }


SIMILAR = {
    "... under a limit of 400 W",
    "... clock locked at 1,200 MHz",
    "no waiting",
    "waiting varies, shared board",
}


def static_rows(seeds: int, seconds: int, overlaps: list[float], *, similar: bool) -> Iterator[str]:
    """The rows of boards; ``overlaps`` gets the relative errors of the advice to overlap."""
    yield f"| board | fitted, of {seeds} | known after | largest error | not fitted because |"
    yield "|---|---|---|---|---|"
    for name in _static_plants(random.Random(0)):
        if name in SIMILAR and not similar:
            continue
        outcomes = [
            run(_static_plants(random.Random(seed))[name], seconds) for seed in range(seeds)
        ]
        overlaps += [
            energy / (one.plant.waited * one.observed) - 1
            for one in outcomes
            if (energy := _advised(one.advice, AdviceKind.OVERLAP))
        ]
        yield _static_row(name, outcomes)


def _static_row(name: str, outcomes: list[Outcome]) -> str:
    errors, refused = [], Counter[str]()
    for one in outcomes:
        if isinstance(one.fit, StaticPowerFit):
            errors.append(one.fit.power / statistics.fmean(one.plant.static) - 1)
        else:
            refused[str(one.fit).replace("_", " ")] += 1
    after = [one.fitted_after for one in outcomes if one.fitted_after is not None]
    known = f"{statistics.median(after):.0f} s" if after else "–"
    error = f"{max(map(abs, errors)):.1%}" if errors else "–"
    why = ", ".join(f"{reason} ({count})" for reason, count in refused.items()) or "–"
    return f"| {name} | {len(errors)} | {known} | {error} | {why} |"


def _advised(advice: list[Advice], kind: AdviceKind) -> int:
    return sum(one.energy for one in advice if one.kind is kind)


def oscillating(seconds: float) -> int:
    """A limit that another controller moves between 300 and 560 W."""
    return round(430_000 + 130_000 * math.sin(2 * math.pi * seconds / 23))


def advice_rows(seeds: int, seconds: int, overlaps: list[float]) -> Iterator[str]:
    yield "| advice | truth | advised / truth − 1, worst |"
    yield "|---|---|---|"
    errors = defaultdict[str, list[float]](list, overlap=overlaps)
    for seed in range(seeds):
        chance = random.Random(seed)
        plant = Plant(steps(chance, nothing(chance)), oscillating)
        found = run(plant, seconds)
        mean = round(statistics.fmean(plant.clocks))
        chance = random.Random(seed)
        locked = Plant(steps(chance, nothing(chance)), lock_mhz=mean)
        run(locked, seconds)
        saved = _training_energy(plant) - _training_energy(locked) * plant.work / locked.work
        errors["clock"].append(_advised(found.advice, AdviceKind.LOCK_CLOCK) / saved - 1)
        chance = random.Random(seed)
        small = Plant(steps(chance, nothing(chance), host=0.2, compute=0.05, kernel=DECODE))
        found = run(small, seconds)
        chance = random.Random(seed)
        large = Plant(steps(chance, nothing(chance), host=0.2, compute=0.1, kernel=DECODE))
        run(large, seconds)
        saved = _training_energy(small) - _training_energy(large) * small.work / large.work
        errors["batch"].append(_advised(found.advice, AdviceKind.LARGER_BATCH) / saved - 1)
        idle = SILICON.idle * 1000 * (REST + seconds)
        errors["idle"].append(_advised(found.advice, AdviceKind.IDLE_BOARD) / idle - 1)
    for key, (advice, truth) in _ADVICE.items():
        yield f"| {advice} | {truth} | {max(errors[key], key=abs):+.1%} |"


def _training_energy(plant: Plant) -> float:
    """The energy of the training, without the rest before it."""
    return plant.energy - SILICON.idle * 1000 * REST


_ADVICE = {
    "overlap": ("overlap communication", "energy of the waiting phases"),
    "clock": ("lock the clock", "same work, clock locked at its mean"),
    "batch": ("larger batch", "same work, twice the batch"),
    "idle": ("idle board", "its energy"),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=4)
    options.add_argument("--seconds", type=int, default=600)
    options.add_argument("--all", action="store_true", help="also similar boards")
    chosen = options.parse_args()
    print(
        f"Emulated, {chosen.seeds} runs of {chosen.seconds} s. Truth: the power"
        " of a spinning collective by the law of the board.\n"
    )
    overlaps: list[float] = []
    for line in static_rows(chosen.seeds, chosen.seconds, overlaps, similar=chosen.all):
        print(line, flush=True)
    print()
    for line in advice_rows(chosen.seeds, chosen.seconds, overlaps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
