"""One HTTP GET request of a bounded answer, without redirects."""

from __future__ import annotations

from typing import NamedTuple

OK = 200


class HttpAnswer(NamedTuple):
    """Status and body; the body has at most one byte more than permitted."""

    status: int
    body: bytes


class FetchError(Exception):
    """The request had no answer; the message is the cause in lower case."""


def http_get(url: str, *, timeout: float, most: int) -> HttpAnswer:
    """The answer to a GET request, of any status, read up to ``most`` + 1 bytes; FetchError.

    ``timeout`` is the seconds that each step of the connection may take.
    """
    # Imported here: most agents query no server.
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirect(HTTPRedirectHandler):
        """Follows no redirect: the agent contacts only the configured server."""

        def redirect_request(self, *_: object) -> None:
            return None

    try:
        try:
            with build_opener(NoRedirect).open(Request(url), timeout=timeout) as response:  # noqa: S310
                return HttpAnswer(response.status, response.read(most + 1))
        except HTTPError as error:
            with error:
                return HttpAnswer(error.code, error.read(most + 1))
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        cause = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise FetchError(str(cause).lower()) from None
