"""Jobs that applications declare, one declaration for each process; rows of jobs without units.

Processes of one owner that declare the same service and span are the ranks of one job. Processes
of different owners are never joined. A declaration ends with its process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.config.tuning_settings import TOKENS, matching_job
from wattspan.ingest.export_request import WorkAttribute
from wattspan.model import (
    SECOND,
    Consumer,
    Decision,
    DecisionReason,
    DeclarationOutcome,
    DeclaredTerms,
    Instant,
    Move,
    Principal,
    RequestedTerms,
    TuningRow,
    TuningState,
)
from wattspan.ports import ProcessDirectory
from wattspan.sharing.fair_pool import share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.tuning.decisions.declarations import decide_terms
from wattspan.tuning.permissions import (
    GpuVerdict,
    JobOwner,
    JobTerms,
    TuningPermissions,
    operator_terms,
)

if TYPE_CHECKING:
    from wattspan.tuning.work_units import ReceivedSpans

MAX_DECLARATIONS = PoolName.DECLARED_JOBS.limit
"""Declarations of all users; one user has half of them at most."""


class ProcessDeclaration(NamedTuple):
    """The declaration of one process; ``work`` is as in [[autotune.job]].

    ``owner`` decides which declarations are of one job; ``uid`` is the user who is named.
    """

    consumer: Consumer
    owner: JobOwner
    uid: int
    name: str
    service: str
    span: str
    work: str = ""
    asked: RequestedTerms = RequestedTerms()


@dataclass(frozen=True, slots=True)
class DeclaredJob:
    """The declarations of one job, and its terms as if the configuration named it."""

    service: str
    span: str
    owner: JobOwner
    processes: tuple[Consumer, ...]
    terms: JobTerms
    answer: DeclaredTerms


class DeclarationsFullError(Exception):
    """The agent has no room for a further declaration of this user."""


class DeclaredJobs:
    """The declarations of living processes. Thread-safe.

    ``instance`` identifies the agent's run, so that applications notice that it has restarted.
    """

    def __init__(
        self,
        settings: AutotuneSettings,
        directory: ProcessDirectory,
        instance: str,
        gpus: Callable[[str, Collection[Consumer]], GpuVerdict] = lambda *_: GpuVerdict(),
        pools: Pools | None = None,
    ) -> None:
        """``gpus`` tells if the GPUs of a job's processes may be tuned."""
        self.instance, self._gpus = instance, gpus
        self._settings, self._directory = settings, directory
        self._permissions = TuningPermissions(directory, settings.groups)
        self._lock = threading.Lock()
        self._declarations: list[ProcessDeclaration] = []  # of the same spans, oldest first
        self._quota = (pools or Pools()).make(PoolName.DECLARED_JOBS)
        self._jobs: dict[_Spans, tuple[DeclaredJob, ...]] = {}
        self._work = _work_attributes(settings.job)

    def declare(self, declaration: ProcessDeclaration) -> DeclaredTerms:
        """Add ``declaration``, or replace those of its process with its name or its spans.

        Returns the terms of the job, with the answer to this process. DeclarationsFullError.
        """
        with self._lock:
            replaced = [one for one in self._declarations if _is_same(one, declaration)]
            if replaced != [declaration]:
                if not replaced and not self._acquire(declaration.owner.principal):
                    raise DeclarationsFullError
                self._change(replaced, declaration)
            joined = self._joined(_spans(declaration), declaration.owner)
            return self._terms(declaration, joined)

    def withdraw(self, consumer: Consumer, name: str) -> bool:
        """Remove the declaration of that name; False if the process has none."""
        with self._lock:
            known = self._declarations
            named = [one for one in known if (one.consumer, one.name) == (consumer, name)]
            self._change(named)
        return bool(named)

    def living(self) -> tuple[DeclaredJob, ...]:
        """The jobs of living processes, ignored ones included."""
        with self._lock:
            self._remove_ended()
            for spans, jobs in self._jobs.items():
                if any(job.answer.provisional for job in jobs):
                    self._jobs[spans] = self._made(spans)
            return tuple(chain.from_iterable(self._jobs.values()))

    def tuned(self) -> tuple[DeclaredJob, ...]:
        """The jobs of living processes whose terms apply."""
        return tuple(filter(_is_tuned, self.living()))

    def work_attributes(self) -> tuple[WorkAttribute, ...]:
        """The attributes that count the work of declared and of configured jobs."""
        return self._work

    # ------------------------------------------------------------------------- with the lock

    def _acquire(self, principal: Principal) -> bool:
        """True if there is room for one more declaration of the user, which is reserved."""
        if self._quota.scarce:
            self._remove_ended()
        return bool(self._quota.acquire(share_path(principal)))

    def _remove_ended(self) -> None:
        processes = {one.consumer for one in self._declarations}
        ended = set(filter(self._directory.has_ended, processes))
        self._change([one for one in self._declarations if one.consumer in ended])

    def _change(
        self, removed: Sequence[ProcessDeclaration], added: ProcessDeclaration | None = None
    ) -> None:
        """Remove declarations, and put ``added`` in the place of those with its spans."""
        changed = [*removed, *filter(None, (added,))]
        if not changed:
            return
        for one in removed:
            self._quota.release(share_path(one.owner.principal))
        known = self._declarations
        if added is not None:
            if removed:  # else there is room already
                self._quota.force(share_path(added.owner.principal))
            former = (one for one in removed if _spans(one) == _spans(added))
            known.insert(min(map(known.index, former), default=len(known)), added)
        self._declarations = [one for one in known if one is added or one not in removed]
        for spans in dict.fromkeys(map(_spans, changed)):
            self._jobs[spans] = self._made(spans)
            if not self._jobs[spans]:
                del self._jobs[spans]
        # Declared ones first: they are exact, and exist only where the configuration counts none.
        jobs = chain.from_iterable(self._jobs.values())
        declared = [one.terms.job for one in jobs if _is_tuned(one)]
        work = _work_attributes((*declared, *self._settings.job))
        if work != self._work:  # receivers compare its identity
            self._work = work

    def _made(self, spans: _Spans) -> tuple[DeclaredJob, ...]:
        """The jobs of declarations of these spans, one for each owner."""
        owners = dict.fromkeys(one.owner for one in self._declarations if _spans(one) == spans)
        return tuple(self._job(self._joined(spans, owner)) for owner in owners)

    def _joined(self, spans: _Spans, owner: JobOwner) -> list[ProcessDeclaration]:
        """The declarations of one job."""
        known = self._declarations
        return [one for one in known if (_spans(one), one.owner) == (spans, owner)]

    def _job(self, joined: Sequence[ProcessDeclaration]) -> DeclaredJob:
        first = joined[0]
        answer = self._terms(first, joined)
        given = answer.given
        named = matching_job(self._settings.job, first.service, first.span)
        settings = msgspec.structs.replace(
            named or TunedJobSettings(service=first.service),
            service=first.service,
            span=first.span,
            work=(named.work if named is not None else "") or _declared_work(joined),
            max_slowdown=given.max_slowdown,
        )
        host = msgspec.structs.replace(
            self._settings, objective=given.objective, eta=given.eta, knobs=given.knobs
        )
        processes = tuple(one.consumer for one in joined)
        terms = JobTerms(host, settings, declared=answer)
        return DeclaredJob(first.service, first.span, first.owner, processes, terms, answer)

    def _terms(
        self, declaration: ProcessDeclaration, joined: Sequence[ProcessDeclaration]
    ) -> DeclaredTerms:
        """The terms of a job, with the answer to one of its processes."""
        name = f"{declaration.service}/{declaration.span}"
        processes = [one.consumer for one in joined]
        refusal, condition = self._permissions.refusal(name, processes), ""
        if not refusal and self._settings.mode != "off":
            refusal, condition = self._gpus(name, processes)
        named = matching_job(self._settings.job, declaration.service, declaration.span)
        if named is None or not named.work:
            refusal = refusal or self._work_conflict(declaration, _declared_work(joined))
        operator = operator_terms(self._settings, named, refusal, condition)
        decided = decide_terms(declaration.asked, operator, [one.asked for one in joined])
        owner = declaration.owner.label
        return DeclaredTerms(declaration.name, declaration.uid, declaration.asked, *decided, owner)

    def _work_conflict(self, declaration: ProcessDeclaration, work: str) -> str:
        """A sentence if an older job of another owner counts such spans by another attribute.

        One attribute is read from the spans of one name, whoever sends them.
        """
        group = (one for one in self._declarations if _spans(one) == _spans(declaration))
        older = takewhile(lambda one: one.owner != declaration.owner, group)
        other = next((one.work for one in older if one.work not in ("", TOKENS, work)), "")
        if not other or work in ("", TOKENS):
            return ""
        return (
            f"{'/'.join(_spans(declaration))} is not tuned: a job of another owner counts the work "
            f'of such spans by "{other}". Choose another service or span name.'
        )


_Spans = tuple[str, str]  # service and name


def _spans(declaration: ProcessDeclaration) -> _Spans:
    return declaration.service, declaration.span


def _is_same(one: ProcessDeclaration, other: ProcessDeclaration) -> bool:
    """True if both are of one process, and have the same name or the same spans."""
    same = one.name == other.name or _spans(one) == _spans(other)
    return one.consumer == other.consumer and same


def _is_tuned(job: DeclaredJob) -> bool:
    """True if the terms of its declarations apply."""
    return job.answer.decision is not DeclarationOutcome.IGNORED


def _work_attributes(jobs: Iterable[TunedJobSettings]) -> tuple[WorkAttribute, ...]:
    return tuple(
        WorkAttribute(job.work, job.service, job.span)
        for job in jobs
        if job.work not in ("", TOKENS)
    )


def _declared_work(joined: Sequence[ProcessDeclaration]) -> str:
    return next((one.work for one in joined if one.work), "")


# ----------------------------------------------------------------------- jobs without units

MISSING_AFTER = 300 * SECOND
"""Time after which a configured job without units of work is logged."""

_MAX_SERVICES, _MAX_LISTED_NAMES = 64, 6
_HINT = "`wattspan top --by span` lists the received spans."


@dataclass(slots=True)
class MissingJobs:
    """The rows of jobs without units of work; their sentences list the received spans.

    ``declined`` are causes, as clauses, why the pages of engines are not used.
    """

    settings: AutotuneSettings
    started: Instant
    log: Callable[[str], None]
    declined: dict[str, str] = field(default_factory=dict)
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
                yield self._row(name, one.terms)
        for job in self.settings.job:
            name = f"{job.service or '*'}/{job.span or '*'}"
            if job.engine and not job.span:
                name = job.unit[0]
            if name in names or any(matching_job([job], *one) for one in spans):
                continue
            row = self._row(name, JobTerms(self.settings, job))
            if now.mono - self.started.mono > MISSING_AFTER and name not in self._logged:
                self._logged.add(name)
                self.log(f"{name} is not tuned. {row.decision.sentence}")
            yield row

    def _row(self, name: str, terms: JobTerms) -> TuningRow:
        host, job, declared = terms.host, terms.job, terms.declared
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
            budget=0.0 if job.tracked else terms.budget,
            confidence=host.confidence,
            declared=declared,
        )

    def _missing(self, job: TunedJobSettings) -> str:
        """A sentence: the missing spans, the received ones, and a remedy."""
        if job.engine:
            if declined := self.declined.get(job.engine):
                return f'The page of the engine "{job.engine}" is not used: {declined}.'
            return (
                f'The page of the engine "{job.engine}" was not read yet, or its processes use no '
                "GPU yet: see `wattspan doctor`."
            )
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
