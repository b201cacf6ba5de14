"""The exporter ``otlp``: pushes metrics by OTLP. Its modules are imported on use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from wattspan.model.settings import Duration, Table, about
from wattspan.ports import Exporter, ExporterContext, ExporterPlugin


class OtlpSettings(Table, frozen=True):
    """The settings of the table ``[exporters.otlp]``."""

    endpoint: Annotated[
        str,
        about(
            "The receiver: `http://HOST:4318`, `https://HOST`, `grpc://HOST:4317`, `grpcs://HOST` "
            'or `unix:///PATH`; "" turns the exporter off.'
        ),
    ] = ""
    protocol: Annotated[
        Literal["http/protobuf", "grpc"],
        about("The protocol of an `http://` or `https://` endpoint; `grpc` needs the package h2."),
    ] = "http/protobuf"
    interval: Annotated[Duration, about("The interval of pushes.", least="1s", most="1h")] = (
        Duration.parse("10s")
    )
    timeout: Annotated[
        Duration, about("The longest wait for a response.", least="100ms", most="10m")
    ] = Duration.parse("10s")
    headers: Annotated[
        str,
        about(
            'Headers sent with every push, as "authorization=Bearer%20...,x-tenant=a": the form '
            "of OTEL_EXPORTER_OTLP_HEADERS. Never shown.",
            secret=True,
        ),
    ] = ""
    headers_file: Annotated[
        str, about("A file with more headers, one a line, `name: value`; read at the start.")
    ] = ""
    compression: Annotated[
        Literal["auto", "gzip", "none"],
        about("`auto` is gzip to other hosts, and none on this host."),
    ] = "auto"
    tls_ca: Annotated[
        str, about('A PEM file with the trusted authorities; "" for those of the host.')
    ] = ""
    tls_certificate: Annotated[
        str, about("A PEM file with the agent's own certificate, for receivers that require one.")
    ] = ""
    tls_key: Annotated[
        str, about('A PEM file with its key; "" if the certificate\'s file has it.')
    ] = ""
    metrics: Annotated[
        tuple[str, ...],
        about(
            'OpenTelemetry names of the pushed metrics; `*` matches anything, and a leading "!" '
            'excludes: ["*", "!wattspan.process.*"].'
        ),
    ] = ("*",)
    resource: Annotated[
        str,
        about(
            'More resource attributes, as "deployment.environment.name=prod,team=ml"; they win '
            "over those of OTEL_RESOURCE_ATTRIBUTES and over the agent's own."
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.tls_key and not self.tls_certificate:
            raise ValueError("tls_key needs tls_certificate")
        plain = self.endpoint.startswith(("http://", "grpc://", "unix:", "grpc+unix:"))
        if plain and (self.tls_ca or self.tls_certificate):
            raise ValueError(
                "tls_ca and tls_certificate are of no use at an endpoint without TLS; write "
                "https:// or grpcs://, or leave them out"
            )


def open_exporter(settings: OtlpSettings, context: ExporterContext) -> Exporter | None:
    """The exporter, not started; None if ``endpoint`` is empty."""
    if not settings.endpoint:
        return None
    from wattspan_exporters.otlp.exporter import open_otlp

    return open_otlp(settings, context)


def faults(settings: OtlpSettings) -> Iterable[str]:
    """A sentence for each error that would prevent opening."""
    if not settings.endpoint:
        return ()
    from wattspan_exporters.otlp.exporter import otlp_faults

    return otlp_faults(settings)


plugin = ExporterPlugin(settings=OtlpSettings, open=open_exporter, faults=faults)
