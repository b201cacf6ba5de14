"""Encodings of bodies: gzip with bounds on the decompressed size, and the frames of gRPC."""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum

_GZIP = 16 + zlib.MAX_WBITS


MAX_COMPRESSION_RATIO = 200
"""The largest ratio of the decompressed size of a body to its compressed size."""

RATIO_EXEMPT_BYTES = 1 << 20
"""Bytes after decompression up to which the ratio does not matter."""


class InvalidBodyError(ValueError):
    """A body is rejected; ``reason`` is a label of a metric."""

    reason = "malformed"


class BodyEncodingError(InvalidBodyError):
    """The body is not valid in its declared encoding."""


class BodyTooLongError(InvalidBodyError):
    """The decompressed body exceeds its bound."""

    reason = "too_large"


def gzip_compress(body: bytes) -> bytes:
    # Level 1: telemetry is so repetitive that higher levels gain little at several times the cost.
    press = zlib.compressobj(1, wbits=_GZIP)
    return press.compress(body) + press.flush()


def gzip_decompress(body: bytes, most: int) -> bytes:
    """The decompressed body; BodyEncodingError, or BodyTooLongError beyond ``most`` bytes.

    BodyTooLongError also beyond ``MAX_COMPRESSION_RATIO`` times the compressed size, from
    ``RATIO_EXEMPT_BYTES`` on. Decompression ends at the first byte beyond the smaller bound.
    """
    bound = max(RATIO_EXEMPT_BYTES, MAX_COMPRESSION_RATIO * len(body))
    if bound < most:
        why = (
            f"the body becomes more than {MAX_COMPRESSION_RATIO} times its size once it is "
            "decompressed"
        )
        most = bound
    else:
        why = f"the body has more than {most} bytes once it is decompressed"
    members, left = [], most
    while True:
        member = zlib.decompressobj(_GZIP)
        try:
            # One byte above the limit, to notice that it is exceeded; 0 would mean no limit.
            data = member.decompress(body, left + 1)
        except zlib.error as error:
            raise BodyEncodingError(f"the body is not gzip: {error}") from None
        left -= len(data)
        if left < 0:
            raise BodyTooLongError(why)
        if not member.eof:
            raise BodyEncodingError("the body is not gzip: it ends too early")
        members.append(data)
        body = member.unused_data
        if not body.strip(b"\0"):  # members may follow each other, and zeros the last
            return data if len(members) == 1 else b"".join(members)
        if len(members) > _MAX_GZIP_MEMBERS:
            raise BodyEncodingError("the body has too many gzip members")


_MAX_GZIP_MEMBERS = 32
"""No real client sends more; the bytes after each member are copied."""


GrpcStatus = IntEnum(
    "GrpcStatus",
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS "
    "PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED "
    "INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED",
    start=0,
)

FRAME_PREFIX = struct.Struct(">BI")
"""Before each message: the compressed flag, and the length as sent."""


def frame_message(message: bytes, *, zipped: bool = False) -> bytes:
    return FRAME_PREFIX.pack(zipped, len(message)) + message
