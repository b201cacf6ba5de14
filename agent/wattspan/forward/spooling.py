"""The thread that writes the spool: nobody else waits for its disk, which may not answer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

from wattspan.collector.signals import SPANS
from wattspan.forward.spool import Spool
from wattspan.forward.waiting import Parcel, Record
from wattspan.model import Failure
from wattspan.ports import Clock
from wattspan.storage.async_writer import (
    CLOSE_TIMEOUT_SECONDS,
    HANG_AFTER,
    AsyncWriter,
    hang_failure,
)

LONG_FAREWELL = 5.0
"""Seconds for what is still to be written at the end, by a disk that does answer, and durably."""


class Spooling:
    """A disk as ``waiting`` wants it: it tells what became of the newest state of each parcel."""

    def __init__(
        self,
        spool: Spool,
        clock: Clock,
        lock: AbstractContextManager[object],
        log: Callable[[str], None],
    ) -> None:
        """``lock`` is that under which parcels change."""
        self._spool = spool
        self._lock = lock
        self._log = log
        self._said = False
        self._keeper = AsyncWriter[Callable[[], None]](operator.call, clock, name="wattspan-spool")

    def restored(self) -> Iterable[Record]:
        return self._spool.restored()

    def keep(self, parcel: Parcel, kept: Callable[[Parcel, Record], None]) -> None:
        self._keeper.hand_over(partial(self._write, parcel, kept), parcel)

    def spare(self, parcel: Parcel) -> None:
        self._keeper.take_back(parcel)

    def wait(self, parcels: Iterable[Parcel]) -> None:
        """Until the disk knows of these what was told of them, but a moment at most."""
        self._keeper.wait(parcels)

    @property
    def idle(self) -> bool:
        """Whether the disk knows of all that was told of parcels, as far as it can."""
        return self._keeper.idle

    @property
    def failure(self) -> Failure | None:
        """What there is to tell of a disk that does not answer."""
        if self._keeper.overdue() < HANG_AFTER:
            return None
        return hang_failure(
            SPANS.name,
            f"waiting spans to {self._spool.folder}",
            "They wait in memory, and do not outlive a restart, until it does.",
        )

    def look(self) -> None:
        """Log when the disk no longer answers, and when it does again."""
        failure = self.failure
        if (failure is not None) != self._said:
            self._said = failure is not None
            answers = f"The disk of {self._spool.folder} answers again."
            self._log(str(failure) if failure is not None else answers)

    def close(self) -> None:
        """Write what is still to be written, and force it to the disk, if that answers in time."""
        self._keeper.hand_over(self._spool.close)
        if not self._keeper.close(LONG_FAREWELL if self.failure is None else CLOSE_TIMEOUT_SECONDS):
            self._log(
                f"The disk of {self._spool.folder} does not answer and is left behind: what was "
                "sent in the end may be sent again."
            )

    def ended(self, lost: int) -> None:
        """So many spans are not on disk after all."""
        if lost:
            self._log(
                f"{lost} spans still waited at the end, could not be written to "
                f"{self._spool.folder}, and are dropped."
            )

    def _write(self, parcel: Parcel, kept: Callable[[Parcel, Record], None]) -> None:
        with self._lock:
            body, record, settled = parcel.body, parcel.record, parcel.settled
        if record is None:
            if body is None or settled == parcel.spans:
                return
            record = self._spool.keep(body, parcel.spans, settled)
            if record is None:
                return
            with self._lock:
                kept(parcel, record)
                settled = parcel.settled  # which may have gone on since it was begun to be written
        if record.settled != settled:
            record.settle(settled)
