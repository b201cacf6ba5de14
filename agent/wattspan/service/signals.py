"""How SIGTERM and SIGINT end a command: once, in order, from its first line on.

And how SIGHUP has a service read its configuration again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wattspan.clock import SystemClock
from wattspan.model import SECOND

REPEATED_SIGNAL_DELAY = SECOND
"""A further signal ends the program at once, if it comes this much later than the first: what
comes sooner is the same wish twice, as `timeout` and a terminal's process group deliver it."""


class StopRequest:
    """Whether somebody has asked the program to end, or to read its configuration again.

    A command asks between the steps of its start, and names what is to be told once it waits.
    """

    def __init__(self) -> None:
        self.asked = False
        self.reload_asked = False
        self._tell: Callable[[], None] | None = None
        self._tell_reload: Callable[[], None] | None = None

    def tell(self, stop: Callable[[], None], reload: Callable[[], None] | None = None) -> None:
        """Call ``stop`` when somebody asks; at once if somebody has. It may run in a handler.

        So may ``reload``, which is called when the configuration is to be read again.
        """
        self._tell, self._tell_reload = stop, reload
        if self.asked:
            stop()
        if self.reload_asked and reload is not None:
            reload()

    def ask(self) -> None:
        """End the program."""
        self.asked = True
        if self._tell is not None:
            self._tell()

    def ask_reload(self) -> None:
        """Have the configuration read again."""
        self.reload_asked = True
        if self._tell_reload is not None:
            self._tell_reload()

    def take_reload(self) -> bool:
        """Whether it is to be read again; the next time, only if somebody has asked anew."""
        asked, self.reload_asked = self.reload_asked, False
        return asked


def hangup_reloads(*, managed: bool) -> bool:
    """Whether SIGHUP asks for a reload: where there is a service manager, or no terminal to lose.

    On a terminal it says that the terminal has gone, and ends the program as it ever did.
    """
    return managed or not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@contextmanager
def stop_on_signals(*, patiently: bool = False, reload: bool = False) -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT and a lost terminal into a request, while the block runs.

    ``patiently``: a further signal ends nothing, for the program must finish what it does.
    ``reload``: SIGHUP asks for a reload.
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
        elif not patiently and now - asked_at >= REPEATED_SIGNAL_DELAY:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def handle_reload(number: int, frame: object) -> None:
        request.ask_reload()

    handlers: dict[int, Callable[[int, object], None]] = {
        signal.SIGTERM: handle,
        signal.SIGINT: handle,
    }
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it is ignored: let it be
        handlers[signal.SIGHUP] = handle_reload if reload else handle
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
