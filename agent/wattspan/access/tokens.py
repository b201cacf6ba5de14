"""Bearer tokens from a file, and whether a client has sent one of them."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Callable
from hashlib import sha256

from wattspan.access.files import AccessError, Log, Reread, is_everybodys, unreadable
from wattspan.access.settings import AccessSettings
from wattspan.regular_file import read_regular

LEAST = 16
"""Characters of a token: shorter ones are guessed."""

MOST = 1000
"""Tokens of a file."""

CHALLENGES = 'Bearer realm="wattspan", Basic realm="wattspan", charset="UTF-8"'
"""What WWW-Authenticate says. Browsers know Basic, and ask for a user and a password."""

_TOKEN = re.compile(r"[!-~]+", re.ASCII)

Admits = Callable[[str], bool]
"""Whether a client that sends this Authorization header may come in."""


def anybody(_: str) -> bool:
    return True


def token_check(settings: AccessSettings, *, where: str, log: Log) -> Admits | None:
    """What ``settings`` ask for: None for no tokens. AccessError says what is wrong."""
    path = settings.token_file
    if not path:
        return None
    digests = Reread((path,), lambda: read_tokens(path, where), log)
    return lambda authorization: _known(_sent(authorization), digests())


def read_tokens(path: str, where: str) -> frozenset[bytes]:
    """The digests of the tokens of a file: the tokens themselves are not kept."""
    try:
        content, status = read_regular(path)
    except OSError as error:
        raise unreadable(path, error, "token_file", where) from None
    if is_everybodys(status.st_mode):
        raise AccessError(
            f"Cannot use the tokens in {path}: other users can read or change them; run "
            f"`chmod 0640 {path}`."
        )
    lines = content.decode("utf-8", "replace").splitlines()
    told = [line.strip() for line in lines]
    tokens = list(filter(_is_token, told))
    wrong = next((n for n, line in enumerate(told, 1) if _is_token(line) and not _fit(line)), None)
    if wrong is not None or len(tokens) > MOST:
        cause = (
            f"that on line {wrong} is not {LEAST} or more visible ASCII characters"
            if wrong is not None
            else f"there are more than {MOST} of them"
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


def _fit(line: str) -> bool:
    return len(line) >= LEAST and _TOKEN.fullmatch(line) is not None


def _sent(authorization: str) -> str:
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


def _known(token: str, digests: frozenset[bytes]) -> bool:
    """Whether it is one of them, in a time that does not say how much of it was right."""
    sent, known = _digest(token), False
    for digest in digests:
        known |= hmac.compare_digest(sent, digest)
    return known


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()
