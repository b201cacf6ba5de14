"""Restoring without a capper, and responses that count as no capper."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from testbed.capper_bench import BOOT, Bench, W
from testbed.fixtures import entered, short_path

from wattspan.capper.host_directory import CapperHost, HostClaim, HostHeldError, lock_capper
from wattspan.capper.journal import JournalError
from wattspan.capper.process import RestoreContext, accept_foreign_limits, restore_limits
from wattspan.capper.protocol import CapperClient, RefusalReason, RefusedReply
from wattspan.config import Config
from wattspan.ports import CapsError
from wattspan.testing import ManualClock

path = entered(lambda: short_path("capper.sock"))


@pytest.fixture
def left(tmp_path: Path) -> Bench:
    """State left by a capper that was killed while holding 500 W of 650 W."""
    bench = Bench(tmp_path)
    bench.hold(500 * W)
    assert bench.stands == [500 * W, 650 * W]
    return bench


@contextmanager
def refusing(path: Path, reason: RefusalReason) -> Iterator[None]:
    """A listener that refuses the next connection and ends."""

    def refuse() -> None:
        connection, _ = listener.accept()
        with connection:
            refused = RefusedReply(reason=reason, sentence="The capper cannot start.")
            connection.sendall(msgspec.json.encode(refused) + b"\n")
            connection.recv(1)  # until it is read

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=refuse)
        thread.start()
        yield
        thread.join()


def here(
    left: Bench,
    path: Path,
    clock: ManualClock | None = None,
    *,
    host_dir: Path | None = None,
    log: Callable[[str], None] = lambda sentence: None,
) -> RestoreContext:
    clock = clock or ManualClock()
    return RestoreContext(
        lambda: CapperHost(left.folder, BOOT),
        lambda who: CapperClient(path, clock, who=who, timeout=5.0),
        Config(),
        lambda: [left.actuator],
        clock,
        log,
        host_dir=host_dir,
    )


def test_terminating_capper_is_not_waited_for(left: Bench, path: Path) -> None:
    with refusing(path, RefusalReason.ENDING):
        done = restore_limits(here(left, path))
    assert (done.by, done.restored, done.troubles) == ("journal", 1, ())
    assert left.stands == [650 * W, 650 * W]


def test_capper_that_refuses_is_obeyed(left: Bench, path: Path) -> None:
    with refusing(path, RefusalReason.NOT_ALLOWED), pytest.raises(CapsError, match="cannot start"):
        restore_limits(here(left, path))
    assert left.stands == [500 * W, 650 * W]


def test_foreign_limit_is_accepted_with_a_terminating_capper(left: Bench, path: Path) -> None:
    left.board().stands = 600 * W
    left.turn()
    with refusing(path, RefusalReason.ENDING):
        assert accept_foreign_limits(here(left, path)) == 1


def test_terminating_capper_keeps_its_lock(left: Bench, path: Path) -> None:
    ending = lock_capper(CapperHost(left.folder, BOOT))
    clock = ManualClock()
    clock.on_sleep = lambda now: ending.release()
    with refusing(path, RefusalReason.ENDING):
        done = restore_limits(here(left, path, clock))
    assert (done.by, done.restored) == ("journal", 1)


def test_lock_holder_that_does_not_end_is_named(left: Bench, path: Path) -> None:
    hanging = lock_capper(CapperHost(left.folder, BOOT))
    with (
        refusing(path, RefusalReason.ENDING),
        pytest.raises(JournalError, match="is the one capper of this host"),
    ):
        restore_limits(here(left, path))
    hanging.release()
    assert left.stands == [500 * W, 650 * W]


def test_limits_are_not_restored_while_another_agents_capper_serves(
    left: Bench, path: Path, tmp_path: Path
) -> None:
    other = HostClaim(tmp_path / "host")
    with pytest.raises(HostHeldError, match=r"Process \d+ is the capper of this host"):
        restore_limits(here(left, path, host_dir=tmp_path / "host"))
    assert left.stands == [500 * W, 650 * W]
    other.release()
    assert restore_limits(here(left, path, host_dir=tmp_path / "host")).restored == 1


def test_limits_are_restored_without_a_usable_host_directory(
    left: Bench, path: Path, tmp_path: Path
) -> None:
    log = list[str]()
    (tmp_path / "host").touch()
    done = restore_limits(here(left, path, host_dir=tmp_path / "host", log=log.append))
    assert (done.restored, left.stands) == (1, [650 * W, 650 * W])
    assert "without the lock of the host" in log[0]
