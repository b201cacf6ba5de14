"""One step of a pipeline's control: spans, clocks and energies become iterations of its session.

Clocks are read at each step, so that the time of a change is known only as that between two steps:
an iteration that overlaps it has unknown clocks. Energies may arrive later than spans: an iteration
waits for a while until the energy up to its end is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.tuning.decisions.values import EnergyPoint
from wattspan.tuning.pipeline.assembly import (
    AssembledIteration,
    ClockChange,
    IterationAssembly,
    RankInstruction,
    RankUnit,
    finished,
)
from wattspan.tuning.pipeline.session import add_iteration
from wattspan.tuning.pipeline.session_state import PipelineState

ENERGY_PATIENCE = 5 * SECOND
"""An iteration waits for its energy for at most this time after its end."""

_KEPT_CHANGES = 16
_KEPT_POINTS = 512


class PipelineObservation(NamedTuple):
    """Input of one step, at ``now`` in monotonic nanoseconds.

    ``clocks`` are those read back of each rank's device in MHz, None if unknown, ``energy`` further
    points of its cumulative energy. ``others`` are recent iterations of other data-parallel
    pipelines of the job.
    """

    now: int
    units: tuple[RankUnit, ...] = ()
    instructions: tuple[RankInstruction, ...] = ()
    clocks: Mapping[int, int | None] = MappingProxyType({})
    energy: Mapping[int, EnergyPoint] = MappingProxyType({})
    others: tuple[AssembledIteration, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineControl:
    """The session of one pipeline, and the spans, clocks and energies that wait for it.

    ``latest`` are the iterations that the last step added to the session, ``waiting`` complete
    ones without their energy. ``stepped`` is the time of the last step, ``reported`` that of each
    rank's latest energy that was used.
    """

    session: PipelineState
    assembly: IterationAssembly = field(default_factory=IterationAssembly)
    clocks: Mapping[int, tuple[ClockChange, ...]] = field(default_factory=dict)
    energy: Mapping[int, tuple[EnergyPoint, ...]] = field(default_factory=dict)
    latest: tuple[AssembledIteration, ...] = ()
    stepped: int = 0
    reported: Mapping[int, int] = field(default_factory=dict)
    waiting: tuple[AssembledIteration, ...] = ()

    def step(self, observation: PipelineObservation) -> PipelineControl:
        """Add the observation, and every iteration whose energy is known, to the session."""
        assembly, found = self.assembly.add(observation.units, observation.instructions)
        clocks = {**self.clocks}
        for rank, mhz in observation.clocks.items():
            clocks[rank] = _changed(clocks.get(rank, ()), mhz, self.stepped, observation.now)
        energy = {**self.energy}
        for rank, point in observation.energy.items():
            energy[rank] = (*energy.get(rank, ())[1 - _KEPT_POINTS :], point)
        session, reported = self.session, {**self.reported}
        known = min((points[-1].at for points in energy.values()), default=observation.now)
        ready = max(known, observation.now - ENERGY_PATIENCE)
        every = (*self.waiting, *found)
        found = tuple(one for one in every if one.end <= ready)
        for one in found:
            iteration = finished(one, clocks, energy, observation.others, reported)
            session = add_iteration(session, iteration)
            for rank, points in energy.items():
                used = [point.at for point in points if point.at <= one.end]
                reported[rank] = max([reported.get(rank, one.start), *used[-1:]])
        return replace(
            self,
            session=session,
            assembly=assembly,
            clocks=clocks,
            energy=energy,
            latest=found,
            stepped=observation.now,
            reported=reported,
            waiting=every[len(found) :],
        )


def _changed(
    changes: tuple[ClockChange, ...], mhz: int | None, before: int, now: int
) -> tuple[ClockChange, ...]:
    """The changes with the clock that was read ``now``, and the time of unknown clocks before."""
    if changes and changes[-1].mhz == mhz:
        return changes
    unknown = (ClockChange(before, None),) if changes else ()
    return (*changes[-_KEPT_CHANGES:], *unknown, ClockChange(now, mhz))
