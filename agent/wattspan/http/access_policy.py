"""Access policy of a listener: TLS, bearer tokens, and the names by which it may be called."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import urlsplit

from wattspan.config import AccessSettings
from wattspan.http.limits import CountRejection, ignore_rejection
from wattspan.http.tls import (
    AccessError,
    FileReloader,
    Log,
    TlsContexts,
    is_world_accessible,
    server_tls,
    unreadable_error,
)
from wattspan.model.settings import Listen
from wattspan.util.files import read_regular

MIN_TOKEN_LENGTH = 16
"""Minimum length of a token, in characters."""

MAX_TOKENS = 1000
"""Maximum number of tokens in a file."""

CHALLENGES = 'Bearer realm="wattspan", Basic realm="wattspan", charset="UTF-8"'
"""Value of WWW-Authenticate. Basic makes browsers ask for a user and a password."""

_TOKEN = re.compile(r"[!-~]+", re.ASCII)

TokenCheck = Callable[[str], bool]
"""Check of an Authorization header: True if the header is admitted."""


def admit_all(_: str) -> bool:
    return True


def token_check(settings: AccessSettings, *, where: str, log: Log) -> TokenCheck | None:
    """The check of the configured tokens, None without tokens. AccessError."""
    path = settings.token_file
    if not path:
        return None
    digests = FileReloader((path,), lambda: read_tokens(path, where), log)
    return lambda authorization: _is_known(_token_from_header(authorization), digests())


def read_tokens(path: str, where: str) -> frozenset[bytes]:
    """Digests of the tokens in a file; the tokens themselves are not kept. AccessError."""
    try:
        content, status = read_regular(path)
    except OSError as error:
        raise unreadable_error(path, error, "token_file", where) from None
    if is_world_accessible(status.st_mode):
        raise AccessError(
            f"Cannot use the tokens in {path}: other users can read or change them; run "
            f"`chmod 0640 {path}`."
        )
    lines = content.decode("utf-8", "replace").splitlines()
    entries = [line.strip() for line in lines]
    tokens = list(filter(_is_token, entries))
    wrong = next(
        (n for n, line in enumerate(entries, 1) if _is_token(line) and not _is_valid(line)),
        None,
    )
    if wrong is not None or len(tokens) > MAX_TOKENS:
        cause = (
            f"that on line {wrong} is not {MIN_TOKEN_LENGTH} or more visible ASCII characters"
            if wrong is not None
            else f"there are more than {MAX_TOKENS} of them"
        )
        remedy = "make tokens by `openssl rand -hex 32`"
        raise AccessError(f"Cannot use the tokens in {path}: {cause}; {remedy}.")
    if not tokens:
        raise AccessError(
            f"Cannot use the tokens in {path}: there is none; put one into it, such as "
            f"`openssl rand -hex 32` makes, or correct token_file {where}."
        )
    return frozenset(map(_digest, tokens))


def _is_token(line: str) -> bool:
    return bool(line) and not line.startswith("#")


def _is_valid(line: str) -> bool:
    return len(line) >= MIN_TOKEN_LENGTH and _TOKEN.fullmatch(line) is not None


def _token_from_header(authorization: str) -> str:
    """The token in an Authorization header, "" for none."""
    scheme, _, credentials = authorization.strip().partition(" ")
    credentials = credentials.strip()
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(credentials, validate=True).decode("utf-8", "replace")
        except (binascii.Error, ValueError):
            return ""
        return pair.partition(":")[2]
    return ""


def _is_known(token: str, digests: frozenset[bytes]) -> bool:
    """True if the token is known, in a time independent of the number of correct characters."""
    sent, known = _digest(token), False
    for digest in digests:
        known |= hmac.compare_digest(sent, digest)
    return known


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def exposure_warning(listen: Listen, settings: AccessSettings, *, where: str, risk: str) -> str:
    """A warning for a listener that is open to the network without TLS or tokens; "" for none.

    ``risk`` is the consequence, as a clause.
    """
    if not listen or listen.loopback:
        return ""
    if settings.tls_certificate:
        if settings.token_file or settings.tls_client_ca:
            return ""
        gap = f"for everybody: {risk}; set token_file or tls_client_ca in {where}"
    elif settings.token_file:
        gap = f"without TLS: eavesdroppers learn the token; set tls_certificate in {where}"
    else:
        gap = (
            f"without TLS and for everybody: {risk}; set tls_certificate and token_file in "
            f"{where}, or listen on loopback"
        )
    return f"{listen} is open to the network {gap}."


LOCAL_HOST_NAMES = frozenset(
    {"localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
)
"""Other names that distributions give the loopback addresses; no public name server has them."""


def is_local_host_header(host: str) -> bool:
    """True if a Host header can be that of a client on this machine.

    By DNS rebinding, a web page can make its own name resolve to 127.0.0.1 and read in the
    visitor's browser what is served there. The Host header then holds that name; an address or
    ``localhost`` belongs to nobody else.
    """
    if not host:  # no browser omits it
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if f".{name}".endswith(".localhost") or name in LOCAL_HOST_NAMES:
            return True
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class Refusal(NamedTuple):
    """The response to a request that the policy does not admit."""

    status: int
    sentence: str
    headers: Mapping[str, str] = {}


_FROM_PAGE = Refusal(403, "Requests of web pages are not accepted here.")
_WRONG_NAME = Refusal(
    421,
    "Requests are accepted from this machine only, for the name localhost or an address; a proxy "
    'in front has to send "Host: localhost".',
)
_NO_TOKEN = Refusal(
    401,
    "A token of the agent's token_file is needed, as a bearer token or as the password of any "
    "user.",
    {"WWW-Authenticate": CHALLENGES},
)


class AccessPolicy(NamedTuple):
    """The policy of one listener. ``count_rejection`` is called with the reason of a rejection.

    Requests for ``open_paths`` need no token, and are delayed instead of refused if they exceed
    the rate.
    """

    count_rejection: CountRejection = ignore_rejection
    tls: TlsContexts | None = None
    admits: TokenCheck = admit_all  # by the Authorization header
    browsers: bool = True  # whether requests of web pages (with an Origin header) are accepted
    local_names: bool = False  # whether only this machine's own names are accepted
    open_paths: frozenset[str] = frozenset()

    def refusal(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why a request with these headers (names in lower case) is not admitted."""
        if "origin" in headers and not self.browsers:
            return _FROM_PAGE  # DNS rebinding, see is_local_host_header
        if self.local_names and not is_local_host_header(headers.get("host", "")):
            return _WRONG_NAME
        if path not in self.open_paths and not self.admits(headers.get("authorization", "")):
            return _NO_TOKEN
        return None


OPEN_ACCESS = AccessPolicy()


def tcp_policy(
    settings: AccessSettings,
    *,
    what: str,
    table: str,
    protocol: str,
    log: Log,
    count: CountRejection,
) -> AccessPolicy:
    """The policy of a TCP listener by the files in ``settings``. AccessError if one is invalid.

    ``what`` the listener does and ``table`` are for messages; TLS offers ``protocol`` (ALPN).
    """
    where = f"in {table}"
    tls = server_tls(
        settings, what=f"Cannot {what}", where=where, log=log, speaks=(protocol,), count=count
    )
    admits = token_check(settings, where=where, log=log) or admit_all
    return AccessPolicy(count, tls, admits)
