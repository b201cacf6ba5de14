"""The emulated GPUs of a host of one or both vendors, by their index in its profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wattspan.emulation.boards import EmulatedBoard
from wattspan.emulation.control import Closeable
from wattspan.emulation.gpu_engine import EnergySplit
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.profiles import AMD_GPUS, NVIDIA_GPUS
from wattspan.emulation.workloads import GpuWork, WorkLog
from wattspan.ports import Clock


class HostGpus(Closeable):
    """Boards in ``directory``: a file for each vendor, as each has a driver of its own.

    A method for one GPU is that of ``EmulatedGpus``; ValueError for an index without a GPU.
    """

    def __init__(
        self,
        directory: Path,
        boards: Sequence[EmulatedBoard],
        clock: Clock,
        hosts: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._places: list[tuple[EmulatedGpus, int]] = []
        by_vendor = {
            amd: [board for board in boards if board.is_amd is amd] for amd in (False, True)
        }
        opened = {
            amd: EmulatedGpus(directory / (AMD_GPUS if amd else NVIDIA_GPUS), own, clock, hosts)
            for amd, own in by_vendor.items()
            if own
        }
        self.files: tuple[EmulatedGpus, ...] = tuple(opened.values())
        counts = {False: 0, True: 0}
        for board in boards:
            self._places.append((opened[board.is_amd], counts[board.is_amd]))
            counts[board.is_amd] += 1

    def __len__(self) -> int:
        return len(self._places)

    def of(self, gpu: int) -> tuple[EmulatedGpus, int]:
        """The boards of a GPU's vendor, and its index among them."""
        if not 0 <= gpu < len(self._places):
            raise ValueError(f"this host has no GPU {gpu}")
        return self._places[gpu]

    def attach(self, gpu: int, pid: int, work: GpuWork, **where: Any) -> None:
        boards, index = self.of(gpu)
        boards.attach(index, pid, work, **where)

    def divide(self, gpu: int, slices: Sequence[int]) -> None:
        boards, index = self.of(gpu)
        boards.divide(index, slices)

    def set_load(self, gpu: int, pid: int, demand: float) -> None:
        boards, index = self.of(gpu)
        boards.set_load(index, pid, demand)

    def change_work(self, gpu: int, pid: int, change: Callable[[GpuWork], GpuWork]) -> None:
        boards, index = self.of(gpu)
        boards.change_work(index, pid, change)

    def work_log(self, gpu: int, pid: int) -> WorkLog:
        boards, index = self.of(gpu)
        return boards.work_log(index, pid)

    def spent_at(self, gpu: int, times: Sequence[int]) -> list[EnergySplit]:
        boards, index = self.of(gpu)
        return boards.spent_at(index, times)

    def start(self, every: float = 0.01) -> None:
        for boards in self.files:
            boards.start(every)

    def close(self) -> None:
        for boards in self.files:
            boards.close()
