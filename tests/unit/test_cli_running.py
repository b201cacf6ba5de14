"""What the agent's process looks after."""

from __future__ import annotations

import threading
from collections.abc import Callable

from wattspan.service.daemon import report_thread_failures


def run(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="a part")
    thread.start()
    thread.join()


def test_a_thread_that_fails_unexpectedly_is_told_of() -> None:
    told: list[str] = []
    with report_thread_failures(lambda name, error: told.append(f"{name}: {error!r}")):
        run(lambda: [][0])
    assert told == ["a part: IndexError('list index out of range')"]


def test_a_thread_that_ends_or_leaves_is_none() -> None:
    told: list[str] = []

    def leave() -> None:
        raise SystemExit

    with report_thread_failures(lambda name, _: told.append(name)):
        run(lambda: None)
        run(leave)
    assert told == []


def test_who_was_told_of_failures_before_is_told_again_afterwards() -> None:
    before = threading.excepthook
    with report_thread_failures(lambda *_: None):
        assert threading.excepthook is not before
    assert threading.excepthook is before
