"""Faults of emulated AMD boards."""

from __future__ import annotations

from support.emulated_faults import GpuFaults
from wattspan.emulation import gpu_file
from wattspan.emulation.gpus import EmulatedGpus


class AmdFaults(GpuFaults):
    """Faults by AMD SMI's codes, and those that only AMD boards have."""

    def __init__(self, gpus: EmulatedGpus) -> None:
        super().__init__(gpus)

    def lost(self, gpu: int, code: int = 31) -> None:
        """The board is gone: each call returns ``code``; 0 brings it back."""
        self.error(gpu, code)

    def short_counter(self, gpu: int, on: bool = True) -> None:
        """The energy accumulator has 32 bits."""
        self._flag(gpu, gpu_file.FAULT_SHORT_COUNTER, on)

    def divide(self, gpu: int, partitions: int) -> None:
        """Another partition mode: 2, 4 or 8 partitions; 0 for an undivided board."""
        self._record(gpu).partitions = partitions
