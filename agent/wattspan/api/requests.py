"""Parsing of query parameters, and errors as problem details (RFC 9457).

``mono:NS`` is a time of the monotonic clock, which all processes of a host share: exact. Other
notations are converted by the present wall clock, so a clock that was set, or a host that
slept, since then shifts them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from wattspan.http.messages import HttpResponse
from wattspan.model import SECOND, Consumer, Instant
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
    """The monotonic nanoseconds that ``text`` means at ``now``; ValueError says what is wrong."""
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
        told = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise ValueError("that is no time") from None
    if told.tzinfo is None:
        raise ValueError('that time has no offset, such as "Z"')
    return (told - _EPOCH) // timedelta(microseconds=1) * 1000


LONGEST_WAIT = 60 * SECOND
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
_LARGEST_PID = 2**22  # PID_MAX_LIMIT of the kernel


class ProcessReference(NamedTuple):
    """A process in a query. ``pid`` is None for the sender of the query."""

    pid: int | None
    started: int | None = None

    @property
    def consumer(self) -> Consumer | None:
        """The process, if pid and start time are given."""
        if self.pid is None or self.started is None:
            return None
        return Consumer(self.pid, self.started)


class EnergyQuery(NamedTuple):
    """Query of the energy of the host and of ``subject``, from ``start`` to ``end`` (monotonic)."""

    start: int
    end: int
    subject: ProcessReference | None
    family: bool
    wait: int


def energy_query(query: Mapping[str, str], now: Instant) -> EnergyQuery:
    """The parsed ``query``. ProblemError names its first error."""
    reject_unknown(query, ("pid", "started", "start", "end", "family", "wait"))
    if "start" not in query:
        raise bad_request("start", "it is missing", TIME_FORMATS)
    start = time_parameter("start", query["start"], now)
    end = time_parameter("end", query["end"], now) if "end" in query else now.mono
    if end < start:
        raise bad_request(
            "end", "it lies before start", "Swap them, or write both by the same clock."
        )
    return EnergyQuery(start, end, process_reference(query), _flag("family", query), _wait(query))


def watch_query(query: Mapping[str, str]) -> tuple[ProcessReference, bool]:
    """The process to watch, and whether its descendants are included."""
    reject_unknown(query, ("pid", "started", "family"))
    whom = process_reference(query)
    if whom is None:
        raise bad_request("pid", "it is missing", 'Write a process id, or "self" for whoever asks.')
    return whom, _flag("family", query)


def no_parameters(query: Mapping[str, str]) -> None:
    reject_unknown(query, ())


def process_reference(query: Mapping[str, str]) -> ProcessReference | None:
    """The process in the query, None without one."""
    pid, started = query.get("pid"), query.get("started")
    if pid is None:
        if started is not None:
            raise bad_request("started", "it says nothing without pid", "Give both.")
        return None
    ticks = None if started is None else _number("started", started, 2**63 - 1)
    if pid == "self":
        return ProcessReference(None, ticks)
    return ProcessReference(_number("pid", pid, _LARGEST_PID), ticks)


def reject_unknown(query: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Raise ProblemError for a parameter that is not ``known``."""
    for name in query:
        if name not in known:
            raise bad_request(
                f"{sanitized(name)}", "there is no such parameter", suggestion(name, known)
            )


def time_parameter(name: str, text: str, now: Instant) -> int:
    """The parameter ``name`` in monotonic nanoseconds. ProblemError."""
    try:
        return parse_time(text, now)
    except ValueError as error:
        raise bad_request(f"{name}={sanitized(text)}", str(error), TIME_FORMATS) from None


def _number(name: str, text: str, most: int) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 19 and 0 < int(text) <= most:
        return int(text)
    raise bad_request(
        f"{name}={sanitized(text)}",
        f"that is no whole number from 1 to {most}",
        'Write a process id, or "self" for whoever asks.'
        if name == "pid"
        else "It is field 22 of /proc/PID/stat, in clock ticks since boot.",
    )


def _flag(name: str, query: Mapping[str, str]) -> bool:
    text = query.get(name, "0")
    if text not in _BOOLEANS:
        raise bad_request(
            f"{name}={sanitized(text)}", "that is neither yes nor no", "Write 1 or 0."
        )
    return _BOOLEANS[text]


def _wait(query: Mapping[str, str]) -> int:
    text = query.get("wait", "0s")
    try:
        wait = Duration.parse(text)
    except ValueError as error:
        raise bad_request("wait", str(error), 'Write it as "2s".') from None
    if wait > LONGEST_WAIT:
        raise bad_request(
            f"wait={sanitized(text)}", "that is too long", "Wait at most 60s, and ask again."
        )
    return wait


def sanitized(text: str) -> str:
    """Input of a client, shortened and printable."""
    return printable(text[:60])
