"""Parsing of query parameters, and errors as problem details (RFC 9457).

``mono:NS`` is a time of the monotonic clock, which all processes of a host share: exact. Other
notations are converted by the present wall clock, so a clock that was set, or a host that
slept, since then shifts them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from wattspan.http.messages import HttpResponse
from wattspan.model import SECOND, Instant
from wattspan.model.settings import Duration
from wattspan.util.text import printable


class ProblemError(Exception):
    """A rejected query: thing, cause and remedy."""

    def __init__(
        self,
        status: HTTPStatus,
        thing: str,
        cause: str,
        remedy: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{thing}: {cause}. {remedy}")
        self.status = status
        self.thing, self.cause, self.remedy = thing, cause, remedy
        self.headers = dict(headers or {})

    def response(self) -> HttpResponse:
        return json_response(
            {
                "type": "about:blank",
                "title": self.status.phrase,
                "status": int(self.status),
                "detail": str(self),
                "thing": self.thing,
                "cause": self.cause,
                "remedy": self.remedy,
            },
            self.status,
            content_type="application/problem+json",
            headers=self.headers,
        )


def json_response(
    facts: object,
    status: HTTPStatus = HTTPStatus.OK,
    *,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    """A JSON response that no cache stores."""
    kept = {"cache-control": "no-store", **(headers or {})}
    return HttpResponse(int(status), msgspec.json.encode(facts), content_type, kept)


def bad_request(thing: str, cause: str, remedy: str) -> ProblemError:
    """The error of an invalid query."""
    return ProblemError(HTTPStatus.BAD_REQUEST, thing, cause, remedy)


def suggestion(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the most similar known word, or all of them."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known here: {', '.join(words)}." if words else "Nothing is known here."


TIME_FORMATS = (
    'Write "mono:NANOSECONDS" (CLOCK_MONOTONIC), Unix nanoseconds, '
    '"2026-01-31T12:00:00Z", or "-10s" for so long ago.'
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LARGEST_TIME = 2**63 - 1


def parse_time(text: str, now: Instant) -> int:
    """The monotonic nanoseconds that ``text`` means at ``now``; ValueError names the cause."""
    if text.startswith("mono:"):
        return _nanoseconds(text[5:])
    if text.startswith("-"):
        return now.mono - Duration.parse(text[1:])
    if text.isdecimal():
        wall = _nanoseconds(text)
        if wall < 10**17:  # 1973 in nanoseconds, the year 5138 in seconds
            raise ValueError("that is too small for Unix nanoseconds")
    else:
        wall = _iso_time(text)
    return now.mono - (now.wall - wall)


def _nanoseconds(digits: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19):
        raise ValueError("that is no whole number of nanoseconds")
    if int(digits) > _LARGEST_TIME:
        raise ValueError("that is too much")
    return int(digits)


def _iso_time(text: str) -> int:
    try:
        # an unescaped "+" arrives as a blank
        moment = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise ValueError("that is no time") from None
    if moment.tzinfo is None:
        raise ValueError('that time has no offset, such as "Z"')
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


CAPS_PATH = "/v1/caps"
RECURRING_PATH = "/v1/recurring"
REPORT_PATH = "/v1/report"

LONGEST_WAIT = 60 * SECOND
MAX_KINDS = 16
SENDER = 0  # as a pid: the process that sends the query
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
_LARGEST_PID = 2**22  # PID_MAX_LIMIT of the kernel


class Parameter(NamedTuple):
    """A parameter of a query: its parser, whose ValueError is the cause, and the remedy."""

    parse: Callable[[str], Any]
    remedy: str


def whole_number(most: int, least: int = 1) -> Callable[[str], int]:
    """The parser of numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdecimal() and len(text) <= 19 and least <= int(text) <= most:
            return int(text)
        raise ValueError(f"that is no whole number from {least} to {most}")

    return parse


def _pid(text: str) -> int:
    return SENDER if text == "self" else whole_number(_LARGEST_PID)(text)


def flag(text: str) -> bool:
    if text not in _BOOLEANS:
        raise ValueError("that is neither yes nor no")
    return _BOOLEANS[text]


def _wait(text: str) -> int:
    wait = Duration.parse(text)
    if wait > LONGEST_WAIT:
        raise ValueError("that is too long")
    return wait


def _seconds(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 12:
        return int(text)
    raise ValueError("that is no whole number of Unix seconds")


def _kinds(text: str) -> frozenset[str]:
    kinds = frozenset(filter(None, text.split(",")))
    if len(kinds) > MAX_KINDS:
        raise ValueError(f"these are more than {MAX_KINDS}")
    return kinds


def time_parameter(now: Instant) -> Parameter:
    return Parameter(partial(parse_time, now=now), TIME_FORMATS)


PROCESS_PARAMETERS = {
    "pid": Parameter(_pid, 'Write a process id, or "self" for the calling process.'),
    "started": Parameter(
        whole_number(2**63 - 1), "It is field 22 of /proc/PID/stat, in clock ticks since boot."
    ),
    "family": Parameter(flag, "Write 1 or 0."),
}
REPORT_PARAMETERS = {
    "start": Parameter(_seconds, "Write Unix seconds."),
    "end": Parameter(_seconds, "Write Unix seconds."),
    "kinds": Parameter(_kinds, "Write kinds of groups, separated by commas."),
}
WAIT = Parameter(_wait, 'Write it as "2s", at most 60s, and ask again.')


def read_query(query: Mapping[str, str], known: Mapping[str, Parameter]) -> dict[str, Any]:
    """The values of the parameters in ``query``. ProblemError names its first error."""
    for name in query:
        if name not in known:
            remedy = suggestion(name, known)
            raise bad_request(sanitized(name), "there is no such parameter", remedy)
    if "started" in query and "pid" not in query:
        raise bad_request("started", "it has no meaning without pid", "Give both.")
    values = {}
    for name, text in query.items():
        try:
            values[name] = known[name].parse(text)
        except ValueError as error:
            thing, remedy = f"{name}={sanitized(text)}", known[name].remedy
            raise bad_request(thing, str(error), remedy) from None
    return values


def required(values: Mapping[str, Any], name: str, remedy: str) -> Any:
    """A value that the query must have. ProblemError."""
    if name not in values:
        raise bad_request(name, "it is missing", remedy)
    return values[name]


def sanitized(text: str) -> str:
    """Input of a client, shortened and printable."""
    return printable(text[:60])
