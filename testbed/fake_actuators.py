"""Knobs of scripted devices: a FakeNvml that can be set, and a kernel behind a powercap tree."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from testbed.fake_nvml import FakeGpu, FakeNvml
from wattspan.capper.actuators.cpu import write_number
from wattspan.ports import Clock

REQUESTED, ENFORCED = 192, 190  # the numbers of NVML's fields


class KnobNvml(FakeNvml):
    """FakeNvml with setters. ``deaf`` boards take every limit and keep their own."""

    def __init__(self, clock: Clock, *gpus: FakeGpu) -> None:
        super().__init__(clock, *gpus)
        self.deaf: set[str] = set()
        self.missing: set[str] = set()  # functions that an old binding does not have
        self.locks: dict[str, tuple[int, int]] = {}
        self.clock_now = 1980
        self.ceiling: int | None = None  # externally enforced

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)
        answer = _ANSWERS.get(name)
        if answer is None:
            return super().__getattr__(name)

        def call(handle: Any, *arguments: Any) -> Any:
            return answer(self, self._enter(name, handle), *arguments)

        return call

    def set_limit(self, gpu: FakeGpu, milliwatts: int) -> None:
        if not gpu.limits[187] <= milliwatts <= gpu.limits[188]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if gpu.uuid not in self.deaf:
            gpu.limits[REQUESTED] = milliwatts
            gpu.limits[ENFORCED] = min(milliwatts, self.ceiling or milliwatts)

    def set_clocks(self, gpu: FakeGpu, lowest: int, highest: int) -> None:
        self.locks[gpu.uuid] = (lowest, highest)

    def clock_of(self, gpu: FakeGpu, kind: int) -> int:
        obeys = gpu.uuid in self.locks and gpu.uuid not in self.deaf
        return min(self.clock_now, self.locks[gpu.uuid][1]) if obeys else self.clock_now

    def reload_driver(self) -> None:
        """All sessions end and every setting is at its default."""
        self.generation += 1
        self.initialised = 0
        self.locks.clear()
        for gpu in self.gpus:
            gpu.limits[REQUESTED] = gpu.limits[ENFORCED] = gpu.limits[189]


_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceSetPowerManagementLimit": KnobNvml.set_limit,
    "nvmlDeviceSetGpuLockedClocks": KnobNvml.set_clocks,
    "nvmlDeviceResetGpuLockedClocks": lambda n, g: n.locks.pop(g.uuid, None),
    "nvmlDeviceGetClockInfo": KnobNvml.clock_of,
    "nvmlDeviceGetMaxClockInfo": lambda _n, _g, _kind: 1980,
    "nvmlDeviceGetSupportedMemoryClocks": lambda _n, _g: [2619, 1593],
    "nvmlDeviceGetSupportedGraphicsClocks": lambda _n, _g, memory: list(
        range(1980, 344, -15) if memory == 2619 else range(1200, 209, -15)
    ),
}


class FakeRapl:
    """Effects of a written limit in a kernel, which an ordinary file lacks.

    ``unit`` is the register's, in microwatts; ``refuses`` the error in which writing ends;
    ``keeps`` is for a register that takes every value and changes nothing.
    """

    def __init__(self, unit: int = 125_000) -> None:
        self.unit = unit
        self.refuses: int | None = None
        self.keeps = False
        self.written: list[int] = []

    def put(self, path: Path, microwatts: int) -> None:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "gone", str(path))
        if self.refuses is not None:
            raise OSError(self.refuses, "refused", str(path))
        self.written.append(microwatts)
        if not self.keeps:
            write_number(path, microwatts // self.unit % 2**15 * self.unit)
