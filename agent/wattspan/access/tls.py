"""TLS for a listener, from the operator's files."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from wattspan.access.files import AccessError, Log, Reread, is_everybodys, unreadable
from wattspan.access.refusals import Count, Reason, uncounted
from wattspan.access.settings import AccessSettings
from wattspan.regular_file import read_regular

LARGEST_PEM = 16 << 20
"""Bytes of a file of certificates: the authorities of a whole system are below one MiB."""

Contexts = Callable[[], ssl.SSLContext]
"""The context for the next connection."""


def server_tls(
    settings: AccessSettings,
    *,
    what: str,
    where: str,
    log: Log,
    speaks: Sequence[str] = (),
    count: Count = uncounted,
) -> Contexts | None:
    """What ``settings`` ask for: None for no TLS. AccessError says what is wrong.

    ``what`` cannot be done and ``where`` it is set are for that sentence. ``speaks`` are the
    protocols that are offered (ALPN). What the files hold is looked at for each connection.
    """
    if not settings.tls_certificate:
        return None
    sslobject, sslsocket = _counting(count)

    def read() -> ssl.SSLContext:
        context = _context(settings, what, where)
        key = settings.tls_key or settings.tls_certificate
        # Told and not refused, unlike tokens: where keys are mounted, modes are often not ours.
        if is_everybodys(Path(key).stat().st_mode):
            log(f"Other users can read or change the key in {key}: run `chmod 0640 {key}`.")
        context.sslobject_class, context.sslsocket_class = sslobject, sslsocket
        if speaks:
            context.set_alpn_protocols(list(speaks))
        return context

    files = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    return Reread(files, read, log)


def _context(settings: AccessSettings, what: str, where: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Whoever comes again shakes hands again: a certificate that was taken back is of no more use.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    certificate = _readable("tls_certificate", settings.tls_certificate, where)
    key = _readable("tls_key", settings.tls_key, where) if settings.tls_key else certificate

    def no_passphrase() -> str:
        """Asked for only if the key is encrypted, when OpenSSL would ask on a terminal."""
        raise AccessError(
            f"{what} over TLS: the key is encrypted; give tls_key {where} a key without a "
            "passphrase, readable by the agent's user only."
        )

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            cause = f"the key in {key} does not belong to the certificate in {certificate}"
        else:
            cause = f"{certificate} and {key} do not hold a certificate and a key in PEM form"
        raise AccessError(f"{what} over TLS: {cause}; correct {where}.") from None
    if settings.tls_client_ca:
        authority = _readable("tls_client_ca", settings.tls_client_ca, where)
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError:
            raise AccessError(
                f"{what} over mutual TLS: {authority} holds no certificate in PEM form; correct "
                f"tls_client_ca {where}."
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _readable(setting: str, path: str, where: str) -> str:
    try:
        read_regular(path, LARGEST_PEM)
    except OSError as error:
        raise unreadable(path, error, setting, where) from None
    return path


def _counting(count: Count) -> tuple[type[ssl.SSLObject], type[ssl.SSLSocket]]:
    """Kinds of connection that count handshakes that fail."""

    class CountedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise  # there is more to come
            except OSError:
                count(Reason.TLS)
                raise

    class CountedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            try:
                super().do_handshake(block)
            except OSError:
                count(Reason.TLS)
                raise

    return CountedObject, CountedSocket
