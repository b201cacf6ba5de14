"""Bearer tokens from a file, and whether a client has sent one of them.

What an operator should know of a listener that the network reaches.

What a listener asks of whoever comes in, before anything is read.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from wattspan.config.access import AccessSettings
from wattspan.http.connection_limiter import CountRejection, ignore_rejection
from wattspan.http.tls import (
    AccessError,
    FileReloader,
    Log,
    TlsContexts,
    is_world_accessible,
    unreadable_error,
)
from wattspan.model.settings import Listen
from wattspan.util.files import read_regular

MIN_TOKEN_LENGTH = 16
"""Characters of a token: shorter ones are guessed."""

MAX_TOKENS = 1000
"""Tokens of a file."""

CHALLENGES = 'Bearer realm="wattspan", Basic realm="wattspan", charset="UTF-8"'
"""What WWW-Authenticate says. Browsers know Basic, and ask for a user and a password."""

_TOKEN = re.compile(r"[!-~]+", re.ASCII)

TokenCheck = Callable[[str], bool]
"""Whether a client that sends this Authorization header may come in."""


def admit_all(_: str) -> bool:
    return True


def token_check(settings: AccessSettings, *, where: str, log: Log) -> TokenCheck | None:
    """What ``settings`` ask for: None for no tokens. AccessError says what is wrong."""
    path = settings.token_file
    if not path:
        return None
    digests = FileReloader((path,), lambda: read_tokens(path, where), log)
    return lambda authorization: _is_known(_token_from_header(authorization), digests())


def read_tokens(path: str, where: str) -> frozenset[bytes]:
    """The digests of the tokens of a file: the tokens themselves are not kept."""
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
    told = [line.strip() for line in lines]
    tokens = list(filter(_is_token, told))
    wrong = next(
        (n for n, line in enumerate(told, 1) if _is_token(line) and not _is_valid_token(line)), None
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


def _is_valid_token(line: str) -> bool:
    return len(line) >= MIN_TOKEN_LENGTH and _TOKEN.fullmatch(line) is not None


def _token_from_header(authorization: str) -> str:
    """The token in an Authorization header, "" for none."""
    scheme, _, credentials = authorization.strip().partition(" ")
    credentials = credentials.strip()
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() == "basic":
        try:
            told = base64.b64decode(credentials, validate=True).decode("utf-8", "replace")
        except (binascii.Error, ValueError):
            return ""
        return told.partition(":")[2]
    return ""


def _is_known(token: str, digests: frozenset[bytes]) -> bool:
    """Whether it is one of them, in a time that does not say how much of it was right."""
    sent, known = _digest(token), False
    for digest in digests:
        known |= hmac.compare_digest(sent, digest)
    return known


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def exposure_warning(listen: Listen, settings: AccessSettings, *, where: str, risk: str) -> str:
    """One sentence for a listener that is open to more than was surely meant; "" for none.

    ``risk`` says what whoever reaches it may do.
    """
    if not listen or listen.loopback:
        return ""
    tls, mutual = bool(settings.tls_certificate), bool(settings.tls_client_ca)
    token = bool(settings.token_file)
    if tls and (mutual or token):
        return ""
    if tls:
        return (
            f"{listen} is open to the network for everybody: {risk}; set token_file or "
            f"tls_client_ca in {where}."
        )
    if token:
        return (
            f"{listen} is open to the network without TLS: whoever listens on the way learns the "
            f"token; set tls_certificate in {where}."
        )
    return (
        f"{listen} is open to the network without TLS and for everybody: {risk}; set "
        f"tls_certificate and token_file in {where}, or listen on loopback."
    )


class AccessPolicy(NamedTuple):
    """One listener's. ``refused`` is told of everybody who is turned away, and why."""

    refused: CountRejection = ignore_rejection
    tls: TlsContexts | None = None
    admits: TokenCheck = admit_all  # by the Authorization header
    browsers: bool = True  # whether a request may come from a page


OPEN_ACCESS = AccessPolicy()
