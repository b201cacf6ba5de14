"""Configured jobs without units of work: their rows, with the spans that were received instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import (
    SECOND,
    Decision,
    DecisionReason,
    Instant,
    Move,
    TuningRow,
    TuningState,
)
from wattspan.tuning.job import slowdown_budget
from wattspan.tuning.work_units import ReceivedSpans, matching_job

MISSING_AFTER = 300 * SECOND
"""Time after which a configured job without units of work is logged."""

_MAX_SERVICES, _MAX_LISTED_NAMES = 64, 6
_HINT = "`wattspan top --by span` lists the received spans."


@dataclass(slots=True)
class MissingJobs:
    """Configured jobs without units of work, and the spans that were received instead."""

    settings: AutotuneSettings
    started: Instant
    log: Callable[[str], None]
    _received: OrderedDict[str, dict[str, None]] = field(default_factory=OrderedDict)
    _logged: set[str] = field(default_factory=set)

    def add(self, received: ReceivedSpans) -> None:
        names = self._received.setdefault(received.service, {})
        self._received.move_to_end(received.service)
        if len(self._received) > _MAX_SERVICES:
            self._received.popitem(last=False)
        for span in received.spans:
            if len(names) >= _MAX_LISTED_NAMES:
                break
            names.setdefault(span.name)

    def rows(self, known: Collection[tuple[str, str]], now: Instant) -> Iterator[TuningRow]:
        """A row for each configured job that is none of the ``known`` services and spans."""
        for job in self.settings.job:
            if any(matching_job([job], service, span) for service, span in known):
                continue
            name, sentence = f"{job.service or '*'}/{job.span or '*'}", self._missing(job)
            if now.mono - self.started.mono > MISSING_AFTER and name not in self._logged:
                self._logged.add(name)
                self.log(f"{name} is not tuned. {sentence}")
            yield TuningRow(
                job=name,
                service=job.service,
                span=job.span,
                knob=self.settings.knobs[0],
                state=TuningState.WAITING,
                decision=Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, sentence),
                since=self.started,
                budget=slowdown_budget(self.settings, job),
                confidence=self.settings.confidence,
            )

    def _missing(self, job: TunedJobSettings) -> str:
        """A sentence: the missing spans, the received ones, and a remedy."""
        if job.service and job.service not in self._received:
            others = _quoted(self._received)
            instead = f"; spans come from {others}" if others else ", nor from another service"
            return (
                f'No span of the service "{job.service}" was received yet{instead}. Check its '
                "service.name and its OTLP endpoint (OTEL_EXPORTER_OTLP_ENDPOINT). "
                f"{_HINT}"
            )
        names = {
            name: None
            for service, received in self._received.items()
            if job.service in ("", service)
            for name in received
        }
        service = f'the service "{job.service}"' if job.service else "any service"
        if job.span and job.span not in names:
            others = _quoted(names)
            instead = f"; received: {others}" if others else ""
            return f'No span "{job.span}" of {service} was received yet{instead}. {_HINT}'
        if job.span:
            return f'Too few spans "{job.span}" of {service} were received to determine its kind.'
        return (
            f"No span of {service} looks like a repeated unit of work: name the unit's span as "
            f"`span`. {_HINT}"
        )


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f'"{name}"' for name in list(names)[:_MAX_LISTED_NAMES])
