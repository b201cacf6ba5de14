"""The frontier of a pipeline: the least energy for every iteration time.

Each instruction has a clock of its own here. Clocks that change between instructions need a
controller inside the training process; one clock for each rank (``plan.py``) does not, and the
frontier bounds what it can reach.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wattspan.tuning.pipeline.costs import InstructionCost, PipelineProfile, savings_per_second
from wattspan.tuning.pipeline.critical_flow import CriticalFlow, CriticalState
from wattspan.tuning.pipeline.dag import BadPipelineError, CostKey, PipelineDag

FLOW_UNITS = 10_000
"""Units of flow in the steepest slope of any cost; more are more exact and take longer."""

_MAX_NUMBERS = 4_000_000
"""Start and end times that are kept: the corners of large pipelines are thinned."""

_ROUNDING = 1e-9  # seconds: times of the flow are whole nanoseconds


class PipelineModel:
    """A pipeline with the cost of its instructions: everything that plans are computed from."""

    def __init__(self, dag: PipelineDag, profile: PipelineProfile, blocking_watts: float) -> None:
        """BadPipelineError if the profile has another number of stages, or the power is invalid."""
        if profile.stage_count != dag.stage_count:
            raise BadPipelineError(
                f"The profile has {profile.stage_count} stages and the pipeline {dag.stage_count}."
            )
        if not 0 <= blocking_watts < float("inf"):
            raise BadPipelineError("The blocking power must be a number of watts from 0.")
        self.dag, self.blocking_watts = dag, blocking_watts
        self.clocks = profile.clocks
        self.costs: Mapping[CostKey, InstructionCost] = profile.costs(blocking_watts)
        self.of_instruction = tuple(self.costs[one.cost_key] for one in dag.instructions)

    def energy(self, cost: float, iteration: float) -> float:
        """Joules of all ranks in an iteration of ``iteration`` seconds."""
        return cost + self.blocking_watts * self.dag.rank_count * iteration


class FrontierPoint(NamedTuple):
    """The optimum of one iteration time.

    ``durations`` and ``ends`` have the seconds of each instruction and its end. ``bound`` is at
    most the least possible energy, by linear duality; ``joules`` is that of the durations.
    """

    seconds: float
    joules: float
    bound: float
    durations: Sequence[float]
    ends: Sequence[float]


class _Corner(NamedTuple):
    state: CriticalState
    bound: tuple[float, float]  # of the cost: its value at 0 s and its slope


class PipelineFrontier:
    """The optimal durations of all instructions for every iteration time.

    ``shortest`` and ``longest`` are the iteration times in seconds between which it is computed.
    No cost is saved beyond the longest: it is the iteration time T* of Perseus. At most about
    ``most_numbers`` start and end times are kept.
    """

    def __init__(self, model: PipelineModel, most_numbers: int = _MAX_NUMBERS) -> None:
        self._model = model
        costs = model.costs.values()
        steepest = max((slope for one in costs for slope in savings_per_second(one)), default=1.0)
        flow = CriticalFlow(model.dag, model.costs, steepest / FLOW_UNITS)
        shortest = model.dag.makespan([one.shortest for one in model.of_instruction])
        corners: list[_Corner] = []
        latest = _Corner(flow.state, flow.bound)
        least = (latest.state.iteration / 1e9 - shortest) * 2 * len(model.of_instruction)
        least *= 1e9 / most_numbers
        for state in flow.shortened():
            latest = _Corner(_packed(state), flow.bound)
            if not corners or corners[-1].state.iteration - state.iteration >= least:
                corners.append(latest)
        if corners[-1] is not latest:
            corners.append(latest)
        self._corners = corners[::-1]
        self._times = [one.state.iteration / 1e9 for one in self._corners]

    @property
    def shortest(self) -> float:
        return self._times[0]

    @property
    def longest(self) -> float:
        return self._times[-1]

    @property
    def iteration_times(self) -> Sequence[float]:
        """The iteration times of the computed corners in seconds, rising."""
        return self._times

    def cheapest(self, limit: float) -> float:
        """The iteration time of the least energy within ``limit`` seconds.

        Energy is a convex function of the iteration time, and the slope of the bound, which is
        that of the cost, tells where it stops to fall.
        """
        waiting = self._model.energy(0.0, 1.0)
        rising = (one for one in self._corners if one.bound[1] + waiting >= 0)
        # The last corner has slope 0.
        return min(limit, next(rising).state.iteration / 1e9)

    def at(self, seconds: float) -> FrontierPoint:
        """The optimum of an iteration of ``seconds``; ranks wait beyond the longest useful time.

        Between two corners both optima are mixed, which keeps every link, and costs no more than
        the line between them. BadPipelineError below the shortest.
        """
        if seconds < self.shortest - _ROUNDING:
            raise BadPipelineError(
                f"No iteration takes {seconds:.4g} s: the shortest is {self.shortest:.4g} s."
            )
        place = min(bisect_left(self._times, seconds), len(self._times) - 1)
        upper = self._corners[place]
        lower = self._corners[max(place - 1, 0)]
        span = self._times[place] - self._times[max(place - 1, 0)]
        part = 1.0
        if span > 0:
            part = min(1.0, max(0.0, (seconds - self._times[place] + span) / span))
        starts = _mixed(lower.state.starts, upper.state.starts, part)
        ends = _mixed(lower.state.ends, upper.state.ends, part)
        durations = [
            min(cost.longest, end - start)
            for cost, start, end in zip(self._model.of_instruction, starts, ends, strict=True)
        ]
        cost = sum(
            cost.least_cost(duration)
            for cost, duration in zip(self._model.of_instruction, durations, strict=True)
        )
        bound = max(fixed + slope * seconds for fixed, slope in (lower.bound, upper.bound))
        energy = self._model.energy
        return FrontierPoint(
            seconds, energy(cost, seconds), energy(bound, seconds), durations, ends
        )


def _packed(state: CriticalState) -> CriticalState:
    return CriticalState(state.iteration, array("q", state.starts), array("q", state.ends))


def _mixed(one: Sequence[int], other: Sequence[int], part: float) -> list[float]:
    """Seconds between two times in nanoseconds, ``part`` of the way to the other."""
    return [(a + (b - a) * part) / 1e9 for a, b in zip(one, other, strict=True)]
