"""Handler of ``/v1/recurring/``: the batch size of the next run of a recurring job.

Jobs and runs belong to the principal at the other end of the Unix socket. A run ends with a report,
or as lost with its process. The file is opened by each request, in a worker thread.
"""

from __future__ import annotations

from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from wattspan.api.authorization import PrincipalOf
from wattspan.api.requests import ProblemError, bad_request, json_response, read_query, sanitized
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.sockets import Peer
from wattspan.model import Consumer, Principal
from wattspan.ports import Clock, ProcessDirectory
from wattspan.recurring.jobs import (
    MAX_FIGURE,
    MAX_WHOLE,
    NamedTerms,
    RecurringJobTerms,
    TrainingRun,
    TrialOutcome,
    job_facts,
)
from wattspan.recurring.run_book import (
    MAX_NAME_LENGTH,
    NoRoomError,
    RunBook,
    RunBookError,
    RunBookLimits,
    RunningProcess,
    TermsChangedError,
    UnknownRunError,
)

MAX_BODY_BYTES = 16_384
LARGEST_KEY = 2**63 - 1  # of a row in SQLite

_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
_Figure = Annotated[float, Meta(ge=0, le=MAX_FIGURE)]


class NextBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/recurring/next``.

    Without ``terms``, those of the job's earlier runs on the same GPUs. ``pid`` is the process of
    the run, the sender by default.
    """

    job: _Name
    gpus: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] = ""
    terms: NamedTerms | None = None
    pid: Annotated[int, Meta(ge=1, le=2**22)] | None = None


class ReportBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/recurring/report``: the end of a run."""

    run: Annotated[int, Meta(ge=1, le=LARGEST_KEY)]
    outcome: TrialOutcome
    energy_joules: _Figure
    seconds: _Figure
    power_watts: _Figure
    epochs: Annotated[int, Meta(ge=0, le=MAX_WHOLE)] = 0


class ForgetBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/recurring/forget``."""

    job: _Name


B = TypeVar("B", NextBody, ReportBody, ForgetBody)


class RecurringHandler:
    """``principal_of`` returns the owner of a process; None if it is gone.

    ``path`` is the file of runs, ``host`` the name of this host in it.
    """

    def __init__(
        self,
        path: Path,
        directory: ProcessDirectory,
        principal_of: PrincipalOf,
        clock: Clock,
        *,
        host: str,
        limits: RunBookLimits = RunBookLimits(),  # noqa: B008 - immutable
    ) -> None:
        self._path, self._directory, self._principal_of = path, directory, principal_of
        self._clock, self._host, self._limits = clock, host, limits

    def respond(self, request: HttpRequest) -> HttpResponse:
        """``POST`` of ``next``, ``report`` and ``forget``, ``GET`` of ``status``. ProblemError."""
        act = {
            "next": self._next,
            "report": self._report,
            "forget": self._forget,
            "status": self._status,
        }[request.path.rpartition("/")[2]]
        with suppress(OSError):  # a host without a store may have no state directory yet
            self._path.parent.mkdir(mode=0o750, exist_ok=True)
        try:
            with closing(RunBook(self._path, self._limits)) as book:
                book.tidy(self._wall())
                return json_response({"host_name": self._host, **act(book, request)})
        except RunBookError as error:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the file of recurring jobs",
                str(error).removesuffix("."),
                "The agent's administrator can repair or remove it.",
            ) from None

    def _next(self, book: RunBook, request: HttpRequest) -> dict[str, Any]:
        owner, body = _owner(request.peer), _decoded(request, NextBody)
        process = self._process(request.peer, owner, body.pid)
        book.end_lost(owner, self._lives)
        terms = self._terms(book, owner, body)
        try:
            begun = book.begin(owner, terms, body.gpus, process, self._wall())
        except TermsChangedError as error:
            raise ProblemError(
                HTTPStatus.CONFLICT,
                f"job {sanitized(body.job)}",
                f"its earlier runs had other terms: {error}",
                "Use the same terms, another name, or `wattspan recurring forget` first.",
            ) from None
        except NoRoomError as error:
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"job {sanitized(body.job)}",
                f"you have {error} already, and all containers of a user share the places",
                "Report runs that have ended, or forget jobs with `wattspan recurring forget`.",
            ) from None
        return {
            "job": body.job,
            "run": begun.key,
            "batch_size": begun.choice.batch_size,
            "phase": begun.choice.phase,
            "stop_cost_joules": begun.choice.stop_cost,
        }

    def _terms(self, book: RunBook, owner: Principal, body: NextBody) -> RecurringJobTerms:
        if body.terms is not None:
            try:
                return body.terms.terms(body.job)
            except ValueError as error:
                raise bad_request("terms", str(error), "Correct them.") from None
        known = book.terms(owner, body.job, body.gpus)
        if known is None:
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                f"job {sanitized(body.job)}",
                "it has no runs on these GPUs",
                "Give its terms with the first run.",
            )
        return known

    def _report(self, book: RunBook, request: HttpRequest) -> dict[str, Any]:
        owner, body = _owner(request.peer), _decoded(request, ReportBody)
        figures = body.energy_joules, body.seconds, body.power_watts
        try:
            recorded = book.end(
                owner, body.run, TrainingRun(0, body.outcome, *figures, body.epochs)
            )
        except UnknownRunError:
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                f"run {body.run}",
                "you have no such run",
                "Report the run that /v1/recurring/next returned.",
            ) from None
        return {"run": body.run, "recorded": recorded}

    def _forget(self, book: RunBook, request: HttpRequest) -> dict[str, Any]:
        owner, body = _owner(request.peer), _decoded(request, ForgetBody)
        if not book.forget(owner, body.job):
            raise _no_job(body.job)
        return {"job": body.job, "forgotten": True}

    def _status(self, book: RunBook, request: HttpRequest) -> dict[str, Any]:
        owner, name = _owner(request.peer), request.query.get("job")
        read_query({key: text for key, text in request.query.items() if key != "job"}, {})
        if name is not None:
            _require_name("job", name)
        book.end_lost(owner, self._lives)
        found = book.jobs(owner, name)
        if name is not None and not found.shown:
            raise _no_job(name)
        return {
            "jobs": list(map(job_facts, found.shown)),
            "hidden_jobs": found.hidden,
            "dropped_runs": found.dropped,
        }

    def _process(self, peer: Peer, owner: Principal, pid: int | None) -> RunningProcess:
        """The process of a run, which belongs to the user."""
        named = pid or peer.pid
        consumer = self._directory.identify(named) if named else None
        if consumer is None or (pid is not None and self._principal_of(consumer) != owner):
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                f"process {named}",
                "it is not known to be yours, and a run ends with its process",
                "Ask on the agent's Unix socket, from the PID namespace of the host.",
            )
        return RunningProcess(self._host, consumer.pid, consumer.started)

    def _wall(self) -> int:
        return self._clock.now().wall // 10**9

    def _lives(self, process: RunningProcess) -> bool:
        consumer = Consumer(process.pid, process.started)
        return process.host != self._host or not self._directory.has_ended(consumer)


def _owner(peer: Peer) -> Principal:
    if peer.principal is None or peer.address is not None:  # over TCP it serves quotas only
        raise ProblemError(
            HTTPStatus.FORBIDDEN,
            "the sender",
            "the kernel does not identify its user",
            "Ask on the agent's Unix socket.",
        )
    return peer.principal


def _no_job(name: str) -> ProblemError:
    return ProblemError(
        HTTPStatus.NOT_FOUND,
        f"job {sanitized(name)}",
        "you have no recurring job of that name",
        "GET /v1/recurring/status lists yours.",
    )


def _decoded(request: HttpRequest, kind: type[B]) -> B:
    """The body of a request. ProblemError."""
    read_query(request.query, {})
    if len(request.body) > MAX_BODY_BYTES:
        raise ProblemError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "the body",
            f"it has more than {MAX_BODY_BYTES} bytes",
            "Shorten the name, or give fewer batch sizes.",
        )
    try:
        body = msgspec.json.decode(request.body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        fields = ", ".join(kind.__struct_fields__)
        raise bad_request("the body", str(error), f"Its fields are {fields}.") from None
    for field in ("job", "gpus"):
        _require_name(field, getattr(body, field, ""))
    return body


def _require_name(field: str, name: str) -> None:
    """ProblemError for a name that no job has: SQLite and terminals cannot hold every text."""
    if len(name) > MAX_NAME_LENGTH:
        raise bad_request(field, f"it has more than {MAX_NAME_LENGTH} characters", "Shorten it.")
    if not name.isprintable():
        raise bad_request(field, "it contains characters that do not print", "Remove them.")
