"""A lease of fixed limits for the run of one command, renewed by a thread of its own.

The capper restores the original limits however the holder ends: with the block, by the end of the
connection if the process is killed, and by the end of the lease if it hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

from wattspan.model import SECOND, CapKey, CapRow
from wattspan.ports import Caps, CapsError

RENEWAL_INTERVAL: Final = SECOND
"""Between two renewals; the shortest lease that can be configured lasts for a second more."""

STEP_INTERVAL: Final = SECOND // 10
"""Between two steps down: the capper limits the size of one."""

MAX_STEPS: Final = 100
"""Steps after which a limit that is not reached is accepted as it is: the device's floor."""


class FixedLease:
    """Holds ``caps`` while the block runs. CapsError at its start if they are refused.

    ``lost`` tells in a sentence why they stopped being in force, "" while they are.
    """

    def __init__(
        self, connect: Callable[[], Caps], job: str, caps: Mapping[CapKey, int], why: str
    ) -> None:
        """``connect`` is called in the thread that renews: a client belongs to one thread."""
        self._connect, self._job, self._caps, self._why = connect, job, dict(caps), why
        self._started, self._ended = threading.Event(), threading.Event()
        self._refused: CapsError | None = None
        self._lost = ""
        self._rows: Mapping[CapKey, CapRow] = {}
        self._thread = threading.Thread(target=self._run, name="wattspan-lease", daemon=True)

    @property
    def lost(self) -> str:
        return self._lost

    @property
    def rows(self) -> Mapping[CapKey, CapRow]:
        """The held knobs as last read."""
        return self._rows

    def __enter__(self) -> FixedLease:
        self._thread.start()
        self._started.wait()
        if self._refused is not None:
            self._thread.join()
            raise self._refused
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    # --------------------------------------------------------------------------- inner workings

    def _run(self) -> None:
        caps: Caps | None = None
        try:
            caps = self._connect()
            self._lower(caps)
        except CapsError as error:
            self._refused = error
        except Exception as error:  # noqa: BLE001 - the caps may not be in force: a refusal
            self._refused = CapsError(_unexpected(error))
        finally:
            self._started.set()
        try:
            if caps is not None and self._refused is None:
                self._renew(caps)
        finally:
            if caps is not None:
                caps.close()

    def _lower(self, caps: Caps) -> None:
        """Hold the caps, and repeat it until every limit is in force or moves no further."""
        before: dict[CapKey, int | None] = {}
        for _ in range(MAX_STEPS):
            self._read(caps.hold(self._job, self._caps, self._why))
            reached = {key: self._rows[key].state.requested for key in self._caps}
            if reached == before or all(
                self._rows[key].reaches(value) for key, value in self._caps.items()
            ):
                return
            before = reached
            if self._ended.wait(STEP_INTERVAL / SECOND):
                return

    def _renew(self, caps: Caps) -> None:
        try:
            while not self._ended.wait(RENEWAL_INTERVAL / SECOND):
                self._read(caps.rows(renew=True))
                for key in self._caps:
                    row = self._rows.get(key)
                    if row is None or row.wanted is None or row.holder != self._job:
                        name = key.device if row is None else row.state.name
                        cause = "" if row is None or not row.trouble else f" {row.trouble}"
                        self._lost = f"The limit of {name} is not held any more.{cause}"
                        return
            caps.release(self._job)
        except CapsError as error:  # the capper has ended, and restored the limits
            self._lost = str(error)
        except Exception as error:  # noqa: BLE001 - nobody renews the lease any more
            self._lost = _unexpected(error)

    def _read(self, rows: tuple[CapRow, ...]) -> None:
        self._rows = {row.state.key: row for row in rows if row.state.key in self._caps}


def _unexpected(error: Exception) -> str:
    return (
        f"The fixed limits cannot be held: {type(error).__name__}: {str(error)[:200]}. "
        "This is a bug; report it. The capper restores the original limits."
    )
