"""The receiver as it is configured: its address, headers, certificates, and the way there.

What in the settings would keep the exporter from opening, found without opening it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

from wattspan.http.tls import MAX_PEM_BYTES
from wattspan.model import SECOND
from wattspan.otlp.destination import (
    METRICS,
    Destination,
    OtlpProtocol,
    as_grpc,
    header_error,
    parse_destination,
    parse_headers,
)
from wattspan.otlp.transport import Transport
from wattspan.otlp.validation import address_errors, collect_errors
from wattspan.ports import Clock, ExporterError
from wattspan.util.files import read_regular
from wattspan_exporters.catalogue.selection import select_metrics
from wattspan_exporters.otlp.resource import configured_attributes
from wattspan_exporters.otlp.settings import OtlpSettings

_TABLE_NAME = "in [exporters.otlp]"


def endpoint_address(settings: OtlpSettings) -> str:
    """The endpoint, with the protocol in it."""
    return as_grpc(settings.endpoint) if settings.protocol == "grpc" else settings.endpoint


def endpoint_destination(settings: OtlpSettings) -> Destination:
    """ConfigError says what the address should be."""
    return parse_destination(endpoint_address(settings), METRICS)


def open_transport(settings: OtlpSettings, clock: Clock, version: str) -> Transport:
    """The way to the receiver, not yet gone; a WattspanError if it cannot be one."""
    to = endpoint_destination(settings)
    headers = parse_headers(settings.headers, METRICS) | read_headers(settings.headers_file)
    trust = tls_context_factory(settings) if to.tls else ssl.create_default_context
    patience = settings.timeout / SECOND
    compress = {"gzip": True, "none": False}.get(settings.compression)
    if to.protocol is OtlpProtocol.GRPC:
        from wattspan.otlp.grpc_transport import GrpcTransport

        return GrpcTransport(
            to, headers, clock, trust=trust, answer_within=patience, compress=compress
        )
    from wattspan.otlp.http_transport import HttpTransport

    return HttpTransport(
        to,
        headers,
        clock,
        agent=f"wattspan/{version}",
        trust=trust,
        answer_within=patience,
        compress=compress,
    )


def read_headers(path: str) -> dict[str, str]:
    """Headers from a file of lines, ``name: value``; empty ones and those after # are left out."""
    if not path:
        return {}
    try:
        lines = read_regular(path).content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable("headers_file", path, error) from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        name = name.lower() if colon else ""
        if fault := header_error(name, value, "name: value"):
            raise ExporterError(
                f"{path}, line {number}: {fault}; correct the file, which headers_file "
                f"{_TABLE_NAME} names."
            )
        found[name] = value
    return found


def tls_context_factory(settings: OtlpSettings) -> Callable[[], ssl.SSLContext]:
    """Makes the TLS context; what is wrong with the files is said now, and not at each push."""

    def context() -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=settings.tls_ca or None)
        if settings.tls_certificate:
            key = settings.tls_key or settings.tls_certificate
            made.load_cert_chain(settings.tls_certificate, key, password=_no_passphrase)
        return made

    for setting in ("tls_ca", "tls_certificate", "tls_key"):
        if path := getattr(settings, setting):
            try:
                read_regular(path, MAX_PEM_BYTES)
            except OSError as error:
                raise _unreadable(setting, path, error) from None
    try:
        context()
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            cause = "the key of tls_key does not belong to the certificate of tls_certificate"
        else:
            cause = "a file of tls_ca, tls_certificate or tls_key does not hold what it should, in "
            cause += "PEM form"
        raise ExporterError(
            f"Cannot push metrics over TLS: {cause}; correct it {_TABLE_NAME}."
        ) from None
    return context


def _unreadable(setting: str, path: str, error: OSError | UnicodeDecodeError) -> ExporterError:
    why = (getattr(error, "strerror", None) or "it is not text").lower()
    return ExporterError(
        f"Cannot read {path}: {why}; correct {setting} {_TABLE_NAME} or let the agent's user "
        "read the file."
    )


def _no_passphrase() -> str:
    """Asked for only if the key is encrypted, when OpenSSL would ask on a terminal."""
    raise ExporterError(
        f"Cannot push metrics over TLS: the key is encrypted; give tls_key {_TABLE_NAME} a key "
        "without a passphrase, readable by the agent's user only."
    )


def otlp_faults(settings: OtlpSettings) -> Iterator[str]:
    """A sentence for each of them.

    Files that are there, and not for us to read, are the agent's user's affair.
    """
    yield from address_errors(endpoint_address(settings), settings.headers, METRICS)
    if settings.headers_file and _is_readable_here(settings.headers_file):
        yield from collect_errors(lambda: read_headers(settings.headers_file))
    tls = [path for path in (settings.tls_ca, settings.tls_certificate, settings.tls_key) if path]
    if tls and all(map(_is_readable_here, tls)):
        yield from collect_errors(lambda: tls_context_factory(settings))
    yield from collect_errors(
        lambda: configured_attributes(settings.resource),
        lambda: select_metrics(settings.metrics, "exporters.otlp"),
    )


def _is_readable_here(path: str) -> bool:
    """Whether we may say what is wrong with it, its absence included."""
    try:
        Path(path).stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return os.access(path, os.R_OK)
