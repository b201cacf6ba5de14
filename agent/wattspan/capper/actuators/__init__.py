"""Actuators: the knobs of devices, one module per family. Each reads back what it wrote.

The ``trouble`` of an ActuatorError:

- DENIED: this process may not write the knob; with ``locked``, no process may until the next boot.
- ABSENT: there is no such device, or it has no such knob.
- RETRY: the device or its driver does not answer now.
- MALFORMED: the device reports another value than it took, or cannot have the value.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from wattspan.capper.actuators.cpu import POWERCAP_CLASS, CpuPower
from wattspan.capper.actuators.gpu import GpuClock, GpuPower
from wattspan.capper.actuators.nvml import NvmlBoards, load_pynvml
from wattspan.model import MILLISECOND, Knob
from wattspan.ports import Clock, SlottedActuator

SYSFS = Path("/sys")
EMULATED_RESPONSE_TIME = 50 * MILLISECOND
"""An emulated host reads the files of its limits when its counters move: every 10 ms or so."""


def open_actuators(
    knobs: Collection[Knob],
    *,
    clock: Clock,
    nvml: Any = None,
    sysfs: Path = SYSFS,
    emulated: bool = False,
) -> tuple[SlottedActuator, ...]:
    """One actuator for each of ``knobs`` that this host may have, in the order of Knob.

    ``nvml`` replaces the ``pynvml`` module; an ``emulated`` host uses nothing else, so that no real
    GPU is ever set instead of an emulated one. GPUs are included while the driver is not loaded:
    they appear once it is. No device is used before the first call.
    """
    found: list[SlottedActuator] = []
    if Knob.GPU_POWER in knobs or Knob.GPU_CLOCK in knobs:
        nvml = load_pynvml() if nvml is None and not emulated else nvml
        boards = None if nvml is None else NvmlBoards(nvml, clock)
        if boards is not None and Knob.GPU_POWER in knobs:
            found.append(GpuPower(boards, clock))
        if boards is not None and Knob.GPU_CLOCK in knobs:
            found.append(GpuClock(boards, clock))
    if Knob.CPU_POWER in knobs and (sysfs / POWERCAP_CLASS).is_dir():
        found.append(
            CpuPower(sysfs, clock, answers_after=EMULATED_RESPONSE_TIME if emulated else 0)
        )
    return tuple(found)
