"""Handlers of ``/v1/caps`` and ``/v1/report``: facts for users without their files and sockets.

The capper's socket and the store belong to root and the agent's group. These handlers give every
user who may open ``api.sock`` the parts that are for every user: the limits with their holders, as
``/v1/tuning`` does, and past energy of the host and of the user's own processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from wattspan.api.requests import Parameter, ProblemError, json_response, read_query, required
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.sockets import Peer
from wattspan.model import GroupKind
from wattspan.ports import ProcessDirectory, WattspanError

CAPS_PATH = "/v1/caps"
REPORT_PATH = "/v1/report"
MAX_KINDS = 16
NOBODY = -1
"""No user's id."""

CapsState = Callable[[], Mapping[str, Any]]
"""The state of the running capper; an empty mapping without one. WattspanError."""

StoredEnergy = Callable[[int, int, frozenset[str], int | None], Mapping[str, Any]]
"""The stored energy from one Unix second to another by kinds, as far as a user may see it.

Without a user, everything. WattspanError.
"""


def _seconds(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 12:
        return int(text)
    raise ValueError("that is no whole number of Unix seconds")


def _kinds(text: str) -> frozenset[str]:
    kinds = frozenset(filter(None, text.split(",")))
    if len(kinds) > MAX_KINDS:
        raise ValueError(f"these are more than {MAX_KINDS}")
    return kinds


_REPORT_PARAMETERS = {
    "start": Parameter(_seconds, "Write Unix seconds."),
    "end": Parameter(_seconds, "Write Unix seconds."),
    "kinds": Parameter(_kinds, "Write kinds of groups, separated by commas."),
}


def caps_response(state: CapsState, request: HttpRequest, host: str) -> HttpResponse:
    """The response of ``GET /v1/caps``; it may take a while."""
    read_query(request.query, {})
    try:
        return json_response({"host_name": host, "capper": state() or None})
    except WattspanError as error:
        raise _unavailable("the state of the capper", error) from None


def report_response(
    stored: StoredEnergy, request: HttpRequest, host: str, user: int | None
) -> HttpResponse:
    """The response of ``GET /v1/report`` for a ``user``, or for everything if that is None."""
    values = read_query(request.query, _REPORT_PARAMETERS)
    start, end = (required(values, name, "Write Unix seconds.") for name in ("start", "end"))
    kinds = values.get("kinds", frozenset())
    try:
        facts = stored(start, end, kinds, user)
    except WattspanError as error:
        raise _unavailable("the report", error) from None
    return json_response({"host_name": host, "restricted": user is not None, **facts})


def shown_user(directory: ProcessDirectory, peer: Peer, *, privileged: bool) -> int | None:
    """The user whose row ``peer`` may see; None for every row, NOBODY for none.

    A user id inside a container is not the host's user of that id, and neither is its root.
    """
    consumer = directory.identify(peer.pid) if peer.pid else None
    described = None if consumer is None else directory.describe(consumer)
    inside = (GroupKind.CONTAINER, GroupKind.POD)
    if described is None or any(group.kind in inside for group in described.groups):
        return NOBODY
    if privileged:
        return None
    return NOBODY if peer.uid is None else peer.uid


def _unavailable(thing: str, error: WattspanError) -> ProblemError:
    cause, _, remedy = str(error).partition(". ")
    return ProblemError(
        HTTPStatus.SERVICE_UNAVAILABLE, thing, cause.rstrip("."), remedy or "Try again."
    )
