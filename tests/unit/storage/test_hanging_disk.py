"""A hanging disk blocks no caller, and receives the newest checkpoint on recovery."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from testbed.known_totals import Books, totals
from testbed.waiting import eventually

from wattspan.config import StoreSettings as Settings
from wattspan.model import SECOND, Checkpoint
from wattspan.ports import StoreError
from wattspan.storage.async_writer import HANG_AFTER, AsyncWriter
from wattspan.storage.store import Store
from wattspan.testing import ManualClock


class Disk:
    """It responds unless it hangs."""

    def __init__(self) -> None:
        self.clock, self.host = ManualClock(), Books()
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Semaphore(0)
        self.written: list[Checkpoint] = []
        self.keeper = AsyncWriter(self._write, self.clock)

    def _write(self, opening: Checkpoint) -> None:
        self.asked.release()
        assert self.answers.wait(60)
        self.written.append(opening)

    def keep(self) -> Checkpoint:
        opening = self.host.spend({1: 1})
        self.keeper.submit_and_wait(opening)
        return opening

    def hang(self) -> Checkpoint:
        """It hangs in a write that has begun."""
        while self.asked.acquire(blocking=False):
            pass
        self.answers.clear()
        opening = self.keep()
        assert self.asked.acquire(timeout=60)
        return opening


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    try:
        yield disk
    finally:
        disk.answers.set()
        assert disk.keeper.close()


def test_submitted_checkpoint_is_written_on_return(disk: Disk) -> None:
    for _ in range(20):
        opening = disk.keep()
        assert disk.written[-1] is opening
    assert len(disk.written) == 20
    assert disk.keeper.overdue() == 0


def test_hanging_disk_is_reported_and_receives_the_newest_checkpoint(disk: Disk) -> None:
    disk.keep()
    first = disk.hang()
    disk.clock.advance(3)
    assert disk.keeper.overdue() == 3 * SECOND
    skipped, newest = disk.keep(), disk.keep()
    assert len(disk.written) == 1
    disk.answers.set()
    eventually(lambda: disk.written[-1] is newest, "written")
    assert disk.written[1] is first
    assert skipped not in disk.written


def test_recovered_disk_is_waited_for_again(disk: Disk) -> None:
    disk.hang()
    disk.clock.advance(1)
    disk.answers.set()
    eventually(lambda: disk.keeper.overdue() == 0, "the slow one is written")
    disk.keep()
    eventually(lambda: len(disk.written) == 2, "a quick one, that nobody waited for")
    opening = disk.keep()
    eventually(lambda: disk.written[-1] is opening, "written")
    for _ in range(10):
        opening = disk.keep()
        assert disk.written[-1] is opening


@pytest.mark.slow
def test_close_writes_pending_data_except_on_a_hanging_disk() -> None:
    disk = Disk()
    disk.hang()
    assert not disk.keeper.close()
    newest = disk.keep()
    disk.answers.set()
    assert disk.keeper.close()
    assert newest not in disk.written  # it came after the end


def test_unused_writer_closes_at_once(disk: Disk) -> None:
    assert disk.keeper.close()


def test_write_error_is_raised_at_the_next_submission() -> None:
    host = Books()

    def write(opening: Checkpoint) -> None:
        raise ValueError("no")

    with closing(AsyncWriter(write, host.clock)) as keeper:
        keeper.submit_and_wait(host.spend({1: 1}))
        with pytest.raises(ValueError, match="no"):
            keeper.submit_and_wait(host.spend({1: 1}))


def test_store_health_reports_a_hanging_disk(disk: Disk, tmp_path: Path) -> None:
    with closing(Store(tmp_path, Settings(), disk.clock)) as kept:
        kept._writer = disk.keeper
        kept.write_latest(disk.host.spend({1: 1}))
        assert kept.health.up
        disk.hang()
        disk.clock.advance(ns=HANG_AFTER)
        health = kept.health
        assert not health.up
        (failure,) = health.failures
        assert str(failure).startswith("Cannot write the store ")
        assert "its disk does not respond. Check the kernel log" in str(failure)
        disk.answers.set()
        eventually(lambda: kept.health.up, "well again")


def test_stored_checkpoint_is_found_after_restart(tmp_path: Path) -> None:
    host = Books()
    with closing(Store(tmp_path, Settings(), host.clock)) as kept:
        for _ in range(3):
            kept.write_latest(host.spend({1: 5}))
        with pytest.raises(StoreError):
            Store(tmp_path, Settings(), host.clock)
    with closing(Store(tmp_path, Settings(), host.clock)) as kept:
        assert totals(kept.previous) == totals(host.now())
