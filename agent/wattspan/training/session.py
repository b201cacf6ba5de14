"""A training run as the agent sees it: spans of its epochs and units of work, and its declared job.

No power limit is written here. The agent's tuner decides from the spans and from the declaration,
within the operator's budget.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from functools import partial
from pathlib import Path
from time import time_ns
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from wattspan import otel
from wattspan.sdk.jobs import UNAVAILABLE, JobDeclaration, check_terms, declare
from wattspan.sdk.span_processor import set_process_resource
from wattspan.training.spans import (
    SCOPE,
    AgentSpanExporter,
    LightTracer,
    UnseededIdGenerator,
    otlp_encoder,
)
from wattspan.training.units import (
    EPOCH,
    STEP,
    STEP_PART,
    EpochOrStep,
    Events,
    StepEvent,
    StepTracker,
    StepWork,
)

WORK_ATTRIBUTE = "wattspan.work"
"""Span attribute with the amount of work of a unit, by which the tuner judges its time."""

WORK_UNIT_ATTRIBUTE = "wattspan.work_unit"
EPOCH_ATTRIBUTE = "wattspan.epoch"
STEP_ATTRIBUTE = "wattspan.step"

OBJECTIVES = ("energy", "cost", "time")

_EXPORT_INTERVAL = 1_000  # milliseconds: the tuner decides twice a second
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")

_log = logging.getLogger("wattspan")


class TuningRequest(NamedTuple):
    """The wish of an application for the tuning of its job. None leaves a value to the operator.

    ``max_slowdown`` is a ratio, 0.05 for 5 %. ``eta``, 0 to 1, is the weight of energy with the
    objective ``cost``. ``first_watts`` is the power limit of a GPU to certify first, and
    ``floor_watts`` the lowest one that may be set. The agent may give less than was asked, and
    never more than the operator allows.
    """

    max_slowdown: float | None = None
    objective: str | None = None
    eta: float | None = None
    knobs: Sequence[str] | None = None
    first_watts: float | None = None
    floor_watts: float | None = None

    def check(self) -> TuningRequest:
        """This request; ValueError with the invalid value."""
        check_terms(self.max_slowdown, self.eta, self.first_watts, self.floor_watts)
        if self.objective is not None and self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise ValueError(f"objective = {self.objective!r} is not known. Give one of {known}.")
        return self


Declare = Callable[..., JobDeclaration]
"""Declares a job to the agent of this host, as ``declare``; without an agent it returns, too."""

BeforeEnd = Callable[[JobDeclaration], object]

_REFUSED = ("limited", "declined", "ignored")


class _OpenSpan(NamedTuple):
    name: EpochOrStep
    number: int
    span: trace.Span
    context: Context  # in which the span is current
    token: Token[Context]


SpanStarter = trace.Tracer | LightTracer


class StepSpans:
    """The open spans of a training run, the innermost last. Each is current while it is open."""

    def __init__(self, tracer: SpanStarter) -> None:
        self._tracer = tracer
        self._open: list[_OpenSpan] = []
        self._ended: _OpenSpan | None = None  # the last, if it may still be current
        self._abandoned = False

    def apply(self, events: Events, end: int | None = None) -> None:
        """Begin and end spans now; ``end``: they ended at this Unix time, in nanoseconds."""
        for event in () if self._abandoned else events:
            if event.action == "begin":
                self._begin(event)
            else:
                self._end(event, end)

    def abandon(self) -> None:
        """End what is open, and begin nothing more: after an error, the last unit is unknown."""
        self._abandoned = True
        while self._open:
            name = self._open[-1].name
            self._end(StepEvent("end", STEP_PART if name == STEP else name, 0))

    def _begin(self, event: StepEvent) -> None:
        self._restore()
        current = outer = get_current()
        if self._open and self._open[-1].context is not current:
            outer = trace.set_span_in_context(self._open[-1].span, current)
        span = self._tracer.start_span(event.name, outer)
        context = trace.set_span_in_context(span, current)
        self._open.append(_OpenSpan(event.name, event.number, span, context, attach(context)))

    def _end(self, event: StepEvent, end: int | None = None) -> None:
        self._restore()
        self._ended = ended = self._open.pop()
        if ended.name != event.name:
            ended.span.update_name(event.name)
        # All attributes at once: each call of the SDK costs as much as several attributes.
        name, work = EPOCH_ATTRIBUTE if ended.name == EPOCH else STEP_ATTRIBUTE, event.work
        attributes: dict[str, float | str] = {name: ended.number}
        if work is not None:
            attributes |= {WORK_ATTRIBUTE: work.amount, WORK_UNIT_ATTRIBUTE: work.kind}
        ended.span.set_attributes(attributes)
        ended.span.end(end)
        self._restore()

    def _restore(self) -> None:
        """Make the span around the ended one current again.

        Not in another thread, and not yet inside of a span of the application: after that one, the
        ended span would be current again.
        """
        ended = self._ended
        if ended is None:
            return
        current = get_current()
        if current is ended.context or trace.get_current_span(current) is ended.span:
            detach(ended.token)
            self._ended = None


class TrainingSession:
    """One training run. Its methods take the hooks of a training loop (see ``StepTracker``).

    They never wait and never raise: after an error in them, the training goes on without spans.
    ``stop`` ends all; so do the end of the process and the disappearance of the session.
    """

    def __init__(
        self,
        tracer: SpanStarter | None,
        declaration: JobDeclaration | None = None,
        shutdown: Callable[[], object] = lambda: None,
        before_end: BeforeEnd | None = None,
    ) -> None:
        """Without a ``tracer`` the session reports nothing.

        ``before_end`` is called before the declaration is withdrawn.
        """
        self._tracker = StepTracker()
        self._spans = StepSpans(tracer or trace.NoOpTracer())
        self._declaration = declaration
        self._works = tracer is not None
        self._completed = 0  # Unix time of the optimizer's last move, in nanoseconds
        self._decision = ""  # of the agent, as it was last logged
        self._pid = os.getpid()
        if declaration is not None:
            self._log_decision(declaration)
        self._finish = weakref.finalize(
            self, _finish, self._tracker, self._spans, declaration, before_end, shutdown, self._pid
        )

    @property
    def declaration(self) -> JobDeclaration | None:
        """The agent's answer; None if another rank declares the job."""
        return self._declaration

    @property
    def declined(self) -> str | None:
        """The agent's sentence if it gives less than was asked; else None."""
        declaration = self._declaration
        if declaration is None or declaration.decision not in _REFUSED:
            return None
        return declaration.reason

    @property
    def is_open(self) -> bool:
        """True until the end of the session; False in a child of a fork."""
        return self._finish.alive and os.getpid() == self._pid

    @property
    def steps(self) -> int:
        """The number of the newest complete step."""
        return self._tracker.steps

    @property
    def epochs(self) -> int:
        """The number of the newest epoch."""
        return self._tracker.epochs

    def continue_after(self, steps: int, epochs: int = 0) -> None:
        """Continue the numbers of a checkpoint."""
        self._tracker.continue_after(steps, epochs)

    def begin_epoch(self) -> None:
        self._apply(self._tracker.begin_epoch())

    def end_epoch(self) -> None:
        self._apply(self._tracker.end_epoch())

    def begin_step(self) -> None:
        self._apply(self._tracker.begin_step())

    def add_work(self, work: StepWork | None) -> None:
        self._tracker.add_work(work)

    def complete_step(self, work: StepWork | None = None) -> None:
        if self._tracker.complete_step(work):
            self._completed = time_ns()

    def interrupt(self) -> None:
        self._apply(self._tracker.interrupt())

    def interrupt_late(self) -> None:
        """The interruption has begun already: the unit ended with the move of the optimizer."""
        end = None if self._tracker.in_step else self._completed
        self._apply(self._tracker.interrupt(), end)

    def stop(self) -> None:
        """End the spans, withdraw the job, and send what is left. Idempotent."""
        self._works = False
        self._finish()

    def _log_decision(self, declaration: JobDeclaration) -> None:
        """Warn if the agent does not tune as asked, or does not answer, once for each decision."""
        before, self._decision = self._decision, declaration.decision
        if self._decision == UNAVAILABLE:
            if not before:
                _log.warning("The training is not tuned: %s", declaration.reason)
        elif self._decision in _REFUSED:
            _log.warning("The agent does not tune as asked: %s", declaration.reason)

    def _apply(self, events: Events, end: int | None = None) -> None:
        if not events or not self._works:
            return
        try:
            self._spans.apply(events, end)
            if self._declaration is not None:
                self._declaration.renew()
                if self._declaration.decision != self._decision:
                    self._log_decision(self._declaration)
        except Exception as error:  # noqa: BLE001 - the training must not fail
            self._works = False
            self._spans.abandon()
            _log.warning("Spans of the training end here: %s: %s", type(error).__name__, error)


def _finish(
    tracker: StepTracker,
    spans: StepSpans,
    declaration: JobDeclaration | None,
    before_end: BeforeEnd | None,
    shutdown: Callable[[], object],
    pid: int,
) -> None:
    """End a session in the process that began it; a child of a fork has nothing to end."""
    if os.getpid() != pid:
        return
    ends: list[Callable[[], object]] = [lambda: spans.apply(tracker.stop())]
    if declaration is not None:
        if before_end is not None:
            ends.append(partial(before_end, declaration))
        ends.append(declaration.withdraw)
    for end in (*ends, shutdown):
        try:
            end()
        except Exception as error:  # noqa: BLE001 - the application must not fail
            _log.warning("The end of the training is incomplete: %s", error)


# ---------------------------------------------------------------------------------- beginning

_newest: weakref.WeakValueDictionary[str, TrainingSession] = weakref.WeakValueDictionary()
"""The newest session of each service in this process."""


def start_session(
    request: TuningRequest,
    *,
    service: str = "",
    declares: bool = True,
    provider: TracerProvider | None = None,
    declare: Declare = declare,
    before_end: BeforeEnd | None = None,
) -> TrainingSession:
    """Begin a session, and declare its job if ``declares``.

    Spans go through ``provider``; by default through the global provider, if the application has
    set one up and ``service`` is empty, and else through one of our own, to the agent of this
    host. An open session of the same service in this process ends: two would count each step twice,
    and the end of the first would withdraw the job of the second. Raises nothing; a warning gives
    the reason for a session without spans.
    """
    if otel.disabled():
        return TrainingSession(None)
    found = provider or (None if service else _application_provider())
    shutdown: Callable[[], object] = lambda: None  # noqa: E731
    tracer: SpanStarter
    if found is None:
        try:
            found, tracer = agent_tracer(service)
        except ImportError as error:
            _log.warning("The training is not measured: %s", error)
            return TrainingSession(None)
        shutdown = found.shutdown
    else:
        otel.instrument(found)
        tracer = found.get_tracer(SCOPE)
        if isinstance(tracer, Tracer):
            tracer.id_generator = UnseededIdGenerator()
    declaration = None
    name = str(found.resource.attributes.get(SERVICE_NAME, ""))
    _end_earlier(name)
    if declares and not name:
        _log.warning(
            "The training is not tuned: its OpenTelemetry provider has no service.name. "
            "Set OTEL_SERVICE_NAME, or service=... of the loop or callback."
        )
    elif declares:
        declaration = declare(
            name=name, service=name, span=STEP, work=WORK_ATTRIBUTE, **request._asdict()
        )
    _newest[name] = session = TrainingSession(tracer, declaration, shutdown, before_end)
    return session


def _end_earlier(service: str) -> None:
    earlier = _newest.get(service)
    if earlier is None or not earlier.is_open:
        return
    earlier.stop()
    _log.warning(
        "Two trainings of this process report their steps as %r. The earlier one ends here, "
        "because each step would count twice. Remove one callback or loop, or name each with "
        "service=...",
        service,
    )


def is_local_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """True for the first process of a job on this host: each host has an agent of its own."""
    return next((environ[name] for name in _LOCAL_RANKS if name in environ), "0") == "0"


def _application_provider() -> TracerProvider | None:
    """The provider that the application has set up, if any."""
    provider = trace.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None


def agent_tracer(service: str) -> tuple[TracerProvider, SpanStarter]:
    """A tracer whose spans go to the agent of this host. ImportError without an encoder.

    It starts no span under ``OTEL_SDK_DISABLED=true``.
    """
    exporting = BatchSpanProcessor(
        AgentSpanExporter(otlp_encoder()), schedule_delay_millis=_EXPORT_INTERVAL
    )
    ring = otel.SpanProcessor()
    provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
    set_process_resource(provider)
    for processor in (ring, exporting):  # until the provider's shutdown
        provider.add_span_processor(processor)
    usual = provider.get_tracer(SCOPE)
    enabled = isinstance(usual, Tracer)
    return provider, LightTracer(provider, exporting, ring) if enabled else usual


def _resource(service: str) -> Resource:
    """The resource of our own provider: ``service``, OpenTelemetry's variables, or the script."""
    resource = Resource.create({SERVICE_NAME: service} if service else {})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        script = Path(sys.argv[0] if sys.argv else "").stem
        resource = resource.merge(Resource({SERVICE_NAME: script or "python"}))
    return resource
