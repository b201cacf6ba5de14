"""Configured and declared jobs without units of work, and the spans that were received instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import (
    SECOND,
    Decision,
    DecisionReason,
    DeclaredTerms,
    Instant,
    Move,
    TuningRow,
    TuningState,
)
from wattspan.tuning.declared_jobs import DeclaredJob
from wattspan.tuning.permissions import slowdown_budget
from wattspan.tuning.work_units import ReceivedSpans, matching_job

MISSING_AFTER = 300 * SECOND
"""Time after which a configured job without units of work is logged."""

_MAX_SERVICES, _MAX_LISTED_NAMES = 64, 6
_HINT = "`wattspan top --by span` lists the received spans."


@dataclass(slots=True)
class MissingJobs:
    """The rows of jobs without units of work; their sentences list the received spans."""

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

    def rows(
        self, known: Collection[TuningRow], declared: Collection[DeclaredJob], now: Instant
    ) -> Iterator[TuningRow]:
        """A row for each declared and each configured job without one among the ``known``."""
        spans = [(row.service, row.span) for row in known]
        owned = [(row.service, row.span, row.declared.owner) for row in known if row.declared]
        names = {row.job for row in known}
        for one in declared:
            spans.append((one.service, one.span))
            if (one.service, one.span, one.owner.label) in owned:
                continue
            name = f"{one.service}/{one.span}"
            name = f"{name}@{one.owner.label}" if name in names else name
            if name not in names:
                names.add(name)
                yield self._row(name, one.host, one.settings, one.terms)
        for job in self.settings.job:
            name = f"{job.service or '*'}/{job.span or '*'}"
            if name in names or any(matching_job([job], *one) for one in spans):
                continue
            row = self._row(name, self.settings, job)
            if now.mono - self.started.mono > MISSING_AFTER and name not in self._logged:
                self._logged.add(name)
                self.log(f"{name} is not tuned. {row.decision.sentence}")
            yield row

    def _row(
        self,
        name: str,
        host: AutotuneSettings,
        job: TunedJobSettings,
        declared: DeclaredTerms | None = None,
    ) -> TuningRow:
        decision = Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, self._missing(job))
        state = TuningState.WAITING
        if declared is not None and declared.given.mode == "off":
            decision = Decision(Move.DECLINE, DecisionReason.NOT_ALLOWED, declared.reason)
            state = TuningState.DECLINED
        return TuningRow(
            job=name,
            service=job.service,
            span=job.span,
            knob=host.knobs[0],
            state=state,
            decision=decision,
            since=self.started,
            budget=0.0 if job.tracked else slowdown_budget(host, job),
            confidence=host.confidence,
            declared=declared,
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
