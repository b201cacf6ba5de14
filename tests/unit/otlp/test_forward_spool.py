"""Waiting spans on disk: restarts, torn tails, full disks."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.forwarding import kill, names_in, request
from testbed.waiting import eventually

from wattspan.otlp.queue import AsyncSpool, QueuedRequest, RequestQueue
from wattspan.otlp.spool import Spool, SpoolSegment
from wattspan.testing import ManualClock

LIMIT = 1 << 20


class Bench:
    """A queue on a disk, opened as often as an agent is."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self.said: list[str] = []
        self.dropped: list[int] = []
        self.lock = threading.RLock()
        self.start()

    def start(self) -> None:
        self.spool = Spool(self.folder, self.limit, self.said.append)
        self.disk = AsyncSpool(self.spool, ManualClock(), self.lock, self.said.append)
        self.queue = RequestQueue(self.limit, self.disk, dropped=self.dropped.append)

    def add(self, body: bytes, spans: int) -> None:
        """Until it is written, if the disk works."""
        with self.lock:
            self.queue.add(body, spans)
        self.written()

    def written(self) -> None:
        eventually(lambda: self.disk.idle, "written")

    def crash(self) -> None:
        """The process ends; its files remain."""
        kill(self.disk)

    def end(self) -> int:
        """The agent stops: the spans that are lost."""
        with self.lock:
            unkept = self.queue.leave()
        self.disk.close()
        return sum(parcel.left for parcel in unkept if parcel.record is None)

    def send(self, count: int = 1) -> list[bytes | None]:
        with self.lock:
            parcels: list[QueuedRequest] = self.queue.take(count, 1 << 30)
        bodies = [parcel.read() for parcel in parcels]
        with self.lock:
            self.queue.settle()
        self.written()
        return bodies

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.spans"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "forward")
    yield bench
    bench.end()


def test_waiting_spans_return_in_order_after_a_restart(bench: Bench):
    for number in range(5):
        bench.add(b"%d" % number, 2)
    assert bench.end() == 0
    bench.start()
    assert bench.queue.spans == 10
    assert bench.send(9) == [b"0", b"1", b"2", b"3", b"4"]


def test_waiting_spans_return_after_a_crash(bench: Bench):
    bench.add(b"a", 1)
    bench.add(b"b", 2)
    bench.crash()
    bench.start()
    assert bench.send(9) == [b"a", b"b"]


def test_sent_spans_do_not_return(bench: Bench):
    for number in range(4):
        bench.add(b"%d" % number, 1)
    bench.send(2)
    bench.crash()
    bench.start()
    assert bench.send(9) == [b"2", b"3"]


def test_spool_is_empty_after_sending(bench: Bench):
    for number in range(100):
        bench.add(os.urandom(5000), 1 + number)
    bench.send(100)
    assert sum(path.stat().st_size for path in bench.files) == 0
    bench.end()
    assert bench.files == []


def test_segments_are_removed_once_sent(bench: Bench):
    for _ in range(40):
        bench.add(os.urandom(20_000), 1)
    before = len(bench.files)
    bench.send(20)
    assert before > 8
    assert len(bench.files) <= before / 2 + 1


def test_full_queue_drops_its_oldest_on_disk_as_well(bench: Bench):
    for number in range(5):
        bench.add(bytes([number]) * 300_000, 1)
    assert bench.dropped == [1, 1]
    bench.crash()
    bench.start()
    assert [body and body[0] for body in bench.send(9)] == [2, 3, 4]


def test_smaller_queue_after_a_restart_keeps_the_newest(bench: Bench):
    for number in range(3):
        bench.add(bytes([number]) * 300_000, 1)
    bench.end()
    bench.limit = 400_000
    bench.start()
    assert bench.dropped == [1, 1]
    assert [body and body[0] for body in bench.send(9)] == [2]


@pytest.mark.parametrize("cut", [1, 10, 23, 24, 30])
def test_torn_record_loses_only_itself(bench: Bench, cut: int):
    bench.add(b"whole", 1)
    bench.add(b"sixteen bytes...", 1)
    bench.crash()
    (path,) = bench.files
    os.truncate(path, path.stat().st_size - cut)
    bench.start()
    assert bench.send(9) == [b"whole"]
    assert "damaged" in bench.said[0]


def test_damaged_record_is_not_sent(bench: Bench):
    bench.add(b"first", 1)
    bench.add(b"second", 1)
    bench.crash()
    (path,) = bench.files
    content = bytearray(path.read_bytes())
    content[content.index(b"first")] ^= 1
    path.write_bytes(content)
    bench.start()
    assert bench.send(9) == [None, b"second"]


def test_foreign_files_are_unchanged(bench: Bench):
    bench.end()
    (bench.folder / "notes.spans").write_text("mine")
    (bench.folder / "7.spans").write_bytes(b"no spans at all, but of our name")
    bench.start()
    bench.add(b"a", 1)
    assert (bench.folder / "notes.spans").read_text() == "mine"
    assert bench.send(9) == [b"a"]


def test_spool_files_are_private(bench: Bench):
    bench.add(b"a", 1)
    assert stat.S_IMODE(bench.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in bench.files} == {0o600}


def test_two_agents_do_not_share_a_spool(bench: Bench, tmp_path: Path):
    bench.add(b"a", 1)
    other = Bench(tmp_path / "forward")
    assert "another agent uses it" in other.said[0]
    other.add(b"b", 1)
    assert other.send(9) == [b"b"]
    other.end()
    assert bench.send(9) == [b"a"]


def test_spans_wait_in_memory_without_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    bench = Bench(tmp_path / "file" / "forward")
    assert "They wait in memory" in bench.said[0]
    bench.add(b"a", 1)
    assert bench.send() == [b"a"]
    bench.end()


def test_settled_spans_of_a_request_do_not_return(bench: Bench):
    body = request("a", "b", "c").SerializeToString()
    bench.add(body, 3)
    with bench.lock:
        bench.queue.take(1, 1)
        bench.queue.settle_some(2)
    bench.crash()
    bench.start()
    assert bench.queue.spans == 1
    assert names_in(filter(None, bench.send())) == ["c"]


class FullDisk(SpoolSegment):
    full = False

    def _write(self, offset: int, content: bytes) -> None:
        if FullDisk.full:
            super()._write(offset, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        super()._write(offset, content)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> type[FullDisk]:
    monkeypatch.setattr("wattspan.otlp.spool.SpoolSegment", FullDisk)
    FullDisk.full = False
    return FullDisk


def test_full_disk_is_logged_once_and_keeps_order(bench: Bench, full_disk: type[FullDisk]):
    bench.add(b"0", 1)
    full_disk.full = True
    bench.add(b"1", 1)
    bench.add(b"2", 1)
    full_disk.full = False
    bench.add(b"3", 1)
    assert len(bench.said) == 1
    assert "no space left on device" in bench.said[0]
    assert bench.send(9) == [b"0", b"1", b"2", b"3"]


def test_unwritten_spans_are_written_at_the_end(bench: Bench, full_disk: type[FullDisk]):
    bench.add(b"0", 1)
    full_disk.full = True
    bench.add(b"1", 1)
    full_disk.full = False
    assert bench.end() == 0
    bench.start()
    assert bench.send(9) == [b"0", b"1"]


def test_spans_lost_to_a_full_disk_are_logged_at_the_end(bench: Bench, full_disk: type[FullDisk]):
    full_disk.full = True
    bench.add(b"1", 5)
    assert bench.end() == 5


def test_many_restarts_hold_few_files_open(bench: Bench):
    for number in range(20):
        bench.add(b"%d" % number, 1)
        bench.end()
        bench.start()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    bench.add(b"last", 1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 1
    assert bench.queue.spans == 21
    assert len(bench.send(99)) == 21
