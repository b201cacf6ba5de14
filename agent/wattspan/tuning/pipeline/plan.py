"""Plans of a pipeline: one clock for each rank, or a clock for each instruction.

One clock for each rank is what the agent can apply from outside. The search begins at the best
clock that is the same for all ranks and at the ranks' clocks of equal busy time. Then it moves
groups of ranks: a single rank cannot move, because fill and drain make every stage critical at some
time, so that a slower rank alone makes the iteration longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from operator import getitem
from typing import NamedTuple

from wattspan.tuning.pipeline.costs import InstructionCost
from wattspan.tuning.pipeline.dag import BadPipelineError
from wattspan.tuning.pipeline.frontier import FrontierPoint, PipelineFrontier, PipelineModel

MAX_RANKS = 16
"""Ranks for which one clock each is searched: those of one host."""

_STEPS = (8, 4, 2, 1)
"""Numbers of clocks by which a group of ranks is moved."""

_MAX_PATHS = 24
"""Known paths; each comparison of clocks evaluates all of them."""

_NEAR = range(-3, 4)
"""Numbers of clocks by which single ranks are moved, three of them at once."""

_TOLERANCE = 1e-9  # relative: rounding of sums


class ClockPlan(NamedTuple):
    """One clock in MHz for each rank, or for each instruction, and the iteration that results.

    ``seconds`` is the time of the pipeline itself, ``joules`` the energy of all ranks until they
    can go on, waiting for a straggler included.
    """

    clocks: tuple[int, ...]
    seconds: float
    joules: float


class RankClocks:
    """Searches one clock for each rank.

    ``wait_until`` is the iteration time in seconds of another pipeline that all ranks wait for; 0
    without a straggler. BadPipelineError for more than MAX_RANKS.
    """

    def __init__(self, model: PipelineModel, wait_until: float = 0.0) -> None:
        self._model, self._wait = model, wait_until
        dag = model.dag
        if dag.rank_count > MAX_RANKS:
            raise BadPipelineError(
                f"The pipeline has {dag.rank_count} ranks, and one clock for each rank is computed"
                f" for {MAX_RANKS} at most. A clock for each instruction has no such limit."
            )
        keys = [one.cost_key for one in dag.instructions]
        self._ranks = dag.ranks
        self._seconds = [
            [model.costs[key].by_clock[mhz].seconds for mhz in model.clocks] for key in keys
        ]
        clocks, ranks = range(len(model.clocks)), range(dag.rank_count)
        self._busy = [[0.0 for _ in clocks] for _ in ranks]
        # Of each path, seconds by rank and clock: no iteration is shorter than a path.
        self._paths: list[list[list[float]]] = []
        self._cost = [[0.0 for _ in clocks] for _ in ranks]
        for key, rank in zip(keys, dag.ranks, strict=True):
            cost = model.costs[key]
            for number, mhz in enumerate(model.clocks):
                point = cost.by_clock[mhz]
                self._busy[rank][number] += point.seconds
                self._cost[rank][number] += cost.cost(point)
        self._known: dict[tuple[int, ...], float] = {}

    @property
    def fastest(self) -> ClockPlan:
        """The highest clock for every rank, which is the reference of savings and slowdowns."""
        return self._plan((len(self._model.clocks) - 1,) * self._model.dag.rank_count)

    def best(self, limit: float) -> ClockPlan:
        """The best clocks that were found within ``limit`` seconds; BadPipelineError if none is."""
        starts = [self._best_uniform(limit), self._balanced(limit)]
        best = min(
            (self._improved(one, limit) for one in starts if one is not None), key=self._energy
        )
        return self._plan(best)

    def evaluated(self, clocks: Sequence[int]) -> ClockPlan:
        """The iteration at these clocks in MHz; BadPipelineError if one is not in the profile."""
        unknown = next((mhz for mhz in clocks if mhz not in self._model.clocks), None)
        if unknown is not None:
            raise BadPipelineError(f"The profile has no clock of {unknown} MHz.")
        return self._plan(tuple(map(self._model.clocks.index, clocks)))

    # ---------------------------------------------------------------------------- evaluation

    def _plan(self, chosen: tuple[int, ...]) -> ClockPlan:
        clocks = tuple(self._model.clocks[number] for number in chosen)
        return ClockPlan(clocks, self._makespan(chosen), self._energy(chosen))

    def _makespan(self, chosen: tuple[int, ...]) -> float:
        known = self._known.get(chosen)
        if known is None:
            known = self._known[chosen] = self._model.dag.makespan(self._durations(chosen))
        return known

    def _durations(self, chosen: tuple[int, ...]) -> list[float]:
        return [
            seconds[chosen[rank]] for seconds, rank in zip(self._seconds, self._ranks, strict=True)
        ]

    def _energy(self, chosen: tuple[int, ...]) -> float:
        return self._energy_until(chosen, max(self._makespan(chosen), self._wait))

    def _energy_until(self, chosen: tuple[int, ...], seconds: float) -> float:
        cost = sum(costs[number] for costs, number in zip(self._cost, chosen, strict=True))
        return self._model.energy(cost, seconds)

    def _shortest(self, chosen: tuple[int, ...]) -> float:
        """A lower bound of the iteration time, from a few known paths."""
        return max((sum(map(getitem, path, chosen)) for path in self._paths), default=0.0)

    def _keeps(self, chosen: tuple[int, ...], limit: float) -> bool:
        limit *= 1 + _TOLERANCE
        if chosen not in self._known and self._shortest(chosen) > limit:
            return False
        if self._makespan(chosen) <= limit:
            return True
        self._add_path(chosen)
        return False

    def _add_path(self, chosen: tuple[int, ...]) -> None:
        """Keep the longest path of these clocks, which is probably too long for similar ones."""
        path = [[0.0] * len(self._model.clocks) for _ in chosen]
        for number in self._model.dag.critical_path(self._durations(chosen)):
            of_rank = path[self._ranks[number]]
            for clock, seconds in enumerate(self._seconds[number]):
                of_rank[clock] += seconds
        self._paths = [path, *self._paths[: _MAX_PATHS - 1]]

    # ------------------------------------------------------------------------------- starts

    def _best_uniform(self, limit: float) -> tuple[int, ...]:
        ranks = self._model.dag.rank_count
        every = [(number,) * ranks for number in range(len(self._model.clocks))]
        within = [one for one in every if self._keeps(one, limit)]
        if not within:
            raise BadPipelineError(
                f"No clock keeps {limit:.4g} s: the iteration takes {self.fastest.seconds:.4g} s at"
                " the highest."
            )
        return min(within, key=self._energy)

    def _balanced(self, limit: float) -> tuple[int, ...] | None:
        """The cheapest clocks of about the same busy time, by bisection on that time."""
        times = sorted({seconds for busy in self._busy for seconds in busy})
        low, high = 0, len(times)
        best: tuple[int, ...] | None = None
        while low < high:
            middle = (low + high) // 2
            chosen = tuple(
                self._cheapest_within(rank, times[middle]) for rank in range(len(self._busy))
            )
            if self._keeps(chosen, limit):
                best, low = chosen, middle + 1
            else:
                high = middle
        return best

    def _cheapest_within(self, rank: int, seconds: float) -> int:
        busy, cost = self._busy[rank], self._cost[rank]
        within = [number for number, own in enumerate(busy) if own <= seconds]
        fastest = min(range(len(busy)), key=busy.__getitem__)
        return min(within, key=cost.__getitem__, default=fastest)

    # ------------------------------------------------------------------------- local search

    def _improved(self, start: tuple[int, ...], limit: float) -> tuple[int, ...]:
        """Take moves that save energy and keep ``limit``, until there are none."""
        chosen, energy = start, self._energy(start)
        moved = True
        while moved:
            moved = False
            for move in self._moves(chosen):
                # Cheap bounds first: most moves fail them.
                shortest = max(self._shortest(move), self._wait)
                if self._energy_until(move, shortest) >= energy * (1 - _TOLERANCE):
                    continue
                if self._keeps(move, limit) and self._energy(move) < energy * (1 - _TOLERANCE):
                    chosen, energy, moved = move, self._energy(move), True
                    break
        return chosen

    def _moves(self, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Settings near ``chosen``: one group of ranks is slower, and perhaps another is faster.

        Then those with another clock for one rank, and with small changes of three ranks.
        """
        highest = len(self._model.clocks) - 1
        groups = self._groups(chosen)
        for slower, down in product(groups, _STEPS):
            lowered = _moved(chosen, slower, -down, highest)
            if lowered is None:
                continue
            yield lowered
            for faster, up in product(groups, _STEPS):
                both = None if slower & faster else _moved(lowered, faster, up, highest)
                if both is not None:
                    yield both
        for rank, number in product(range(len(chosen)), range(highest + 1)):
            yield (*chosen[:rank], number, *chosen[rank + 1 :])
        for ranks in combinations(range(len(chosen)), min(3, len(chosen))):
            for steps in product(_NEAR, repeat=len(ranks)):
                moved = list(chosen)
                for rank, step in zip(ranks, steps, strict=True):
                    moved[rank] += step
                if min(moved) >= 0 and max(moved) <= highest:
                    yield tuple(moved)

    def _groups(self, chosen: tuple[int, ...]) -> list[frozenset[int]]:
        """Neighbouring ranks, ranks with the least or the most busy time, and their complements."""
        ranks = range(len(chosen))
        by_busy = sorted(ranks, key=lambda rank: self._busy[rank][chosen[rank]])
        groups = {frozenset(range(a, b)): None for a, b in combinations(range(len(chosen) + 1), 2)}
        for size in ranks[1:]:
            groups[frozenset(by_busy[:size])] = None
            groups[frozenset(by_busy[size:])] = None
        for group in list(groups):
            groups[frozenset(ranks) - group] = None
        return [group for group in groups if group]


def _moved(
    chosen: tuple[int, ...], group: frozenset[int], step: int, highest: int
) -> tuple[int, ...] | None:
    """``chosen`` with the group moved; None if one of its ranks cannot move so far."""
    moved = list(chosen)
    for rank in group:
        moved[rank] += step
        if not 0 <= moved[rank] <= highest:
            return None
    return tuple(moved)


def target_iteration(frontier: PipelineFrontier, limit: float, straggler: float = 0.0) -> float:
    """The iteration time in seconds to plan for.

    Beside a straggler, min(T*, T') (Perseus): all ranks wait until T', and no cost is saved beyond
    the longest useful time T*. Without one, the time of the least energy within ``limit``.
    """
    return min(frontier.longest, straggler) if straggler else frontier.cheapest(limit)


def instruction_plan(
    model: PipelineModel, point: FrontierPoint, wait_until: float = 0.0
) -> ClockPlan:
    """A clock of each instruction that ends it when the optimum does, or before.

    An instruction that can begin early, since those before have been rounded to faster clocks, has
    more time.
    """
    ends: list[float] = []
    points = []
    dag = model.dag
    for cost, before, latest in zip(
        model.of_instruction, dag.predecessors, point.ends, strict=True
    ):
        start = max((ends[one] for one in before), default=0.0)
        chosen = cost.cheapest_point((latest - start) * (1 + _TOLERANCE))
        points.append(chosen)
        ends.append(start + chosen.seconds)
    seconds = max(ends)
    cost_sum = sum(map(InstructionCost.cost, model.of_instruction, points))
    joules = model.energy(cost_sum, max(seconds, wait_until))
    return ClockPlan(tuple(one.mhz for one in points), seconds, joules)


def rank_orders(model: PipelineModel, clocks: Sequence[int]) -> list[list[tuple[str, int]]]:
    """The names and clocks of each rank's instructions in their order, as Zeus's plans have them.

    ``clocks`` has one for each instruction, or one for each rank.
    """
    dag = model.dag
    if len(clocks) == dag.rank_count != len(dag.instructions):
        clocks = [clocks[rank] for rank in dag.ranks]
    by_instruction = dict(zip(dag.instructions, clocks, strict=True))
    return [[(one.kind.value, by_instruction[one]) for one in order] for order in dag.orders]
