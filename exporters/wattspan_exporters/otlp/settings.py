"""``[exporters.otlp]``: what an operator may choose."""

from __future__ import annotations

from typing import Annotated, Literal

from wattspan.model.settings import Duration, Table, about


class OtlpSettings(Table, frozen=True):
    """Where metrics are pushed to, and how."""

    endpoint: Annotated[
        str,
        about(
            "The receiver: `http://HOST:4318`, `https://HOST`, `grpc://HOST:4317`, `grpcs://HOST` "
            'or `unix:///PATH`; "" turns the exporter off.'
        ),
    ] = ""
    protocol: Annotated[
        Literal["http/protobuf", "grpc"],
        about("What is spoken at an `http://` or `https://` endpoint; `grpc` needs the extra."),
    ] = "http/protobuf"
    interval: Annotated[
        Duration, about("How often the newest figures are pushed.", least="1s", most="1h")
    ] = Duration.parse("10s")
    timeout: Annotated[
        Duration, about("How long the receiver has to answer.", least="100ms", most="10m")
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
        str, about("A file with more of them, one a line, `name: value`; read at the start.")
    ] = ""
    compression: Annotated[
        Literal["auto", "gzip", "none"],
        about("`auto` is gzip to another machine; on this one it would buy nothing."),
    ] = "auto"
    tls_ca: Annotated[
        str, about('A PEM file with the authorities to trust; "" is those of the host.')
    ] = ""
    tls_certificate: Annotated[
        str, about("A PEM file with the agent's own certificate, for receivers that ask for one.")
    ] = ""
    tls_key: Annotated[
        str, about('A PEM file with its key; "" if it is in the certificate\'s file.')
    ] = ""
    metrics: Annotated[
        tuple[str, ...],
        about(
            'The metrics to push by their OpenTelemetry names, `*` being anything; a "!" before '
            'it takes away again: ["*", "!wattspan.process.*"].'
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
