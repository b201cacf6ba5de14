"""Access policy of a listener: TLS, bearer tokens, and the names by which it may be called."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from wattspan.config import AccessSettings
from wattspan.http.limits import CountRejection, RejectionReason, ignore_rejection
from wattspan.model.settings import Listen
from wattspan.ports import WattspanError
from wattspan.util.files import read_regular
from wattspan.util.http_get import client_context

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")
Log = Callable[[str], None]

# ------------------------------------------------------------------------------------- TLS


class AccessError(WattspanError):
    """A certificate, key or token file is invalid."""

    exit_code = 4


_FileVersion = tuple[int, int, int, int]
"""Inode, size and times of a file, which change when it is replaced or rewritten."""


class FileReloader(Generic[T]):
    """The value that ``read`` derives from files, derived again when one of them changes.

    The first ``read`` may raise AccessError. Afterwards an error is logged once, and the last
    valid value stays in force. Safe from any thread.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T], log: Log) -> None:
        self._paths, self._read, self._log = tuple(filter(None, paths)), read, log
        self._state = self._versions()
        self._value = read()
        self._reported = ""
        # Concurrent reads could combine an old value with a new state.
        self._lock = threading.Lock()

    def __call__(self) -> T:
        with self._lock:
            state = self._versions()
            if state != self._state:
                self._renew(state)
            return self._value

    def _renew(self, state: tuple[_FileVersion | None, ...]) -> None:
        try:
            self._value = self._read()
        except (AccessError, OSError) as error:  # OSError: removed meanwhile
            # The state is not stored, so the next call reads again: the key may follow later.
            if self._reported != str(error):
                self._reported = str(error)
                self._log(f"The previous content stays in force: {error}")
        else:
            self._state, self._reported = state, ""

    def _versions(self) -> tuple[_FileVersion | None, ...]:
        return tuple(map(_file_version, self._paths))


def _file_version(path: str) -> _FileVersion | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_world_accessible(mode: int) -> bool:
    """True if ``mode`` lets all users read a file, or its group or all users change it."""
    return bool(mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP))


def unreadable_error(path: str, error: OSError, setting: str, where: str) -> AccessError:
    return AccessError(
        f"Cannot read {path}: {(error.strerror or str(error)).lower()}; correct {setting} "
        f"{where} or let the agent's user read the file."
    )


MAX_PEM_BYTES = 16 << 20
"""Size limit of a PEM file; the authorities of a whole system are below one MiB."""

TlsContexts = Callable[[], "ssl.SSLContext"]
"""Returns the context for the next connection."""


def server_tls(
    settings: AccessSettings,
    *,
    what: str,
    where: str,
    log: Log,
    protocol: str = "",
    count: CountRejection = ignore_rejection,
) -> TlsContexts | None:
    """TLS as configured, None without. AccessError names ``what`` failed and ``where`` it is set.

    ``protocol`` is the offered protocol (ALPN). Changed files are read again for each connection.
    """
    if not settings.tls_certificate:
        return None
    ssl_object = _counting_ssl_object(count)

    def read() -> ssl.SSLContext:
        context = _context(settings, what, where)
        key = settings.tls_key or settings.tls_certificate
        # Logged, not refused as for tokens: the modes of mounted keys are often fixed.
        if is_world_accessible(Path(key).stat().st_mode):
            log(f"Other users can read or change the key in {key}: run `chmod 0640 {key}`.")
        context.sslobject_class = ssl_object
        if protocol:
            context.set_alpn_protocols([protocol])
        return context

    files = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    return FileReloader(files, read, log)


def _context(settings: AccessSettings, what: str, where: str) -> ssl.SSLContext:
    import ssl  # takes 10 ms and 4 MB, and most listeners have no TLS

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # No session is resumed: a revoked certificate must not outlive its revocation.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    load_certificate(context, settings.tls_certificate, settings.tls_key, what, where)
    if settings.tls_client_ca:
        authority = readable_pem("tls_client_ca", settings.tls_client_ca, where)
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError:
            raise AccessError(
                f"{what} over mutual TLS: {authority} holds no certificate in PEM form; correct "
                f"tls_client_ca {where}."
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(
    authority: str, certificate: str, key: str, *, what: str, where: str
) -> ssl.SSLContext:
    """The context of a client; AccessError names ``what`` failed and ``where`` the files are set.

    Without ``authority`` the client trusts the authorities of the host. Without ``certificate`` it
    presents none.
    """
    import ssl

    if authority:
        readable_pem("tls_ca", authority, where)
    try:
        context = client_context(authority)
    except ssl.SSLError:
        raise AccessError(
            f"{what} over TLS: {authority} holds no certificate in PEM form; "
            f"correct tls_ca {where}."
        ) from None
    if certificate:
        load_certificate(context, certificate, key, what, where)
    return context


def load_certificate(
    context: ssl.SSLContext, certificate: str, key: str, what: str, where: str
) -> None:
    """Load a certificate and its key, by default from the same file; AccessError."""
    import ssl

    key = key or certificate

    def no_passphrase() -> str:
        """Called for an encrypted key only, for which OpenSSL would prompt on the terminal."""
        raise AccessError(
            f"{what} over TLS: the key is encrypted; give tls_key {where} a key without a "
            "passphrase, readable by the agent's user only."
        )

    readable_pem("tls_certificate", certificate, where)
    readable_pem("tls_key", key, where)
    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            cause = f"the key in {key} does not belong to the certificate in {certificate}"
        else:
            cause = f"{certificate} and {key} do not hold a certificate and a key in PEM form"
        raise AccessError(f"{what} over TLS: {cause}; correct {where}.") from None


def readable_pem(setting: str, path: str, where: str) -> str:
    """``path``; AccessError if it is unreadable or too large."""
    try:
        read_regular(path, MAX_PEM_BYTES)
    except OSError as error:
        raise unreadable_error(path, error, setting, where) from None
    return path


def _counting_ssl_object(count: CountRejection) -> type[ssl.SSLObject]:
    """A TLS connection type that counts failed handshakes."""
    import ssl

    class CountingSslObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise  # the handshake continues
            except OSError:
                count(RejectionReason.TLS)
                raise

    return CountingSslObject


# ---------------------------------------------------------------------------------- tokens

MIN_TOKEN_LENGTH = 16
"""Minimum length of a token, in characters."""

MAX_TOKENS = 1000
"""Maximum number of tokens in a file."""

CHALLENGES = 'Bearer realm="wattspan", Basic realm="wattspan", charset="UTF-8"'
"""Value of WWW-Authenticate. Basic makes browsers ask for a user and a password."""

_TOKEN = re.compile(rf"[!-~]{{{MIN_TOKEN_LENGTH},}}", re.ASCII)

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
    lines = map(str.strip, content.decode("utf-8", "replace").splitlines())
    tokens = {n: line for n, line in enumerate(lines, 1) if line and not line.startswith("#")}
    wrong = [n for n, token in tokens.items() if not _TOKEN.fullmatch(token)]
    make = "make tokens by `openssl rand -hex 32`"
    fault = ""
    if is_world_accessible(status.st_mode):
        raise AccessError(
            f"Cannot use the tokens in {path}: other users can read or change them; run "
            f"`chmod 0640 {path}`."
        )
    if wrong:
        fault = (
            f"that on line {wrong[0]} is not {MIN_TOKEN_LENGTH} or more visible ASCII characters; "
            f"{make}"
        )
    elif len(tokens) > MAX_TOKENS:
        fault = f"there are more than {MAX_TOKENS} of them; {make}"
    elif not tokens:
        fault = (
            "there is none; put one into it, such as `openssl rand -hex 32` makes, or correct "
            f"token_file {where}"
        )
    if fault:
        raise AccessError(f"Cannot use the tokens in {path}: {fault}.")
    return frozenset(map(_digest, tokens.values()))


def bearer_token(path: str, where: str) -> str:
    """The token in a file that the agent itself sends, "" without a ``path``. AccessError."""
    if not path:
        return ""
    try:
        content, status = read_regular(path)
    except OSError as error:
        raise unreadable_error(path, error, "token_file", where) from None
    token = content.decode("utf-8", "replace").strip()
    if is_world_accessible(status.st_mode):
        fault = f"other users can read or change it; run `chmod 0640 {path}`"
    elif not token.isascii() or not token.isprintable() or " " in token or not token:
        fault = "it is not one line of visible ASCII characters"
    else:
        return token
    raise AccessError(f"Cannot use the token in {path}: {fault}.")


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
    browsers: bool = True  # accept requests of web pages (with an Origin header)
    local_names: bool = False  # accept only this machine's own names
    open_paths: frozenset[str] = frozenset()

    def refusal(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """The response if a request with these headers (names in lower case) is not admitted."""
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
        settings, what=f"Cannot {what}", where=where, log=log, protocol=protocol, count=count
    )
    admits = token_check(settings, where=where, log=log) or admit_all
    return AccessPolicy(count, tls, admits)
