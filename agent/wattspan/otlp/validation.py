"""What cannot be of an address and of headers, found without calling anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wattspan.otlp.destination import SPANS, OtlpProtocol, Signal, parse_destination, parse_headers
from wattspan.ports import WattspanError


def address_errors(url: str, headers: str, signal: Signal = SPANS) -> Iterator[str]:
    """A sentence for each fault with which nothing of ``signal`` could be sent there."""
    yield from collect_errors(
        lambda: _check_address(url, signal),
        lambda: parse_headers(headers, signal),
    )


def collect_errors(*checks: Callable[[], object]) -> Iterator[str]:
    """What each of these says that refuses, one after the other."""
    for check in checks:
        try:
            check()
        except WattspanError as error:
            yield from str(error).splitlines()


def _check_address(url: str, signal: Signal) -> None:
    to = parse_destination(url, signal)
    if to.protocol is OtlpProtocol.GRPC:
        from wattspan.otlp.grpc_transport import load_grpclib

        load_grpclib(to)
