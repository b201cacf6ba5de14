"""Pages of serving engines for tracked jobs: from the scrapers' threads to the tuner's.

A tracked job has its load and its latencies from announced spans or else from its engine's page
(:mod:`wattspan.tuning.decisions.engine_load`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from wattspan.config import ServingEngineSettings, TunedJobSettings
from wattspan.inference.engine_metrics import EngineReading
from wattspan.inference.latency_histograms import LatencyPage
from wattspan.model import SECOND, Consumer
from wattspan.model.settings import Duration
from wattspan.tuning.decisions.engine_load import (
    EngineLoad,
    EnginePageRead,
    EngineProgress,
    in_flight,
)
from wattspan.tuning.decisions.load import LoadSample
from wattspan.tuning.decisions.load_cells import LatencyObjective, RequestTimes
from wattspan.tuning.decisions.values import EnergyPoint

_SLACK = 5 * SECOND
"""Time that a page may be late; one may fail if the next one comes within this time, too."""

SEVERAL_OWNERS = (
    "the processes of its engine have several owners, and the kernel does not show which of them "
    "listens: name the unit, container or pid of one in `process`"
)


class EnginePages:
    """The newest page of each engine of a tracked job.

    A scraper's thread offers its pages, the tuner's reads them.
    """

    def __init__(self, engines: Collection[str]) -> None:
        self._newest: dict[str, EnginePageRead | None] = dict.fromkeys(engines)

    def __contains__(self, engine: str) -> bool:
        return engine in self._newest

    def offer(
        self,
        settings: ServingEngineSettings,
        at: int,
        reading: EngineReading,
        latencies: LatencyPage,
        listener: Consumer | None,
        processes: Sequence[Consumer],
    ) -> None:
        """Keep a page of an engine in the list that was read at ``at``."""
        self._newest[settings.label] = EnginePageRead(
            settings.label, settings.interval, at, reading, latencies, tuple(processes), listener
        )

    def newest(self) -> list[EnginePageRead]:
        return [one for one in self._newest.values() if one is not None]


class TrackedWork(NamedTuple):
    """The load and the ended requests of a tracked job since the last time.

    ``sample`` is None without news. ``generated`` is as in an observation. ``cause`` is a clause
    why nothing is known, ``note`` one on the source; both are "" for announced spans.
    """

    sample: LoadSample | None
    requests: list[RequestTimes]
    generated: tuple[EnergyPoint, ...] | None = None
    cause: str = ""
    note: str = ""


class EngineRequests:
    """The load and the requests of one job, from the page of its engine."""

    def __init__(self, settings: TunedJobSettings) -> None:
        self._settings = settings
        self._load = EngineLoad([LatencyObjective(*one[1:]) for one in settings.objectives])
        self._waiting: list[EngineProgress] = []
        self.interval = 0  # of the pages
        self._declined = ""  # why the newest page does not count
        self._known = 0  # until when the pages continue one another

    @property
    def in_flight(self) -> float:
        page = self._load.last
        return 0.0 if page is None else in_flight(page) or 0.0

    def add(self, page: EnginePageRead) -> None:
        """Add the next page."""
        self.interval = page.interval
        self._declined = ""
        begins = self._load.last is None
        found = self._load.add(page)
        if found is not None:
            self._waiting.append(found)
        if begins or found is not None:
            self._known = page.at

    def decline(self, cause: str) -> None:
        """Ignore the next page for a cause, a clause, and begin anew with the one after it."""
        self.forget()
        self._declined = cause

    def discard(self) -> None:
        """Ignore the work up to the last page."""
        self._waiting.clear()

    def forget(self) -> None:
        """Ignore the work up to the next page."""
        self._load.forget()
        self.discard()

    def read(self, now: int) -> TrackedWork:
        """The oldest work between two pages that was not read yet."""
        page = self._load.last
        cause = self._declined or self._load.missing
        late = 0 if page is None else now - page.at
        if page is None:
            cause = cause or "the page of its engine was not read yet"
        elif late > self.interval + min(self.interval, _SLACK) + _SLACK:
            cause = f"the page of its engine was not read for {late // SECOND} s"
        elif now - self._known > 2 * self.interval + _SLACK and not cause:
            cause = "the counters on the pages of its engine do not continue one another"
        elif self._settings.classes and not cause:
            cause = "the page of its engine does not tell the lengths of requests: remove `classes`"
        if not self._waiting:
            return TrackedWork(None, [], (), cause, self._note)
        found = self._waiting.pop(0)
        return TrackedWork(*found, cause, self._note)

    @property
    def _note(self) -> str:
        stand_ins = [
            f"{Duration(bound)} for {one.name}"
            for one, bound in zip(self._settings.objectives, self._load.bounds, strict=True)
            if bound is not None and bound != one.limit
        ]
        limits = f", whose next lower bounds count: {', '.join(stand_ins)}" if stand_ins else ""
        return f"from the page of its engine{limits}"
