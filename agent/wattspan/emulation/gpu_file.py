"""Reading and writing the file that holds the emulated GPUs; its layout is ``nvml_layout``.

Writing an emulated GPU into the file its clients read.

What goes wrong with real GPUs, on demand, while clients watch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from wattspan.emulation.boards import PICOJOULES, last_edge
from wattspan.emulation.gpu_engine import Controls, GpuState, Throttle
from wattspan.emulation.nvml_layout import (
    FAULT_DEAF,
    FAULT_HANG,
    FAULT_NO_COUNTER,
    FAULT_NO_PERMISSION,
    FAULT_NO_POWER,
    FAULT_NO_PROCESSES,
    KINDS,
    MAGIC,
    NO_INSTANCE,
    VERSION,
    GpuRecord,
    Header,
    HostRecord,
    Identity,
    Live,
)
from wattspan.ports import WattspanError

_READ_TIMEOUT = 2.0  # seconds a reader waits for a writer before it calls the state torn
_RETRY_INTERVAL = 0.0005


class EmulationError(WattspanError):
    """The emulated GPUs cannot be had; the message is one sentence."""


class TornStateError(EmulationError):
    """The owner stopped in the middle of writing."""


class GpuSnapshot(NamedTuple):
    """A consistent copy of one GPU's live state, and a time at which it was still the newest."""

    now: int
    live: Live


class GpuFile:
    """The mapped file. Open it as often as you like, in as many processes; one owner writes."""

    def __init__(self, path: Path) -> None:
        """Map ``path``; EmulationError if it is not a file of emulated GPUs."""
        try:
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size != ctypes.sizeof(HostRecord):
                    raise EmulationError(_foreign(path))
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            cause = error.strerror or str(error)
            raise EmulationError(f"Cannot open the emulated GPUs at {path}: {cause}.") from error
        self.path = path
        self._host = HostRecord.from_buffer(self._map)
        self._pause = threading.Event()
        if self.header.magic != MAGIC or self.header.version != VERSION:
            self.close()
            raise EmulationError(_foreign(path))

    @classmethod
    def create(cls, path: Path, fill: Callable[[HostRecord], None]) -> GpuFile:
        """A new file at ``path``, filled in and put there in one move."""
        host = HostRecord()
        fill(host)
        host.header.magic, host.header.version = MAGIC, VERSION
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(bytes(host))
        fresh.chmod(0o666)  # clients write their requests into it, whoever they are
        fresh.replace(path)
        return cls(path)

    @property
    def header(self) -> Header:
        header: Header = self._host.header
        return header

    def record(self, index: int) -> GpuRecord:
        """One GPU's record, mapped: what is read from it may change at any time."""
        record: GpuRecord = self._host.gpu[index]
        return record

    def identity(self, index: int) -> Identity:
        identity: Identity = self.record(index).identity
        return identity

    def read(self, index: int, clock: Callable[[], int]) -> GpuSnapshot:
        """A consistent copy; TornStateError if the owner stays half-way through writing."""
        record = self.record(index)
        offset = HostRecord.gpu.offset + index * ctypes.sizeof(GpuRecord) + GpuRecord.live.offset
        for _ in range(int(_READ_TIMEOUT / _RETRY_INTERVAL)):
            before = record.sequence
            if before % 2 == 0:
                live = Live.from_buffer_copy(self._map, offset)
                now = clock()
                if record.sequence == before:
                    return GpuSnapshot(now, live)
            self._pause.wait(_RETRY_INTERVAL)
        raise TornStateError(
            f"The emulated GPU {index} in {self.path} stays half written; start its owner again."
        )

    @contextmanager
    def writing(self, index: int) -> Iterator[Live]:
        """The live state to write; take the time of what is written inside, never before."""
        record = self.record(index)
        record.sequence = (record.sequence | 1) & 0xFFFF_FFFF
        try:
            yield record.live
        finally:
            record.sequence = (record.sequence + 1) & 0xFFFF_FFFF

    def close(self) -> None:
        """Unmap. What was read as a copy stays valid."""
        del self._host
        # If somebody still holds a record, the mapping goes when it does.
        with suppress(BufferError):
            self._map.close()


def true_energy(moment: GpuSnapshot) -> int:
    """The energy at the moment in microjoules: the integral of published power, rounded down."""
    live = moment.live
    passed = max(0, moment.now - live.at)
    return int(live.energy + (live.energy_rest + live.power * passed) // PICOJOULES)


def counter_energy(identity: Identity, moment: GpuSnapshot) -> int:
    """What the board's counter shows at the moment, in microjoules: the value at its last edge."""
    live = moment.live
    edge = last_edge(identity.born, identity.counter_step, moment.now)
    if edge < live.at:
        return int(live.latched)
    return int(live.counter + (live.counter_rest + live.power * (edge - live.at)) // PICOJOULES)


def _foreign(path: Path) -> str:
    return f"{path} holds no emulated GPUs of this version; create them anew."


_IDLE, _LOCKED, _POWER_CAP, _HW_SLOWDOWN = 0x1, 0x2, 0x4, 0x8
_REASONS = {
    Throttle.SW_THERMAL: 0x20,
    Throttle.HW_THERMAL: 0x40 | _HW_SLOWDOWN,
    Throttle.POWER_BRAKE: 0x80 | _HW_SLOWDOWN,
}


def write_identity(record: GpuRecord, gpu: GpuState, index: int) -> None:
    """What never changes, and the requests as a freshly loaded driver has them."""
    board, identity = gpu.board, record.identity
    bus = 0x10 + index
    identity.name = board.name.encode()
    # A valid UUID that no real board has.
    identity.uuid = f"GPU-e0e0e0e0-0000-4000-8000-{index:012x}".encode()
    identity.serial = f"{1_650_000_000_000 + index}".encode()
    identity.bus_id = f"00000000:{bus:02X}:00.0".encode()
    identity.bus_id_legacy = f"0000:{bus:02X}:00.0".encode()
    identity.bus = bus
    identity.pci_device = board.pci_device
    identity.architecture, identity.brand = board.architecture, board.brand
    identity.compute_major, identity.compute_minor = board.compute
    identity.multiprocessors = board.multiprocessors
    identity.limit_min, identity.limit_default, identity.limit_max = board.limits
    silicon = board.silicon
    identity.clock_min, identity.clock_max = silicon.min_mhz, silicon.max_mhz
    identity.clock_step, identity.memory_clock = silicon.step_mhz, board.memory_mhz
    identity.usage_is_average = board.sensor.usage_is_average
    identity.has_average = board.sensor.average_window is not None
    identity.memory_total, identity.memory_reserved = board.memory, board.reserved_memory
    identity.counter_step, identity.born = board.counter_step or 0, gpu.born
    record.limit_request = board.limits[1]
    record.persistence_request = 1


def publish(live: Live, gpu: GpuState, mig: bool, before: GpuState | None = None) -> None:
    """What the GPU is now; ``before`` is what was last published, if anything was."""
    live.at, live.power = gpu.at, gpu.point.power
    live.energy, live.energy_rest = divmod(gpu.energy, PICOJOULES)
    live.counter, live.counter_rest = divmod(gpu.energy - gpu.origin, PICOJOULES)
    live.latched = max(0, gpu.latched - gpu.origin) // PICOJOULES
    live.power_instant, live.power_average = gpu.power_instant, gpu.power_average or 0
    live.enforced, live.clock = gpu.enforced, gpu.point.mhz
    live.utilisation, live.memory_utilisation = gpu.utilisation, gpu.memory_utilisation
    live.temperature = round(gpu.temperature)
    live.reasons = _reasons(gpu)
    throttled = dict(gpu.throttled_ns)
    live.capped_ns = gpu.capped_ns
    live.sw_thermal_ns = throttled.get(Throttle.SW_THERMAL, 0)
    live.hw_thermal_ns = throttled.get(Throttle.HW_THERMAL, 0)
    live.power_brake_ns = throttled.get(Throttle.POWER_BRAKE, 0)
    live.memory_used = gpu.memory_used
    live.processes = len(gpu.tenants)
    for place, tenant in enumerate(gpu.tenants):
        entry = live.process[place]
        entry.pid, entry.kind = tenant.pid, KINDS.index(tenant.kind)
        entry.memory, entry.progress = tenant.memory, int(tenant.work.done * 1e6)
        entry.instance = place + 1 if mig else NO_INSTANCE
    if before is not None and before.samples is gpu.samples:
        return
    live.samples = len(gpu.samples)
    for place, sample in enumerate(gpu.samples):
        row = live.sample[place]
        row.stamp, row.pid, row.sm, row.memory = sample


def _reasons(gpu: GpuState) -> int:
    if all(not tenant.grant.share for tenant in gpu.tenants):
        return _IDLE
    reasons = _POWER_CAP if gpu.point.capped else 0
    if gpu.controls.lock_mhz is not None:
        reasons |= _LOCKED
    if gpu.controls.throttle is not None:
        reasons |= _REASONS[gpu.controls.throttle]
    return reasons


GPU_IS_LOST = 15
DRIVER_NOT_LOADED = 9


class GpuFaults:
    """Switches a fault on (``True``) or off (``False``); every client sees it at its next call."""

    def __init__(
        self, file: GpuFile, revise: Callable[[int, Callable[[Controls], Controls]], None]
    ) -> None:
        self._file, self._revise = file, revise
        self._resets: dict[int, int] = {}

    # ------------------------------------------------------------------------ the whole host

    def driver_gone(self, on: bool = True) -> None:
        """The driver is not loaded (NVML error 9, at initialisation too)."""
        self.driver_error(DRIVER_NOT_LOADED if on else 0)

    def driver_error(self, code: int) -> None:
        """Every call returns NVML error ``code``; 0 ends it."""
        self._file.header.error = code

    def driver_hang(self, on: bool = True) -> None:
        """Every call blocks until it is switched off, initialisation too."""
        self._file.header.hang = on

    # ------------------------------------------------------------------------------- one GPU

    def lost(self, gpu: int, on: bool = True) -> None:
        """The GPU fell off the bus (NVML error 15)."""
        self.error(gpu, GPU_IS_LOST if on else 0)

    def error(self, gpu: int, code: int) -> None:
        """Every call on the GPU returns NVML error ``code``; 0 ends it."""
        self._file.record(gpu).error = code

    def hang(self, gpu: int, on: bool = True) -> None:
        """Calls on the GPU block until it is switched off."""
        self._flag(gpu, FAULT_HANG, on)

    def no_permission(self, gpu: int, on: bool = True) -> None:
        """Setters are refused (NVML error 4), as they are to anybody but root."""
        self._flag(gpu, FAULT_NO_PERMISSION, on)

    def deaf(self, gpu: int, on: bool = True) -> None:
        """Limits are set with success and stay as they were, as by some setters of real drivers."""
        self._flag(gpu, FAULT_DEAF, on)

    def no_energy_counter(self, gpu: int, on: bool = True) -> None:
        """The energy counter is not supported, as in many virtual machines."""
        self._flag(gpu, FAULT_NO_COUNTER, on)

    def no_power(self, gpu: int, on: bool = True) -> None:
        """Power readings are not supported."""
        self._flag(gpu, FAULT_NO_POWER, on)

    def no_processes(self, gpu: int, on: bool = True) -> None:
        """Process lists and process utilisation are not supported."""
        self._flag(gpu, FAULT_NO_PROCESSES, on)

    def mig(self, gpu: int, on: bool = True) -> None:
        """MIG mode: no utilisation, no process utilisation, an instance for each process."""
        self._file.record(gpu).mig = on
        self._revise(gpu, lambda controls: controls)

    def reset_counter(self, gpu: int, start: int = 0) -> None:
        """The energy counter begins again at ``start`` picojoules, as when a driver reloads."""
        self._resets[gpu] = start
        self._revise(gpu, lambda controls: controls)

    def take_reset(self, gpu: int) -> int | None:
        """A pending reset, once."""
        return self._resets.pop(gpu, None)

    def reload_driver(self, gpu: int) -> None:
        """The driver was unloaded and loaded: limit and clocks are its defaults, energy is 0."""
        record = self._file.record(gpu)
        record.clock_request = record.memory_clock_request = 0
        self._resets[gpu] = 0
        self.foreign_limit(gpu, int(record.identity.limit_default))

    def foreign_limit(self, gpu: int, milliwatts: int) -> None:
        """Another client requests a power limit, as a person with nvidia-smi would."""
        record = self._file.record(gpu)
        serial = (record.limit_request >> 32) + 1
        record.limit_request = (serial & 0xFFFF_FFFF) << 32 | milliwatts
        self._revise(gpu, lambda controls: controls)

    def enforce_at_most(self, gpu: int, milliwatts: int | None) -> None:
        """Something outside (a BMC) enforces a limit below what is requested; None ends it."""
        self._revise(gpu, lambda controls: replace(controls, ceiling=milliwatts))

    def throttle(self, gpu: int, why: Throttle | None, mhz: int | None = None) -> None:
        """The clock is held at ``mhz`` for a thermal or power-brake reason; None ends it."""
        self._revise(gpu, lambda controls: replace(controls, throttle=why, throttle_mhz=mhz))

    def xid(self, gpu: int, code: int) -> None:
        """An Xid event, delivered to whoever registered for it."""
        record = self._file.record(gpu)
        record.xid = code
        record.xid_serial = (record.xid_serial + 1) & 0xFFFF_FFFF

    def _flag(self, gpu: int, flag: int, on: bool) -> None:
        record = self._file.record(gpu)
        record.faults = record.faults | flag if on else record.faults & ~flag
