"""Which spans are units of work: where the configuration says so, and where the spans do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from wattspan.config import TunedJobSettings
from wattspan.model import SECOND, Consumer
from wattspan.runtime.units import Handed, matching
from wattspan.tuning import Kind
from wattspan.tuning.finding import Finder, Why, agreed

AFRESH = 300 * SECOND
"""What a process did longer ago says little about it."""

JOBS = 256
"""Jobs that are known; beyond, the longest unheard of are let go."""

JUDGE_EVERY = SECOND

PROCESSES = 256
"""Processes that are looked at; beyond, the longest unheard of are let go."""

_Place = tuple[str, str, Consumer]  # service; the one span that is looked at, "" for any; process


class Search:
    """Belongs to the tuner's thread. ``jobs`` are those known by now, by service and span."""

    def __init__(self, jobs: Sequence[TunedJobSettings]) -> None:
        self._configured = jobs
        self._finders: OrderedDict[_Place, Finder] = OrderedDict()
        self._judged: dict[_Place, int] = {}
        self._afresh = 0
        self.jobs: OrderedDict[tuple[str, str], Kind] = OrderedDict()

    def of(self, service: str) -> list[tuple[str, Kind]]:
        """The spans that are units of a service's jobs, and how they follow each other."""
        return [(span, kind) for (known, span), kind in self.jobs.items() if known == service]

    def look(self, handed: Handed, now: int) -> None:
        """Learn from spans of one process; services whose job is known are not looked at again."""
        if now - self._afresh > AFRESH:
            self._finders.clear()
            self._judged.clear()
            self._afresh = now
        service = handed.service
        for name in {span.name for span in handed.spans}:
            job = matching(self._configured, service, name)
            if job is not None and job.span and (service, name) not in self.jobs:
                self._look_at(handed, job, name, now)
        if any(known == service for known, _ in self.jobs):
            return
        if any(job.span and job.service in ("", service) for job in self._configured):
            return  # the operator has said which spans of this service count
        finder = self._finder((service, "", handed.consumer))
        for span in handed.spans:
            finder.add(span.name, span.start, span.end)
        if not self._due((service, "", handed.consumer), now):
            return
        found = agreed(
            one.findings()
            for (known, name, _), one in self._finders.items()
            if known == service and not name
        )
        if found is not None:
            self._know(service, found.name, found.kind)

    def _look_at(self, handed: Handed, job: TunedJobSettings, name: str, now: int) -> None:
        """A span that was named: all that is asked is how its units follow each other."""
        place = handed.service, name
        if job.kind != "auto":
            self._know(*place, Kind(job.kind))
            return
        finder = self._finder((*place, handed.consumer))
        for span in handed.spans:
            if span.name == name:
                finder.add(name, span.start, span.end)
        if not self._due((*place, handed.consumer), now):
            return
        findings = finder.findings()
        if findings.found is not None:
            self._know(*place, findings.found.kind)
        elif findings.passed.get(name) is not Why.RARE:
            self._know(*place, Kind.STEPS)

    def _due(self, place: _Place, now: int) -> bool:
        """Whether it is time to judge; that takes half a millisecond."""
        if now - self._judged.get(place, -JUDGE_EVERY) < JUDGE_EVERY:
            return False
        self._judged[place] = now
        return True

    def _know(self, service: str, span: str, kind: Kind) -> None:
        self.jobs[service, span] = kind
        while len(self.jobs) > JOBS:
            self.jobs.popitem(last=False)

    def _finder(self, place: _Place) -> Finder:
        finder = self._finders.setdefault(place, Finder())
        self._finders.move_to_end(place)
        if len(self._finders) > PROCESSES:
            self._finders.popitem(last=False)
        return finder
