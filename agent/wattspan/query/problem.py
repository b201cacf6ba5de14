"""Errors as answers: the thing, the cause, the remedy (RFC 9457 problem details)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from http import HTTPStatus

import msgspec

from wattspan.http.messages import HttpResponse


class ProblemError(Exception):
    """A question that gets no answer, and why."""

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
    """Facts for a program. Nothing in between may keep them: they are of one moment."""
    kept = {"cache-control": "no-store", **(headers or {})}
    return HttpResponse(int(status), msgspec.json.encode(facts), content_type, kept)


def bad(thing: str, cause: str, remedy: str) -> ProblemError:
    """A question that cannot be understood."""
    return ProblemError(HTTPStatus.BAD_REQUEST, thing, cause, remedy)


def nearest(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the known one that is meant, or all there are."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known here: {', '.join(words)}." if words else "Nothing is known here."
