"""Fakes of the ports, for tests of this project and of plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from wattspan.model import Consumer, Instant, PayerInfo
from wattspan.ports import Batch, ProcessDirectory, UsageBatch


class ManualClock:
    """A clock that tests advance, suspend and step."""

    def __init__(self, mono: int = 10**12, wall: int = 1_700_000_000 * 10**9) -> None:
        self._mono, self._wall, self._asleep = mono, wall, 0
        self.on_sleep: Callable[[int], None] | None = None

    def now(self) -> Instant:
        return Instant(self._mono, self._wall, self._asleep)

    def monotonic(self) -> int:
        return self._mono

    def advance(self, seconds: float = 0.0, *, ns: int = 0) -> Instant:
        step = round(seconds * 1e9) + ns
        self._mono += step
        self._wall += step
        return self.now()

    def suspend(self, seconds: float) -> None:
        """Suspend the host: the wall clock advances, the monotonic clock does not."""
        self._asleep += round(seconds * 1e9)
        self._wall += round(seconds * 1e9)

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock."""
        self._wall += round(seconds * 1e9)

    def sleep_until(self, mono: int) -> None:
        if mono > self._mono:
            self.advance(ns=mono - self._mono)
        if self.on_sleep is not None:
            self.on_sleep(self._mono)


class ReplaySource:
    """A counter source that replays batches; the last one is repeated."""

    def __init__(self, batches: Iterable[Batch], name: str = "replay") -> None:
        self._batches = iter(batches)
        self._last = Batch(domains=())
        self._name = name
        self.closed = False

    @property
    def name(self) -> str:
        return self._name

    def read(self) -> Batch:
        self._last = next(self._batches, self._last)
        return self._last

    def close(self) -> None:
        self.closed = True


class ReplayUsage:
    """A usage source that replays batches, then yields empty ones."""

    def __init__(self, batches: Sequence[UsageBatch] = ()) -> None:
        self._batches = iter(batches)

    def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
        return next(self._batches, UsageBatch())

    def close(self) -> None:
        pass


class FakeDirectory(ProcessDirectory):
    """A process directory of fixed processes."""

    def __init__(self, infos: Iterable[PayerInfo] = ()) -> None:
        self.infos = {info.payer: info for info in infos if isinstance(info.payer, Consumer)}

    def identify(self, pid: int) -> Consumer | None:
        return next((payer for payer in self.infos if payer.pid == pid), None)

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return self.infos.get(consumer)
