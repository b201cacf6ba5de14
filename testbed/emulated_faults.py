"""Faults of emulated hardware: switches of GPUs and counters, and an emulated host that takes them.

``FaultyHost`` is an ``EmulatedHost`` whose engine also answers
``ask(do="fault", zone=ZONE, fault=NAME)``, ``ask(do="fault", gpu=INDEX, fault=NAME, on=...)`` and
``ask(do="fault", fault="driver_gone" | "driver_hang", on=...)``.

This file is also the program of that engine; it imports nothing but wattspan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wattspan.emulation import gpu_file
from wattspan.emulation.engine import PERIOD, HostEngine, main
from wattspan.emulation.gpu_engine import Controls, GpuState, Throttle
from wattspan.emulation.gpu_file import GpuRecord
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.host import EmulatedHost, HostProfile
from wattspan.emulation.powercap_engine import PowercapEngine
from wattspan.emulation.powercap_tree import EmulatedZone, PowercapTree, zone_at
from wattspan.model import MILLISECOND

GPU_IS_LOST = 15
DRIVER_NOT_LOADED = 9


class GpuFaults:
    """Switches a fault on (``True``) or off (``False``); every client sees it at its next call."""

    def __init__(self, gpus: EmulatedGpus) -> None:
        self._gpus = gpus

    # ------------------------------------------------------------------------ the whole host

    def driver_gone(self, on: bool = True) -> None:
        """The driver is not loaded (NVML error 9, at initialisation too)."""
        self.driver_error(DRIVER_NOT_LOADED if on else 0)

    def driver_error(self, code: int) -> None:
        """Every call returns NVML error ``code``; 0 ends it."""
        self._gpus.file.header.error = code

    def driver_hang(self, on: bool = True) -> None:
        """Every call blocks until it is switched off, initialisation too."""
        self._gpus.file.header.hang = on

    # ------------------------------------------------------------------------------- one GPU

    def lost(self, gpu: int, on: bool = True) -> None:
        """The GPU fell off the bus (NVML error 15)."""
        self.error(gpu, GPU_IS_LOST if on else 0)

    def error(self, gpu: int, code: int) -> None:
        """Every call on the GPU returns NVML error ``code``; 0 ends it."""
        self._record(gpu).error = code

    def hang(self, gpu: int, on: bool = True) -> None:
        """Calls on the GPU block until it is switched off."""
        self._flag(gpu, gpu_file.FAULT_HANG, on)

    def no_permission(self, gpu: int, on: bool = True) -> None:
        """Setters are refused (NVML error 4), as they are to anybody but root."""
        self._flag(gpu, gpu_file.FAULT_NO_PERMISSION, on)

    def deaf(self, gpu: int, on: bool = True) -> None:
        """Limits are set with success and stay as they were, as by some setters of real drivers."""
        self._flag(gpu, gpu_file.FAULT_DEAF, on)

    def no_energy_counter(self, gpu: int, on: bool = True) -> None:
        """The energy counter is not supported, as in many virtual machines."""
        self._flag(gpu, gpu_file.FAULT_NO_COUNTER, on)

    def no_power(self, gpu: int, on: bool = True) -> None:
        """Power readings are not supported."""
        self._flag(gpu, gpu_file.FAULT_NO_POWER, on)

    def no_processes(self, gpu: int, on: bool = True) -> None:
        """Process lists and process utilisation are not supported."""
        self._flag(gpu, gpu_file.FAULT_NO_PROCESSES, on)

    def mig(self, gpu: int, on: bool = True) -> None:
        """MIG mode with seven instances: no utilisation, and no process utilisation."""
        self._gpus.divide(gpu, (1,) * 7 if on else ())

    def no_activity(self, gpu: int, on: bool = True) -> None:
        """The activity of MIG instances (GPM) is not supported, as before Hopper."""
        self._flag(gpu, gpu_file.FAULT_NO_GPM, on)

    def reset_counter(self, gpu: int, start: int = 0) -> None:
        """The energy counter begins again at ``start`` picojoules, as when a driver reloads."""
        self._change_state(
            gpu, lambda state: replace(state, origin=state.energy - start, latched=state.energy)
        )

    def reload_driver(self, gpu: int) -> None:
        """The driver was unloaded and loaded: limit and clocks are its defaults, energy is 0."""
        record = self._record(gpu)
        record.clock_request = record.memory_clock_request = 0
        self.reset_counter(gpu)
        self.foreign_limit(gpu, int(record.identity.limit_default))

    def foreign_limit(self, gpu: int, milliwatts: int) -> None:
        """Another client requests a power limit, as a person with nvidia-smi would."""
        self._record(gpu).request_limit(milliwatts)
        self._gpus.step()

    def enforce_at_most(self, gpu: int, milliwatts: int | None) -> None:
        """An external controller (a BMC) enforces a limit below the requested one; None
        removes it."""
        self._revise(gpu, lambda controls: replace(controls, ceiling=milliwatts))

    def throttle(self, gpu: int, why: Throttle | None, mhz: int | None = None) -> None:
        """The clock is held at ``mhz`` for a thermal or power-brake reason; None ends it."""
        self._revise(gpu, lambda controls: replace(controls, throttle=why, throttle_mhz=mhz))

    def cap_latency(self, gpu: int, nanoseconds: int) -> None:
        """The time between the request for a limit and its effect, from now on."""
        self._change_state(
            gpu, lambda state: replace(state, board=replace(state.board, cap_latency=nanoseconds))
        )

    def xid(self, gpu: int, code: int) -> None:
        """An Xid event, delivered to registered listeners."""
        record = self._record(gpu)
        record.xid = code
        record.xid_serial = (record.xid_serial + 1) & 0xFFFF_FFFF

    def _revise(self, gpu: int, change: Callable[[Controls], Controls]) -> None:
        with self._gpus._lock:
            self._gpus.outside[gpu] = change(self._gpus.outside[gpu])
            self._gpus._advance(gpu)

    def _change_state(self, gpu: int, change: Callable[[GpuState], GpuState]) -> None:
        with self._gpus._lock:
            self._gpus._advance(gpu, change)

    def _record(self, gpu: int) -> GpuRecord:
        return self._gpus.file.record(gpu)

    def _flag(self, gpu: int, flag: int, on: bool) -> None:
        record = self._record(gpu)
        record.faults = record.faults | flag if on else record.faults & ~flag


_SWITCHES = frozenset(
    (
        *("lost", "hang", "mig", "no_permission", "deaf"),
        *("no_energy_counter", "no_power", "no_processes", "no_activity"),
    )
)
_THERMAL_MHZ = 900  # like an overheated board, unless a clock is given


def break_gpu(gpus: EmulatedGpus, gpu: int, fault: str, on: object) -> None:
    """Break one GPU; ValueError for an unknown fault or a wrong type of ``on``.

    ``on`` is true, false or the argument of the fault: milliwatts of ``foreign_limit`` and of
    ``enforce_at_most`` (None ends it), MHz of ``hw_thermal``, ``sw_thermal`` and
    ``power_brake`` (False ends them), milliseconds of ``cap_latency``, the code of ``xid``.
    """
    faults = GpuFaults(gpus)
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
            faults.cap_latency(gpu, on * MILLISECOND)
        case "xid", int() if on is not True:
            faults.xid(gpu, on)
        case _:
            raise ValueError(f"no such fault: {fault} {on!r}")


def break_driver(gpus: EmulatedGpus, fault: str, on: object) -> None:
    """Break all GPUs at once: ``driver_gone`` or ``driver_hang``; ValueError for anything else."""
    if fault not in {"driver_gone", "driver_hang"} or not isinstance(on, bool):
        raise ValueError(f"no such fault: {fault} {on!r}")
    getattr(GpuFaults(gpus), fault)(on)


class FaultyPowercapTree(PowercapTree):
    """A powercap tree whose zones can vanish, move and become unreadable."""

    def readd(self, zone: EmulatedZone, directory: str | None = None) -> None:
        """Register ``zone`` again, with another directory id if given."""
        self._directory_of[zone.directory] = directory or zone.directory
        self.add(zone)

    def remove(self, zone: str) -> None:
        """Unregister ``zone`` and the zones below it.

        The kernel lets descriptors into a removed zone fail with ENODEV. An ordinary file
        cannot; it is emptied first, so that a held descriptor reads nothing.
        """
        self.generation += 1
        path = self.path(zone)
        for below in sorted(path.glob("*:*"), reverse=True):
            self._unlink(below)
        self._unlink(path)
        gone = [name for name in self._directory_of if not self.path(name).exists()]
        for name in gone:
            self.close_counter(name)

    def replace_counter(self, zone: str, target: str) -> None:
        """Put a link to ``target`` in the place of the counter of ``zone``."""
        path = self.path(zone) / "energy_uj"
        _empty(path)
        self.close_counter(zone)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    def garble(self, zone: str, content: bytes) -> None:
        """Replace the content of the counter file of ``zone`` by ``content`` until it is
        opened again."""
        fd = self._counters.pop(zone)
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        os.close(fd)

    def block_limit(self, zone: str) -> None:
        """Put a FIFO in place of the long-term limit of ``zone``: opening it blocks.

        The file itself stays aside with its inode, which the physics holds open.
        """
        path = self.path(zone) / _LONG_TERM
        path.rename(path.with_name(_ASIDE))
        os.mkfifo(path)

    def unblock_limit(self, zone: str) -> None:
        """Undo ``block_limit``; readers that are blocked go on, and read nothing."""
        path = self.path(zone) / _LONG_TERM
        if not path.is_fifo():
            return
        fifo = path.rename(path.with_name("blocked"))
        path.with_name(_ASIDE).rename(path)
        os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        fifo.unlink()

    def writable(self, zone: str) -> bool:
        """True if the counter of ``zone`` exists and shows written values."""
        return zone in self._counters

    def _unlink(self, path: Path) -> None:
        (self.root / "class/powercap" / path.name).unlink(missing_ok=True)
        if not path.exists():
            return
        _empty(path / "energy_uj")
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()


_LONG_TERM, _ASIDE = "constraint_0_power_limit_uw", "aside"


def _empty(path: Path) -> None:
    if path.is_file() and not path.is_symlink():
        os.truncate(path, 0)


# Any reader gets EACCES from this file, root as well: the kernel's sysctls know no capability
# that overrides a mode without read permission. No code writes to it.
_UNREADABLE_FILE = "/proc/sys/vm/compact_memory"
# Opens for everybody; a read at 0 fails with EIO, for there never is memory at address 0.
_FAILING_FILE = "/proc/self/mem"


class FaultyPowercapEngine(PowercapEngine):
    """A powercap engine that breaks counters on demand.

    Faults belong to the thread that steps, or into ``PowercapRunner.between_steps``.
    """

    tree: FaultyPowercapTree

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._still: set[str] = set()  # zones whose file is not written
        super().__init__(*arguments, **named)

    def reset(self, zone: str) -> None:
        """The counter starts again at 0."""
        emulated = zone_at(self.tree.layout, zone)
        self._zero[zone] = -self._steps(emulated)
        self._write(emulated)

    def rewind(self, zone: str, microjoules: int = 100_000_000) -> None:
        """The counter runs backwards by ``microjoules``, and on from there."""
        emulated = zone_at(self.tree.layout, zone)
        self._zero[zone] -= microjoules * 1000 // emulated.step
        self._write(emulated)

    def brink(self, zone: str, microjoules: int = 20_000_000) -> None:
        """The counter is ``microjoules`` below its maximum: in a moment it wraps."""
        emulated = zone_at(self.tree.layout, zone)
        left = microjoules * 1000 // emulated.step
        self._zero[zone] = emulated.turn - left - self._steps(emulated)
        self._write(emulated)

    def freeze(self, zone: str) -> None:
        """The counter stops; ``mend`` lets it catch up."""
        self._still.add(zone)

    def vanish(self, zone: str) -> None:
        """The zone is unregistered, with those below it. Held descriptors read nothing."""
        self.tree.remove(zone)
        self._still.update(below for below in self._zero if _within(below, zone))

    def reappear(self, zone: str, directory: str | None = None) -> None:
        """The zone and its subzones are registered again and count from 0.

        Under another directory id, if one is given: ids move when packages come and go.
        """
        for below in [name for name in self._zero if _within(name, zone)]:
            moved = None if directory is None else directory + below.removeprefix(zone)
            self.tree.readd(zone_at(self.tree.layout, below), moved)
            self._still.discard(below)
            self.reset(below)

    def deny(self, zone: str) -> str:
        """The counter is unreadable, for root too. Returns the error readers get: EACCES."""
        there = os.access(_UNREADABLE_FILE, os.F_OK)
        self.tree.replace_counter(zone, _UNREADABLE_FILE if there else "energy_uj")  # itself
        self._still.add(zone)
        return "EACCES" if there else "ELOOP"

    def fail(self, zone: str) -> str:
        """Reading the counter fails, opening it does not. Returns the error: EIO."""
        self.tree.replace_counter(zone, _FAILING_FILE)
        self._still.add(zone)
        return "EIO"

    def garble(self, zone: str, content: bytes = b"not a number\n") -> None:
        """The counter answers ``content``."""
        self.tree.garble(zone, content)
        self._still.add(zone)

    def mend(self, zone: str) -> None:
        """Undo ``freeze``, ``deny``, ``fail`` and ``garble``; the counter never stopped."""
        self._still.discard(zone)
        if not self.tree.writable(zone):
            self.tree.open_counter(zone)
        self._write(zone_at(self.tree.layout, zone))

    def lock(self, zone: str) -> None:
        """Firmware locks the limits of a zone as they are: writes have no effect."""
        self.limits.locked.add(zone)

    def unlock(self, zone: str) -> None:
        """Undo ``lock``."""
        self.limits.locked.discard(zone)

    def hang(self, zone: str) -> None:
        """Accesses to the long-term limit of a zone block until ``release``."""
        self.tree.block_limit(zone)

    def release(self, zone: str) -> None:
        """Undo ``hang``."""
        self.tree.unblock_limit(zone)

    def _write(self, zone: EmulatedZone) -> None:
        if zone.directory not in self._still:
            super()._write(zone)


def _within(directory: str, zone: str) -> bool:
    return directory == zone or directory.startswith(f"{zone}:")


_ZONE_FAULTS = frozenset(
    (
        *("reset", "rewind", "brink", "freeze", "vanish", "reappear", "deny", "fail"),
        *("garble", "mend", "lock", "unlock", "hang", "release"),
    )
)


class FaultyHostEngine(HostEngine):
    """The engine of an emulated host, which also breaks its hardware."""

    tree_type = FaultyPowercapTree
    counters_type = FaultyPowercapEngine

    def __init__(self, profile: HostProfile, directory: Path, period: int = PERIOD) -> None:
        super().__init__(profile, directory, period)
        self._answers = {**self._answers, "fault": self._fault}

    def _fault(
        self, fault: str, zone: str | None = None, gpu: int | None = None, on: object = True
    ) -> dict[str, Any]:
        if zone is not None:
            if fault not in _ZONE_FAULTS:
                raise ValueError(f"no such fault: {fault}")
            self._runner.between_steps(lambda engine: getattr(engine, fault)(zone))
        elif gpu is not None:
            break_gpu(*self._gpus.of(gpu), fault, on)
        else:
            for boards in self._gpus.files:
                break_driver(boards, fault, on)
        return {"done": fault}


class FaultyHost(EmulatedHost):
    """An emulated host whose hardware can be broken."""

    def _engine_command(self) -> tuple[str, ...]:
        return (sys.executable, "-P", str(Path(__file__).resolve()))


if __name__ == "__main__":
    main(sys.argv[1:], FaultyHostEngine)
