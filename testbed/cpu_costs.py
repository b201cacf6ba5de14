"""Processes on an emulated CPU package, the real ledger beside it, and their judge.

All time is virtual. The ledger and the energy history see the package by its counter, with the
updates and the noise of RAPL, and by CPU times at the last scheduler tick of each running thread.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from testbed.cpu_judge import RULES, Charge, Moment, Score, owed_energies
from testbed.cpu_plants import (
    ADDITIVE,
    LEAKING,
    MEMORY,
    MODULES,
    SANDY_BRIDGE,
    SAPPHIRE_RAPIDS,
    SERVER,
    SKYLAKE,
    SMT,
    TURBO,
    CpuPlant,
    EnergyCounter,
    Rates,
    Work,
)
from testbed.idle_baseline import (
    BEGIN,
    NOISE,
    PACKAGE,
    SCHEDULER_TICK,
    STEP,
    TICK,
    Loads,
    observed,
    wandering,
)
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import SECOND, Consumer, Counts, Domain, HwType, Payer
from wattspan.service.energy_history import EnergyHistory

LEARNING, JUDGED, SETTLING = 60, 30, 3  # seconds of work
REST = 30  # seconds before the work of a package whose idle power is observed once
WARMING = 60 * SECOND  # time constant
FULL_TRAFFIC = 100.0  # gigabytes a second
MISSES_NOISE = 0.2  # relative standard deviation of the misses of an instant
SWITCH = SCHEDULER_TICK  # the longest time of a thread between two switches
AGENT, COUNTED = "agent", "agent with counters"
MEMORY_ZONE = replace(
    PACKAGE, id="rapl:dram-0", name="dram", hw_type=HwType.MEMORY, method="cpu-time-proxy"
)

Pattern = Callable[[random.Random], Loads]


class Process(NamedTuple):
    """Joules per CPU-second alone at the base clock, CPUs, and their load, 0 to 1.

    ``traffic`` is the part of ``FULL_TRAFFIC``. A process that changes its nature costs ``later``
    from ``LEARNING`` seconds of work on. One that ``copies`` has the load of another, earlier one.
    Alone on a core it retires ``ipc`` instructions in a cycle. The part ``unmissed`` of its traffic
    has no misses. Counters never tell of one that is not ``counted``.
    """

    cost: float
    cpus: tuple[int, ...]
    load: Pattern
    traffic: Pattern = wandering(0.0, 0.0)
    later: float | None = None
    copies: int | None = None
    ipc: float = 1.5
    unmissed: float = 0.0
    counted: bool = True


class Row(NamedTuple):
    """Processes of a scenario that are judged together, over periods of ``seconds``."""

    title: str
    processes: Sequence[int]
    goal: str
    pooled: bool = False
    seconds: int = JUDGED


@dataclass(frozen=True)
class Scenario:
    """Processes on a plant, of which each row is judged after some seconds of work.

    ``rested``: the package was at rest before, so that its idle power was observed once.
    ``counted``: the agent reads performance counters. ``domain`` is that of the package's counter,
    which is read once in an ``interval``.
    """

    plant: CpuPlant
    processes: Sequence[Process]
    rows: Sequence[Row]
    rested: bool = True
    counter: EnergyCounter = SKYLAKE
    learning: int = LEARNING
    counted: bool = False
    domain: Domain = PACKAGE
    interval: int = TICK


class Truth(NamedTuple):
    """The energy that each process owes, and its CPU time."""

    owed: tuple[float, ...]
    spent: tuple[float, ...]


@dataclass
class EmulatedPackage:
    """The true energies of a package and of its processes, and what an agent reads of them."""

    scenario: Scenario
    chance: random.Random

    def __post_init__(self) -> None:
        scenario, count = self.scenario, len(self.scenario.processes)
        self.at, self.energy, self.warmth = BEGIN, 0.0, 0.0
        self.owed, self.spent = [0.0] * count, [0.0] * count
        self._loads = [(p.load(self.chance), p.traffic(self.chance)) for p in scenario.processes]
        self._starts = BEGIN + REST * SECOND if scenario.rested else BEGIN
        self._works = dict[int, Work]()
        self._powers = dict[int, float]()
        self._read = 0
        self._counting = random.Random(self.chance.getrandbits(64))  # of the counters alone
        self._rates = dict[int, Rates]()
        self._counts = [[0.0] * len(Counts._fields) for _ in range(count)]

    @property
    def busy(self) -> float:
        """The CPU time of all processes."""
        return sum(self.spent)

    @property
    def truth(self) -> Truth:
        return Truth(tuple(self.owed), tuple(self.spent))

    @property
    def power(self) -> float:
        return self.scenario.plant.idle(self.warmth) + sum(self._powers.values())

    def advance(self, until: int) -> None:
        """Spend energy and CPU time."""
        plant = self.scenario.plant
        while self.at < until:
            length = min(STEP - self.at % STEP, until - self.at)
            if self.at % STEP == 0 and self.at >= self._starts:
                self._works = self._next_works()
                self._powers = plant.owed(self._works)
                self._rates = plant.rates(self._works) if self.scenario.counted else {}
            # Power that load does not explain is a part of all powers alike.
            noise = 1 + self.chance.gauss(0, NOISE * math.sqrt(TICK / length))
            self.energy += self.power * noise * length / 1e3
            used = 0.0
            for i, work in self._works.items():
                self.owed[i] += self._powers[i] * noise * length / 1e3
                self.spent[i] += work.busy * len(work.cpus) * length
                used += work.busy * len(work.cpus)
            for i, rates in self._rates.items():
                self._count(i, rates, length)
            self.warmth += (used / plant.cpus - self.warmth) * length / WARMING
            self.at += length

    def _next_works(self) -> dict[int, Work]:
        changed = self.at >= self._starts + LEARNING * SECOND
        works: dict[int, Work] = {}
        for i, (process, (loads, traffic)) in enumerate(
            zip(self.scenario.processes, self._loads, strict=True)
        ):
            load = next(loads) if process.copies is None else works[process.copies].busy
            cost = process.later if changed and process.later else process.cost
            moved = next(traffic) * FULL_TRAFFIC
            works[i] = Work(process.cpus, load, cost, moved, process.ipc, process.unmissed)
        return works

    def _count(self, process: int, rates: Rates, length: int) -> None:
        """Count the work of an instant; prefetching hides and adds misses."""
        work, sums = self._works[process], self._counts[process]
        sums[0] += work.busy * len(work.cpus) * length
        noise = 1 + self._counting.gauss(0, MISSES_NOISE)
        for place, rate in enumerate((*rates[:-1], rates.misses * max(0.0, noise)), 1):
            sums[place] += rate * length / SECOND

    def counter(self) -> int:
        """The value of the counter's last update."""
        counter, chance = self.scenario.counter, self.chance
        age = counter.age(chance.random(), chance.gauss(0, 1), chance.random())
        value = counter.value(self.energy - self.power * age * 1e3, chance.gauss(0, 1))
        self._read = max(self._read, value)
        return self._read

    def cpu_times(self) -> dict[Payer, int]:
        """The CPU time of each process at the last scheduler tick of each running thread."""
        found: dict[Payer, int] = {}
        for i, spent in enumerate(self.spent):
            work = self._works.get(i)
            running = work.cpus if work is not None and self.chance.random() < work.busy else ()
            unseen = sum(self.chance.uniform(0, SCHEDULER_TICK) for _ in running)
            found[consumer(i)] = max(0, int(spent - unseen))
        return found

    def counters(self) -> dict[Payer, Counts]:
        """The counts of each process at the last switch of each running thread."""
        found: dict[Payer, Counts] = {}
        for i, sums in enumerate(self._counts):
            if not self.scenario.processes[i].counted:
                continue
            work, rates = self._works.get(i), self._rates.get(i)
            if work is None or rates is None or not work.busy:
                found[consumer(i)] = Counts(*map(int, sums))
                continue
            running = sum(self._counting.random() < work.busy for _ in work.cpus)
            unseen = sum(self._counting.uniform(0, SWITCH) for _ in range(running))
            of_time = unseen / (work.busy * len(work.cpus) * SECOND)
            now = (unseen, *(rate * of_time for rate in rates))
            seen = (max(0, int(one - each)) for one, each in zip(sums, now, strict=True))
            found[consumer(i)] = Counts(*seen)
        return found


def consumer(process: int) -> Consumer:
    return Consumer(process + 1, 1)


class Outcome(NamedTuple):
    """The judged seconds of one run, and the agent's charge of a process between two times."""

    moments: list[Moment]
    charge: Callable[[int, int, int], Charge]


def run(scenario: Scenario, seed: int) -> Outcome:
    """The real ledger and energy history beside the package. RuntimeError if energy is lost."""
    package = EmulatedPackage(scenario, random.Random(seed))
    ledger = Ledger(LedgerSettings(), boot_id=str(seed), now=package.at)
    history = EnergyHistory(600 * SECOND, 10**7, baseline_errors=ledger.baseline_errors)
    consumers = [consumer(i) for i in range(len(scenario.processes))]
    clocks = {one: list[tuple[int, int]]() for one in consumers}
    profiles = [
        history.watch(one, samples=partial(_taken, clocks[one]), holder="judge")
        for one in consumers
    ]
    first = scenario.learning + (REST if scenario.rested else 0)
    seen, moments = dict.fromkeys(consumers, 0), list[Moment]()
    counters = package.counters if scenario.counted else None
    seconds, interval = first + JUDGED + SETTLING, scenario.interval
    domain, kind = scenario.domain, scenario.domain.hw_type
    cycles = observed(
        package,
        seconds,
        cpus=scenario.plant.cpus,
        counters=counters,
        domain=domain,
        interval=interval,
    )
    for number, (tick, truth) in enumerate(cycles):
        for usage in tick.usages:
            for one in consumers:
                seen[one] += usage.spent[one]
                clocks[one].append((usage.end.mono, seen[one]))
        history.apply(tick, ledger.apply(tick))
        (reading,) = tick.readings
        if first <= number * interval / SECOND <= first + JUDGED:
            read = tuple(seen.values())
            moments.append(Moment(reading.at.mono, reading.counter, read, *truth))
    account = ledger.snapshot(tick.at, "emulated").account(domain.id)
    if account.energy != account.consumers + account.idle + account.unattributed:
        raise RuntimeError(f"the account does not balance: {account}")

    def charge(process: int, start: int, end: int) -> Charge:
        one = consumers[process]
        history.merge(one)
        found = profiles[process].between(start, end)
        bound = kind in history.bounded(one, start)
        energy, uncertainty = (by.get(kind, 0) for by in (found.energy, found.uncertainty))
        return Charge(energy, uncertainty, bound)

    return Outcome(moments, charge)


def _taken(samples: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    found = samples[:]
    samples.clear()
    return iter(found)


def _judge_run(
    outcome: Outcome, row: Row, by_method: dict[str, Score], agent: str, cpus: int, interval: int
) -> None:
    """Add the errors of the ``agent``, and those of the peers in its first run."""
    length = row.seconds * SECOND // interval
    for begin in range(0, len(outcome.moments) - length, length):
        moments = outcome.moments[begin : begin + length + 1]
        truth = owed_energies(moments)
        start, end = moments[0].at, moments[-1].at
        charges = {agent: {i: outcome.charge(i, start, end) for i in row.processes}}
        if agent == AGENT:
            for name, rule in RULES.items():
                charges[name] = dict(enumerate(rule.charges(moments, cpus)))
        true = [truth[i] for i in row.processes]
        for name, charged in charges.items():
            if charged:
                wanted = [charged[i] for i in row.processes]
                by_method[name].add(wanted, true, pooled=row.pooled)


def judge(scenario: Scenario, seeds: Iterable[int]) -> list[tuple[Row, dict[str, Score]]]:
    """The score of each method in each row of the scenario, with counters and without."""
    methods = (AGENT, COUNTED, *RULES)
    scores = [(row, {name: Score() for name in methods}) for row in scenario.rows]
    for seed in seeds:
        for agent in (AGENT, COUNTED):
            outcome = run(replace(scenario, counted=agent == COUNTED), seed)
            for row, by_method in scores:
                _judge_run(outcome, row, by_method, agent, scenario.plant.cpus, scenario.interval)
    return scores


# ---------------------------------------------------------------------------------- scenarios


def switching(low: float, high: float, seconds: float) -> Pattern:
    """A load that changes at random between two values, on average after some seconds."""

    def loads(chance: random.Random) -> Loads:
        value = low
        while True:
            if chance.random() < STEP / (seconds * SECOND):
                value = high if value == low else low
            yield value

    return loads


def two(first: Process, second: Process) -> tuple[Process, Process]:
    """Both on eight CPUs of sixteen."""
    return first._replace(cpus=tuple(range(8))), second._replace(cpus=tuple(range(8, 16)))


APART = wandering(0.15, 0.6, 3.0)
UNEQUAL = two(Process(4.0, (), APART), Process(10.0, (), APART))
VARYING, STEADY = (0, 4, 9), (1, 2, 3, 5, 6, 7, 8)


def ten(most: float, varying: Sequence[int]) -> list[Process]:
    """Ten processes, each on its CPU, whose costs rise evenly from 4 J to ``most`` times that."""
    return [
        Process(
            4.0 * (1 + (most - 1) * i / 9),
            (i,),
            wandering(0.2, 0.6, 3.0) if i in varying else wandering(0.0, 0.3 + 0.06 * i),
        )
        for i in range(10)
    ]


BURSTY = [
    Process(4.0 * (1 + 2 * i / 9), (i,), switching(0.02, 0.9, 0.1 + 0.05 * i)) for i in range(10)
]
"""Ten processes 1 : 3, each on its CPU, with bursts of 0.1 to 0.55 s on average."""


def _ten_rows(idle: str, varying: str, steady: str, sum_of_them: str) -> list[Row]:
    title = f"ten 1 : 3, idle power {idle}"
    return [
        Row(f"{title}: three varying", VARYING, varying),
        Row(f"{title}: seven steady", STEADY, steady),
        Row(f"{title}: their sum", STEADY, sum_of_them, pooled=True),
    ]


BOTH = (0, 1)
INSIDE = "inside ≥ 95 %"
SCENARIOS = [
    Scenario(
        ADDITIVE,
        UNEQUAL,
        [
            Row("two 1 : 2.5, never at rest", BOTH, "≤ 3 %"),
            Row("spans of 1 s in them", BOTH, "≤ 8 %", seconds=1),
        ],
        rested=False,
    ),
    Scenario(ADDITIVE, UNEQUAL, [Row("two 1 : 2.5, once at rest", BOTH, "≤ 3 %")]),
    Scenario(TURBO, UNEQUAL, [Row("two 1 : 2.5, once at rest", BOTH, "≤ 6 %")]),
    Scenario(TURBO, UNEQUAL, [Row("two 1 : 2.5, never at rest", BOTH, INSIDE)], rested=False),
    Scenario(ADDITIVE, ten(3, VARYING), _ten_rows("observed", "≤ 3 %", INSIDE, "≤ 5 %")),
    Scenario(ADDITIVE, ten(3, VARYING), _ten_rows("learned", "≤ 10 %", INSIDE, "–"), rested=False),
    Scenario(
        ADDITIVE,
        ten(3, ()),
        [Row("never varying, once at rest", range(10), f"{INSIDE}, ≤ CPU time")],
    ),
    Scenario(
        SMT,
        [
            Process(8.0, (0, 1, 2, 3), wandering(0.1, 0.7, 3.0), ipc=1.2),
            Process(8.0, (4, 5, 6, 7), wandering(0.1, 0.7, 3.0), ipc=1.8),
            Process(8.0, (12, 13, 14, 15), wandering(0.1, 0.7, 3.0), ipc=1.5),
        ],
        [Row("siblings: one busy against both busy", (0, 1, 2), "≤ 6 % with counters")],
    ),
    Scenario(
        TURBO,
        [
            Process(4.0, (0, 1), wandering(0.0, 0.8)),
            Process(10.0, (2, 3), APART),
            Process(6.0, tuple(range(4, 16)), switching(0.0, 0.9, 4.0)),
        ],
        [Row("clock moved by a neighbour", (0, 1, 2), "≤ 6 %")],
    ),
    Scenario(ADDITIVE, BURSTY, [Row("ten bursty processes 1 : 3, at 10 Hz", range(10), "–")]),
    Scenario(
        ADDITIVE,
        BURSTY,
        [Row("ten bursty processes 1 : 3, at 1 Hz", range(10), "≤ 1 point more")],
        interval=SECOND,
    ),
    Scenario(ADDITIVE, ten(1, VARYING), [Row("equal costs, once at rest", range(10), "no worse")]),
    Scenario(
        ADDITIVE,
        ten(1, VARYING),
        [Row("equal costs, never at rest", range(10), "no worse")],
        rested=False,
    ),
    Scenario(
        MEMORY,
        two(Process(4.0, (), APART, wandering(0.15, 0.4, 3.0)), Process(4.0, (), APART)),
        [Row("equal cores, one moves memory", BOTH, INSIDE)],
    ),
    Scenario(
        ADDITIVE,
        two(Process(4.0, (), APART, later=10.0), Process(6.0, (), APART)),
        [Row("4 J per CPU-second became 10 J a minute ago", BOTH, INSIDE)],
        learning=2 * LEARNING,
    ),
    Scenario(
        ADDITIVE,
        two(Process(4.0, (), APART), Process(10.0, (), APART, copies=0)),
        [Row("a neighbour of 2.5 times the cost copies the load", BOTH, INSIDE)],
    ),
    Scenario(LEAKING, UNEQUAL, [Row("two 1 : 2.5, warming", BOTH, INSIDE)]),
    *(
        Scenario(
            replace(SERVER, name=f"{SERVER.name}, {counter.name}"),
            ten(4, VARYING),
            [Row("ten 1 : 4", range(10), INSIDE)],
            counter=counter,
        )
        for counter in (SANDY_BRIDGE, SAPPHIRE_RAPIDS)
    ),
    Scenario(
        MODULES,
        [
            Process(0.0, (0, 1, 2, 3), APART, wandering(0.15, 0.6, 3.0)),
            Process(0.0, (4, 5, 6, 7), APART, wandering(0.05, 0.2, 3.0), unmissed=0.4),
            Process(0.0, (8, 9, 10, 11), APART, wandering(0.01, 0.02, 3.0)),
        ],
        [Row("equal CPU time, traffic 30 : 10 : 1", (0, 1, 2), INSIDE)],
        domain=MEMORY_ZONE,
    ),
]
