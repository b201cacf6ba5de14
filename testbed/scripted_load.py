"""Emulated GPU work that follows a script."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wattspan.emulation.boards import Kernel
from wattspan.emulation.workloads import TRAIN, FinishedUnit

_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ScriptedLoad:
    """Demands each listed share for the listed seconds, repeatedly, at any GPU speed."""

    phases: tuple[tuple[float, float], ...]  # (seconds, demand)
    kernel: Kernel = TRAIN
    position: int = 0  # nanoseconds into the script
    finished: tuple[FinishedUnit, ...] = ()

    @property
    def demand(self) -> float:
        return self._phase()[1]

    def lasts(self, speed: float, host: float = 1.0) -> float:
        del speed, host
        return self._phase()[0]

    def _phase(self) -> tuple[float, float]:
        """The seconds left of the present phase, and its demand."""
        left = self.position
        for seconds, demand in self.phases:
            left -= round(seconds * _SECOND)
            if left < 0:
                return -left / _SECOND, demand
        return 0.0, self.phases[-1][1]

    def after(self, elapsed: int, speed: float, host: float = 1.0) -> ScriptedLoad:
        del speed, host
        length = sum(round(seconds * _SECOND) for seconds, _ in self.phases)
        return replace(
            self,
            position=(self.position + elapsed) % length,
        )
