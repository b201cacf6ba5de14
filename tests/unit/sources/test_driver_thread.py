"""The thread of a driver: unexpected errors of its session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
from testbed.waiting import eventually

from wattspan.model import MILLISECOND, SECOND, Reading
from wattspan.ports import Batch, PacedSource
from wattspan.service.daemon import report_thread_failures
from wattspan.sources.driver_thread import LEAST_PAUSE, CallGivenUpError, DriverThreadSource
from wattspan.testing import ManualClock


class Intervals(NamedTuple):
    interval: int = MILLISECOND
    longest: int = SECOND
    status_interval: int = SECOND
    deadline: int = 60 * SECOND


class Session:
    """Raises once in the call ``failing``; implements DriverSession."""

    current_call = None

    def __init__(self, clock: ManualClock, failing: str) -> None:
        self.clock, self.failing = clock, failing
        self.samples = self.closed = 0

    def _call(self, name: str) -> None:
        if name == self.failing:
            self.failing = ""
            raise ValueError(f"in {name}")

    def sample(self, interval: int = 0) -> Batch:
        del interval
        self._call("sample")
        self.samples += 1
        return Batch(())

    def next_read(self, now: int) -> int | None:
        self._call("next_read")
        return now

    def read_between(self, now: int) -> Sequence[Reading]:
        self.clock.advance(ns=MILLISECOND)
        self._call("read_between")
        return ()

    def close(self) -> None:
        self.closed += 1


def open_source(
    session: Session, clock: ManualClock, wait: Callable[[float], bool]
) -> DriverThreadSource:
    return DriverThreadSource(
        "boards", session, clock, Intervals(), "a library", "Look", restart_wait=wait
    )


@pytest.fixture(autouse=True)
def reported() -> Iterator[list[str]]:
    told: list[str] = []
    with report_thread_failures(lambda name, *_: told.append(name)):
        yield told


@pytest.mark.parametrize("call", ["sample", "next_read", "read_between"])
def test_failed_calls_are_shown_and_made_again(call: str, reported: list[str]) -> None:
    clock, go_on = ManualClock(), threading.Event()
    session = Session(clock, call)

    def wait(_: float) -> bool:
        assert go_on.wait(60)
        return False

    source = DriverThreadSource(
        "boards", session, clock, Intervals(), "a library", "Look", restart_wait=wait
    )
    source.start()
    (failure,) = eventually(lambda: source.read().failures, "the failure is shown")
    assert failure.cause == f"its thread raised ValueError: in {call}"
    before = session.samples
    go_on.set()
    eventually(lambda: session.samples > before, "the calls are made again")
    eventually(lambda: not source.read().failures, "the failure is over")
    source.close()
    assert (session.closed, reported) == (1, ["wattspan-boards"])


class Paced(Session):
    """Records the interval of each sample; the clock passes by the time that the thread waits."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock, "")
        self.intervals: list[int] = []

    def sample(self, interval: int = 0) -> Batch:
        self.intervals.append(interval)
        return super().sample()

    def next_read(self, now: int) -> None:
        del now


@pytest.mark.parametrize(
    ("asked", "sampled"),
    [(MILLISECOND // 2, 2), (2 * MILLISECOND, 2), (7 * MILLISECOND, 6), (10 * SECOND, 1000)],
)
def test_samples_follow_the_reader_within_the_settings(asked: int, sampled: int) -> None:
    clock = ManualClock()
    session = Paced(clock)
    source = DriverThreadSource(
        "boards", session, clock, Intervals(interval=2 * MILLISECOND), "a library", "Look"
    )
    source.pace(asked)
    source.start()
    eventually(lambda: session.intervals, "the first sample")
    source.close()
    assert session.intervals[0] == sampled * MILLISECOND
    assert isinstance(source, PacedSource)
    assert not source.integrates_power()


def test_shorter_interval_wakes_the_thread_at_once() -> None:
    clock = ManualClock()
    session = Paced(clock)
    source = DriverThreadSource(
        "boards", session, clock, Intervals(longest=3600 * SECOND), "a library", "Look"
    )
    source.pace(3600 * SECOND)
    source.start()
    eventually(lambda: session.samples == 1, "the first sample")
    clock.advance(1)
    source.pace(SECOND)
    eventually(lambda: session.samples == 2, "the second one, an hour before it was due")
    source.close()
    assert session.intervals == [3600 * SECOND, SECOND]


def test_thread_pauses_before_a_read_that_is_always_due() -> None:
    turns: list[int] = []

    class Due(Session):
        def read_between(self, now: int) -> Sequence[Reading]:
            assert self.next_read(now) == now, "the clock of the session stands still"
            turns.append(time.monotonic_ns())
            return ()

    clock = ManualClock()
    source = DriverThreadSource("boards", Due(clock, ""), clock, Intervals(), "a library", "Look")
    source.start()
    eventually(lambda: len(turns) > 20, "some reads")
    source.close()
    assert turns[20] - turns[0] >= 19 * LEAST_PAUSE


def test_session_is_closed_if_the_agent_stops_before_the_restart() -> None:
    clock = ManualClock()
    session = Session(clock, "sample")
    waiting = threading.Event()

    def wait(_: float) -> bool:
        waiting.set()
        return True

    source = DriverThreadSource(
        "boards", session, clock, Intervals(), "a library", "Look", restart_wait=wait
    )
    source.start()
    assert waiting.wait(60)
    source.close()
    assert session.closed == 1


class Isolated(Session):
    """Its first sample hangs; implements HangIsolation."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock, "")
        self.entered, self.returns = threading.Event(), threading.Event()
        self.hung: list[tuple[str, str, int]] = []

    def sample(self, interval: int = 0) -> Batch:
        if not self.entered.is_set():
            self.entered.set()
            assert self.returns.wait(60)
            raise CallGivenUpError("board")
        return super().sample()

    def give_up(self) -> bool:
        gives, self.hung = not self.hung, [("board", "a call", 0)]
        return gives

    def take_back(self, device: str) -> None:
        self.hung.clear()


class Refused(DriverThreadSource):
    """The system refuses its threads for a while."""

    refusals = 0

    def start(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.mark.parametrize("permitted", [True, False])
def test_refused_thread_is_tried_again_by_the_next_read(permitted: bool) -> None:
    clock = ManualClock()
    session = Isolated(clock)
    source = Refused("boards", session, clock, Intervals(), "a library", "Look", isolation=session)
    source.start()
    assert session.entered.wait(60)
    source.refusals = 2 if permitted else 1000
    for _ in range(2):
        assert "TasksMax" in source.read().failures[-1].remedy
    if permitted:
        assert [one.thing for one in source.read().failures] == ["board"]
        eventually(lambda: session.samples, "the other boards are sampled")
    session.returns.set()
    eventually(lambda: not session.hung, "the board is taken back")
    source.close()
    assert session.closed == 1
