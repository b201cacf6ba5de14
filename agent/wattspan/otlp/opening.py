"""Opens the transport of an address, and checks addresses without connecting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wattspan.otlp.destination import (
    SPANS,
    Destination,
    OtlpProtocol,
    Signal,
    parse_destination,
    parse_headers,
)
from wattspan.otlp.transport import Transport
from wattspan.ports import Clock, ConfigError, error_sentences


def open_transport(
    destination: Destination, headers: Mapping[str, str], clock: Clock, version: str, **options: Any
) -> Transport:
    """The transport of ``destination``; ConfigError if its extra is not installed.

    ``options`` are those of HttpTransport and GrpcTransport.
    """
    if destination.protocol is OtlpProtocol.GRPC:
        _require_grpc(destination)
        from wattspan.otlp.grpc_transport import GrpcTransport

        return GrpcTransport(destination, headers, clock, **options)
    from wattspan.otlp.http_transport import HttpTransport

    agent = f"wattspan/{version}".rstrip("/")
    return HttpTransport(destination, headers, clock, agent=agent, **options)


def address_errors(url: str, headers: str, signal: Signal = SPANS) -> Iterator[str]:
    """A sentence for each error of a configured address and headers."""

    def check_address() -> None:
        destination = parse_destination(url, signal)
        if destination.protocol is OtlpProtocol.GRPC:
            _require_grpc(destination)

    yield from error_sentences(check_address, lambda: parse_headers(headers, signal))


def _require_grpc(destination: Destination) -> None:
    try:
        import grpclib.client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"[{destination.signal.table}] {destination.signal.address} = "
            f'"{destination}" needs gRPC, which is not installed ({error}); '
            "run `pip install wattspan[grpc]`, or name an http:// address."
        ) from error
