"""Emulated GPUs and a session of their source, driven by one manual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wattspan.emulation.boards import EmulatedBoard
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.model import Consumer, GpuStatus, PayerInfo, Reading, Usage
from wattspan.ports import Batch, SourceContext
from wattspan.sources.driver_thread import DriverSession
from wattspan.testing import FakeDirectory, ManualClock

TRAIN = Consumer(100, 5)
SERVE = Consumer(200, 7)


class SampledBoards:
    """Boards, and the results of their samples since the start."""

    session: DriverSession

    def __init__(self, path: Path, boards: Sequence[EmulatedBoard]) -> None:
        """A subclass opens the ``session`` on ``context``."""
        self.clock = ManualClock()
        self.gpus = EmulatedGpus(path, boards, self.clock)
        directory = FakeDirectory([PayerInfo(TRAIN, "train"), PayerInfo(SERVE, "serve")])
        self.context = SourceContext(self.clock, directory, emulated=True)
        self.batch = Batch(())
        self.readings: list[Reading] = []
        self.usages: list[Usage] = []
        self.statuses: list[GpuStatus] = []

    def run(self, seconds: float, interval: float = 0.1) -> Batch:
        """Samples are ``interval`` seconds apart, a multiple of 0.1, with the reads between."""
        for _ in range(round(seconds / interval)):
            for _ in range(round(interval * 10) - 1):
                self.gpus.run(0.1, every=0.05)
                self.readings += self.session.read_between(self.clock.monotonic())
            self.gpus.run(0.1, every=0.05)
            self.batch = self.session.sample(round(interval * 1e9))
            self.readings += self.batch.readings
            self.usages += self.batch.usages
            self.statuses += self.batch.gpus
        return self.batch

    def id(self, gpu: int) -> str:
        return f"gpu:{self.gpus.uuid(gpu)}"

    def of(self, gpu: int) -> list[Reading]:
        return [reading for reading in self.readings if reading.domain_id == self.id(gpu)]

    def used(self, gpu: int) -> list[Usage]:
        return [usage for usage in self.usages if usage.resource == self.id(gpu)]

    def status(self, gpu: int) -> GpuStatus:
        return [status for status in self.statuses if status.domain_id == self.id(gpu)][-1]

    def close(self) -> None:
        self.session.close()
        self.gpus.close()
