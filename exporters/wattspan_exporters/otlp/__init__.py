"""The exporter ``otlp``: pushes metrics by OTLP. Its modules are imported on use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from wattspan.model.settings import Duration, Table, about
from wattspan.ports import Exporter, ExporterContext, ExporterPlugin


class OtlpSettings(Table, frozen=True):
    """The settings of the table ``[exporters.otlp]``.

    Keys:
        endpoint: The receiver: `http://HOST:4318`, `https://HOST`, `grpc://HOST:4317`,
            `grpcs://HOST` or `unix:///PATH`; "" turns the exporter off.
        protocol: The protocol of an `http://` or `https://` endpoint; `grpc` needs the package h2.
        interval: The interval of pushes.
        timeout: The longest wait for a response.
        headers: Headers sent with every push, as "authorization=Bearer%20...,x-tenant=a": the form
            of OTEL_EXPORTER_OTLP_HEADERS. Never shown.
        headers_file: A file with more headers, one a line, `name: value`; read at the start.
        compression: `auto` is gzip to other hosts, and none on this host.
        tls_ca: A PEM file with the trusted authorities; "" for those of the host.
        tls_certificate: A PEM file with the agent's own certificate, for receivers that require
            one.
        tls_key: A PEM file with its key; "" if the certificate's file has it.
        metrics: OpenTelemetry names of the pushed metrics; `*` matches anything, and a leading "!"
            excludes: ["*", "!wattspan.process.*"].
        resource: More resource attributes, as "deployment.environment.name=prod,team=ml"; they win
            over those of OTEL_RESOURCE_ATTRIBUTES and over the agent's own.
    """

    endpoint: str = ""
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    interval: Annotated[Duration, about(least="1s", most="1h")] = Duration.parse("10s")
    timeout: Annotated[Duration, about(least="100ms", most="10m")] = Duration.parse("10s")
    headers: Annotated[str, about(secret=True)] = ""
    headers_file: str = ""
    compression: Literal["auto", "gzip", "none"] = "auto"
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    metrics: tuple[str, ...] = ("*",)
    resource: str = ""

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
