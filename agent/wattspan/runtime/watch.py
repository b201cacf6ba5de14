"""How each source is doing: the one place where a broken source is caught and counted."""

from __future__ import annotations

from wattspan.model import SECOND, Failure, SourceHealth, Trouble
from wattspan.ports import Batch, Clock, CounterSource

QUIET = 5 * SECOND
"""A source that yielded no reading for longer is down, whatever it says."""


class WatchedSource:
    """A counter source whose every turn is timed, counted and survived."""

    def __init__(self, source: CounterSource, clock: Clock) -> None:
        self.source = source
        self._clock = clock
        self._reads = 0
        self._failed = 0
        self._failures: tuple[Failure, ...] = ()
        self._last_reading: int | None = None
        self._took = 0
        self._batch = Batch(domains=())

    def read(self) -> Batch:
        """One turn. What the source raises becomes a failure of the source as a whole."""
        before = self._clock.monotonic()
        try:
            batch = self.source.read()
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not stop the others
            failure = Failure(
                self.source.name,
                f"source {self.source.name!r}",
                Trouble.MALFORMED,
                f"it raised {type(error).__name__}: {error}",
                "This is a bug in the source; its energy counts as a gap meanwhile.",
            )
            batch = Batch(domains=self._batch.domains, failures=(failure,))
        self._took = self._clock.monotonic() - before
        self._reads += 1
        self._failed += len(batch.failures)
        self._failures = batch.failures
        if batch.readings:
            self._last_reading = batch.readings[-1].at.mono
        self._batch = batch
        return batch

    def health(self) -> SourceHealth:
        """Whether it is up, and what fails."""
        up = (
            self._last_reading is not None and self._clock.monotonic() - self._last_reading <= QUIET
        )
        return SourceHealth(
            self.source.name, up, self._reads, self._failed, self._failures, self._took
        )
