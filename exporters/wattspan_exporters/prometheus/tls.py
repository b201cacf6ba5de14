"""TLS for the server, from the operator's files."""

from __future__ import annotations

import ssl
from pathlib import Path

from wattspan.ports import ExporterError
from wattspan_exporters.prometheus.settings import PrometheusSettings

_WHERE = "in [exporters.prometheus]"


def server_context(settings: PrometheusSettings) -> ssl.SSLContext | None:
    """What the settings ask for: None for plain HTTP; ExporterError says what is wrong."""
    if not settings.tls_certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate = _readable("tls_certificate", settings.tls_certificate)
    key = _readable("tls_key", settings.tls_key) if settings.tls_key else certificate
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            cause = f"the key in {key} does not belong to the certificate in {certificate}"
        else:
            cause = f"{certificate} and {key} do not hold a certificate and a key in PEM form"
        raise ExporterError(f"Cannot serve metrics over TLS: {cause}; correct {_WHERE}.") from None
    if settings.tls_client_ca:
        authority = _readable("tls_client_ca", settings.tls_client_ca)
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError:
            raise ExporterError(
                f"Cannot serve metrics over mutual TLS: {authority} holds no certificate in PEM "
                f"form; correct tls_client_ca {_WHERE}."
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _readable(setting: str, path: str) -> str:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ExporterError(
            f"Cannot read {path}: {(error.strerror or str(error)).lower()}; correct {setting} "
            f"{_WHERE} or let the agent's user read the file."
        ) from None
    return path


def _no_passphrase() -> str:
    """Asked for only if the key is encrypted, when OpenSSL would ask on a terminal."""
    raise ExporterError(
        f"Cannot serve metrics over TLS: the key is encrypted; give tls_key {_WHERE} a key "
        "without a passphrase, readable by the agent's user only."
    )
