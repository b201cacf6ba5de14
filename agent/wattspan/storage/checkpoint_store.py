"""What is kept of the books: the store and its history, and the newest of all beside it.

Books whose store cannot be had when the agent begins: somebody has it, or its disk is read-only.

The agent measures meanwhile, with totals that begin at zero. They are never added to those of an
earlier run afterwards: who takes rates of a counter that leaps reads a burst of energy. Its
history lacks nothing.
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
    """Books that outlive the process however it ends. One thread writes, one keeps."""

    def __init__(
        self, store: Store, latest: AlternatingCheckpointFiles, keeper: AsyncWriter[Checkpoint]
    ) -> None:
        """Use :meth:`open`."""
        self._store, self._latest, self._keeper = store, latest, keeper
        self.opening: Checkpoint | None = latest_checkpoint(store.opening(), latest.opening())
        """What a run before this one came to; None if this is the first."""
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
        """As :meth:`Store.open`, which see."""
        store = Store.open(state_dir, settings, clock, emulated=emulated, log=log)
        try:
            latest = AlternatingCheckpointFiles(store.path, log)
            return cls(store, latest, AsyncWriter(latest.write, clock))
        except OSError as error:
            store.close()
            raise StoreError(store_failure(error, store.path, "open")) from None

    def begin_anew(self, since: Checkpoint | None) -> None:
        """Go on from no run before: count from ``since``, or from the beginning of the next books.

        StoreError if that cannot be written.
        """
        self._store.begin_anew()
        if since is not None:
            self._store.resume(since)

    @property
    def health(self) -> SourceHealth:
        """As the store tells it; and whether its disk answers at all."""
        health, overdue = self._store.health, self._keeper.overdue()
        if overdue < HANG_AFTER:
            return health
        hangs = store_hang_failure(self._store.path)
        return replace(health, up=False, failures=(hangs, *health.failures))

    def keep(self, opening: Checkpoint) -> None:
        """Keep the books of a snapshot that is about to be seen. Never raises, cheap.

        A disk that hangs is waited for a moment only; then they are kept once it answers.
        """
        self._keeper.keep(opening)

    def write(self, opening: Checkpoint) -> bool:
        """Add what was spent since the last write to the history."""
        return self._store.write(opening)

    def close(self) -> None:
        if self._keeper.close():
            self._latest.close()
        self._store.close()


class DeferredCheckpointStore:
    """Asks for the store at every write until it is had. One thread writes, one keeps."""

    def __init__(
        self,
        ask: Callable[[], CheckpointStore],
        refusal: StoreError,
        log: Callable[[str], None],
        *,
        closing: Checkpoint | None = None,
    ) -> None:
        """``ask`` opens the store, or raises StoreError; ``refusal`` is why it could not so far.

        ``closing`` are books that this agent goes on from: what they tell is left to who kept them.
        """
        self._ask = ask
        self._log = log
        self._closing = closing
        self._kept: CheckpointStore | None = None
        self._closed = False
        self._first: Checkpoint | None = None
        self._failure, self._failed = _failure(refusal), 1

    opening = None
    """What a run before this one came to is not known."""

    @property
    def health(self) -> SourceHealth:
        kept = self._kept
        if kept is not None:
            return kept.health
        return SourceHealth(STORE_SOURCE, False, 0, self._failed, (self._failure,))

    def keep(self, opening: Checkpoint) -> None:
        """As :meth:`Kept.keep`, once there is a place for it."""
        kept = self._kept
        if kept is not None:
            kept.keep(opening)

    def write(self, opening: Checkpoint) -> bool:
        """As :meth:`Kept.write`; False while there is no store."""
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
        """The store, if it can be had now."""
        kept: CheckpointStore | None = None
        try:
            kept = self._ask()
            # What another agent of this host wrote since this one began is not written twice.
            twice = kept.opening is not None and kept.opening.at.wall >= first.at.wall
            kept.begin_anew(opening if twice else self._closing)
        except StoreError as error:
            self._failure, self._failed = _failure(error), self._failed + 1
            if kept is not None:
                kept.close()
            return None
        since = "from now on" if twice else "since this agent began"
        self._log(f"The store can be had now. Its history tells what is spent {since}.")
        return kept


def _failure(error: StoreError) -> Failure:
    return error.failure or Failure(
        STORE_SOURCE, "the store", Trouble.RETRY, str(error), verb="open"
    )
