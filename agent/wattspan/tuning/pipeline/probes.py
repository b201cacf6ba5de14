"""The next clocks to measure: those of ranks with slack, at no loss, before those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from wattspan.tuning.pipeline.dag import CostKey, PipelineDag
from wattspan.tuning.pipeline.online_profile import OnlineProfile
from wattspan.tuning.pipeline.session_state import PipelineState

_PROBE_EXECUTIONS = 32
"""Executions of each instruction that a probe measures at least."""

_MORE_ELASTIC = 1.25
"""Factor of an instruction's slowdown per clock below the lowest measured clock."""

_LEAST_ELASTICITY = 0.3


class PipelineProbe(NamedTuple):
    """The clock of each rank in MHz, and the slowdown that is expected at most."""

    clocks: tuple[int, ...]
    slowdown: float


def next_probe(
    state: PipelineState, dag: PipelineDag, limit: float, free: float
) -> PipelineProbe | None:
    """The next lower clocks of ranks for which an iteration longer by ``limit`` has a use.

    Those of the ranks with the most slack come first, as many as together make the iteration longer
    by ``free`` at most; only then those of all remaining ranks. None if no rank has any.
    """
    return _Probes(state, dag).next(limit, free)


def probe_iterations(dag: PipelineDag) -> int:
    """The iterations of a probe, that in which the clocks change included."""
    return 1 + math.ceil(_PROBE_EXECUTIONS / dag.microbatch_count)


def probe_completed(state: PipelineState, dag: PipelineDag) -> bool:
    """True if the present clocks of all ranks were measured often enough."""
    clocks = state.settings[state.level - 1]
    executions = state.profile.executions
    return all(
        executions(one.cost_key, clocks[rank]) >= _PROBE_EXECUTIONS
        for one, rank in zip(dag.instructions, dag.ranks, strict=True)
    )


class _Probes:
    def __init__(self, state: PipelineState, dag: PipelineDag) -> None:
        self._dag, self._profile = dag, state.profile
        self._original = state.original
        self._keys = {
            rank: {one.cost_key for one in order} for rank, order in enumerate(dag.orders)
        }
        self._deepest = {rank: _deepest(state.profile, keys) for rank, keys in self._keys.items()}
        self._lower: Mapping[int, int] = {
            rank: lower
            for rank, deepest in self._deepest.items()
            if (lower := next((mhz for mhz in state.policy.profiled if mhz < deepest), None))
        }
        self._usual = self._makespan({})

    def next(self, limit: float, free: float) -> PipelineProbe | None:
        alone = {
            rank: self._makespan({rank: (self._deepest[rank], 1.0)}) / self._usual - 1
            for rank in self._lower
        }
        useful = [rank for rank, slowdown in alone.items() if slowdown < limit]
        useful.sort(key=lambda rank: (self._slowdown([rank]), rank))
        cheap: list[int] = []
        for rank in useful:
            if self._slowdown([*cheap, rank]) <= free:
                cheap.append(rank)
        chosen = cheap or useful
        if not chosen:
            return None
        clocks = tuple(
            self._lower[rank] if rank in chosen else original
            for rank, original in enumerate(self._original)
        )
        return PipelineProbe(clocks, self._slowdown(chosen))

    def _slowdown(self, ranks: list[int]) -> float:
        """The expected slowdown with the next lower clocks of these ranks."""
        lowered = {rank: (self._deepest[rank], self._factor(rank)) for rank in ranks}
        return self._makespan(lowered) / self._usual - 1

    def _factor(self, rank: int) -> float:
        """The time at the next lower clock relative to the lowest measured one, at most.

        No instruction is slower than in proportion to the clock.
        """
        deepest, elasticity = self._deepest[rank], 1.0
        measured = _measured(self._profile, self._keys[rank])
        before = min((mhz for mhz in measured if mhz > deepest), default=None)
        if before is not None:
            slower = self._seconds(rank, deepest) / self._seconds(rank, before)
            elasticity = _MORE_ELASTIC * math.log(slower) / math.log(before / deepest)
        elasticity = min(max(elasticity, _LEAST_ELASTICITY), 1.0)
        return math.exp(elasticity * math.log(deepest / self._lower[rank]))

    def _seconds(self, rank: int, mhz: int) -> float:
        return sum(self._profile.mean(key, mhz) for key in self._keys[rank])

    def _makespan(self, lowered: Mapping[int, tuple[int, float]]) -> float:
        """The iteration time, for the clock and a factor of the durations of some ranks."""
        seconds = {
            key: factor * self._profile.mean(key, mhz)
            for rank, keys in self._keys.items()
            for mhz, factor in (lowered.get(rank, (self._original[rank], 1.0)),)
            for key in keys
        }
        return self._dag.makespan([seconds[one.cost_key] for one in self._dag.instructions])


def _measured(profile: OnlineProfile, keys: set[CostKey]) -> set[int]:
    """The clocks at which all instructions were measured often enough."""
    clocks = {mhz for _, mhz in profile.durations}
    return {
        mhz
        for mhz in clocks
        if all(profile.executions(key, mhz) >= _PROBE_EXECUTIONS for key in keys)
    }


def _deepest(profile: OnlineProfile, keys: set[CostKey]) -> int:
    return min(_measured(profile, keys))
