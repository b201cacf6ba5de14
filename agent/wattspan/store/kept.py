"""What is kept of the books: the store and its history, and the newest of all beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wattspan.config import Store as StoreSettings
from wattspan.model import Opening, SourceHealth
from wattspan.ports import Clock, StoreError
from wattspan.store.faults import failure
from wattspan.store.latest import Latest, furthest
from wattspan.store.store import Store


class Kept:
    """Books that outlive the process however it ends. One thread writes, one keeps."""

    def __init__(self, store: Store, latest: Latest) -> None:
        """Use :meth:`open`."""
        self._store, self._latest = store, latest
        self.opening: Opening | None = furthest(store.opening(), latest.opening())
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
    ) -> Kept:
        """As :meth:`Store.open`, which see."""
        store = Store.open(state_dir, settings, clock, emulated=emulated, log=log)
        try:
            return cls(store, Latest(store.path, log))
        except OSError as error:
            store.close()
            raise StoreError(str(failure(error, store.path, "open"))) from None

    @property
    def health(self) -> SourceHealth:
        return self._store.health

    def keep(self, opening: Opening) -> None:
        """Keep the books of a snapshot that is about to be seen. Never raises, cheap."""
        self._latest.write(opening)

    def write(self, opening: Opening) -> bool:
        """Add what was spent since the last write to the history."""
        return self._store.write(opening)

    def close(self) -> None:
        self._latest.close()
        self._store.close()
