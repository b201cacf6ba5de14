"""The truth in the file of emulated GPUs."""

from __future__ import annotations

from wattspan.emulation.boards import PICOJOULES
from wattspan.emulation.gpu_file import GpuSnapshot


def true_energy(moment: GpuSnapshot) -> int:
    """The energy at the moment in microjoules: the integral of published power, rounded down."""
    live = moment.live
    passed = max(0, moment.now - live.at)
    return int(live.energy + (live.energy_rest + live.power * passed) // PICOJOULES)
