"""Threads that run again after an unexpected error."""

from __future__ import annotations

import threading

from wattspan.testing import ManualClock
from wattspan.util.process import (
    FIRST_RESTART,
    LONGEST_RESTART,
    report_failure,
    run_again,
    thread_continues,
)


def delays_of(runs: list[int]) -> list[float]:
    """The delays after failing runs of these seconds."""
    clock, delays, left = ManualClock(), list[float](), list(runs)

    def run(_: threading.Event) -> None:
        if left:
            clock.advance(left.pop(0))
            raise ValueError

    def wait(seconds: float) -> bool:
        delays.append(seconds)
        clock.advance(seconds)
        return False

    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        run_again(run, threading.Event(), wait=wait, monotonic=clock.monotonic)
    finally:
        threading.excepthook = before
    return delays


def test_delay_doubles_up_to_the_longest() -> None:
    delays = delays_of([0] * 8)
    assert delays == [min(FIRST_RESTART * 2**n, LONGEST_RESTART) for n in range(8)]


def test_delay_is_the_first_again_after_a_long_run() -> None:
    assert delays_of([0, 0, 61, 0]) == [1, 2, 1, 2]


def test_stop_during_a_delay_ends_the_runs() -> None:
    runs, told = list[int](), list[bool]()

    def run(_: threading.Event) -> None:
        runs.append(1)
        raise ValueError

    before, threading.excepthook = (
        threading.excepthook,
        lambda _: told.append(thread_continues()),
    )
    try:
        run_again(run, threading.Event(), wait=lambda _: True)
        report_failure(ValueError())
    finally:
        threading.excepthook = before
    assert (runs, told) == ([1], [True, True])
    assert not thread_continues()
