"""Energy of processes in MIG instances against known truth, in virtual time, with other rules.

The board is an emulated H100 in MIG mode, whose law defines the energy of each process. The real
source reads it through the emulated NVML, with and without the activity of the instances (GPM), and
the real ledger and energy history divide its energy. The other rules divide the same active energy
(the counter less idle power) at each tick of 0.1 s:

- Kepler's: in proportion to the activity of the graphics engine in each instance. The activity of
  the multiprocessors is taken for it, which is the same for work that fills an instance.
- equal: the same to each instance with a process.

    .venv/bin/python -m benchmarks.mig [--runs N] [--seconds S]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.llm_requests import quantile
from wattspan.attribution.history import AttributionHistory
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.emulation.boards import H100, Kernel
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import DECODE, TRAIN, SteadyLoad
from wattspan.model import SECOND, Consumer, HwType, PayerInfo, Tick
from wattspan.ports import SourceContext
from wattspan.service.energy_history import EnergyHistory
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.sources.nvml.source import NvmlSession
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


class Case(NamedTuple):
    name: str
    slices: tuple[int, ...]
    jobs: tuple[Job, ...]


CASES = (
    Case("7 x 1 slice, one kind of work", (1,) * 7, tuple(Job(i) for i in range(1, 8))),
    Case("3 + 2 + 1 + 1 slices, one kind of work", (3, 2, 1, 1), tuple(map(Job, range(1, 5)))),
    Case(
        "3 + 2 + 1 + 1 slices, training and decoding",
        (3, 2, 1, 1),
        (Job(1), Job(2, DECODE), Job(3), Job(4, DECODE)),
    ),
    Case("3 + 4 slices, two processes in each", (3, 4), (Job(1), Job(1), Job(2), Job(2))),
)


@dataclass
class Observer:
    """The real source, ledger and history on the board."""

    session: NvmlSession
    ledger: Ledger = field(default_factory=lambda: Ledger(LedgerSettings()))
    history: EnergyHistory = field(init=False)

    def __post_init__(self) -> None:
        attributions = AttributionHistory(600 * SECOND, 64 << 20)
        self.history = EnergyHistory(attributions, baseline_errors=self.ledger.baseline_errors)

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
            "wattspan (GPM)": Observer(NvmlSession(nvml, NvmlSettings(), context)),
            "wattspan (no activity)": Observer(
                NvmlSession(WithoutActivity(nvml), NvmlSettings(), context)
            ),
        }
        self.kepler = dict.fromkeys(self.consumers, 0.0)
        self.equal = dict.fromkeys(self.consumers, 0.0)
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
        users = {job.instance for job in self.case.jobs}
        total = sum(activity.values())
        for consumer, job in zip(self.consumers, self.case.jobs, strict=True):
            together = sum(one.instance == job.instance for one in self.case.jobs)
            self.equal[consumer] += spent / len(users) / together
            if total:
                self.kepler[consumer] += spent * activity[job.instance] / total / together

    def step(self) -> None:
        self.gpus.run(TICK, every=TICK / 2)
        self._divide()
        for observer in self.observers.values():
            observer.tick(self.clock)

    def results(self, seconds: int) -> Iterator[tuple[str, float, float, float | None]]:
        """Rule, energy, truth and stated uncertainty of each process in each window."""
        for _ in range(round(REST / TICK)):
            self.step()
        for consumer, job in zip(self.consumers, self.case.jobs, strict=True):
            work = SteadyLoad(self.chance.random(), job.kernel)
            self.gpus.attach(0, consumer.pid, work, instance=job.instance)
        for observer in self.observers.values():
            for consumer in self.consumers:
                observer.history.watch(consumer)
        for _ in range(30):  # the first seconds, in which processes are discovered
            self.step()
        marks = [self._mark()]
        changes = dict.fromkeys(self.consumers, 0.0)
        for tick in range(round(seconds / TICK)):
            for consumer in self.consumers:
                if tick * TICK >= changes[consumer]:
                    changes[consumer] = tick * TICK + self.chance.uniform(1, 8)
                    load = self.chance.choice((0.0, self.chance.random(), 1.0))
                    self.gpus.set_load(0, consumer.pid, load)
            self.step()
            if (tick + 1) % round(WINDOW / TICK) == 0:
                marks.append(self._mark())
        for _ in range(60):
            self.step()
        for (start, before), (end, after) in itertools.pairwise(marks):
            yield from self._compared(start, end, before, after)

    def _mark(self) -> tuple[int, Mapping[str, Mapping[Consumer, float]]]:
        return self.clock.monotonic(), {
            "Kepler's rule": dict(self.kepler),
            "equal to each instance": dict(self.equal),
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


RULES = (
    "wattspan (GPM)",
    "Kepler's rule",
    "equal to each instance",
    "wattspan (no activity)",
)


def rows(case: Case, runs: int, seconds: int) -> Iterator[str]:
    found: dict[str, list[tuple[float, float, float | None]]] = {rule: [] for rule in RULES}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(runs):
            run = Run(case, seed, Path(directory))
            for rule, *figures in run.results(seconds):
                found[rule].append(tuple(figures))  # type: ignore[arg-type]
            run.close()
    for rule in RULES:
        errors = [abs(energy / truth - 1) for energy, truth, _ in found[rule]]
        bias = sum(e for e, _, _ in found[rule]) / sum(t for _, t, _ in found[rule]) - 1
        known = [(e, t, u) for e, t, u in found[rule] if u is not None]
        stated = [(abs(e - t) <= u + ROUNDING * t, u / t) for e, t, u in known]
        inside = f"{statistics.mean(ok for ok, _ in stated):.1%}" if stated else "–"
        width = f"{statistics.median(w for _, w in stated):.1%}" if stated else "–"
        yield (
            f"| {case.name} | {rule} | {statistics.median(errors):.1%} | "
            f"{quantile(errors, 0.95):.1%} | {bias:+.1%} | {width} | {inside} | {len(errors)} |"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--seconds", type=int, default=120)
    chosen = options.parse_args()
    print(
        f"Emulated in virtual time: {chosen.runs} runs of {chosen.seconds} s, energy of each"
        f" process in windows of {WINDOW} s; errors relative to the truth of the process.\n"
    )
    print("| instances | rule | median | p95 | bias | stated, median | within stated | windows |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for case in CASES:
        for row in rows(case, chosen.runs, chosen.seconds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
