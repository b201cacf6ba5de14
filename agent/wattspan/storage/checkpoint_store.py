"""Stores of checkpoints: the database with its history, and the files of the newest checkpoint.

`DeferredCheckpointStore` handles a store that is not available at the start of the agent, because
another process holds it or its disk is read-only. The agent then counts from zero and never adds
the totals of an earlier run later: a jump of a counter would look like a burst of energy. The
history is complete in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wattspan.config import StoreSettings as StoreSettings
from wattspan.model import Checkpoint, Failure, SourceHealth, Trouble
from wattspan.ports import Clock, StoreError
from wattspan.storage.async_writer import HANG_AFTER, AsyncWriter
from wattspan.storage.checkpoints import AlternatingCheckpointFiles, latest_checkpoint
from wattspan.storage.database import STORE_SOURCE, store_failure, store_hang_failure
from wattspan.storage.store import Store


class CheckpointStore:
    """Checkpoints that survive any end of the process.

    One thread calls `write`, another thread calls `keep`.
    """

    def __init__(
        self, store: Store, latest: AlternatingCheckpointFiles, keeper: AsyncWriter[Checkpoint]
    ) -> None:
        """Use :meth:`open`."""
        self._store, self._latest, self._keeper = store, latest, keeper
        self.opening: Checkpoint | None = latest_checkpoint(store.opening(), latest.opening())
        """The last checkpoint of the previous run; None in the first run."""
        if self.opening is not None:
            store.resume(self.opening)

    @classmethod
    def open(
        cls,
        state_dir: Path,
        settings: StoreSettings,
        clock: Clock,
        *,
        emulated: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> CheckpointStore:
        """Open or create the store in ``state_dir``; see :meth:`Store.open`."""
        store = Store.open(state_dir, settings, clock, emulated=emulated, log=log)
        try:
            latest = AlternatingCheckpointFiles(store.path, log)
            return cls(store, latest, AsyncWriter(latest.write, clock))
        except OSError as error:
            store.close()
            raise StoreError(store_failure(error, store.path, "open")) from None

    def begin_anew(self, since: Checkpoint | None) -> None:
        """Ignore earlier runs: count from ``since``, or from the next checkpoint.

        StoreError if the write fails.
        """
        self._store.begin_anew()
        if since is not None:
            self._store.resume(since)

    @property
    def health(self) -> SourceHealth:
        """Health of the store, with a failure if its disk hangs."""
        health, overdue = self._store.health, self._keeper.overdue()
        if overdue < HANG_AFTER:
            return health
        hangs = store_hang_failure(self._store.path)
        return replace(health, up=False, failures=(hangs, *health.failures))

    def keep(self, opening: Checkpoint) -> None:
        """Write the checkpoint of a snapshot before its publication. Never raises.

        The call waits for a hanging disk only shortly; the write completes later.
        """
        self._keeper.keep(opening)

    def write(self, opening: Checkpoint) -> bool:
        """Add the energy since the last write to the history; see :meth:`Store.write`."""
        return self._store.write(opening)

    def close(self) -> None:
        if self._keeper.close():
            self._latest.close()
        self._store.close()


class DeferredCheckpointStore:
    """Tries to open the store at every write until that succeeds."""

    def __init__(
        self,
        ask: Callable[[], CheckpointStore],
        refusal: StoreError,
        log: Callable[[str], None],
        *,
        closing: Checkpoint | None = None,
    ) -> None:
        """``ask`` opens the store or raises StoreError; ``refusal`` is the first such error.

        ``closing`` is a checkpoint from which this agent continues; its energy is not written
        again.
        """
        self._ask = ask
        self._log = log
        self._closing = closing
        self._kept: CheckpointStore | None = None
        self._closed = False
        self._first: Checkpoint | None = None
        self._failure, self._failed = _failure(refusal), 1

    opening = None
    """The last checkpoint of the previous run: unknown without the store."""

    @property
    def health(self) -> SourceHealth:
        kept = self._kept
        if kept is not None:
            return kept.health
        return SourceHealth(STORE_SOURCE, False, 0, self._failed, (self._failure,))

    def keep(self, opening: Checkpoint) -> None:
        """Write the checkpoint once the store is open; see :meth:`CheckpointStore.keep`."""
        kept = self._kept
        if kept is not None:
            kept.keep(opening)

    def write(self, opening: Checkpoint) -> bool:
        """Write to the history; False until the store is open."""
        if self._first is None:
            self._first = opening
        if self._kept is None and not self._closed:
            self._kept = self._had(opening, self._first)
        return self._kept is not None and self._kept.write(opening)

    def close(self) -> None:
        self._closed = True
        if self._kept is not None:
            self._kept.close()

    def _had(self, opening: Checkpoint, first: Checkpoint) -> CheckpointStore | None:
        """Return the store if it opens now."""
        kept: CheckpointStore | None = None
        try:
            kept = self._ask()
            # Energy that another agent of this host wrote meanwhile must not be written again.
            twice = kept.opening is not None and kept.opening.at.wall >= first.at.wall
            kept.begin_anew(opening if twice else self._closing)
        except StoreError as error:
            self._failure, self._failed = _failure(error), self._failed + 1
            if kept is not None:
                kept.close()
            return None
        since = "from now on" if twice else "since this agent began"
        self._log(f"The store is open now. Its history covers the time {since}.")
        return kept


def _failure(error: StoreError) -> Failure:
    return error.failure or Failure(
        STORE_SOURCE, "the store", Trouble.RETRY, str(error), verb="open"
    )
