"""For any collector behaviour and any restarts of the agent: spans are sent in order, and
each one is delivered or counted."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from testbed.forwarding import TAKEN, HangingSpool, delivery, kill, names_in, no_energy

from wattspan.config import SpansSettings
from wattspan.model import SECOND
from wattspan.model.settings import Size
from wattspan.otlp.forwarder import Forwarder
from wattspan.otlp.transport import MAX_BACKOFF, ExportResult, ExportStatus, retry_result
from wattspan.storage.async_writer import HANG_AFTER
from wattspan.testing import ManualClock
from wattspan.util.throttle import RetryBackoff


@dataclass(frozen=True)
class Offer:
    spans: int
    length: int  # of a name: data that fills the queue


@dataclass(frozen=True)
class Turn:
    """An attempt, answered so; ``has`` says whether the collector has the spans nonetheless."""

    answer: ExportResult
    has: bool = False


@dataclass(frozen=True)
class Restart:
    crash: bool


@dataclass(frozen=True)
class Disk:
    """The disk of the spool hangs in a write, or answers."""

    answers: bool


AWAY = retry_result("away")
offers = st.builds(Offer, st.integers(1, 5), st.sampled_from([1, 1, 100_000]))
answers = st.one_of(
    st.just(Turn(TAKEN, has=True)),
    st.just(Turn(AWAY)),
    st.builds(Turn, st.just(retry_result("silent", perhaps_taken=True)), st.booleans()),
    st.just(Turn(ExportResult(ExportStatus.AGAIN, "busy", after=3 * SECOND))),
    st.just(Turn(ExportResult(ExportStatus.REFUSED, "bad"))),
    st.just(Turn(ExportResult(ExportStatus.TOO_LARGE, "large"))),
    st.builds(
        lambda rejected: Turn(
            ExportResult(ExportStatus.TAKEN, "some", rejected=rejected), has=True
        ),
        st.integers(1, 9),
    ),
)
steps = st.lists(st.one_of(offers, answers, answers), max_size=40)
steps_with_restarts = st.lists(
    st.one_of(offers, answers, answers, st.builds(Restart, st.booleans())), max_size=40
)
steps_on_a_bad_disk = st.lists(
    st.one_of(
        offers,
        answers,
        answers,
        st.builds(Disk, st.booleans()),
        st.builds(Restart, st.booleans()),
    ),
    max_size=40,
)


class World:
    """A collector, and the forwarders that one agent after the other had."""

    def __init__(self, spool: Path | None) -> None:
        self.clock = ManualClock()
        self.offered: list[str] = []
        self.sent: list[list[str]] = []  # spans of each attempt that the collector has
        self.doubtful = 0  # spans of attempts that the collector has and did not answer
        self.turn: Turn = Turn(TAKEN, has=True)
        self.counted: Counter[str] = Counter()
        self._spool = spool
        self._numbers = itertools.count()
        self.start()

    def start(self) -> None:
        queue = Size.parse("1MiB")
        self.disk = HangingSpool(self._spool, queue, lambda _: None) if self._spool else None
        self.forwarder = Forwarder(
            SpansSettings(forward="http://collector", forward_queue=queue),
            self.clock,
            lambda _: None,
            transport=self,
            backoff=RetryBackoff(SECOND, MAX_BACKOFF),
            spool=self.disk,
        )

    def hang(self) -> None:
        """During the write of one more span."""
        assert self.disk is not None
        if self.disk.answers.is_set() and self.forwarder._disk.idle:
            self.disk.hang()
            self.take(Offer(1, 1))
            self.disk.hangs()
            self.clock.advance(ns=HANG_AFTER)

    def answer(self) -> None:
        if self.disk is not None:
            self.disk.answers.set()

    def restart(self, *, crash: bool) -> None:
        self.answer()
        if crash:
            assert self.forwarder._disk is not None
            kill(self.forwarder._disk)
        else:
            self.forwarder.stop()
        self.note(restored=True)
        self.start()

    def note(self, *, restored: bool = False) -> None:
        stats = self.forwarder.stats
        self.counted["forwarded"] += stats.forwarded
        self.counted["perhaps_twice"] += stats.perhaps_twice
        self.counted["dropped"] += sum(stats.drops.values())

    # -------------------------------------------------------------------------- as a transport

    def send(self, body: bytes) -> ExportResult:
        names = names_in([body])
        answer = self.turn.answer
        if self.turn.has:
            has = names[: max(0, len(names) - answer.rejected)]
            self.sent.append(has)
            if answer.perhaps_taken:
                self.doubtful += len(names)
        return answer

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    # ------------------------------------------------------------------------------------ steps

    def take(self, step: Offer | Turn | Restart | Disk) -> None:
        match step:
            case Offer(spans, length):
                names = [f"{next(self._numbers)} " + "x" * length for _ in range(spans)]
                self.offered += names
                self.forwarder.offer(delivery(*names), no_energy(spans))
            case Turn():
                self.turn = step
                self.step()
            case Restart(crash):
                self.restart(crash=crash)
            case Disk(answers):
                self.answer() if answers else self.hang()

    def step(self) -> bool:
        due = self.forwarder.turn()
        if due is not None:
            self.clock.sleep_until(due)
        return due is not None

    def settle(self) -> None:
        self.turn = Turn(TAKEN, has=True)
        while self.step():
            pass
        assert self.forwarder.stats.queue_spans == self.forwarder.stats.queue_bytes == 0
        self.note()

    def check(self) -> None:
        place = {name: number for number, name in enumerate(self.offered)}
        arrived = [place[name] for attempt in self.sent for name in attempt]
        twice = len(arrived) - len(set(arrived))
        assert self.counted["forwarded"] + self.counted["dropped"] == len(self.offered)
        assert len(set(arrived)) >= self.counted["forwarded"]
        assert twice <= self.doubtful <= self.counted["perhaps_twice"]
        first = list(dict.fromkeys(arrived))
        assert first == sorted(first), "they did not arrive in order"


@given(steps)
def test_memory_queue_delivers_in_order_or_counts(taken: list[Offer | Turn]):
    world = World(None)
    for step in taken:
        world.take(step)
    world.settle()
    world.check()


@given(steps_with_restarts)
def test_disk_queue_delivers_in_order_or_counts(taken: list[Offer | Turn | Restart]):
    with TemporaryDirectory() as folder:
        world = World(Path(folder) / "forward")
        for step in taken:
            world.take(step)
        world.settle()
        world.check()
        world.forwarder.stop()
        assert not list(Path(folder).rglob("*.spans")), "what was sent is still on disk"


@given(steps_on_a_bad_disk)
def test_hanging_disk_queue_delivers_in_order_or_counts(
    taken: list[Offer | Turn | Restart | Disk],
):
    with TemporaryDirectory() as folder:
        world = World(Path(folder) / "forward")
        for step in taken:
            world.take(step)
        world.settle()
        world.check()
        world.answer()
        world.forwarder.stop()
        assert not list(Path(folder).rglob("*.spans")), "what was sent is still on disk"


@given(
    st.lists(st.sampled_from([AWAY, retry_result("busy"), TAKEN]), max_size=30), st.integers(1, 20)
)
def test_within_limits_every_span_is_delivered_once(fates: list[ExportResult], requests: int):
    world = World(None)
    for number in range(requests):
        world.take(Offer(1 + number % 3, 10))
        if number < len(fates):
            world.take(Turn(fates[number], has=fates[number] is TAKEN))
    world.settle()
    assert [name for attempt in world.sent for name in attempt] == world.offered
    assert world.counted["perhaps_twice"] == 0
