"""Asks the capper regularly whether it answers, for as long as caps are wanted.

Where systemd listens for the capper and starts it at the first connection, this connection starts
it: fixed caps and a budget have no other client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from wattspan.model import SECOND, Failure, SourceHealth, Trouble
from wattspan.ports import SUSPENDED, Caps, CapsError

HEALTH_INTERVAL = 5 * SECOND
CAPPER = "capper"
CAPPER_LABEL = "the capper"


@dataclass(slots=True)
class CapperHealth:
    """Started and stopped as a part of the agent."""

    open: Callable[[], Caps]
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _asked: int = 0
    _failed: int = 0
    _error: CapsError | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="wattspan-capper-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def turn(self, caps: Caps) -> None:
        """Ask once."""
        self._error = None
        try:
            caps.rows()
            if caps.totals.suspended:
                self._error = CapsError(SUSPENDED, "suspended")
        except CapsError as error:
            self._error = error
        self._failed += self._error is not None
        self._asked += 1

    def health(self) -> tuple[SourceHealth, ...]:
        """The last answer; nothing before the first. Safe from any thread."""
        asked, failed, error = self._asked, self._failed, self._error
        if not asked:
            return ()
        if error is None:
            return (SourceHealth(CAPPER, True, asked, failed),)
        trouble = Trouble.DENIED if error.refusal else Trouble.ABSENT
        failure = Failure(
            CAPPER, CAPPER_LABEL, trouble, f"caps are wanted. {error}".rstrip("."), verb="use"
        )
        return (SourceHealth(CAPPER, False, asked, failed, (failure,)),)

    def _run(self) -> None:
        caps = self.open()
        try:
            self.turn(caps)
            while not self._stop.wait(HEALTH_INTERVAL / SECOND):
                self.turn(caps)
        finally:
            caps.close()
