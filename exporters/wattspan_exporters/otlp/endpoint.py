"""The receiver of a configuration: address, headers, TLS, resource attributes, and their errors."""

from __future__ import annotations

import os
import ssl
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from wattspan.http.tls import MAX_PEM_BYTES
from wattspan.model import SECOND, Snapshot
from wattspan.otlp.destination import (
    METRICS,
    Destination,
    as_grpc,
    header_error,
    parse_destination,
    parse_headers,
)
from wattspan.otlp.opening import address_errors, open_transport
from wattspan.otlp.transport import Transport
from wattspan.ports import Clock, ConfigError, ExporterError, error_sentences
from wattspan.util.files import read_regular
from wattspan_exporters.catalogue.metrics import select_metrics
from wattspan_exporters.otlp import OtlpSettings
from wattspan_exporters.otlp.wire import Value

_TABLE_NAME = "in [exporters.otlp]"


def endpoint_address(settings: OtlpSettings) -> str:
    """The endpoint with the scheme of its protocol."""
    return as_grpc(settings.endpoint) if settings.protocol == "grpc" else settings.endpoint


def endpoint_destination(settings: OtlpSettings) -> Destination:
    """The address of the receiver; ConfigError."""
    return parse_destination(endpoint_address(settings), METRICS)


def endpoint_transport(settings: OtlpSettings, clock: Clock, version: str) -> Transport:
    """The transport to the receiver; a WattspanError for invalid settings or files."""
    destination = endpoint_destination(settings)
    return open_transport(
        destination,
        parse_headers(settings.headers, METRICS) | read_headers(settings.headers_file),
        clock,
        version,
        trust=tls_context_factory(settings) if destination.tls else ssl.create_default_context,
        answer_within=settings.timeout / SECOND,
        compress={"gzip": True, "none": False}.get(settings.compression),
    )


def read_headers(path: str) -> dict[str, str]:
    """The headers of a file with lines ``name: value``, empty lines and # comments."""
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
    """A function that makes the TLS context; ExporterError now for invalid files."""

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
            cause = "a file of tls_ca, tls_certificate or tls_key is not valid PEM"
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
    """Called for an encrypted key, for which OpenSSL would ask on a terminal."""
    raise ExporterError(
        f"Cannot push metrics over TLS: the key is encrypted; give tls_key {_TABLE_NAME} a key "
        "without a passphrase, readable by the agent's user only."
    )


def otlp_faults(settings: OtlpSettings) -> Iterator[str]:
    """A sentence for each error of the settings.

    Files that this user may not read are skipped; the agent's user may.
    """
    yield from address_errors(endpoint_address(settings), settings.headers, METRICS)
    if settings.headers_file and _is_readable_here(settings.headers_file):
        yield from error_sentences(lambda: read_headers(settings.headers_file))
    tls = [path for path in (settings.tls_ca, settings.tls_certificate, settings.tls_key) if path]
    if tls and all(map(_is_readable_here, tls)):
        yield from error_sentences(lambda: tls_context_factory(settings))
    yield from error_sentences(
        lambda: configured_attributes(settings.resource),
        lambda: select_metrics(settings.metrics, "exporters.otlp"),
    )


def _is_readable_here(path: str) -> bool:
    """True if the errors of a file, including its absence, can be determined."""
    try:
        Path(path).stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return os.access(path, os.R_OK)


# ------------------------------------------------------------------------- resource attributes

MACHINE_ID_PATHS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))

_NAMESPACE = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
"""OpenTelemetry's namespace for a ``service.instance.id`` made from other values."""


class ResourceAttributes:
    """The resource attributes of a snapshot, the same after a restart.

    Settings override the environment, and the environment overrides the agent's own values.
    """

    def __init__(
        self,
        version: str,
        *,
        configured: Mapping[str, str],
        environ: Mapping[str, str],
        machine_id: str,
    ) -> None:
        self._version = version
        self._machine_id = machine_id
        name = "OTEL_RESOURCE_ATTRIBUTES"
        self._overrides = parse_attributes(environ.get(name, ""), name)
        if service := environ.get("OTEL_SERVICE_NAME"):
            self._overrides["service.name"] = service
        self._overrides |= configured

    def __call__(self, snapshot: Snapshot) -> dict[str, Value]:
        known: dict[str, Value] = {
            "service.name": "wattspan",
            "service.version": self._version,
            "service.instance.id": self._instance(snapshot.host),
            "host.name": snapshot.host,
        }
        if snapshot.emulated:
            known["wattspan.emulated"] = True
        elif self._machine_id:
            known["host.id"] = self._machine_id
        return known | self._overrides

    def _instance(self, host: str) -> str:
        # Includes the host name, because an emulated host has the machine id of the real one.
        return str(uuid.uuid5(_NAMESPACE, f"wattspan/{self._machine_id}/{host}"))


def machine_id(places: tuple[Path, ...] = MACHINE_ID_PATHS) -> str:
    """The id of this machine; "" if it has none, as in some containers."""
    for place in places:
        try:
            found = place.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if found and found.isalnum():
            return found
    return ""


def configured_attributes(text: str) -> dict[str, str]:
    """The attributes of the setting ``resource``; ConfigError."""
    return parse_attributes(text, "[exporters.otlp] resource")


def parse_attributes(text: str, where: str) -> dict[str, str]:
    """Percent-encoded ``name=value`` pairs, separated by commas, as OTEL_RESOURCE_ATTRIBUTES.

    ConfigError with ``where`` and the number of an invalid pair.
    """
    found: dict[str, str] = {}
    for number, pair in enumerate(text.split(","), start=1):
        if not pair.strip():
            continue
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise ConfigError(f'{where}, pair {number}: it is not of the form "name=value".')
        found[unquote(name)] = unquote(value)
    return found
