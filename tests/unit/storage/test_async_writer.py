"""Several things that are to be kept: in order, the newest version of each, without long waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from testbed.waiting import eventually

from wattspan.storage.async_writer import AsyncWriter
from wattspan.testing import ManualClock


class Disk:
    """It responds unless it hangs."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Semaphore(0)
        self.written: list[str] = []
        self.error: Exception | None = None
        self.keeper = AsyncWriter[str](self._write, self.clock)

    def _write(self, thing: str) -> None:
        self.asked.release()
        assert self.answers.wait(60)
        if self.error is not None:
            raise self.error
        self.written.append(thing)

    def hang(self) -> None:
        """During a write of "first"."""
        self.answers.clear()
        self.keeper.submit("first", "first")
        assert self.asked.acquire(timeout=60)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    try:
        yield disk
    finally:
        disk.answers.set()
        assert disk.keeper.close(60)


def test_things_are_written_in_their_order_and_of_each_the_newest(disk: Disk) -> None:
    disk.hang()
    for thing, key in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("c1", "c")):
        disk.keeper.submit(thing, key)
    disk.answers.set()
    eventually(lambda: disk.keeper.idle, "written")
    assert disk.written == ["first", "a2", "b1", "c1"]


def test_withdrawn_write_is_skipped_unless_started(disk: Disk) -> None:
    disk.hang()
    disk.keeper.submit("a", "a")
    disk.keeper.submit("b", "b")
    disk.keeper.cancel("a")
    disk.keeper.cancel("first")
    disk.keeper.cancel("never heard of")
    disk.answers.set()
    eventually(lambda: disk.keeper.idle, "written")
    assert disk.written == ["first", "b"]


def test_resubmission_during_a_write_is_written_again(disk: Disk) -> None:
    disk.hang()
    disk.keeper.submit("second", "first")
    disk.answers.set()
    eventually(lambda: disk.keeper.idle, "written")
    assert disk.written == ["first", "second"]


def test_wait_covers_the_named_and_the_running_write(disk: Disk) -> None:
    disk.keeper.submit("a", "a")
    disk.keeper.submit("b", "b")
    disk.keeper.wait(["a", "b"])
    assert disk.written == ["a", "b"]
    disk.hang()
    disk.keeper.wait(["a", "b"])  # which wait for nothing
    waiting = threading.Thread(target=disk.keeper.wait, args=(["first"],), daemon=True)
    waiting.start()
    disk.answers.set()
    waiting.join(60)
    assert disk.written == ["a", "b", "first"]


def test_overdue_write_is_not_waited_for(disk: Disk) -> None:
    disk.hang()
    disk.clock.advance(1)
    disk.keeper.wait(["first"])
    assert disk.written == []


def test_close_writes_pending_items_and_rejects_new_ones(disk: Disk) -> None:
    disk.hang()
    disk.keeper.submit("a", "a")
    disk.keeper.submit("b", "b")
    disk.answers.set()
    assert disk.keeper.close(60)
    disk.keeper.submit("c", "c")
    assert disk.written == ["first", "a", "b"]
    assert disk.keeper.idle


def test_error_of_a_write_is_raised_once_and_blocks_no_later_write(disk: Disk) -> None:
    disk.error = ValueError("no disk of mine")
    disk.keeper.submit("a", "a")
    eventually(lambda: disk.keeper.idle, "the write has failed")
    disk.error = None
    with pytest.raises(ValueError, match="no disk of mine"):
        disk.keeper.submit("b", "b")
    disk.keeper.submit("c", "c")
    eventually(lambda: disk.keeper.idle, "written")
    assert disk.written == ["b", "c"]
