"""Faults of emulated GPUs by name, as a question to the engine asks for them."""

from __future__ import annotations

from wattspan.emulation.gpu_engine import Throttle
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.model import MILLISECOND

_SWITCHES = frozenset(
    (
        *("lost", "hang", "mig", "no_permission", "deaf"),
        *("no_energy_counter", "no_power", "no_processes"),
    )
)
_THERMAL_MHZ = 900  # where a board goes that is too hot, unless it is told


def break_gpu(gpus: EmulatedGpus, gpu: int, fault: str, on: object) -> None:
    """Break one GPU as a question to the engine says; ValueError for what cannot be broken so.

    ``on`` is true or false, or what the fault takes: milliwatts of ``foreign_limit`` and of
    ``enforce_at_most`` (None ends it), MHz of ``hw_thermal``, ``sw_thermal`` and
    ``power_brake`` (False ends them), milliseconds of ``cap_latency``, the code of ``xid``.
    """
    faults = gpus.faults
    match fault, on:
        case _, bool() if fault in _SWITCHES:
            getattr(faults, fault)(gpu, on)
        case "reload_driver", True:
            faults.reload_driver(gpu)
        case "foreign_limit", int() if on is not True:
            faults.foreign_limit(gpu, on)
        case "enforce_at_most", int() | None if on is not True:
            faults.enforce_at_most(gpu, on or None)
        case "hw_thermal" | "sw_thermal" | "power_brake", False:
            faults.throttle(gpu, None)
        case "hw_thermal" | "sw_thermal" | "power_brake", int():
            faults.throttle(gpu, Throttle(fault), _THERMAL_MHZ if on is True else on)
        case "cap_latency", int() if on is not True:
            gpus.cap_latency(gpu, on * MILLISECOND)
        case "xid", int() if on is not True:
            faults.xid(gpu, on)
        case _:
            raise ValueError(f"no such fault: {fault} {on!r}")


def break_driver(gpus: EmulatedGpus, fault: str, on: object) -> None:
    """Break all GPUs at once: ``driver_gone`` or ``driver_hang``; ValueError for anything else."""
    if fault not in {"driver_gone", "driver_hang"} or not isinstance(on, bool):
        raise ValueError(f"no such fault: {fault} {on!r}")
    getattr(gpus.faults, fault)(on)
