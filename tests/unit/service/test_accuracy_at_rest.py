"""Energy of bursty processes at one sample a second, compared with ten a second.

The truth is not the law of the ledger: a processor draws more for the first busy core than for the
others, each draws its own power, and each moment's power is that of the processes that run in it.
"""

import random
from dataclasses import replace
from operator import sub
from typing import NamedTuple

import pytest
from testbed.simulated_host import PACKAGE
from testbed.synthetic_kernel import Life, SyntheticKernel

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    MILLISECOND,
    SECOND,
    HwType,
    Microjoules,
    Milliwatts,
    Reading,
    Snapshot,
)
from wattspan.ports import Batch
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import LatestSnapshot, Poller, SnapshotProviders
from wattspan.service.sampling_demand import FINE, REST, fixed
from wattspan.testing import FakeDirectory

CORES, STEP = 16, 5 * MILLISECOND
IDLE, FIRST_CORE, OTHER_CORE = 20_000, 10_000, (8_000, 12_000)  # milliwatts, by socket
SHORT = 20, 900  # milliseconds
MOVES = 0.2  # probability that a process begins a burst on another socket
QUIET, LEARNING, WINDOW = 60 * SECOND, 90 * SECOND, 30 * SECOND


class Load(NamedTuple):
    """Processes that work and pause, and births of short-lived ones a second."""

    sockets: int = 1
    processes: int = 10
    births: int = 0
    burst: int = 3000  # milliseconds at most; pauses are twice as long


class Cores:
    """A host with sixteen CPUs in each socket."""

    def __init__(self, sockets: int) -> None:
        self.sockets = tuple(range(sockets))

    def socket_of(self, cpu: int) -> int:
        return cpu // CORES

    def capacity(self) -> dict[int, int]:
        return dict.fromkeys(self.sockets, CORES)

    def refresh(self) -> bool:
        return False


class BurstyHost:
    """Packages, and processes that work and pause at random.

    With two sockets, one of three processes is bound to each, and the third one moves.
    """

    name = "rapl"

    def __init__(self, load: Load, seed: int) -> None:
        self.topology, self._load = Cores(load.sockets), load
        self.kernel = SyntheticKernel(pid_max=30_000, cpus=CORES * load.sockets)
        self.clock, self._draw = self.kernel.clock, random.Random(seed)
        self._packages = [
            replace(PACKAGE, id=f"rapl:package-{one}", name=f"package-{one}", resource=f"cpu:{one}")
            for one in self.topology.sockets
        ]
        self._energy = [0.0] * load.sockets
        self.spent: dict[Life, float] = {}
        self.short = 0.0  # energy of short-lived processes
        self._ends: dict[Life, int] = {}  # of short-lived processes
        for number in range(load.processes):
            self.spent[self._spawn(number)] = 0.0
        self._begin = self.clock.monotonic() + QUIET
        # Whether it works, and until when; it pauses until the idle power was observed.
        self._turns = {one: [0, self._begin] for one in self.spent}

    def truth(self) -> list[float]:
        """The energies of the long-lived processes, and that of all short-lived ones."""
        return [*self.spent.values(), self.short]

    def _spawn(self, number: int) -> Life:
        life, bound = self.kernel.spawn(), number % 3
        everywhere = range(CORES * len(self.topology.sockets))
        alone = len(self.topology.sockets) == 1
        life.allowed = frozenset(
            cpu for cpu in everywhere if alone or bound in (self.topology.socket_of(cpu), 2)
        )
        life.processor = self._draw.choice(sorted(life.allowed))
        return life

    def read(self) -> Batch:
        now = self.clock.now()
        return Batch(
            tuple(self._packages),
            tuple(
                Reading(package.id, now, Microjoules(int(energy)))
                for package, energy in zip(self._packages, self._energy, strict=True)
            ),
        )

    def close(self) -> None:
        pass

    def work_until(self, mono: int) -> None:
        """Let time pass in steps, in which each process works or pauses."""
        while (began := self.clock.monotonic()) < mono:
            births = self._load.births if began > self._begin else 0
            if self._draw.random() * SECOND < births * STEP:
                short = self._spawn(self._draw.randrange(3))  # takes a moment, too
                self._ends[short] = began + self._draw.randint(*SHORT) * MILLISECOND
            else:
                self.clock.advance(ns=STEP)
            step = self.clock.monotonic() - began
            for one in [one for one, end in self._ends.items() if end <= began]:
                self.kernel.exit(one)
                del self._ends[one]
            busy = [*self._ends, *(one for one in self.spent if self._is_busy(one))]
            for socket in self.topology.sockets:
                here = [one for one in busy if one.processor // CORES == socket]
                active = FIRST_CORE + OTHER_CORE[socket] * (len(here) - 1) if here else 0
                self._energy[socket] += (IDLE + active) * step / 1e6
                for one in here:
                    self.kernel.run(one, step)
                    energy = active * step / 1e6 / len(here)
                    if one in self.spent:
                        self.spent[one] += energy
                    else:
                        self.short += energy

    def _is_busy(self, process: Life) -> bool:
        turn, now = self._turns[process], self.clock.monotonic()
        if now >= turn[1]:
            turn[0] = not turn[0]
            turn[1] = now + self._draw.randint(10, self._load.burst * (2 - turn[0])) * MILLISECOND
            if turn[0] and self._draw.random() < MOVES:
                process.processor = self._draw.choice(sorted(process.allowed))
        return bool(turn[0])


def errors(interval: int, load: Load, seed: int) -> tuple[list[float], list[float]]:
    """The relative errors of energies in windows of 30 s.

    Those of each long-lived process, and those of the sum of all short-lived ones.
    """
    host = BurstyHost(load, seed)
    settings = LedgerSettings(idle_powers={HwType.CPU: Milliwatts(IDLE)}, top=1000)
    ledger = Ledger(settings, boot_id="b", now=host.clock.monotonic())
    plain = load.sockets == 1 and not load.births
    poller = Poller(
        host.clock,
        ledger,
        EnergyHistory(WINDOW, 1 << 22),
        [host],
        # The packaged service may not receive events of processes, or count their times on sockets.
        host.kernel.source(topology=host.topology, events=plain, envelope=not plain),
        FakeDirectory([]),
        LatestSnapshot(ledger.snapshot(host.clock.now(), "host")),
        demand=fixed(host.clock, interval),
        providers=SnapshotProviders(),
    )
    for _ in range(LEARNING // FINE):  # the idle power is learned at the fine interval
        poller.turn()
        host.work_until(host.clock.monotonic() + FINE)
    poller.turn()
    found: list[float] = []
    pooled: list[float] = []
    poller.publish()
    before = charged(poller.view(), host), host.truth()
    for _ in range(4):
        end = host.clock.monotonic() + WINDOW
        while host.clock.monotonic() < end:
            host.work_until(host.clock.monotonic() + interval)
            poller.turn()
        poller.publish()
        after = charged(poller.view(), host), host.truth()
        energy, true = (map(sub, new, old) for new, old in zip(after, before, strict=True))
        *known, short = (abs(e - t) / t if t else 0.0 for e, t in zip(energy, true, strict=True))
        found, pooled, before = found + known, [*pooled, short], after
    return found, pooled


def charged(view: Snapshot, host: BurstyHost) -> list[float]:
    """The energies of the long-lived processes, and that of all others together."""
    rows = {row.info.payer: row.energy.get(HwType.CPU, 0) for row in view.processes}
    known = [rows[one.consumer] for one in host.spent]
    total = sum(rows.values()) + view.other.get(HwType.CPU, 0) + view.retired.get(HwType.CPU, 0)
    return [*known, total - sum(known)]


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(), marks=pytest.mark.slow),
        pytest.param(Load(2, 48, births=4, burst=300), marks=pytest.mark.exhaustive),
    ],
)
def test_one_sample_a_second_is_at_most_a_point_worse_than_ten(load: Load) -> None:
    def worst(interval: int) -> list[float]:
        found = [errors(interval, load, seed) for seed in range(2)]
        return [quantile([*one, *other], 0.95) for one, other in zip(*found, strict=True)]

    for fine, rest in zip(worst(FINE), worst(REST), strict=True):
        assert rest <= fine + 0.01
