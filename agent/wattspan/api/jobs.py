"""Handler of ``/v1/jobs``: applications declare, list and withdraw tuning jobs.

A declaration belongs to the process at the other end of the Unix socket, identified by the kernel,
and to its principal and Slurm job. Every user of the socket may list the declarations, as the
decisions of the tuner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from wattspan.api.authorization import PrincipalOf
from wattspan.api.requests import ProblemError, bad_request, json_response, read_query, sanitized
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import MAX_NAME
from wattspan.model import Consumer, DeclaredTerms, Knob, RequestedTerms, TuningAccounts
from wattspan.ports import ProcessDirectory
from wattspan.tuning.declared_jobs import (
    MAX_DECLARATIONS,
    DeclarationsFullError,
    DeclaredJob,
    DeclaredJobs,
    ProcessDeclaration,
)
from wattspan.tuning.permissions import JobOwner, slurm_job
from wattspan.util.text import MAX_JOB_NAME

JOBS_PATH = "/v1/jobs"
MAX_BODY_BYTES = 8192
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
_Watts = Annotated[float, Meta(gt=0, le=100_000)]


class DeclarationBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/jobs``; null leaves a term to the operator."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_JOB_NAME)]
    service: _Name
    span: _Name
    work: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    max_slowdown: Annotated[float, Meta(ge=0)] | None = None
    objective: Literal["energy", "cost", "time"] | None = None
    eta: Annotated[float, Meta(ge=0, le=1)] | None = None
    knobs: Annotated[list[Knob], Meta(max_length=len(Knob))] | None = None
    first_watts: _Watts | None = None
    floor_watts: _Watts | None = None


_decoder = msgspec.json.Decoder(DeclarationBody)

_REMEDY = (
    'Write a JSON object such as {"name": "train", "service": "trainer", "span": "train_step"}; '
    f"its fields are {', '.join(DeclarationBody.__struct_fields__)}."
)


class JobsHandler:
    """``principal_of`` returns the principal of a process; None if it is gone.

    It returns one with a negative user for a process with several user ids.
    """

    def __init__(
        self,
        jobs: DeclaredJobs,
        directory: ProcessDirectory,
        principal_of: PrincipalOf,
        *,
        host: str,
        tuning: Callable[[], TuningAccounts],
    ) -> None:
        self._jobs, self._directory, self._principal_of = jobs, directory, principal_of
        self._host, self._tuning = host, tuning

    async def declare_or_list(self, request: HttpRequest) -> HttpResponse:
        """``GET``, ``HEAD`` and ``POST`` of ``/v1/jobs``."""
        read_query(request.query, {})
        return self._declare(request) if request.method == "POST" else self._list(request.peer)

    async def withdraw(self, request: HttpRequest) -> HttpResponse:
        """``DELETE`` of ``/v1/jobs/NAME``."""
        read_query(request.query, {})
        name = request.path.removeprefix(f"{JOBS_PATH}/")
        consumer, _, _ = self._sender(request.peer)
        if not self._jobs.withdraw(consumer, name):
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                f"job {sanitized(name)}",
                f"process {consumer.pid} has declared no job of that name",
                "Only the process that has declared a job can withdraw it.",
            )
        return json_response({"job": name, "withdrawn": True})

    def _declare(self, request: HttpRequest) -> HttpResponse:
        consumer, owner, uid = self._sender(request.peer)
        body = decoded_body(request.body)
        asked = RequestedTerms(
            body.max_slowdown,
            body.objective,
            body.eta,
            None if body.knobs is None else tuple(dict.fromkeys(body.knobs)),
            body.first_watts,
            body.floor_watts,
        )
        declaration = ProcessDeclaration(
            consumer, owner, uid, body.name, body.service, body.span, body.work, asked
        )
        try:
            terms = self._jobs.declare(declaration)
        except DeclarationsFullError:
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"job {sanitized(body.name)}",
                f"user {uid} has no room among the {MAX_DECLARATIONS} declarations of this agent",
                "Withdraw others, or end their processes.",
            ) from None
        return json_response(
            {
                "instance": self._jobs.instance,
                "service": body.service,
                "span": body.span,
                "work": body.work,
                **_terms(terms),
            }
        )

    def _list(self, peer: Peer) -> HttpResponse:
        accounts, sender = self._tuning(), self._identified(peer)
        rows = {
            (row.service, row.span, row.declared.owner): row
            for row in accounts.rows
            if row.declared
        }

        def facts(job: DeclaredJob) -> dict[str, Any]:
            row = rows.get((job.service, job.span, job.owner.label))
            tuned = None
            if row is not None:
                tuned = {"job": row.job, "state": row.state, "sentence": row.decision.sentence}
            return {
                "service": job.service,
                "span": job.span,
                "work": job.terms.job.work,
                "uid": job.answer.uid,
                "processes": len(job.processes),
                "own": sender in job.processes,
                **_terms(job.answer),
                "tuning": tuned,
            }

        return json_response(
            {
                "host_name": self._host,
                "instance": self._jobs.instance,
                "mode": accounts.mode,
                "jobs": [facts(job) for job in self._jobs.living()],
            }
        )

    def _sender(self, peer: Peer) -> tuple[Consumer, JobOwner, int]:
        """The process at the other end, the owner of its jobs, and its user. ProblemError."""
        consumer = self._identified(peer)
        if consumer is None or peer.uid is None or peer.principal is None:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "the sender",
                "the kernel does not identify its process and user, and a declaration ends with "
                "its process",
                "Declare on the agent's Unix socket, from a container in the PID namespace of the "
                "host.",
            )
        found, info = self._principal_of(consumer), self._directory.describe(consumer)
        several = found is not None and found.user is not None and found.user < 0
        if found is None or info is None or not (several or found == peer.principal):
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                f"process {consumer.pid}",
                "it is not known to belong to the user who opened the connection",
                "Declare from a connection that the process of the job opens itself.",
            )
        return consumer, JobOwner(peer.principal, slurm_job(info)), peer.uid

    def _identified(self, peer: Peer) -> Consumer | None:
        return self._directory.identify(peer.pid) if peer.pid else None


def decoded_body(raw: bytes) -> DeclarationBody:
    """The body of a declaration. ProblemError."""
    if len(raw) > MAX_BODY_BYTES:
        raise ProblemError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "the body",
            f"it has more than {MAX_BODY_BYTES} bytes",
            "Shorten the names.",
        )
    try:
        body = _decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request("the body", f"it is no declaration: {error}", _REMEDY) from None
    for name in ("name", "service", "span", "work"):
        if not getattr(body, name).isprintable():
            raise bad_request(name, "it contains characters that do not print", "Remove them.")
    if body.max_slowdown is not None and not math.isfinite(body.max_slowdown):
        raise bad_request("max_slowdown", "it is no finite number", "0.05 is 5 %.")
    return body


def _terms(terms: DeclaredTerms) -> dict[str, Any]:
    return {
        "job": terms.name,
        "asked": msgspec.to_builtins(terms.asked),
        "given": msgspec.to_builtins(terms.given),
        "decision": terms.decision,
        "reason": terms.reason,
        "provisional": terms.provisional,
    }
