"""Faults of emulated AMD boards, and an AMD SMI with answers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.emulated_faults import GpuFaults
from wattspan.emulation import gpu_file
from wattspan.emulation.amdsmi import EmulatedAmdSmi


class AmdFaults(GpuFaults):
    """Faults by AMD SMI's codes, and those that only AMD boards have."""

    def lost(self, gpu: int, code: int = 31) -> None:
        """The board is gone: each call returns ``code``; 0 brings it back."""
        self.error(gpu, code)

    def short_counter(self, gpu: int, on: bool = True) -> None:
        """The energy accumulator has 32 bits."""
        self._flag(gpu, gpu_file.FAULT_SHORT_COUNTER, on)

    def divide(self, gpu: int, partitions: int) -> None:
        """Another partition mode: 2, 4 or 8 partitions; 0 for an undivided board."""
        self._record(gpu).partitions = partitions


class ScriptedAmdSmi(EmulatedAmdSmi):
    """Emulated AMD SMI with other answers: ``replies[name]`` gets the true one, and may raise.

    ``begun`` is the number of initialisations, ``amdsmi_wrapper`` the part of the package below it.
    """

    amdsmi_wrapper: Any

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replies: dict[str, Callable[[Any], Any]] = {}
        self.begun = 0

    def amdsmi_init(self, *arguments: Any) -> None:
        self.begun += 1
        super().amdsmi_init(*arguments)

    def __getattr__(self, name: str) -> Any:
        true = super().__getattr__(name)
        if name not in self.replies:
            return true
        return lambda *arguments: self.replies[name](true(*arguments))
