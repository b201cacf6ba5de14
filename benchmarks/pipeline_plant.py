"""A pipeline-parallel training in virtual time, whose ranks change their clocks when asked.

Costs of instructions are those of a profile, linear between its clocks. Each iteration is as much
longer or shorter as the recorded iterations of pipelines on A40 GPUs were (`tuner/data`), in blocks
of six neighbours, and each instruction has 1 % of noise besides. Spans arrive up to 5 s after the
end of an iteration, clocks change 10 to 200 ms after a request, counters are updated every 100 ms
and read every 500 ms. Ranks that wait draw the blocking power.
"""

from __future__ import annotations

import csv
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from testbed.requirements import ROOT

from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import CostKey, PipelineDag
from wattspan.tuning.pipeline.iterations import InstructionSpan, PipelineIteration, RankEnergy
from wattspan.tuning.pipeline.session import add_iteration, use_plan
from wattspan.tuning.pipeline.session_state import (
    PipelinePhase,
    PipelinePolicy,
    PipelineState,
    begin_session,
)

RECORDED = ROOT / "testbed/tuner/data/iterations.csv"
BLOCK = 6
INSTRUCTION_NOISE = 0.01
MOST_DELAY = 5.0
LATENCY = 0.01, 0.2
COUNTER_PERIOD, READING_PERIOD = 0.1, 0.5
TAIL = 0.1
"""Seconds between two iterations, for the optimizer's step."""


class PipelineLoad(NamedTuple):
    """A training: the pipeline, its true costs, and the power of waiting."""

    name: str
    dag: PipelineDag
    profile: PipelineProfile
    blocking_watts: float

    @property
    def original(self) -> int:
        return self.profile.clocks[-1]


class Straggler(NamedTuple):
    """Another data-parallel pipeline, slower by ``factor`` in some iterations."""

    first: int
    end: int
    factor: float


class RunResult(NamedTuple):
    """A run of a session; ``slowdown`` and ``saving`` are against the original clocks.

    ``worst`` is the largest slowdown of the run so far after its first tenth. ``late`` are the
    iterations that began with the clocks for a straggler after the session had received the first
    one without it.
    """

    slowdown: float
    saving: float
    worst: float
    held_from: int | None
    followed: int
    late: int
    reason: str


class _Executed(NamedTuple):
    starts: list[float]
    ends: list[float]
    watts: list[float]
    clocks: tuple[int, ...] | None


class Plant:
    """Executes iterations; the same seed gives the same noise at all clocks."""

    def __init__(self, load: PipelineLoad, seed: int) -> None:
        self.load = load
        self._random = random.Random(seed)
        self._rounds = recorded_rounds()
        self._block: list[float] = []
        self._costs: dict[tuple[CostKey, int], tuple[float, float]] = {}
        self._keys = [one.cost_key for one in load.dag.instructions]
        self.original = (load.original,) * load.dag.rank_count
        self._clocks = self.original
        self._pending: list[tuple[float, int, int]] = []  # time, rank, clock
        self._above = [0.0] * load.dag.rank_count
        self._read = [(-1.0, 0.0)] * load.dag.rank_count
        self._read_clocks: tuple[int, ...] | None = None
        self._next_reading = 1

    def noise(self) -> list[float]:
        """The factors of the durations of one iteration's instructions."""
        if not self._block:
            of_round = self._random.choice(self._rounds)
            first = self._random.randrange(len(of_round) - BLOCK + 1)
            self._block = of_round[first : first + BLOCK]
        factor = self._block.pop()
        gauss = self._random.gauss
        return [factor * (1 + INSTRUCTION_NOISE * gauss(0, 1)) for _ in self._keys]

    def delay(self) -> float:
        return self._random.uniform(0, MOST_DELAY)

    def request(self, at: float, clocks: Sequence[int]) -> None:
        """Ask for clocks; each rank has its own latency."""
        for rank, mhz in enumerate(clocks):
            self._pending.append((at + self._random.uniform(*LATENCY), rank, mhz))

    def executed(self, start: float, noise: Sequence[float]) -> _Executed:
        """One iteration from ``start``; requests before its end take effect."""
        clocks = list(self._clocks)
        changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for at, rank, mhz in sorted(self._pending):
            changes[rank].append((at, mhz))
        dag = self.load.dag
        starts, ends, watts = [], [], []
        for number, (rank, before) in enumerate(zip(dag.ranks, dag.predecessors, strict=True)):
            begun = max((ends[one] for one in before), default=start)
            waiting = changes.get(rank)
            while waiting and waiting[0][0] <= begun:
                clocks[rank] = waiting.pop(0)[1]
            seconds, power = self._cost(self._keys[number], clocks[rank])
            starts.append(begun)
            ends.append(begun + seconds * noise[number])
            watts.append(power)
        end = max(ends)
        steady = all(at > end or (at <= start) for at, _, _ in self._pending)
        self._pending = [one for one in self._pending if one[0] > end]
        for rank, waiting in changes.items():
            for at, mhz in waiting:
                if at <= end:
                    clocks[rank] = mhz
        self._clocks = tuple(clocks)
        return _Executed(starts, ends, watts, self._clocks if steady else None)

    def fixed(self, clocks: tuple[int, ...], noise: Sequence[float]) -> tuple[float, float]:
        """Seconds and joules of an iteration at fixed clocks, without the tail."""
        dag = self.load.dag
        ends: list[float] = []
        joules = busy = 0.0
        for number, (rank, before) in enumerate(zip(dag.ranks, dag.predecessors, strict=True)):
            begun = max((ends[one] for one in before), default=0.0)
            seconds, power = self._cost(self._keys[number], clocks[rank])
            ends.append(begun + seconds * noise[number])
            busy += seconds * noise[number]
            joules += seconds * noise[number] * power
        seconds = max(ends)
        return seconds, joules + self.waiting(seconds * dag.rank_count - busy)

    def waiting(self, seconds: float) -> float:
        return self.load.blocking_watts * seconds

    def _cost(self, key: CostKey, mhz: int) -> tuple[float, float]:
        known = self._costs.get((key, mhz))
        if known is None:
            known = self._costs[key, mhz] = interpolated(self.load.profile.points[key], mhz)
        return known

    def iteration(self, number: int, executed: _Executed, waited: float) -> PipelineIteration:
        """The iteration as the session sees it, with energies of readings inside."""
        dag = self.load.dag
        spans = tuple(
            InstructionSpan(number, rank, one, start, end)
            for one, rank, start, end in zip(
                dag.instructions, dag.ranks, executed.starts, executed.ends, strict=True
            )
        )
        energy = tuple(self._energies(executed))
        return PipelineIteration(spans, executed.clocks, energy, waited)

    def _energies(self, executed: _Executed) -> Iterator[RankEnergy]:
        """Energies between readings, from the last one before if the clocks were the same."""
        ended = max(executed.ends)
        steady = executed.clocks is not None and executed.clocks == self._read_clocks
        watts, ranks = self.load.blocking_watts, self.load.dag.rank_count
        first = self._next_reading
        last = int(ended / READING_PERIOD)
        by_rank: dict[int, list[int]] = defaultdict(list)
        for number, rank in enumerate(self.load.dag.ranks):
            by_rank[rank].append(number)
        for rank, numbers in by_rank.items():
            # Joules above the power of waiting, until the start of each instruction.
            starts = [executed.starts[one] for one in numbers]
            above = [
                (executed.ends[n] - executed.starts[n]) * (executed.watts[n] - watts)
                for n in numbers
            ]
            before = list(accumulate(above, initial=self._above[rank]))
            phase = COUNTER_PERIOD * rank / ranks
            known = self._read[rank]
            for reading in range(first, last + 1):
                at = READING_PERIOD * reading
                updated = (at - phase) // COUNTER_PERIOD * COUNTER_PERIOD + phase
                place = bisect_left(starts, updated) - 1
                total = before[max(place, 0)]
                if place >= 0:
                    one = numbers[place]
                    total += (min(updated, executed.ends[one]) - starts[place]) * (
                        executed.watts[one] - watts
                    )
                value = total + watts * updated
                inside = steady or known[0] >= starts[0]
                if inside and executed.clocks is not None:
                    yield RankEnergy(rank, known[0], at, value - known[1])
                known = at, value
            self._read[rank] = known
            self._above[rank] = before[-1]
        self._next_reading = last + 1
        self._read_clocks = executed.clocks


def recorded_rounds(path: Path = RECORDED) -> list[list[float]]:
    """By round of recorded iterations, their times relative to the round's mean."""
    rounds: dict[tuple[str, ...], list[float]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["curve"], row["limit_w"], row["round"]
            rounds[key].append(float(row["time_s"]))
    return [[one / fmean(of) for one in of] for of in rounds.values() if len(of) >= BLOCK]


def interpolated(points: Sequence[ClockPoint], mhz: int) -> tuple[float, float]:
    """Seconds and watts at a clock, linear between the profile's."""
    clocks = [one.mhz for one in points]
    place = min(max(bisect_left(clocks, mhz), 1), len(clocks) - 1)
    low, high = points[place - 1 : place + 1]
    part = min(max((mhz - low.mhz) / (high.mhz - low.mhz), 0.0), 1.0)
    watts = [one.joules / one.seconds for one in (low, high)]
    return (
        low.seconds + part * (high.seconds - low.seconds),
        watts[0] + part * (watts[1] - watts[0]),
    )


def run(
    load: PipelineLoad,
    budget: float,
    iterations: int,
    seed: int,
    straggler: Straggler | None = None,
    trace: Callable[[int, PipelineState], object] | None = None,
) -> RunResult:
    """Run a session with the training, searches of plans included."""
    plant = Plant(load, seed)
    policy = PipelinePolicy(load.original, load.profile.clocks[0], max_slowdown=budget)
    state = begin_session(policy)
    now = seconds = joules = usual_seconds = usual_joules = worst = 0.0
    held_from: int | None = None
    followed = late = 0
    recovered = False
    requested: tuple[int, ...] = ()
    arriving: list[tuple[float, PipelineIteration]] = []
    ranks = load.dag.rank_count
    for number in range(iterations):
        noise = plant.noise()
        own_seconds, own_joules = plant.fixed(plant.original, noise)
        if recovered and state.phase is PipelinePhase.STRAGGLE:
            late += 1
        executed = plant.executed(now, noise)
        took = max(executed.ends) - now
        other = 0.0
        if straggler is not None and straggler.first <= number < straggler.end:
            other = straggler.factor * own_seconds
        waited = max(0.0, other - took)
        busy = [end - start for start, end in zip(executed.starts, executed.ends, strict=True)]
        lasted = max(took, other)
        seconds += lasted + TAIL
        joules += sum(map(float.__mul__, busy, executed.watts))
        joules += plant.waiting((lasted + TAIL) * ranks - sum(busy))
        usual = max(own_seconds, other)
        usual_seconds += usual + TAIL
        usual_joules += own_joules + plant.waiting((usual - own_seconds + TAIL) * ranks)
        if number >= iterations // 10:
            worst = max(worst, seconds / usual_seconds - 1)
        arriving.append((now + lasted + plant.delay(), plant.iteration(number, executed, waited)))
        now += lasted + TAIL
        # Spans that arrive during the next iteration change its clocks.
        while arriving and arriving[0][0] <= now + took:
            at, finished = arriving.pop(0)
            recovered = straggler is not None and finished.number >= straggler.end
            state = add_iteration(state, finished)
            if state.task is not None:
                state = use_plan(state, state.task.solved())
            if state.decision.clocks != requested:
                requested = state.decision.clocks
                plant.request(max(at, now), requested or plant.original)
            if trace is not None:
                trace(number, state)
        if held_from is None and state.plan and state.level == state.plan:
            held_from = number
        followed += state.phase is PipelinePhase.STRAGGLE
    return RunResult(
        seconds / usual_seconds - 1,
        1 - joules / usual_joules,
        worst,
        held_from,
        followed,
        late,
        state.decision.reason.value,
    )


def fixed_run(
    load: PipelineLoad, clocks: tuple[int, ...], iterations: int, seed: int
) -> tuple[float, float]:
    """Slowdown and saving of fixed clocks in a run with the noise of a seed."""
    plant = Plant(load, seed)
    seconds = joules = usual_seconds = usual_joules = 0.0
    for _ in range(iterations):
        noise = plant.noise()
        plant.delay()
        tail = plant.waiting(TAIL * load.dag.rank_count)
        one, other = plant.fixed(clocks, noise), plant.fixed(plant.original, noise)
        seconds, joules = seconds + one[0] + TAIL, joules + one[1] + tail
        usual_seconds, usual_joules = (
            usual_seconds + other[0] + TAIL,
            usual_joules + other[1] + tail,
        )
    return seconds / usual_seconds - 1, 1 - joules / usual_joules
