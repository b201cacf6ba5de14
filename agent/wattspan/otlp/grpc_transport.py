"""OTLP/gRPC: an extra, imported only where the address requires it.

The flag before a message marks it as compressed, the header ``grpc-encoding`` names the encoding.
An endpoint that cannot read the encoding should answer UNIMPLEMENTED; libraries without
compression answer other errors.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace

from wattspan.otlp.destination import SPANS, Signal
from wattspan.otlp.transport import (
    MAX_RESPONSE_SIZE,
    CollectorTransport,
    ExportResult,
    ExportStatus,
    describe_os_error,
    result_of_grpc,
    result_of_response,
)
from wattspan.util.encoding import (
    BodyEncodingError,
    BodyTooLongError,
    frame_message,
    gzip_compress,
    gzip_decompress,
)
from wattspan.util.grpc_client import GrpcConnection, GrpcReply, ResponseTooLargeError
from wattspan.util.protobuf import retry_delay

_NO_GZIP = "does not know gzip, and gets them uncompressed"


def result_of_reply(reply: GrpcReply, signal: Signal = SPANS) -> ExportResult:
    """The result of a complete reply."""
    code, message = reply.status
    if code != 0:
        return result_of_grpc(code, code.name, message, _retry_delay(reply), signal)
    try:
        return result_of_response(_decompressed(reply), signal)
    except (BodyEncodingError, BodyTooLongError) as error:
        # The status confirms the request; its rejected part is unknown.
        return ExportResult(
            ExportStatus.TAKEN, f"its answer cannot be read ({error})", signal.elsewhere
        )


def _decompressed(reply: GrpcReply) -> bytes:
    if reply.flag == 0:
        return reply.message
    if reply.flag > 1:
        raise BodyEncodingError("its message has unknown flags")
    encoding = reply.headers.get("grpc-encoding", "identity")
    if encoding == "identity":
        raise BodyEncodingError("it is compressed, but grpc-encoding names no encoding")
    if encoding != "gzip":
        raise BodyEncodingError("it is compressed in a way that was not offered")
    return gzip_decompress(reply.message, MAX_RESPONSE_SIZE)


def _retry_delay(reply: GrpcReply) -> int | None:
    """The delay that the details of a failure ask for, in nanoseconds."""
    details = {**reply.headers, **reply.trailers}.get("grpc-status-details-bin", "")
    try:
        return retry_delay(base64.b64decode(details + "=" * (-len(details) % 4)))
    except (binascii.Error, ValueError):
        return None


class GrpcTransport(CollectorTransport):
    """OTLP/gRPC, one call at a time."""

    alpn = "h2"
    _takes_gzip: bool | None = None  # None until it has been tried
    _report_no_gzip = False

    def _open(self) -> None:
        if self._takes_gzip:  # gzip that was refused is not tried again on each connection
            self._takes_gzip = None
        self._http2 = GrpcConnection(self._read, self._write, MAX_RESPONSE_SIZE)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._takes_gzip = None  # the next connection may reach another collector

    def _is_open(self, unread: bytes) -> bool:
        self._deadline_in(self._answer_within)
        try:
            return self._http2.process(unread)
        except Exception:  # noqa: BLE001 - as in _call
            return False

    def send(self, body: bytes) -> ExportResult:
        if not self._compress or self._takes_gzip is False:
            result, _ = self._call(body, zipped=False)
            return self._with_gzip_report(result)
        result, reply = self._call(gzip_compress(body), zipped=True)
        if self._takes_gzip is None and reply is not None and reply.blames_encoding:
            return self._with_gzip_report(self._retry_without_gzip(body, reply))
        if result.verdict is ExportStatus.TAKEN:
            self._takes_gzip = True
        return result

    def _retry_without_gzip(self, body: bytes, refused: GrpcReply) -> ExportResult:
        """Send uncompressed what was refused, and so not accepted, when it was compressed."""
        result, reply = self._call(body, zipped=False)
        differs = reply is not None and reply.status[0] != refused.status[0]
        if result.verdict is not ExportStatus.AGAIN and differs:
            self._takes_gzip, self._report_no_gzip = False, True
        return result

    def _with_gzip_report(self, result: ExportResult) -> ExportResult:
        """The result; the first accepted one without gzip says so."""
        if not self._report_no_gzip or result.verdict is not ExportStatus.TAKEN:
            return result
        self._report_no_gzip = False
        why = f"{result.why}, and it {_NO_GZIP}" if result.why else f"it {_NO_GZIP}"
        return replace(result, why=why)

    def _call(self, message: bytes, *, zipped: bool) -> tuple[ExportResult, GrpcReply | None]:
        """The result of one call, and the reply unless there is none."""
        if (failure := self._connect()) is not None:
            return failure, None
        http2 = self._http2
        self._deadline_in(self._answer_within)
        headers = {
            ":scheme": "https" if self._destination.tls else "http",
            ":path": self._signal.method,
            ":authority": self._authority,
            **self._headers,
            "grpc-accept-encoding": "identity,gzip",
        }
        if zipped:
            headers["grpc-encoding"] = "gzip"
        remedy = ""
        try:
            reply = http2.call(headers, frame_message(message, zipped=zipped))
        except TimeoutError:
            why = f"it did not answer within {self._answer_within:g} s"
        except ResponseTooLargeError as error:
            why = str(error)
        except OSError as error:
            why = f"the connection was lost: {describe_os_error(error)}"
        except Exception as error:  # noqa: BLE001 - h2 and hpack have errors of their own
            why, remedy = f"its protocol is not gRPC: {describe_os_error(error)}", self._signal.away
        else:
            self._used_at = self._clock.monotonic()
            if not http2.is_open:
                self.close()
            return result_of_reply(reply, self._signal), reply
        if http2.reply.failed:  # the collector answered before it read everything
            self.close()
            return result_of_reply(http2.reply, self._signal), http2.reply
        sent = http2.sent
        return self._lost(why, remedy, perhaps_taken=sent, unfinished=not sent), None
