"""Asking for one number: of a server that speaks Prometheus's HTTP API, or of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.regular_file import read_regular
from wattspan.settings import quoted

LARGEST = 64 * 1024
"""Bytes of an answer; one number takes less."""


class AnswerError(Exception):
    """There is no number: the message is why. ``answered`` if somebody did, and said no number."""

    def __init__(self, why: str, *, answered: bool = True) -> None:
        super().__init__(why)
        self.answered = answered


class Answer(NamedTuple):
    """A number, and for how many nanoseconds it has been known."""

    number: float
    age: int = 0


def ask_server(url: str, query: str, timeout: float) -> Answer:
    """The one number that ``query`` comes to now; AnswerError if there is none, or several.

    ``timeout`` seconds are for each step of the conversation, not for all of it.
    """
    return Answer(number_in(_fetch(url, query, timeout)))


def number_in(body: bytes) -> float:
    """The number in an answer of ``/api/v1/query``: a scalar, or a vector of one."""
    try:
        answer: Any = json.loads(body)
        if answer["status"] != "success":
            raise AnswerError(f"the server says {quoted(str(answer.get('error', 'no reason')))}")
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        if kind == "vector":
            if len(result) != 1:
                raise AnswerError(_how_many(len(result)))
            result = result[0]["value"]
        elif kind != "scalar":
            raise AnswerError(f"the query yields a {quoted(str(kind))} and not one number")
        return float(str(result[1]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise AnswerError("the answer is not that of a Prometheus server") from None


def _how_many(series: int) -> str:
    if not series:
        return "the query yields nothing"
    return f"the query yields {series} series; make it one, as with avg()"


def _fetch(url: str, query: str, timeout: float) -> bytes:
    # Imported here: most agents never ask anybody.
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import urlencode
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Stay(HTTPRedirectHandler):
        """Whoever was configured is asked, and nobody else."""

        def redirect_request(self, *_: object) -> None:
            return None

    address = f"{url.rstrip('/')}/api/v1/query?{urlencode({'query': query})}"
    try:
        with build_opener(Stay).open(Request(address), timeout=timeout) as answer:  # noqa: S310
            body: bytes = answer.read(LARGEST + 1)
    except HTTPError as error:
        with error:
            body = error.read(LARGEST + 1)
        if not body.startswith(b'{"status":"error"'):
            raise AnswerError(f"the server answers {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise AnswerError(str(why).lower(), answered=False) from None
    if len(body) > LARGEST:
        raise AnswerError("the answer is far too long for one number")
    return body


def ask_file(path: Path, now: int) -> Answer:
    """The number in a file, as old as the file; ``now`` is Unix nanoseconds."""
    try:
        text, status = read_regular(path)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise AnswerError(why, answered=False) from None
    try:
        return Answer(float(text.decode("ascii")), max(0, now - status.st_mtime_ns))
    except ValueError:
        shown = quoted(text[:60].decode("ascii", "replace").strip())
        raise AnswerError(f"{shown} is not a number") from None
