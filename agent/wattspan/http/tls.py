"""TLS contexts of listeners, and files that are read again when they change (rotation)."""

from __future__ import annotations

import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from wattspan.config import AccessSettings
from wattspan.http.limits import CountRejection, RejectionReason, ignore_rejection
from wattspan.ports import WattspanError
from wattspan.util.files import read_regular

T = TypeVar("T")
Log = Callable[[str], None]


class AccessError(WattspanError):
    """A certificate, key or token file is invalid."""


class _FileVersion(NamedTuple):
    """Identity of a version of a file, which changes when it is replaced or rewritten."""

    inode: int
    size: int
    modified: int
    changed: int


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
                self._log(f"What was in force before stays in force: {error}")
        else:
            self._state, self._reported = state, ""

    def _versions(self) -> tuple[_FileVersion | None, ...]:
        return tuple(map(_file_version, self._paths))


def _file_version(path: str) -> _FileVersion | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return _FileVersion(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


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

TlsContexts = Callable[[], ssl.SSLContext]
"""Returns the context for the next connection."""


def server_tls(
    settings: AccessSettings,
    *,
    what: str,
    where: str,
    log: Log,
    speaks: Sequence[str] = (),
    count: CountRejection = ignore_rejection,
) -> TlsContexts | None:
    """TLS as configured, None without. AccessError names ``what`` failed and ``where`` it is set.

    ``speaks`` are the offered protocols (ALPN). Changed files are read again for each connection.
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
        if speaks:
            context.set_alpn_protocols(list(speaks))
        return context

    files = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    return FileReloader(files, read, log)


def _context(settings: AccessSettings, what: str, where: str) -> ssl.SSLContext:
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


def load_certificate(
    context: ssl.SSLContext, certificate: str, key: str, what: str, where: str
) -> None:
    """Load a certificate and its key, by default from the same file; AccessError."""
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
