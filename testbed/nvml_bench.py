"""A session over scripted GPUs, driven turn by turn by a manual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.fake_nvml import FakeGpu, FakeNvml
from testbed.gpu_sessions import nvml_session
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    Domain,
    Failure,
    GpuStatus,
    PayerInfo,
    Reading,
    Usage,
)
from wattspan.ports import Batch, SourceContext
from wattspan.sources.driver_thread import LEAST_PAUSE
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock

TRAIN = Consumer(100, 5)
SERVE = Consumer(200, 7)
INTERVAL = 0.1
COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
STEP = 100 * MILLISECOND


class Bench:
    """Remembers everything that all turns yielded."""

    def __init__(
        self,
        *gpus: FakeGpu,
        nested: bool = False,
        settings: NvmlSettings | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.gpus = gpus or (FakeGpu("GPU-a"),)
        self.nvml = FakeNvml(self.clock, *self.gpus)
        self.directory = FakeDirectory([PayerInfo(TRAIN, "train"), PayerInfo(SERVE, "serve")])
        context = SourceContext(self.clock, self.directory)
        settings = settings or NvmlSettings()
        self.session = nvml_session(self.nvml, settings, context, nested=nested)
        self.batch = Batch(())
        self.readings: list[Reading] = []
        self.usages: list[Usage] = []
        self.statuses: list[GpuStatus] = []

    @property
    def gpu(self) -> FakeGpu:
        return self.gpus[0]

    def turn(self, interval: float = INTERVAL) -> Batch:
        self.batch = self.session.sample(round(interval * 1e9))
        self.readings += self.batch.readings
        self.usages += self.batch.usages
        self.statuses += self.batch.gpus
        return self.batch

    def run(
        self, seconds: float, every: float = INTERVAL, each: Callable[[], Any] | None = None
    ) -> Batch:
        """Turn and wait, until ``seconds`` have passed; ``each`` is called before each turn."""
        for _ in range(round(seconds / every)):
            self.clock.advance(every)
            if each is not None:
                each()
            self.turn(every)
        return self.batch

    def live(
        self, seconds: float, interval: int = STEP, late: Callable[[], int] = lambda: 0
    ) -> int:
        """Make the turns of the source's thread; returns the reads of counters.

        It wakes ``late()`` nanoseconds late.
        """
        clock, before = self.clock, self.nvml.calls.count(COUNTER)
        sample, end = clock.monotonic(), clock.monotonic() + round(seconds * SECOND)
        while (now := clock.monotonic()) < end:
            if now >= sample:
                self.turn(interval / SECOND)
                sample = now + interval if now >= sample + interval else sample + interval
            else:
                self.readings += self.session.read_between(now)
            now = clock.monotonic()
            due = self.session.next_read(now)
            wake = sample if due is None else min(sample, due)
            clock.advance(ns=max(LEAST_PAUSE, wake - now) + late())
        return self.nvml.calls.count(COUNTER) - before

    def joules(self, uuid: str = "GPU-a") -> float:
        """Energy of one GPU by its readings, within its last epoch."""
        mine = [r for r in self.readings if r.domain_id == f"gpu:{uuid}"]
        last = [r for r in mine if r.epoch == mine[-1].epoch]
        return (last[-1].counter - last[0].counter) / 1e6

    def epochs(self, uuid: str = "GPU-a") -> list[int]:
        """The epochs of one GPU's readings, each once, in order."""
        return list(dict.fromkeys(r.epoch for r in self.readings if r.domain_id == f"gpu:{uuid}"))

    def usages_of(self, uuid: str = "GPU-a") -> list[Usage]:
        return [usage for usage in self.usages if usage.resource == f"gpu:{uuid}"]

    def spent(self, consumer: Consumer, uuid: str = "GPU-a") -> float:
        """Seconds of one GPU charged to ``consumer``."""
        return sum(usage.spent.get(consumer, 0) for usage in self.usages_of(uuid)) / 1e9

    def unclaimed(self, uuid: str = "GPU-a") -> float:
        return sum(usage.unclaimed for usage in self.usages_of(uuid)) / 1e9

    def domain(self, uuid: str = "GPU-a") -> Domain:
        (domain,) = [d for d in self.batch.domains if d.id == f"gpu:{uuid}"]
        return domain

    def failure(self, about: str) -> Failure:
        """The one failure in force whose subject has ``about`` in it."""
        (failure,) = [f for f in self.batch.failures if about in f.thing]
        return failure
