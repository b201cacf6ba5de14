"""Whether a capper answers and does what it is asked to, for as long as caps are wanted.

Where a service manager listens for the capper and starts it when somebody knocks, this knock is
what starts it: fixed caps and a budget need nobody else who asks.
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
_SUSPENDED = CapsError(SUSPENDED, "suspended")


@dataclass(slots=True)
class CapperHealth:
    """Asks the capper now and then; started and stopped as a part of the agent."""

    open: Callable[[], Caps]
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _asked: int = 0
    _failed: int = 0
    _refusal: CapsError | None = None

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self.run, args=(self._stop,), name="wattspan-capper-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def run(self, stop: threading.Event) -> None:
        """Ask until ``stop``."""
        caps = self.open()
        try:
            self.turn(caps)
            while not stop.wait(HEALTH_INTERVAL / SECOND):
                self.turn(caps)
        finally:
            caps.close()

    def turn(self, caps: Caps) -> None:
        """Ask once."""
        try:
            caps.rows()
            self._refusal = _SUSPENDED if caps.totals.suspended else None
        except CapsError as error:
            self._refusal = error
        self._failed += self._refusal is not None
        self._asked += 1

    def health(self) -> tuple[SourceHealth, ...]:
        """How the capper is doing, once it was asked. Safe from any thread."""
        asked, failed, refusal = self._asked, self._failed, self._refusal
        if not asked:
            return ()
        if refusal is None:
            return (SourceHealth(CAPPER, True, asked, failed),)
        trouble = Trouble.DENIED if refusal.refusal else Trouble.ABSENT
        failure = Failure(
            CAPPER, CAPPER_LABEL, trouble, f"caps are wanted. {refusal}".rstrip("."), verb="use"
        )
        return (SourceHealth(CAPPER, False, asked, failed, (failure,)),)
