"""Reading and writing the file that holds the emulated GPUs; its layout is ``nvml_layout``."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from wattspan.emulation.gpu_meter import PICOJOULES, last_edge
from wattspan.emulation.nvml_layout import (
    MAGIC,
    VERSION,
    GpuRecord,
    Header,
    HostRecord,
    Identity,
    Live,
)
from wattspan.ports import WattspanError

_PATIENCE = 2.0  # seconds a reader waits for a writer before it calls the state torn
_PAUSE = 0.0005


class EmulationError(WattspanError):
    """The emulated GPUs cannot be had; the message is one sentence."""


class TornStateError(EmulationError):
    """The owner stopped in the middle of writing."""


class Moment(NamedTuple):
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

    def read(self, index: int, clock: Callable[[], int]) -> Moment:
        """A consistent copy; TornStateError if the owner stays half-way through writing."""
        record = self.record(index)
        offset = HostRecord.gpu.offset + index * ctypes.sizeof(GpuRecord) + GpuRecord.live.offset
        for _ in range(int(_PATIENCE / _PAUSE)):
            before = record.sequence
            if before % 2 == 0:
                live = Live.from_buffer_copy(self._map, offset)
                now = clock()
                if record.sequence == before:
                    return Moment(now, live)
            self._pause.wait(_PAUSE)
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


def true_energy(moment: Moment) -> int:
    """The energy at the moment in microjoules: the integral of published power, rounded down."""
    live = moment.live
    passed = max(0, moment.now - live.at)
    return int(live.energy + (live.energy_rest + live.power * passed) // PICOJOULES)


def counter_energy(identity: Identity, moment: Moment) -> int:
    """What the board's counter shows at the moment, in microjoules: the value at its last edge."""
    live = moment.live
    edge = last_edge(identity.born, identity.counter_step, moment.now)
    if edge < live.at:
        return int(live.latched)
    return int(live.counter + (live.counter_rest + live.power * (edge - live.at)) // PICOJOULES)


def _foreign(path: Path) -> str:
    return f"{path} holds no emulated GPUs of this version; create them anew."
