"""The file through which several processes see the same emulated GPUs, and a driver's calls on it.

Its structures are the only description of the layout: the C library of the tests generates its
header from them. Everything is little-endian and naturally aligned.

The owner writes ``Live`` between two increments of the GPU's ``sequence``: an odd value means
half written. A reader copies, takes the time, and copies again if the sequence has moved. The
owner takes its time after making the sequence odd, so no reader can extrapolate past a change of
power, and the energy counter never runs backwards. The words outside ``Live`` are single aligned
stores; clients write those called ``request``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.clock import SystemClock
from wattspan.emulation.boards import PICOJOULES, last_edge
from wattspan.ports import Clock, WattspanError

NVIDIA_GPUS, AMD_GPUS = "gpus", "amd-gpus"
"""Names of the files in the directory of an emulated host, by driver."""

MAGIC = 0x5550_4745_5053_4157  # "WASPEGPU"
VERSION = 2
MAX_GPUS = 16
MAX_PROCESSES = 64
MAX_SAMPLES = 72
MAX_INSTANCES = 7


class ProcessEntry(ctypes.LittleEndianStructure):
    _fields_ = (
        ("pid", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),  # index into KINDS
        ("memory", ctypes.c_uint64),  # bytes
        ("instance", ctypes.c_uint32),  # MIG GPU instance; all ones: none
        ("share", ctypes.c_uint32),  # of the GPU's time now, in millionths
        ("busy", ctypes.c_uint64),  # ns of the GPU's time since the process is there
    )


class SampleEntry(ctypes.LittleEndianStructure):
    _fields_ = (
        ("stamp", ctypes.c_uint64),  # Unix microseconds
        ("pid", ctypes.c_uint32),
        ("sm", ctypes.c_uint32),  # percent
        ("memory", ctypes.c_uint32),  # percent
        ("reserved", ctypes.c_uint32),
    )


class InstanceEntry(ctypes.LittleEndianStructure):
    """A MIG instance: a GPU instance with one compute instance of the same size."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("slices", ctypes.c_uint32),
        ("multiprocessors", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),  # bytes
        ("active", ctypes.c_uint64),  # ns that all its multiprocessors were busy
    )


class Identity(ctypes.LittleEndianStructure):
    """The constant properties."""

    _fields_ = (
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 80),
        ("serial", ctypes.c_char * 32),
        ("bus_id", ctypes.c_char * 32),  # 00000000:17:00.0
        ("bus_id_legacy", ctypes.c_char * 16),  # 0000:17:00.0
        ("domain", ctypes.c_uint32),
        ("bus", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("pci_device", ctypes.c_uint32),
        ("architecture", ctypes.c_uint32),
        ("brand", ctypes.c_uint32),
        ("compute_major", ctypes.c_uint32),
        ("compute_minor", ctypes.c_uint32),
        ("multiprocessors", ctypes.c_uint32),
        ("limit_min", ctypes.c_uint32),  # mW
        ("limit_default", ctypes.c_uint32),
        ("limit_max", ctypes.c_uint32),
        ("clock_min", ctypes.c_uint32),  # MHz
        ("clock_max", ctypes.c_uint32),
        ("clock_step", ctypes.c_uint32),
        ("memory_clock", ctypes.c_uint32),
        ("usage_is_average", ctypes.c_uint32),  # of the power that nvmlDeviceGetPowerUsage returns
        ("has_average", ctypes.c_uint32),  # whether field 185 is supported
        ("memory_total", ctypes.c_uint64),  # bytes
        ("memory_reserved", ctypes.c_uint64),
        ("counter_step", ctypes.c_uint64),  # ns; 0: there is no energy counter
        ("born", ctypes.c_uint64),  # ns of the monotonic clock: edges lie whole steps after it
    )


class Live(ctypes.LittleEndianStructure):
    """The state that the owner rewrites at every step. ``counter`` is the energy for clients."""

    _fields_ = (
        ("at", ctypes.c_uint64),  # ns of the monotonic clock
        ("energy", ctypes.c_uint64),  # uJ at ``at``, the truth
        ("counter", ctypes.c_uint64),  # uJ at ``at`` since the counter was last reset
        ("latched", ctypes.c_uint64),  # uJ at the counter's latest edge up to ``at``
        ("energy_rest", ctypes.c_uint32),  # pJ beyond ``energy``
        ("counter_rest", ctypes.c_uint32),  # pJ beyond ``counter``
        ("power", ctypes.c_uint32),  # mW from ``at`` on, the truth
        ("power_instant", ctypes.c_uint32),  # mW, the sensor's value
        ("power_average", ctypes.c_uint32),
        ("enforced", ctypes.c_uint32),  # mW
        ("clock", ctypes.c_uint32),  # MHz
        ("utilisation", ctypes.c_uint32),  # percent
        ("memory_utilisation", ctypes.c_uint32),
        ("temperature", ctypes.c_uint32),  # degrees Celsius
        ("reasons", ctypes.c_uint64),  # nvmlClocksEventReason*
        ("capped_ns", ctypes.c_uint64),
        ("sw_thermal_ns", ctypes.c_uint64),
        ("hw_thermal_ns", ctypes.c_uint64),
        ("power_brake_ns", ctypes.c_uint64),
        ("memory_used", ctypes.c_uint64),  # bytes
        ("processes", ctypes.c_uint32),
        ("samples", ctypes.c_uint32),
        ("instances", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("instance", InstanceEntry * MAX_INSTANCES),
        ("process", ProcessEntry * MAX_PROCESSES),
        ("sample", SampleEntry * MAX_SAMPLES),  # oldest first
    )


class GpuRecord(ctypes.LittleEndianStructure):
    _fields_ = (
        ("identity", Identity),
        ("sequence", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),  # FAULT_*
        ("error", ctypes.c_uint32),  # if not 0, every call on the GPU returns it
        ("mig", ctypes.c_uint32),
        ("limit_request", ctypes.c_uint64),  # serial << 32 | mW
        ("clock_request", ctypes.c_uint64),  # serial << 48 | lowest << 24 | highest MHz; 0: none
        ("memory_clock_request", ctypes.c_uint64),  # likewise
        ("persistence_request", ctypes.c_uint32),
        ("xid", ctypes.c_uint32),
        ("xid_serial", ctypes.c_uint32),
        ("partitions", ctypes.c_uint32),  # of an AMD board; 0 and 1: it is not divided
        ("live", Live),
    )

    def request_limit(self, milliwatts: int) -> None:
        """Write a request for a power limit, with a serial number that shows that it is new."""
        serial = ((int(self.limit_request) >> 32) + 1) & 0xFFFF_FFFF
        self.limit_request: int = serial << 32 | milliwatts


class Header(ctypes.LittleEndianStructure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("gpus", ctypes.c_uint32),
        ("error", ctypes.c_uint32),  # if not 0, every call returns it: 9 is "driver not loaded"
        ("hang", ctypes.c_uint32),  # every call blocks while it is not 0
        ("driver_version", ctypes.c_char * 80),
        ("nvml_version", ctypes.c_char * 80),
        ("cuda_version", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class HostRecord(ctypes.LittleEndianStructure):
    """The whole file."""

    _fields_ = (("header", Header), ("gpu", GpuRecord * MAX_GPUS))


FAULT_HANG = 1  # calls on the GPU block
FAULT_NO_PERMISSION = 2  # setters are refused
FAULT_NO_COUNTER = 4  # no energy counter
FAULT_NO_POWER = 8  # no power reading
FAULT_NO_PROCESSES = 16  # no process lists and no process utilisation
FAULT_DEAF = 32  # setters of limits succeed, and nothing comes of it
FAULT_SHORT_COUNTER = 128  # the energy accumulator of an AMD board has 32 bits
FAULT_NO_GPM = 64  # no activity of MIG instances, as before Hopper and with older drivers

KINDS = ("compute", "graphics", "mps")
NO_INSTANCE = 0xFFFF_FFFF

_READ_TIMEOUT = 2.0  # seconds a reader waits for a writer before it calls the state torn
_RETRY_INTERVAL = 0.0005


class EmulationError(WattspanError):
    """The emulated GPUs are not available; the message is one sentence."""


class TornStateError(EmulationError):
    """The owner stopped in the middle of writing."""


class GpuSnapshot(NamedTuple):
    """A consistent copy of one GPU's live state, and a time at which it was still the newest."""

    now: int
    live: Live


class GpuFile:
    """The mapped file. Any number of processes open it; one owner writes."""

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
        fresh.chmod(0o666)  # clients of any user write their requests into it
        fresh.replace(path)
        return cls(path)

    @property
    def header(self) -> Header:
        header: Header = self._host.header
        return header

    def record(self, index: int) -> GpuRecord:
        """One GPU's record, mapped: its values may change at any time."""
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
        """The live state to write; the writer takes its time inside the block, never before."""
        record = self.record(index)
        record.sequence = (record.sequence | 1) & 0xFFFF_FFFF
        try:
            yield record.live
        finally:
            record.sequence = (record.sequence + 1) & 0xFFFF_FFFF

    def close(self) -> None:
        """Unmap. Copies stay valid."""
        del self._host
        # The mapping lives as long as a record is referenced.
        with suppress(BufferError):
            self._map.close()


def counter_energy(identity: Identity, moment: GpuSnapshot) -> int:
    """The value of the board's energy counter, in microjoules: that of its last edge."""
    live = moment.live
    edge = last_edge(identity.born, identity.counter_step, moment.now)
    if edge < live.at:
        return int(live.latched)
    return int(live.counter + (live.counter_rest + live.power * (edge - live.at)) // PICOJOULES)


ENERGY_UNIT = 15_300_000
"""Picojoules in a step of the energy accumulator of AMD boards, as AMD SMI states it."""


def energy_accumulator(record: GpuRecord, moment: GpuSnapshot) -> int:
    """The steps that the energy accumulator of an AMD board has counted."""
    steps = counter_energy(record.identity, moment) * PICOJOULES // ENERGY_UNIT
    return steps & 0xFFFF_FFFF if record.faults & FAULT_SHORT_COUNTER else steps


_POLL = 0.005  # seconds between two checks of a fault that blocks calls

DriverCalls = Mapping[str, Callable[..., Any]]
"""Calls on a GPU by the names of a driver's library."""


class EmulatedDriver(ABC):
    """A driver's library over the file at ``path``, which is opened when it is initialised.

    A fault blocks or refuses calls; its code is one of the library's own.
    """

    uninitialised: int
    not_loaded: int
    not_supported: int
    denied: int
    torn: int  # the owner of the file stopped in the middle of writing

    def __init__(
        self, path: Path, clock: Clock | None, part_calls: DriverCalls, gpu_calls: DriverCalls
    ) -> None:
        """``part_calls`` are those on a GPU or a part of it; a part supports no ``gpu_calls``."""
        self._path, self.clock = path, clock or SystemClock()
        self._part_calls, self._gpu_calls = part_calls, gpu_calls
        self._pause = threading.Event()
        self._file: GpuFile | None = None

    @abstractmethod
    def failure(self, code: int) -> Exception:
        """The library's exception for one of its codes."""

    def _load(self) -> GpuFile:
        """The file of a driver that answers."""
        try:
            file = GpuFile(self._path)
        except EmulationError:
            raise self.failure(self.not_loaded) from None
        self._await_driver(file)
        return file

    def _opened(self) -> GpuFile:
        file = self._file
        if file is None:
            raise self.failure(self.uninitialised)
        self._await_driver(file)
        return file

    def _await_driver(self, file: GpuFile) -> None:
        """Return when the driver answers; its error if it refuses."""
        while file.header.hang:
            self._pause.wait(_POLL)
        if file.header.error:
            raise self.failure(int(file.header.error))

    def _gpu(self, file: GpuFile, index: int, part: int = 0) -> CalledGpu:
        """The GPU, or a ``part`` of it, that a call is about; its error if it is lost."""
        record = file.record(index)
        while record.faults & FAULT_HANG:
            self._pause.wait(_POLL)
        if record.error:
            raise self.failure(int(record.error))
        return CalledGpu(self, file, index, part)

    def _answer(self, name: str, gpu: CalledGpu, *arguments: Any) -> Any:
        """The answer to a call on a GPU or on a part of it."""
        call = self._part_calls.get(name)
        if call is None and gpu.part:
            raise self.failure(self.not_supported)
        return (call or self._gpu_calls[name])(gpu, *arguments)


class CalledGpu:
    """The GPU, its MIG instance or its partition (``part``), that a call is about."""

    def __init__(self, driver: EmulatedDriver, file: GpuFile, index: int, part: int) -> None:
        self._driver, self.clock = driver, driver.clock
        self.file, self.index, self.part = file, index, part
        self.record = file.record(index)
        self.identity: Identity = self.record.identity

    @cached_property
    def snapshot(self) -> GpuSnapshot:
        """The state that the whole call sees."""
        try:
            return self.file.read(self.index, self.clock.monotonic)
        except TornStateError:
            raise self._driver.failure(self._driver.torn) from None

    @property
    def live(self) -> Live:
        return self.snapshot.live

    def refuse_if(self, fault: int, code: int | None = None) -> None:
        """Refuse the call with ``code``, "not supported" by default, if there is the fault."""
        if self.record.faults & fault:
            raise self._driver.failure(self._driver.not_supported if code is None else code)

    @property
    def requested_limit(self) -> int:
        return int(self.record.limit_request) & 0xFFFF_FFFF

    def request_limit(self, milliwatts: int, rejected: int) -> None:
        """Request a power limit; ``rejected`` is the code for one out of range."""
        self.refuse_if(FAULT_NO_PERMISSION, self._driver.denied)
        if not self.identity.limit_min <= milliwatts <= self.identity.limit_max:
            raise self._driver.failure(rejected)
        if not self.record.faults & FAULT_DEAF:
            self.record.request_limit(milliwatts)

    def request_clock(self, lowest: int, highest: int) -> None:
        """Request bounds of the clock in megahertz; 0 for none."""
        self.refuse_if(FAULT_NO_PERMISSION, self._driver.denied)
        self.record.clock_request = lowest << 24 | highest


def _foreign(path: Path) -> str:
    return f"{path} holds no emulated GPUs of this version; start the emulated host again."
