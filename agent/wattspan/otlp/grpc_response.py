"""What comes back from a gRPC call, and what it means, without a socket.

The flag in front of a message says whether it is compressed, the header ``grpc-encoding`` how. An
endpoint that cannot read what it is sent says UNIMPLEMENTED, if it keeps to the rules; one whose
library knows no compression fails in some way of its own.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from wattspan.otlp.destination import SPANS, Signal
from wattspan.otlp.transport import (
    MAX_RESPONSE_SIZE,
    ExportResult,
    ExportStatus,
    result_of_grpc,
    result_of_response,
)
from wattspan.util.encoding import BodyEncodingError, BodyTooLongError, gzip_decompress
from wattspan.util.protobuf import retry_delay

FRAME_PREFIX = struct.Struct(">BI")
"""What is in front of a message: whether it is compressed, and its length as it is sent."""

ACCEPTED_ENCODINGS = "identity,gzip"
"""The encodings that are understood here, as ``grpc-accept-encoding`` lists them."""

_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
    *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
    "UNAUTHENTICATED",
)
_CODES = {str(code): code for code in range(len(_NAMES))}
_UNKNOWN, _UNIMPLEMENTED, _INTERNAL, _UNAVAILABLE = 2, 12, 13, 14

_OF_HTTP = {
    "400": _INTERNAL,
    "401": _NAMES.index("UNAUTHENTICATED"),
    "403": _NAMES.index("PERMISSION_DENIED"),
    "404": _UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), _UNAVAILABLE),
}
"""What the status of HTTP means where something on the way answers that speaks no gRPC."""

_Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GrpcReply:
    """What came back, as far as it came.

    ``flag`` and ``message`` are as they are on the wire. A failure as a rule has headers only.
    """

    headers: _Headers = field(default_factory=dict)
    flag: int = 0
    message: bytes = b""
    trailers: _Headers = field(default_factory=dict)

    @property
    def headers_say_all(self) -> bool:
        """Whether nothing is to be read after the headers, for they tell how the call went."""
        return "grpc-status" in self.headers or not _is_grpc(self.headers)

    @property
    def status(self) -> tuple[int, str]:
        """The gRPC status, and what is said about it; UNKNOWN if it is none."""
        http = self.headers.get(":status", "200")
        if http != "200":
            return _OF_HTTP.get(http, _UNKNOWN), f"HTTP {http}"
        if not _is_grpc(self.headers):
            return _UNKNOWN, f"its content is {self.headers.get('content-type', 'of no type')}"
        told = self._told
        code = told.get("grpc-status", "")
        if code not in _CODES:
            return _UNKNOWN, "it tells no gRPC status"
        return _CODES[code], unquote(told.get("grpc-message", ""), errors="replace")

    @property
    def failed(self) -> bool:
        """Whether it says that the call failed, be it whole or not."""
        begun = "grpc-status" in self._told or (self.headers and self.headers_say_all)
        return bool(begun) and self.status[0] != 0

    @property
    def blames_encoding(self) -> bool:
        """Whether it may be a failure of reading what was compressed by gzip."""
        told = {**self.headers, **self.trailers}.get("grpc-accept-encoding", "")
        knows = "gzip" in (name.strip() for name in told.split(","))
        return self.failed and not knows and self.status[0] in _MAY_BE_ENCODING

    @property
    def _told(self) -> _Headers:
        return self.headers if "grpc-status" in self.headers else self.trailers


_MAY_BE_ENCODING = frozenset((_UNIMPLEMENTED, _UNKNOWN, _INTERNAL))


def frame_message(message: bytes, *, zipped: bool) -> bytes:
    return FRAME_PREFIX.pack(zipped, len(message)) + message


def result_of_reply(reply: GrpcReply, signal: Signal = SPANS) -> ExportResult:
    """The meaning of a reply that came whole."""
    code, said = reply.status
    if code != 0:
        return result_of_grpc(code, _NAMES[code], said, _retry_delay(reply), signal)
    try:
        return result_of_response(_decompressed(reply), signal)
    except (BodyEncodingError, BodyTooLongError) as error:
        # The status says that it was taken; what was rejected of it is not known.
        return ExportResult(
            ExportStatus.TAKEN, f"its answer cannot be read ({error})", signal.elsewhere
        )


def _decompressed(reply: GrpcReply) -> bytes:
    """A message as it was before it was compressed; of a bounded size."""
    if reply.flag == 0:
        return reply.message
    if reply.flag > 1:
        raise BodyEncodingError("its flags are not known")
    encoding = reply.headers.get("grpc-encoding", "identity")
    if encoding == "identity":
        raise BodyEncodingError("it is compressed, and grpc-encoding names no way")
    if encoding != "gzip":
        raise BodyEncodingError("it is compressed in a way that was not offered")
    return gzip_decompress(reply.message, MAX_RESPONSE_SIZE)


def _is_grpc(headers: _Headers) -> bool:
    of_http = headers.get(":status", "200") == "200"
    return of_http and headers.get("content-type", "").startswith("application/grpc")


def _retry_delay(reply: GrpcReply) -> int | None:
    """What a failure's details ask for, in nanoseconds."""
    told = {**reply.headers, **reply.trailers}.get("grpc-status-details-bin", "")
    try:
        return retry_delay(base64.b64decode(told + "=" * (-len(told) % 4)))
    except (binascii.Error, ValueError):
        return None
