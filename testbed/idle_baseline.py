"""An emulated CPU socket that never rests, and the agent's energy of its processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Protocol, TypeVar

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Checkpoint,
    Consumer,
    Counts,
    Domain,
    HwType,
    Instant,
    Microjoules,
    Payer,
    Provenance,
    Reading,
    Tick,
    Usage,
)

CPUS = 8
MEAN_LOAD = 0.6
STEP = 10 * MILLISECOND  # of the emulation
BEGIN = 1_000 * SECOND
TICK = 100 * MILLISECOND
SCHEDULER_TICK = 4 * MILLISECOND
READ_DELAY = 2 * MILLISECOND
NOISE = 0.003  # relative standard deviation of the power of 100 ms that load does not explain
IDLE, ACTIVE = 42_000, 72_000  # milliwatts: without load, and more at full load
LOAD = Consumer(1, 1)
PACKAGE = Domain(
    "rapl:package-0",
    HwType.CPU,
    "package-0",
    "rapl",
    Provenance.EMULATED,
    resource="cpu:0",
    method="cpu-time",
)

Law = Callable[[float], float]
"""Active power at a load, as a part of that at full load."""

LAWS: dict[str, Law] = {
    "straight line": lambda load: load,
    "Fan et al.": lambda load: 2 * load - load**1.4,
    "saturating": lambda load: (1 - math.exp(-1.5 * load)) / (1 - math.exp(-1.5)),
    "rising clock": lambda load: load**1.2,
}

Loads = Iterator[float]
"""The load of each step, 0 to 1."""


def steady(_: random.Random) -> Loads:
    """No variation at all."""
    while True:
        yield MEAN_LOAD


def wandering(
    deviation: float, mean: float = MEAN_LOAD, seconds: float = 1.0
) -> Callable[[random.Random], Loads]:
    """A load with this standard deviation and correlation time."""

    def loads(chance: random.Random) -> Loads:
        keep, value = math.exp(-STEP / (seconds * SECOND)), 0.0
        while True:
            value = keep * value + math.sqrt(1 - keep * keep) * chance.gauss(0, deviation)
            yield min(1.0, max(0.0, mean + value))

    return loads


def requests(chance: random.Random) -> Loads:
    """Requests of 20 ms on average that arrive at random and are refused if all CPUs are busy."""
    busy, arrivals = round(MEAN_LOAD * CPUS), MEAN_LOAD * CPUS * 1.14 / 20
    while True:
        whole = 0
        for _ in range(STEP // MILLISECOND):
            busy += chance.random() < arrivals and busy < CPUS
            busy -= sum(chance.random() < 1 / 20 for _ in range(busy))
            whole += busy
        yield whole / CPUS / (STEP // MILLISECOND)


def resting(_: random.Random) -> Loads:
    """Half a minute at rest, then the steady load: for a value that a later boot remembers."""
    for _ in range(30 * SECOND // STEP):
        yield 0.0
    yield from steady(_)


SCENARIOS: dict[str, Callable[[random.Random], Loads]] = {
    "no variation": steady,
    "variation of 5 %": wandering(0.05),
    "variation of 10 %": wandering(0.1),
    "variation of 15 %": wandering(0.15),
    "requests": requests,
}


Truth_co = TypeVar("Truth_co", covariant=True)


class ObservedSocket(Protocol[Truth_co]):
    """A socket in virtual time, as the agent sees it and as it is."""

    @property
    def at(self) -> int: ...
    @property
    def busy(self) -> float: ...
    @property
    def truth(self) -> Truth_co: ...
    def advance(self, until: int) -> None: ...
    def counter(self) -> int: ...
    def cpu_times(self) -> Mapping[Payer, int]: ...


def observed(
    socket: ObservedSocket[Truth_co],
    seconds: int,
    *,
    cpus: int = CPUS,
    idle_states: bool = False,
    counters: Callable[[], dict[Payer, Counts]] | None = None,
    domain: Domain = PACKAGE,
    interval: int = TICK,
) -> Iterator[tuple[Tick, Truth_co]]:
    """The ticks by which an agent sees the socket, each with the truth when the counter was read.

    They come once in an ``interval``. CPU times are read ``READ_DELAY`` after the counter. With
    ``idle_states`` the CPUs' own idle times are known without delay, besides the CPU time of
    processes. ``counters`` are performance counters since the start, which are read with the CPU
    times.
    """
    usage_at, known, metered = Instant(socket.at, 0), dict[Payer, int](), 0
    counted = dict[Payer, Counts]()
    for number in range(seconds * SECOND // interval + 1):
        socket.advance(BEGIN + number * interval)
        reading = Reading(domain.id, Instant(socket.at, 0), Microjoules(socket.counter()))
        truth = socket.truth
        socket.advance(socket.at + READ_DELAY)
        now, before = Instant(socket.at, 0), known
        known = {one: max(before.get(one, 0), at) for one, at in socket.cpu_times().items()}
        usages, counts = (), None
        if counters is not None:
            earlier = counted
            counted = {one: _latest(earlier.get(one), at) for one, at in counters().items()}
            counts = {one: _since(earlier.get(one), at) for one, at in counted.items()}
        if number:
            spent = {one: at - before[one] for one, at in known.items()}
            capacity = cpus * (now.mono - usage_at.mono)
            precise = int(socket.busy) - metered if idle_states else None
            usage = Usage("cpu:0", usage_at, now, spent, capacity=capacity, metered=precise)
            usages = (replace(usage, counts=counts),)
        usage_at, metered = now, int(socket.busy)
        yield Tick(now, {} if number else {"rapl": (domain,)}, (reading,), (), usages), truth


def _latest(earlier: Counts | None, now: Counts) -> Counts:
    """The counts of two readings, of which counters that never run backwards show the larger."""
    return now if earlier is None else Counts(*map(max, earlier, now))


def _since(earlier: Counts | None, now: Counts) -> Counts:
    """The counts since an earlier reading."""
    return now if earlier is None else Counts(*map(sub, now, earlier))


@dataclass
class EmulatedSocket:
    """The true energy of a socket, and the counters by which the agent sees it."""

    loads: Loads
    law: Law
    chance: random.Random
    at: int = BEGIN
    energy: float = 0.0  # microjoules
    active: float = 0.0  # the part above idle power
    busy: float = 0.0  # nanoseconds of CPU time
    load: float = MEAN_LOAD

    @property
    def truth(self) -> float:
        """The active energy so far."""
        return self.active

    def advance(self, until: int) -> None:
        """Spend energy and CPU time."""
        while self.at < until:
            length = min(STEP - self.at % STEP, until - self.at)
            if self.at % STEP == 0:
                self.load = next(self.loads)
            whole = IDLE + ACTIVE * self.law(self.load)
            noise = 1 + self.chance.gauss(0, NOISE * math.sqrt(TICK / length))
            self.energy += whole * noise * length / 1e6
            self.active += (whole * noise - IDLE) * length / 1e6
            self.busy += self.load * CPUS * length
            self.at += length

    def counter(self) -> int:
        """The energy at the counter's last update."""
        age = self.chance.uniform(0, MILLISECOND)
        return int(self.energy - (IDLE + ACTIVE * self.law(self.load)) * age / 1e6)

    def cpu_times(self) -> dict[Payer, int]:
        """The CPU time at the last scheduler tick of each running thread."""
        running = round(self.load * CPUS)
        unseen = sum(self.chance.uniform(0, SCHEDULER_TICK) for _ in range(running))
        return {LOAD: int(self.busy - unseen)}


@dataclass
class Run:
    """Cumulated energies at each second, in microjoules."""

    charged: list[int] = field(default_factory=list)
    active: list[float] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)
    checkpoint: Checkpoint | None = None

    def error(self, start: int, end: int) -> float:
        """The relative error of the energy of processes between two seconds."""
        charged = self.charged[end] - self.charged[start]
        return charged / (self.active[end] - self.active[start]) - 1

    @property
    def known_after(self) -> int | None:
        """Seconds until the idle power was known; None if it never was."""
        return self.known.index(True) if True in self.known else None


def run(
    scenario: Callable[[random.Random], Loads],
    law: Law,
    *,
    seconds: int,
    seed: int,
    checkpoint: Checkpoint | None = None,
    idle_states: bool = False,
) -> Run:
    """The ledger beside an emulated socket, for some seconds from its start; see ``observed``."""
    chance = random.Random(seed)
    socket = EmulatedSocket(scenario(chance), law, chance)
    ledger = Ledger(LedgerSettings(), checkpoint=checkpoint, boot_id=str(seed), now=socket.at)
    earlier = checkpoint.accounts[0].consumers if checkpoint is not None else 0
    result = Run()
    for number, (tick, active) in enumerate(observed(socket, seconds, idle_states=idle_states)):
        ledger.apply(tick)
        if number % (SECOND // TICK) == 0:
            snapshot = ledger.snapshot(tick.at, "emulated")
            account = snapshot.account(PACKAGE.id)
            result.charged.append(account.consumers - earlier)
            result.active.append(active)
            result.known.append(account.idle_power is not None)
            result.checkpoint = ledger.checkpoint(snapshot)
    return result
