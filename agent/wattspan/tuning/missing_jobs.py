"""Jobs that the configuration names and that have not been heard of: what is missing of each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import SECOND, Decision, DecisionReason, Instant, Move, TuningRow, TuningState
from wattspan.tuning.work_units import ReceivedSpans

MISSING_AFTER = 300 * SECOND
"""A job that has not been heard of for so long is told of in the log."""

MAX_SERVICES, MAX_LISTED_NAMES = 64, 6
"""Services that are remembered, the latest heard of, and span names of each."""

_TOP_HINT = "`wattspan top --by span` shows what comes."


@dataclass(slots=True)
class MissingJobs:
    """Belongs to the tuner's thread. ``began`` is when waiting began."""

    settings: AutotuneSettings
    began: Instant
    log: Callable[[str], None]
    _heard: OrderedDict[str, dict[str, None]] = field(default_factory=OrderedDict)
    _told: set[str] = field(default_factory=set)

    def hear(self, handed: ReceivedSpans) -> None:
        """Take note of who sends what."""
        names = self._heard.setdefault(handed.service, {})
        self._heard.move_to_end(handed.service)
        if len(self._heard) > MAX_SERVICES:
            self._heard.popitem(last=False)
        for span in handed.spans:
            if len(names) >= MAX_LISTED_NAMES:
                break
            names.setdefault(span.name)

    def rows(self, known: Collection[tuple[str, str]], now: Instant) -> Iterator[TuningRow]:
        """A row for each configured job that is none of the ``known`` services and spans."""
        for job in self.settings.job:
            if any(
                job.service in ("", service) and job.span in ("", span) for service, span in known
            ):
                continue
            name, sentence = f"{job.service or '*'}/{job.span or '*'}", self._missing(job)
            if now.mono - self.began.mono > MISSING_AFTER and name not in self._told:
                self._told.add(name)
                self.log(f"{name} is not tuned. {sentence}")
            budget = job.max_slowdown
            yield TuningRow(
                job=name,
                service=job.service,
                span=job.span,
                knob=self.settings.knobs[0],
                state=TuningState.WAITING,
                decision=Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, sentence),
                since=self.began,
                budget=self.settings.max_slowdown if budget is None else budget,
                confidence=self.settings.confidence,
            )

    def _missing(self, job: TunedJobSettings) -> str:
        """One sentence: what came instead, and where to look."""
        if job.service and job.service not in self._heard:
            others = _listed(self._heard)
            instead = f"; spans come from {others}" if others else ", nor from anybody else"
            return (
                f'No span of the service "{job.service}" has come yet{instead}. Check its '
                "service.name and where it sends its spans (OTEL_EXPORTER_OTLP_ENDPOINT). "
                f"{_TOP_HINT}"
            )
        names = {
            name: None
            for service, told in self._heard.items()
            if job.service in ("", service)
            for name in told
        }
        whose = f'the service "{job.service}"' if job.service else "any service"
        if job.span and job.span not in names:
            others = _listed(names)
            instead = f"; what came is {others}" if others else ""
            return f'No span "{job.span}" of {whose} has come yet{instead}. {_TOP_HINT}'
        if job.span:
            return f'Too few spans "{job.span}" of {whose} have come yet to tell how it works.'
        return (
            f"No span of {whose} looks like a unit of work that repeats: name the one that is, as "
            f"`span`. {_TOP_HINT}"
        )


def _listed(names: Collection[str]) -> str:
    """Some of the names, quoted."""
    shown = [f'"{name}"' for name in list(names)[:MAX_LISTED_NAMES]]
    return ", ".join(shown)
