"""Energy of processes in MIG instances against known truth, in virtual time, with other rules.

The board is an emulated H100 in MIG mode, whose law defines the energy of each process. The real
source reads it through the emulated NVML, with and without the activity of the instances (GPM), and
the real ledger and energy history divide its energy. The other rules divide the same active energy
(the counter less idle power) at each tick of 0.1 s:

- Kepler's: in proportion to the activity of the graphics engine in each instance. The activity of
  the multiprocessors is taken for it, which is the same for work that fills an instance.
- activity: in proportion to the activity of the multiprocessors, times their number. It is what the
  source tells; the ledger learns the power of this activity in each instance.

The law of the board is linear in the activity of each process, and so is the model that is learned.
Further cases break that: work whose power depends on its data and rises with its load, a clock that
falls with the load of all under a limit, work of a kind that changes, and loads without variation,
or with the same variation everywhere.

    .venv/bin/python -m benchmarks.mig [--runs N] [--seconds S]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from testbed.gpu_sessions import nvml_session
from testbed.serving_engines import quantile

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.emulation.boards import H100, Kernel
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import DECODE, TRAIN, SteadyLoad
from wattspan.model import SECOND, Consumer, HwType, PayerInfo, Tick
from wattspan.ports import SourceContext
from wattspan.service.energy_history import EnergyHistory
from wattspan.sources.gpu.session import GpuSession
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock

TICK = 0.1
REST = 10  # seconds without a process, which show the idle power
WINDOW = 10  # seconds of each compared energy
ROUNDING = 1e-4  # relative errors up to this are roundings of the counter's millijoules
LEAST = 0.02  # windows with less of the board's active energy have no relative error


class Job(NamedTuple):
    """A process in an instance; its load changes to a random value every few seconds."""

    instance: int
    kernel: Kernel = TRAIN


class Loads(Enum):
    """How the loads of the jobs vary."""

    INDEPENDENT = auto()
    TOGETHER = auto()  # one value for all
    STEADY = auto()  # each has its first value for ever


class Case(NamedTuple):
    """``data``: the power of a job depends on its data, by a random factor, and on its load.

    ``limit`` is a power limit in milliwatts. ``changing``: a job changes its kind after 20 to 60 s.
    """

    name: str
    slices: tuple[int, ...]
    jobs: tuple[Job, ...]
    loads: Loads = Loads.INDEPENDENT
    data: bool = False
    limit: int | None = None
    changing: bool = False


DATA = 0.75, 1.25
"""Factors of a job's power by its data: the products of matrices on an A100 differ by 1.67."""
SEED = 10
"""The first seed: the constants of the regression were chosen with those below."""
RISE = 0.4
"""Part of the dynamic power of a job that rises with its load; an assumption."""
MIXED = (Job(1), Job(2, DECODE), Job(3), Job(4, DECODE))
SIZES = (3, 2, 1, 1)

CASES = (
    Case("7 x 1 slice, one kind of work", (1,) * 7, tuple(Job(i) for i in range(1, 8))),
    Case("3+2+1+1 slices, one kind of work", (3, 2, 1, 1), tuple(map(Job, range(1, 5)))),
    Case("3+2+1+1 slices, training and decoding", SIZES, MIXED),
    Case("... power depends on data and load", SIZES, MIXED, data=True),
    Case("... under a limit of 300 W", SIZES, MIXED, limit=300_000),
    Case("... kinds that change after 20 to 60 s", SIZES, MIXED, changing=True),
    Case("... steady loads", SIZES, MIXED, Loads.STEADY),
    Case("... loads that vary together", SIZES, MIXED, Loads.TOGETHER),
    Case("3+4 slices, two processes in each", (3, 4), (Job(1), Job(1), Job(2), Job(2))),
)


@dataclass
class Observer:
    """The real source, ledger and history on the board."""

    session: GpuSession
    ledger: Ledger = field(default_factory=lambda: Ledger(LedgerSettings()))
    history: EnergyHistory = field(init=False)

    def __post_init__(self) -> None:
        self.history = EnergyHistory(
            600 * SECOND, 64 << 20, baseline_errors=self.ledger.baseline_errors
        )

    def tick(self, clock: ManualClock) -> None:
        batch = self.session.sample()
        tick = Tick(clock.now(), {"nvml": batch.domains}, batch.readings, usages=batch.usages)
        self.history.apply(tick, self.ledger.apply(tick))


class WithoutActivity:
    """The emulated NVML of a driver without GPM."""

    def __init__(self, nvml: EmulatedNvml) -> None:
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlGpm"):
            raise AttributeError(name)
        return getattr(self._nvml, name)


class Run:
    """One board with its jobs; the energies of each rule and the truth, by window and process."""

    def __init__(self, case: Case, seed: int, directory: Path) -> None:
        self.case, self.chance = case, random.Random(seed)
        self.clock = ManualClock()
        self.gpus = EmulatedGpus(directory / f"gpus-{seed}", [H100], self.clock)
        self.gpus.divide(0, case.slices)
        self.consumers = [Consumer(100 + i, 1) for i in range(len(case.jobs))]
        known = FakeDirectory([PayerInfo(one, f"job-{one.pid}") for one in self.consumers])
        context = SourceContext(self.clock, known, emulated=True)
        nvml = EmulatedNvml(self.gpus.path, self.clock)
        self.observers = {
            "wattspan (GPM)": Observer(nvml_session(nvml, NvmlSettings(), context)),
            "wattspan (no activity)": Observer(
                nvml_session(WithoutActivity(nvml), NvmlSettings(), context)
            ),
        }
        self.kepler = dict.fromkeys(self.consumers, 0.0)
        self.activity = dict.fromkeys(self.consumers, 0.0)
        self.kernels = [job.kernel for job in case.jobs]
        self.factors = [self.chance.uniform(*DATA) if case.data else 1.0 for _ in case.jobs]
        if case.limit is not None:
            self.gpus.file.record(0).request_limit(case.limit)
        self._last = self._state()

    def _state(self) -> tuple[int, tuple[int, ...]]:
        state = self.gpus.state(0)
        return state.energy, state.active

    def _divide(self) -> None:
        """The other rules, over one tick."""
        (energy, active), (before, earlier) = self._state(), self._last
        self._last = energy, active
        spent = (energy - before) / 1e6 - H100.silicon.idle * TICK * 1e3
        activity = {i: a - b for i, (a, b) in enumerate(zip(active, earlier, strict=True), 1)}
        total = sum(activity.values())
        sizes = {one.id: one.multiprocessors for one in self.gpus.state(0).instances}
        busy = {one: part * sizes[one] for one, part in activity.items()}
        for consumer, job in zip(self.consumers, self.case.jobs, strict=True):
            together = sum(one.instance == job.instance for one in self.case.jobs)
            if total:
                self.kepler[consumer] += spent * activity[job.instance] / total / together
                own = busy[job.instance] / sum(busy.values())
                self.activity[consumer] += spent * own / together

    def step(self) -> None:
        self.gpus.run(TICK, every=TICK / 2)
        self._divide()
        for observer in self.observers.values():
            observer.tick(self.clock)

    def results(self, seconds: int) -> Iterator[tuple[str, float, float, float | None]]:
        """Rule, energy, truth and stated uncertainty of each process in each window."""
        for _ in range(round(REST / TICK)):
            self.step()
        for number, (consumer, job) in enumerate(zip(self.consumers, self.case.jobs, strict=True)):
            self.gpus.attach(0, consumer.pid, self._work(number), instance=job.instance)
        for observer in self.observers.values():
            for consumer in self.consumers:
                observer.history.watch(consumer)
        for _ in range(30):  # the first seconds, in which processes are discovered
            self.step()
        marks = [self._mark()]
        changes, kinds = dict.fromkeys(self.consumers, 0.0), [20.0] * len(self.consumers)
        for tick in range(round(seconds / TICK)):
            for number in range(len(self.consumers)):
                if self.case.changing and tick * TICK >= kinds[number]:
                    kinds[number] = tick * TICK + self.chance.uniform(20, 60)
                    self.kernels[number] = self.chance.choice((TRAIN, DECODE))
                    self._set(number, self._work(number))
            self._change_loads(tick * TICK, changes)
            self.step()
            if (tick + 1) % round(WINDOW / TICK) == 0:
                marks.append(self._mark())
        for _ in range(60):
            self.step()
        for (start, before), (end, after) in itertools.pairwise(marks):
            yield from self._compared(start, end, before, after)

    def _change_loads(self, now: float, changes: dict[Consumer, float]) -> None:
        """Change the loads whose time in ``changes`` has come."""
        due = [number for number, one in enumerate(self.consumers) if now >= changes[one]]
        if not due or self.case.loads is Loads.STEADY:
            return
        if self.case.loads is Loads.TOGETHER:
            due = list(range(len(self.consumers)))
        common = self._load()
        end = now + self.chance.uniform(1, 8)
        for number in due:
            together = self.case.loads is Loads.TOGETHER
            load = common if together else self._load()
            until = end if together else now + self.chance.uniform(1, 8)
            changes[self.consumers[number]] = until
            self._set(number, self._work(number, load))

    def _load(self) -> float:
        return self.chance.choice((0.0, self.chance.random(), 1.0))

    def _work(self, number: int, load: float | None = None) -> SteadyLoad:
        """The work of a job with a load, by default a random one."""
        load = self.chance.random() if load is None else load
        kernel = self.kernels[number]
        rise = 1 - RISE / 2 + RISE * load if self.case.data else 1.0
        activity = kernel.activity * self.factors[number] * rise
        return SteadyLoad(load, replace(kernel, activity=activity))

    def _set(self, number: int, work: SteadyLoad) -> None:
        self.gpus.change_work(0, self.consumers[number].pid, lambda _: work)

    def _mark(self) -> tuple[int, Mapping[str, Mapping[Consumer, float]]]:
        return self.clock.monotonic(), {
            "Kepler's rule": dict(self.kepler),
            "activity": dict(self.activity),
        }

    def _compared(
        self,
        start: int,
        end: int,
        before: Mapping[str, Mapping[Consumer, float]],
        after: Mapping[str, Mapping[Consumer, float]],
    ) -> Iterator[tuple[str, float, float, float | None]]:
        first, last = self.gpus.spent_at(0, (start, end))
        truths = {
            one: last.processes.get(one.pid, 0) - first.processes.get(one.pid, 0)
            for one in self.consumers
        }
        least = LEAST * sum(truths.values())
        for consumer, truth in truths.items():
            if truth < max(1, least):
                continue
            for name in after:
                yield name, after[name][consumer] - before[name][consumer], truth, None
            for name, observer in self.observers.items():
                found = observer.history.process(consumer, start, end)
                energy = found.energy.get(HwType.GPU, 0)
                yield name, energy, truth, found.uncertainty.get(HwType.GPU, 0)

    def close(self) -> None:
        for observer in self.observers.values():
            observer.session.close()
        self.gpus.close()


RULES = ("wattspan (GPM)", "activity", "Kepler's rule", "wattspan (no activity)")


def row(case: Case, runs: int, seconds: int) -> str:
    found: dict[str, list[tuple[float, float, float | None]]] = {rule: [] for rule in RULES}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(SEED, SEED + runs):
            run = Run(case, seed, Path(directory))
            for rule, *figures in run.results(seconds):
                found[rule].append(tuple(figures))  # type: ignore[arg-type]
            run.close()
    known = [(e, t, u) for e, t, u in found[RULES[0]] if u is not None]
    inside = statistics.mean(abs(e - t) <= u + ROUNDING * t for e, t, u in known)
    errors = {rule: [abs(e / t - 1) for e, t, _ in found[rule]] for rule in RULES}
    cells = [case.name, f"{inside:.1%}", f"{quantile(errors[RULES[0]], 0.95):.1%}"]
    cells += [f"{statistics.median(errors[rule]):.1%}" for rule in RULES]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--seconds", type=int, default=120)
    options.add_argument("--all", action="store_true", help="also similar cases")
    chosen = options.parse_args()
    print(
        f"Emulated, {chosen.runs} runs of {chosen.seconds} s: error of a process's"
        f" energy in {WINDOW} s. Truth: a board's law, linear in each process's activity unless a"
        " row says otherwise.\n"
    )
    titles = ["within stated", "p95", f"median: {RULES[0]}", *RULES[1:]]
    print(f"| instances | {' | '.join(titles)} |")
    print("|---|" + "---:|" * len(titles))
    for case in CASES:
        if (case.changing or case.loads is Loads.TOGETHER) and not chosen.all:
            continue
        print(row(case, chosen.runs, chosen.seconds), flush=True)


if __name__ == "__main__":
    main()
