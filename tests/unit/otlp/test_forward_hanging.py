"""The disk of the spool does not answer: no caller waits for it, and its data is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.forwarding import (
    TAKEN,
    HangingSpool,
    ScriptedTransport,
    delivery,
    kill,
    names_in,
    no_energy,
)
from testbed.waiting import eventually

from wattspan.config import SpansSettings
from wattspan.model import SECOND, Trouble
from wattspan.model.settings import Size
from wattspan.otlp.forwarder import Forwarder
from wattspan.otlp.queue import REQUEST_OVERHEAD, QueuedRequest, RequestQueue
from wattspan.otlp.spool import SpooledRequest, SpoolSegment
from wattspan.otlp.transport import MAX_BACKOFF, ExportResult, retry_result
from wattspan.storage.async_writer import HANG_AFTER
from wattspan.testing import ManualClock
from wattspan.util.throttle import RetryBackoff

AWAY = retry_result("connection refused")


class Bench:
    """A forwarder with its spool on such a disk, stepped by the test."""

    def __init__(self, folder: Path, queue: str = "1MiB") -> None:
        self.folder, self.queue = folder, Size.parse(queue)
        self.clock = ManualClock()
        self.said: list[str] = []
        self.offered = 0
        self.start()

    def start(self, *answers: ExportResult) -> None:
        self.collector = ScriptedTransport(*answers)
        self.disk = HangingSpool(self.folder, self.queue, self.said.append)
        self.forwarder = Forwarder(
            SpansSettings(forward="http://collector:4318", forward_queue=self.queue),
            self.clock,
            self.said.append,
            transport=self.collector,
            backoff=RetryBackoff(SECOND, MAX_BACKOFF),
            spool=self.disk,
        )

    def offer(self, count: int = 1, size: int = 0) -> None:
        for _ in range(count):
            name = f"{self.offered} " + "x" * size
            self.forwarder.offer(delivery(name), no_energy(1))
            self.offered += 1

    def kept(self) -> None:
        eventually(lambda: not self.forwarder.stats.unkept_bytes, "kept")

    def hang(self) -> None:
        """During the write of one more span."""
        self.disk.hang()
        self.offer()
        self.disk.hangs()

    def answer(self) -> None:
        self.disk.answers.set()

    def kill(self) -> None:
        """While it hangs: the write that is under way is done, as the kernel does it, no other."""
        self.forwarder._disk._writer._queue.clear()
        self.answer()
        kill(self.forwarder._disk)

    def send(self) -> None:
        """Until the queue is empty, advancing the time by each requested delay."""
        while (due := self.forwarder.turn()) is not None:
            self.clock.sleep_until(due)

    @property
    def arrived(self) -> list[int]:
        return [int(name.split()[0]) for name in names_in(self.collector.taken)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "forward")
    yield bench
    bench.answer()
    bench.forwarder.stop()


def test_offer_does_not_wait_for_a_hanging_disk(bench: Bench) -> None:
    bench.hang()
    bench.offer(20)
    assert bench.disk.writes == 1
    assert bench.forwarder.stats.queue_spans == 21
    assert bench.forwarder.stats.unkept_bytes == bench.forwarder.stats.queue_bytes


def test_spans_are_sent_in_order_while_the_disk_hangs(bench: Bench) -> None:
    bench.offer(3)
    bench.kept()
    bench.hang()
    bench.offer(3)
    bench.send()
    assert bench.arrived == [*range(7)]
    assert bench.forwarder.stats.drops == {}


def test_spans_sent_while_the_disk_hangs_are_never_written(bench: Bench) -> None:
    bench.hang()
    bench.offer(50)
    bench.send()
    bench.answer()
    eventually(lambda: bench.forwarder._disk.idle, "written")
    assert bench.disk.writes == 1
    bench.kill()
    bench.start()
    assert bench.forwarder.stats.restored == 0


def test_waiting_spans_are_written_once_the_disk_responds(bench: Bench) -> None:
    bench.hang()
    bench.offer(20)
    bench.answer()
    bench.kept()
    bench.kill()
    bench.start()
    bench.send()
    assert bench.arrived == [*range(21)]


def test_kill_while_the_disk_hangs_loses_only_unkept_spans(bench: Bench) -> None:
    bench.offer(5)
    bench.kept()
    bench.hang()
    bench.offer(5)
    bench.kill()
    bench.start()
    bench.send()
    assert bench.arrived == [*range(6)]  # the one under way is the kernel's


def test_spans_settled_while_the_disk_hangs_do_not_return(bench: Bench) -> None:
    bench.hang()
    bench.forwarder.offer(delivery("7", "8", "9"), no_energy(3))
    with bench.forwarder._lock:
        waiting = bench.forwarder._waiting
        waiting.take(1, 0)
        waiting.settle()
        waiting.take(1, 0)
        waiting.settle_some(2)
    bench.answer()
    bench.kept()
    bench.kill()
    bench.start()
    bench.send()
    assert bench.arrived == [9]


class Unasked:
    """A disk as a queue sees it: the disk performs requests when released."""

    def __init__(self) -> None:
        self.asked: dict[QueuedRequest, Callable[[QueuedRequest, SpooledRequest], None]] = {}

    def restored(self) -> list[SpooledRequest]:
        return []

    def keep(
        self, parcel: QueuedRequest, kept: Callable[[QueuedRequest, SpooledRequest], None]
    ) -> None:
        self.asked[parcel] = kept

    def spare(self, parcel: QueuedRequest) -> None:
        del self.asked[parcel]

    def answer(self, segment: SpoolSegment) -> None:
        while self.asked:
            parcel = next(iter(self.asked))
            kept = self.asked.pop(parcel)
            if parcel.body is not None:
                kept(parcel, segment.append(parcel.body, parcel.spans))


def test_memory_overflow_drops_the_oldest_requests(tmp_path: Path) -> None:
    disk, dropped = Unasked(), list[int]()
    segment = SpoolSegment(tmp_path / "segment", lambda _: None)
    segment.create()
    queue = RequestQueue(1 << 30, disk, dropped=dropped.append, memory=10_000)
    body = bytes(2500 - REQUEST_OVERHEAD)
    for spans in (1, 2):
        queue.add(body, spans)
    disk.answer(segment)
    assert queue.in_memory == 0
    for spans in (3, 4, 5, 6, 7, 8):
        queue.add(body, spans)
    assert dropped == [3, 4]
    assert queue.in_memory == 10_000
    assert len(disk.asked) == 4
    disk.answer(segment)
    assert [parcel.spans for parcel in queue.take(99, 1 << 30)] == [1, 2, 5, 6, 7, 8]
    segment.close()


@pytest.mark.parametrize("place", ["queue", "memory"])
def test_flood_of_one_owner_drops_requests_of_its_own_only(place: str) -> None:
    dropped = list[int]()
    disk = Unasked() if place == "memory" else None
    limits = {"memory": (1 << 30, 10_000), "queue": (10_000, 1 << 30)}[place]
    queue = RequestQueue(limits[0], disk, dropped=dropped.append, memory=limits[1])
    body = bytes(1000 - REQUEST_OVERHEAD)
    queue.add(body, 1, "other")
    assert [one.spans for one in queue.take(1, 1 << 30)] == [1]
    for spans in (2, 3):
        queue.add(body, spans, "owner")
    for spans in range(100, 200):
        queue.add(body, spans, "flood")
    assert not queue.add(bytes(9000), 4, "flood")
    queue.put_back()
    for spans in (5, 6):
        queue.add(body, spans, "late")
    assert [one.spans for one in queue.take(99, 1 << 30)] == [1, 2, 3, *range(195, 200), 5, 6]
    assert queue.spans == 1 + 2 + 3 + sum(range(195, 200)) + 5 + 6
    assert (queue.size, queue.in_memory) == (10_000, 10_000)
    queue.settle()
    assert (len(queue), queue.size, queue.spans, queue.in_memory) == (0, 0, 0, 0)


def test_memory_overflow_keeps_requests_being_sent(tmp_path: Path) -> None:
    dropped = list[int]()
    queue = RequestQueue(1 << 30, Unasked(), dropped=dropped.append, memory=1000)
    assert queue.add(bytes(500), 1)
    queue.take(1, 0)
    assert not queue.add(bytes(500), 2)
    assert dropped == [2]


def test_single_request_may_exceed_the_memory_limit() -> None:
    dropped = list[int]()
    queue = RequestQueue(1 << 30, Unasked(), dropped=dropped.append, memory=1000)
    assert queue.add(bytes(5000), 1)
    assert dropped == []


def test_hanging_disk_is_in_health_and_log(bench: Bench) -> None:
    bench.hang()
    assert bench.forwarder.health().failures == ()
    bench.clock.advance(ns=HANG_AFTER)
    health = bench.forwarder.health()
    (failure,) = health.failures
    assert health.up  # the collector's
    assert failure.trouble is Trouble.STUCK
    assert str(failure) == (
        f"Cannot write waiting spans to {bench.folder}: its disk does not respond. "
        "Check the kernel log for disk errors. They wait in memory, and do not outlive "
        "a restart, until it does."
    )
    bench.offer(3)
    assert bench.said == [str(failure)]
    bench.answer()
    eventually(lambda: not bench.forwarder.health().failures, "well again")
    bench.offer()
    assert bench.said[1:] == [f"The disk of {bench.folder} responds again."]


def test_health_has_disk_and_collector_failures(bench: Bench) -> None:
    bench.collector.answers.append(AWAY)
    bench.hang()
    bench.clock.advance(ns=HANG_AFTER)
    bench.forwarder.turn()
    health = bench.forwarder.health()
    assert not health.up
    assert [one.trouble for one in health.failures] == [Trouble.STUCK, Trouble.RETRY]


def test_stop_does_not_wait_for_a_hanging_disk(bench: Bench) -> None:
    bench.offer(2)
    bench.kept()
    bench.hang()
    bench.offer(3)
    bench.clock.advance(ns=HANG_AFTER)
    bench.forwarder.stop(bench.clock.monotonic())
    assert not bench.disk.answers.is_set()
    assert bench.forwarder.stats.drops == {"stopped": 4}
    assert "does not respond and is abandoned" in bench.said[-2]
    assert bench.said[-1].startswith("4 spans still waited at the end, could not be written to ")


def test_slow_disk_has_the_waiting_spans_at_the_end(bench: Bench) -> None:
    bench.hang()
    bench.offer(20)
    stopping = threading.Thread(target=bench.forwarder.stop, args=(bench.clock.monotonic(),))
    stopping.start()
    eventually(lambda: not bench.forwarder.stats.queue_spans, "the end")
    bench.answer()
    stopping.join()
    assert bench.forwarder.stats.drops == {}
    bench.start()
    bench.send()
    assert bench.arrived == [*range(21)]


def test_sent_spans_are_marked_at_the_end_of_a_turn(bench: Bench) -> None:
    bench.offer(5)
    bench.kept()
    bench.collector.answers.extend([TAKEN])
    assert bench.forwarder.turn() is None
    assert bench.forwarder._disk.idle
