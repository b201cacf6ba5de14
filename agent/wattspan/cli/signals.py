"""How SIGTERM and SIGINT end a command: once, in order, from its first line on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wattspan.clock import SystemClock
from wattspan.model import SECOND

IMPATIENCE = SECOND
"""A further signal ends the program at once, if it comes this much later than the first: what
comes sooner is the same wish twice, as `timeout` and a terminal's process group deliver it."""


class StopRequest:
    """Whether somebody has asked the program to end.

    A command asks between the steps of its start, and names what is to be told once it waits.
    """

    def __init__(self) -> None:
        self.asked = False
        self._tell: Callable[[], None] | None = None

    def tell(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` when somebody asks; at once if somebody has. It may run in a handler."""
        self._tell = stop
        if self.asked:
            stop()

    def ask(self) -> None:
        """End the program."""
        self.asked = True
        if self._tell is not None:
            self._tell()


@contextmanager
def stop_on_signals(*, patiently: bool = False) -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT and a lost terminal into a request, while the block runs.

    ``patiently``: a further signal ends nothing, for the program must finish what it does.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    clock = SystemClock()
    asked_at: int | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal asked_at
        now = clock.monotonic()
        if asked_at is None:
            asked_at = now
            request.ask()
        elif not patiently and now - asked_at >= IMPATIENCE:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it is ignored: let it be
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
