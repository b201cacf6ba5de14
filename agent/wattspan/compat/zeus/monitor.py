"""``ZeusMonitor``: named windows, and the energy of each GPU and CPU package in them.

The begin and end of a window take a time stamp each. The agent is asked when a value is first
read, and answers once the devices have a reading after the window.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from time import time
from typing import Any, ClassVar, Literal, get_args

from wattspan.compat.zeus.devices import DeviceIndex
from wattspan.compat.zeus.log_file import WindowLog
from wattspan.sdk import MeasurementError, NotMeasuredError, UnreadWindows
from wattspan.sdk.client import Device, DeviceReader, Energy, read_device_windows, read_devices
from wattspan.sdk.window import RESULT_TIMEOUT, Window, finish_jax

Framework = Literal["torch", "jax", "cupy"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


class DeviceSynchronizer:
    """Waits for queued GPU work through a framework; warns once if there is none to wait with.

    A framework that the program has not loaded has queued nothing, so none is imported.

    ValueError for an unknown framework.
    """

    def __init__(self, framework: str, modules: Mapping[str, Any] = sys.modules) -> None:
        if framework not in FRAMEWORKS:
            raise ValueError(
                f"sync_execution_with={framework!r} is not known: "
                f"write one of {', '.join(FRAMEWORKS)}."
            )
        self.framework = framework
        self._modules = modules
        self._warned = False

    def wait(self, devices: Sequence[int]) -> None:
        """Return when the work queued on each of ``devices`` is done."""
        module = self._modules.get(self.framework)
        if module is None:
            self._warn("the program has not imported it")
        elif self.framework == "torch":
            if not module.cuda.is_available():
                self._warn("it has no CUDA device")
            elif module.cuda.is_initialized():
                for device in devices:
                    module.cuda.synchronize(device)
        elif self.framework == "cupy":
            for device in devices:
                module.cuda.Device(device).synchronize()
        else:
            finish_jax(module)

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Windows do not wait for GPU work through {self.framework}: {cause}. Pass "
                "sync_execution=False, or sync_execution_with= another framework.",
                RuntimeWarning,
                stacklevel=5,
            )


@dataclass
class Measurement:
    """The result of one window: seconds, and joules by index.

    ``gpu_energy`` is that of whole boards, ``cpu_energy`` and ``dram_energy`` those of whole
    packages and their memory, None without counters. ``soc_energy`` is always None.
    """

    time: float
    gpu_energy: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None
    soc_energy: Any = None

    @cached_property
    def total_energy(self) -> float:
        """The joules of all GPUs, and of nothing else, as in Zeus."""
        return sum(self.gpu_energy.values())

    def __eq__(self, other: object) -> bool:
        """True for a measurement with the same values, be they looked up or copied."""
        if not isinstance(other, Measurement):
            return NotImplemented
        return all(getattr(self, one.name) == getattr(other, one.name) for one in fields(self))


class DeviceFigures:
    """The energies of the devices of an index in one period, asked for when they are read."""

    def __init__(
        self,
        read: DeviceReader,
        index: DeviceIndex,
        name: str,
        period: tuple[int, int],
        unread: UnreadWindows | None = None,
    ) -> None:
        self._read, self._index, self._name, self.period = read, index, name, period
        self._unread = unread
        self._found: dict[tuple[str, ...], tuple[Device, ...]] = {}  # read together with others
        if unread is not None:
            unread.add(self)

    def during(self, start: int, end: int) -> DeviceFigures:
        """The same of another period."""
        return DeviceFigures(self._read, self._index, self._name, (start, end))

    def host(self) -> tuple[Device, ...]:
        """All devices of the host."""
        return self._known(self._read(*self.period, timeout=RESULT_TIMEOUT))

    def gpus(self) -> dict[int, Device]:
        ids = self._index.resolve().gpus
        found = self._devices(ids.values())
        return {i: found[key] for i, key in ids.items()}

    def packages(self) -> dict[int, tuple[Device, ...]]:
        return self._grouped(self._index.resolve().packages)

    def memory(self) -> dict[int, tuple[Device, ...]]:
        return self._grouped(self._index.resolve().memory)

    def _grouped(self, groups: Mapping[int, tuple[str, ...]]) -> dict[int, tuple[Device, ...]]:
        found = self._devices(key for ids in groups.values() for key in ids)
        return {i: tuple(found[key] for key in ids) for i, ids in groups.items()}

    def _devices(self, ids: Iterable[str]) -> dict[str, Device]:
        asked = tuple(ids)
        found = self._found.get(asked)
        if found is None and self._unread is not None and asked:
            ask = partial(read_device_windows, ids=asked, timeout=RESULT_TIMEOUT)
            found = self._unread.read(self, asked, ask)
        if found is None:
            found = tuple(self._read(*self.period, asked, timeout=RESULT_TIMEOUT))
        return {device.id: device for device in self._known(found)}

    def accept(self, ids: tuple[str, ...], devices: tuple[Device, ...]) -> bool:
        """Keep the figures of some devices if they are final; True unless they come soon."""
        if all(one.complete for one in devices):  # a silent one may give readings again
            self._found[ids] = devices
        return all(one.complete or one.silent for one in devices)

    def _known(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """``devices``; a warning if a figure is partial, NotMeasuredError if one is unknown."""
        found = tuple(devices)
        for device in found:
            if device.joules is None:
                raise NotMeasuredError(
                    f"The energy of {device.name} in window {self._name!r} is unknown: no reading "
                    "of it is known in this time. The agent started later, has dropped readings of "
                    "a window this old, or the device does not answer; `wattspan doctor` names its "
                    "fault."
                )
            if not device.complete and not device.silent:
                raise NotMeasuredError(
                    f"The energy of {device.name} in window {self._name!r} is not known yet after "
                    f"{RESULT_TIMEOUT:g} s. Read it again later."
                )
        partial = [device for device in found if device.coverage < 1.0]
        if partial:
            covered = ", ".join(f"{device.coverage:.0%} of {device.name}" for device in partial)
            warnings.warn(
                f"The energy of window {self._name!r} is partial: {covered} was measured.",
                RuntimeWarning,
                stacklevel=2,
            )
        return found


def _joules(device: Device) -> float:
    """The joules of a device of ``DeviceFigures``, which are known."""
    return device.joules or 0.0


def _sums(groups: Mapping[int, tuple[Device, ...]]) -> dict[int, float] | None:
    return {i: sum(map(_joules, devices)) for i, devices in groups.items()} or None


class WindowMeasurement(Measurement):
    """A Measurement whose energies are looked up at their first read, in at most 5 s.

    Reading may raise a MeasurementError and can be repeated. ``time`` is known at once.
    """

    def __new__(cls, *_: object, **values: Any) -> Any:
        """With values, as from ``dataclasses.replace``, a plain Measurement."""
        return Measurement(**values) if values else super().__new__(cls)

    def __init__(self, window: Window, figures: DeviceFigures) -> None:
        began, ended = self.period = figures.period
        self.time = (ended - began) / 1e9
        self._window, self._figures = window, figures

    def part(self, start: int, end: int) -> WindowMeasurement:
        """The energies between two monotonic times."""
        return WindowMeasurement(self._window, self._figures.during(start, end))

    @cached_property
    def _gpus(self) -> dict[int, Device]:
        return self._figures.gpus()

    @cached_property
    def _packages(self) -> dict[int, tuple[Device, ...]]:
        return self._figures.packages()

    @cached_property
    def gpu_energy(self) -> dict[int, float]:  # type: ignore[override]
        return {i: _joules(device) for i, device in self._gpus.items()}

    @cached_property
    def cpu_energy(self) -> dict[int, float] | None:  # type: ignore[override]
        return _sums(self._packages)

    @cached_property
    def dram_energy(self) -> dict[int, float] | None:  # type: ignore[override]
        return _sums(self._figures.memory())

    # ------------------------------------------------------------------- beyond Zeus

    @property
    def uncertainty(self) -> dict[int, float]:
        """The uncertainty of each value of ``gpu_energy``, in joules."""
        return {i: device.uncertainty or 0.0 for i, device in self._gpus.items()}

    @property
    def coverage(self) -> float:
        """The measured fraction of the window, 0 to 1: of the GPUs, else of the CPU packages."""
        devices = [*self._gpus.values()] or [*chain.from_iterable(self._packages.values())]
        return min((device.coverage for device in devices), default=0.0)

    @property
    def certainty(self) -> str:
        """``"lower_bound"`` if a GPU or package was not measured all the time, else ``"known"``."""
        devices = [*self._gpus.values(), *chain.from_iterable(self._packages.values())]
        known = devices and all(device.coverage >= 1.0 for device in devices)
        return "known" if known else "lower_bound"

    @property
    def provenance(self) -> dict[str, str]:
        """By device name: measured, derived, estimated or emulated."""
        return {d.name: d.provenance for d in chain(self._gpus.values(), *self._packages.values())}

    @cached_property
    def all_energy(self) -> Energy:
        """The joules of all devices of the host, by kind."""
        devices = self._figures.host()
        joules: dict[str, float] = {}
        uncertainty: dict[str, float] = {}
        for one in devices:
            joules[one.kind] = joules.get(one.kind, 0.0) + _joules(one)
            uncertainty[one.kind] = uncertainty.get(one.kind, 0.0) + (one.uncertainty or 0.0)
        coverage = min((device.coverage for device in devices), default=0.0)
        bounded = {device.kind: None for device in devices if device.coverage < 1.0}
        return Energy(joules, uncertainty, coverage, lower_bound=bounded)

    @property
    def process_energy(self) -> Energy:
        """The joules of this process and its descendants, by kind; settles 1 to 3 s late."""
        return self._window.joules

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except MeasurementError as error:
            return f"<{type(self).__name__} of {self.time:.6g} s without energy: {error}>"

    def __reduce__(self) -> tuple[Callable[..., Measurement], tuple[Any, ...]]:
        """Pickled and copied as a plain Measurement, with its values."""
        return Measurement, (self.time, self.gpu_energy, self.cpu_energy, self.dram_energy)


for _cached in (*vars(Measurement).values(), *vars(WindowMeasurement).values()):
    if isinstance(_cached, cached_property):
        # Python 3.11 locks it for all windows while one of them waits for the agent: other threads
        # would wait too, and in the child of a fork nobody would release it.
        vars(_cached)["lock"] = nullcontext()


@dataclass(slots=True)
class OpenWindow:
    """A window that has begun, and the Unix time at which it did, in seconds."""

    window: Window
    wall: float = 0.0


class ZeusMonitor:
    """Measures named windows of a program; signatures and units are those of Zeus.

    ``approx_instant_energy`` is accepted and has no effect: the energy of short windows is
    interpolated between readings. Windows may nest and overlap, in any thread, and belong to the
    process that began them.
    """

    read_devices: ClassVar[DeviceReader] = staticmethod(read_devices)

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        approx_instant_energy: bool = False,
        log_file: str | Path | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        self.approx_instant_energy = approx_instant_energy
        self.sync_with = sync_execution_with
        self._synchronizer = DeviceSynchronizer(sync_execution_with)
        self._index = DeviceIndex(self.read_devices, gpu_indices, cpu_indices)
        self._index.check(type(self).__name__)
        self._windows: dict[str, OpenWindow] = {}
        self._inherited: tuple[int, frozenset[str]] = 0, frozenset()
        self._unread, self._gpus = UnreadWindows(), None
        self.log_file = None
        if log_file is not None:
            self.log_file = WindowLog(Path(log_file), self.gpu_indices, lambda: self._index.boards)
        _MONITORS.add(self)

    @property
    def gpus(self) -> Any:
        """All visible GPUs, with readings and setters: ``GPUs``."""
        if self._gpus is None:
            hardware = import_module("wattspan.compat.zeus.hardware")  # imports this module
            self._gpus = hardware.GPUs(read=self.read_devices)
        return self._gpus

    @property
    def gpu_indices(self) -> list[int]:
        """Indices of the measured GPUs, as the framework numbers them; empty without an agent."""
        return self._index.gpu_indices

    @property
    def cpu_indices(self) -> list[int]:
        """Numbers of the measured CPU packages; empty without an agent."""
        return self._index.cpu_indices

    def begin_window(self, key: str, sync_execution: bool = True, restart: bool = False) -> None:
        """Begin a window, after the queued GPU work with ``sync_execution``.

        ValueError if ``key`` is open; with ``restart`` the open window is discarded.
        """
        opened = OpenWindow(Window(key))
        if restart:
            self._windows[key] = opened
        elif self._windows.setdefault(key, opened) is not opened:
            raise ValueError(f"Measurement window '{key}' already exists")
        try:
            if sync_execution:
                self.synchronize()
        except BaseException:
            self._windows.pop(key, None)
            raise
        opened.wall = time()
        opened.window.begin()

    def end_window(
        self, key: str, sync_execution: bool = True, cancel: bool = False
    ) -> Measurement:
        """End a window and return its time; the energies are looked up when they are read.

        With ``cancel`` the window is discarded: all values are 0, as in Zeus. ValueError if no
        window ``key`` is open.
        """
        if not cancel:
            return self.finish_window(key, sync_execution)
        self._take(key)
        if sync_execution:
            self.synchronize()
        return Measurement(
            time=0.0,
            gpu_energy=dict.fromkeys(self.gpu_indices, 0.0),
            cpu_energy=dict.fromkeys(self.cpu_indices, 0.0),
        )

    def finish_window(self, key: str, sync_execution: bool = True) -> WindowMeasurement:
        """As ``end_window`` without ``cancel``."""
        opened = self._take(key)
        window = opened.window
        if sync_execution:
            self.synchronize()
        window.end()
        measurement = WindowMeasurement(
            window,
            DeviceFigures(self.read_devices, self._index, key, window.period, self._unread),
        )
        if self.log_file is not None:
            self.log_file.add(opened.wall, key, measurement)
        return measurement

    def between(self, key: str, start: int, end: int) -> WindowMeasurement:
        """The energies between two monotonic times, such as of a part of an open window."""
        figures = DeviceFigures(self.read_devices, self._index, key, (start, end))
        return WindowMeasurement(Window(key), figures)

    def reset_windows(self) -> None:
        """Discard all open windows."""
        self._windows.clear()

    def _take(self, key: str) -> OpenWindow:
        opened = self._windows.pop(key, None)
        if opened is None:
            pid, keys = self._inherited
            if key in keys:
                raise ValueError(
                    f"Measurement window '{key}' does not exist in this process: process {pid} "
                    "began it before it forked this one. End it there."
                )
            raise ValueError(f"Measurement window '{key}' does not exist")
        return opened

    def synchronize(self) -> None:
        """Wait for the queued work of the measured GPUs."""
        if indices := self.gpu_indices:
            self._synchronizer.wait(indices)

    def drop_inherited_windows(self) -> None:
        """In the child of a fork: its parent's windows and log lines stay the parent's."""
        self._inherited = os.getppid(), frozenset(self._windows)
        self._windows = {}
        if self.log_file is not None:
            self.log_file = self.log_file.reopened()


_MONITORS: weakref.WeakSet[ZeusMonitor] = weakref.WeakSet()


def _drop_inherited_windows() -> None:
    for monitor in list(_MONITORS):
        monitor.drop_inherited_windows()


os.register_at_fork(after_in_child=_drop_inherited_windows)


if __name__ == "__main__":
    import_module("wattspan.compat.zeus.power").main()
