"""The frontier of a pipeline: the least energy for every iteration time.

Each instruction has a clock of its own here. Clocks that change between instructions need a
controller inside the training process; one clock for each rank (``plan.py``) does not, and the
frontier bounds what it can reach.

It is a time-cost tradeoff, solved by minimum cuts. The longest duration of every instruction is the
cheapest. To shorten the iteration, all its longest paths must become shorter, and the cheapest way
is a minimum cut of the critical instructions, where an instruction's capacity is the cost of making
it shorter by a second (Phillips and Dessouky, 1977). The cut is found as a maximum flow, and the
flow is kept from one iteration time to the next, as in the primal-dual method of Fulkerson (1961)
and Kelley (1961). Start times are the potentials of the flow.

By linear duality every flow bounds the cost from below (``bound``), however it was found: this
certifies the result.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from wattspan.tuning.pipeline.costs import InstructionCost, PipelineProfile, savings_per_second
from wattspan.tuning.pipeline.dag import BadPipelineError, CostKey, PipelineDag

_NANOSECONDS = 1_000_000_000
_UNLIMITED = 1 << 60


class CriticalState(NamedTuple):
    """The optimum of one iteration time: ``starts`` and ``ends`` by instruction, in nanoseconds."""

    iteration: int
    starts: Sequence[int]
    ends: Sequence[int]


class _Steps(NamedTuple):
    """Durations of an instruction, from the longest, and the flow up to which each is best.

    ``limits`` rise, and the last one, of the shortest duration, is unlimited.
    """

    durations: tuple[int, ...]
    limits: tuple[int, ...]


class CriticalFlow:
    """The flow through the critical instructions of one pipeline.

    Node 2 i is the start of instruction i, node 2 i + 1 its end; then a source and a sink.
    ``watts`` is the unit of the flow: slopes of costs are rounded to it.
    """

    def __init__(
        self, dag: PipelineDag, costs: Mapping[CostKey, InstructionCost], watts: float
    ) -> None:
        keys = [one.cost_key for one in dag.instructions]
        steps = {key: _steps(costs[key], watts) for key in set(keys)}
        self._watts = watts
        self._costs = [costs[key] for key in keys]
        self._steps = [steps[key] for key in keys]
        count = len(keys)
        self._count, self._source, self._sink = count, 2 * count, 2 * count + 1
        self._flows = [0] * count
        self._levels = [0] * count  # the step of each instruction's flow
        self._out: list[list[int]] = [[] for _ in range(2 * count + 2)]
        # by node, the flow from each of its predecessors
        self._into: list[dict[int, int]] = [{} for _ in range(2 * count + 2)]
        last = set(range(count))
        for number, before in enumerate(dag.predecessors):
            for one in before:
                self._link(2 * one + 1, 2 * number)
                last.discard(one)
            if not before:
                self._link(self._source, 2 * number)
        for number in last:
            self._link(2 * number + 1, self._sink)
        self._at = self._earliest()

    def _link(self, before: int, after: int) -> None:
        self._out[before].append(after)
        self._into[after][before] = 0

    def _earliest(self) -> list[int]:
        at = [0] * (2 * self._count + 2)
        for number in range(self._count):
            start = max((at[before] for before in self._into[2 * number]), default=0)
            at[2 * number] = start
            at[2 * number + 1] = start + self._steps[number].durations[0]
        at[self._sink] = max(at[before] for before in self._into[self._sink])
        return at

    @property
    def state(self) -> CriticalState:
        at = self._at
        return CriticalState(
            at[self._sink], at[0 : 2 * self._count : 2], at[1 : 2 * self._count : 2]
        )

    def shortened(self) -> Iterator[CriticalState]:
        """The corners of the frontier, from the longest iteration to the shortest."""
        yield self.state
        while True:
            while (path := self._tight_path()) is not None:
                if not self._push(path):
                    return  # every instruction of the path has its shortest duration
            self._shorten()
            yield self.state

    @property
    def bound(self) -> tuple[float, float]:
        """A line below the cost of every plan: its joules at 0 s, and joules per second.

        For a flow f of value v, an iteration of T seconds costs at least the sum over all
        instructions of min over durations d of (c(d) + f d), less v T.
        """
        value = sum(self._into[self._sink].values()) * self._watts
        best: dict[tuple[int, int], float] = {}
        total = 0.0
        for cost, flow in zip(self._costs, self._flows, strict=True):
            key = id(cost), flow
            if key not in best:
                price = flow * self._watts
                best[key] = min(one.cost + price * one.seconds for one in cost.vertices)
            total += best[key]
        return total, -value

    # ------------------------------------------------------------------------ residual network

    def _ahead(self, number: int) -> int:
        """The slack between an instruction's duration and that of its next unit of flow."""
        at = self._at
        duration = self._steps[number].durations[self._levels[number]]
        return at[2 * number + 1] - at[2 * number] - duration

    def _back(self, number: int) -> int:
        """The same for a unit of flow that is taken back."""
        duration = self._steps[number].durations[self._level_below(number)]
        at = self._at
        return at[2 * number] - at[2 * number + 1] + duration

    def _level_below(self, number: int) -> int:
        """The step of the last unit of an instruction's flow."""
        level = self._levels[number]
        at_limit = level and self._flows[number] == self._steps[number].limits[level - 1]
        return level - 1 if at_limit else level

    def _neighbours(self, node: int) -> Iterator[tuple[int, int]]:
        """Nodes that a unit of flow reaches from ``node``, and the slack on the way."""
        at, here = self._at, self._at[node]
        if node < self._source:
            number = node >> 1
            if node & 1:
                if self._flows[number]:
                    yield node - 1, self._back(number)
            else:
                yield node + 1, self._ahead(number)
        for after in self._out[node]:
            yield after, at[after] - here
        for before, flow in self._into[node].items():
            if flow:
                yield before, at[before] - here

    def _tight_path(self) -> list[int] | None:
        """A path from source to sink without slack."""
        came: dict[int, int] = {self._source: -1}
        stack = [self._source]
        while stack:
            node = stack.pop()
            for after, slack in self._neighbours(node):
                if slack == 0 and after not in came:
                    came[after] = node
                    if after == self._sink:
                        path = [after]
                        while path[-1] != self._source:
                            path.append(came[path[-1]])
                        return path[::-1]
                    stack.append(after)
        return None

    def _push(self, path: Sequence[int]) -> bool:
        """Send as much flow as possible along the path; False if that is unlimited."""
        room = _UNLIMITED
        for before, after in pairwise(path):
            room = min(room, self._room(before, after))
        if room == _UNLIMITED:
            return False
        for before, after in pairwise(path):
            if before >> 1 == after >> 1 and before < self._source:
                number = before >> 1
                self._flows[number] += room if before < after else -room
                limits, flow = self._steps[number].limits, self._flows[number]
                self._levels[number] = next(n for n, limit in enumerate(limits) if flow < limit)
            elif before in self._into[after]:
                self._into[after][before] += room
            else:
                self._into[before][after] -= room
        return True

    def _room(self, before: int, after: int) -> int:
        """The flow that fits between two neighbours at the present durations."""
        if before >> 1 != after >> 1 or before >= self._source:
            return _UNLIMITED if before in self._into[after] else self._into[before][after]
        number = before >> 1
        limits, flow = self._steps[number].limits, self._flows[number]
        if before < after:
            limit = limits[self._levels[number]]
            return _UNLIMITED if limit == _UNLIMITED else limit - flow
        level = self._level_below(number)
        return flow - (limits[level - 1] if level else 0)

    def _shorten(self) -> None:
        """Move start times until another path is critical (Dijkstra's algorithm on the slack)."""
        source, sink = self._source, self._sink
        distance = {source: 0}
        done: set[int] = set()
        heap = [(0, source)]
        while sink not in done:  # every node is reachable
            far, node = heappop(heap)
            if node in done:
                continue
            done.add(node)
            for after, slack in self._neighbours(node):
                if after not in done:
                    through = far + slack
                    if through < distance.get(after, _UNLIMITED):
                        distance[after] = through
                        heappush(heap, (through, after))
        most = distance[sink]
        at = self._at
        for node in range(len(at)):
            at[node] -= min(distance.get(node, most), most)


def _steps(cost: InstructionCost, watts: float) -> _Steps:
    """The convex function with slopes in whole units of flow, from the longest duration."""
    durations = [round(one.seconds * _NANOSECONDS) for one in reversed(cost.vertices)]
    slopes = [max(1, round(slope / watts)) for slope in reversed(savings_per_second(cost))]
    kept: list[int] = [durations[0]]
    limits: list[int] = []
    for duration, slope in zip(durations[1:], slopes, strict=True):
        if limits and slope <= limits[-1]:
            kept[-1] = duration  # of the same slope as the segment before
        else:
            limits.append(slope)
            kept.append(duration)
    return _Steps(tuple(kept), (*limits, _UNLIMITED))


# ---------------------------------------------------------------------------------------- frontier

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
