"""Where the energy of an emulated GPU had gone at any recent moment.

Power changes only when the board's state advances, so between two noted states every energy is
a straight line: what is told of a time in between is exact, not an estimate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import itemgetter
from typing import NamedTuple

from wattspan.emulation.gpu_engine import Gpu
from wattspan.emulation.gpu_meter import PICOJOULES

KEPT = 15_000  # states; five minutes at 50 a second

_AT = itemgetter(0)


class Spendings(NamedTuple):
    """What a GPU had spent at one time, in microjoules, and on which processes."""

    energy: int
    processes: dict[int, int]


class _Noted(NamedTuple):
    at: int
    energy: int  # picojoules, like those of the processes
    processes: dict[int, int]


class TruthLog:
    """The recent states of one GPU, as far as energy is concerned."""

    def __init__(self, kept: int = KEPT) -> None:
        self._states: deque[_Noted] = deque(maxlen=kept)

    def note(self, gpu: Gpu) -> None:
        """Remember a state. States come in the order of time."""
        processes = dict(gpu.departed)
        for tenant in gpu.tenants:
            processes[tenant.pid] = processes.get(tenant.pid, 0) + tenant.energy
        noted = _Noted(gpu.at, gpu.energy, processes)
        if self._states and self._states[-1].at == noted.at:
            self._states.pop()
        self._states.append(noted)

    def at(self, time: int) -> Spendings:
        """What had been spent at ``time``; LookupError before or after what is remembered."""
        states = self._states
        if not states or not states[0].at <= time <= states[-1].at:
            known = f"{states[0].at} to {states[-1].at}" if states else "nothing"
            raise LookupError(f"the truth about {time} is not remembered, only {known}")
        place = bisect_left(states, time, key=_AT)
        after, before = states[place], states[max(0, place - 1)]
        elapsed, since = max(1, after.at - before.at), time - before.at

        def between(early: int, late: int) -> int:
            return (early + (late - early) * since // elapsed) // PICOJOULES

        return Spendings(
            between(before.energy, after.energy),
            {
                pid: between(before.processes.get(pid, 0), energy)
                for pid, energy in after.processes.items()
            },
        )
