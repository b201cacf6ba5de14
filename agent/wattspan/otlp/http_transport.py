"""OTLP/HTTP: protobuf by POST, parsed by h11; and the transport that an address needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import h11

from wattspan.otlp.destination import (
    SPANS,
    Destination,
    OtlpProtocol,
    Signal,
    parse_destination,
    parse_headers,
)
from wattspan.otlp.transport import (
    MAX_RESPONSE_SIZE,
    CollectorTransport,
    ExportResult,
    ExportStatus,
    Transport,
    describe_os_error,
    result_of_http,
    retry_result,
)
from wattspan.ports import Clock, ConfigError, error_sentences
from wattspan.util.encoding import gzip_compress
from wattspan.util.text import pip_command


def open_transport(
    destination: Destination, headers: Mapping[str, str], clock: Clock, version: str, **options: Any
) -> Transport:
    """The transport of ``destination``; ConfigError if its extra is not installed.

    ``options`` are those of CollectorTransport.
    """
    agent = f"wattspan/{version}".rstrip("/")
    if destination.protocol is OtlpProtocol.GRPC:
        _require_grpc(destination)
        from wattspan.otlp.grpc_transport import GrpcTransport

        return GrpcTransport(destination, headers, clock, agent=agent, **options)
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
        import h2.connection  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"[{destination.signal.table}] {destination.signal.address} = "
            f'"{destination}" needs gRPC, which is not installed ({error}); '
            f"run {pip_command('h2')}, or name an http:// address."
        ) from error


class HttpTransport(CollectorTransport):
    """OTLP/HTTP. A request is sent completely or certainly not accepted."""

    def _open(self) -> None:
        """Each request has a parser of its own."""

    def send(self, body: bytes) -> ExportResult:
        headers = self._headers | {
            "host": self._authority,
            "content-type": "application/x-protobuf",
        }
        if self._compress:
            body = gzip_compress(body)
            headers["content-encoding"] = "gzip"
        headers["content-length"] = str(len(body))
        request = h11.Request(
            method="POST", target=self._destination.target, headers=[*headers.items()]
        )
        kept = self._socket
        result = self._exchange(request, body)
        if result.unfinished and kept is not None and not self._aborted:
            # The server had closed the kept connection, and accepted nothing.
            result = self._exchange(request, body)
        return result

    def _exchange(self, request: h11.Request, body: bytes) -> ExportResult:
        if (failure := self._connect()) is not None:
            return failure
        http1 = h11.Connection(h11.CLIENT)
        wire = b"".join(
            filter(None, map(http1.send, (request, h11.Data(data=body), h11.EndOfMessage())))
        )
        self._deadline_in(self._answer_within)
        try:
            self._write(wire)
        except OSError as error:
            why = f"it did not take all of a request: {describe_os_error(error)}"
            self._deadline_in(1)
            early = self._receive(http1)  # a refusal that the collector sent before it read all
            if early.verdict is ExportStatus.TAKEN or early.perhaps_taken:
                early = retry_result(why, unfinished=True)
            self._disconnect()
            return early
        self._deadline_in(self._answer_within)
        return self._receive(http1)

    def _receive(self, http1: h11.Connection) -> ExportResult:
        response: h11.Response | None = None
        body = bytearray()
        why = remedy = ""
        try:
            while len(body) < MAX_RESPONSE_SIZE:
                event = http1.next_event()
                if event is h11.NEED_DATA:
                    http1.receive_data(self._read())
                elif isinstance(event, h11.Response):
                    response = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
        except TimeoutError:
            why = f"it did not answer within {self._answer_within:g} s"
        except OSError as error:
            why = f"its answer broke off: {describe_os_error(error)}"
        except h11.RemoteProtocolError:
            unread, ended = http1.trailing_data
            if not ended:
                why = "it answered something that is not HTTP"
                address = self._signal.address
                remedy = f"If that is a port for OTLP/gRPC, write grpc:// in `{address}`."
            elif unread or response is not None:
                why = "its answer broke off"
            else:
                why = "it closed the connection without an answer"
        if response is None or (why and 200 <= response.status_code < 300):
            return self._lost(why, remedy, perhaps_taken=True)
        if {http1.our_state, http1.their_state} != {h11.DONE}:
            self.close()
        self._used_at = self._clock.monotonic()
        headers = {name: value.decode("latin-1") for name, value in response.headers}
        return result_of_http(
            response.status_code,
            bytes(body),
            content_type=headers.get(b"content-type", ""),
            retry_after=headers.get(b"retry-after", ""),
            location=headers.get(b"location", ""),
            now=self._clock.now().wall,
            signal=self._signal,
        )
