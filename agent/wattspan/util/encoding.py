"""Encodings of bodies: gzip and deflate with bounds on the decompressed size, and gRPC frames."""

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
    """``decompress`` of gzip."""
    return decompress(body, most, "gzip")


CODINGS = ("gzip", "deflate")
"""The content codings that are accepted; x-gzip is gzip."""


def decompress(body: bytes, most: int, coding: str) -> bytes:
    """The body without its ``coding``; BodyEncodingError, or BodyTooLongError beyond ``most``.

    BodyTooLongError also beyond ``MAX_COMPRESSION_RATIO`` times the compressed size, from
    ``RATIO_EXEMPT_BYTES`` on. Decompression ends at the first byte beyond the smaller bound.
    Deflate is the zlib format, or without its header as some clients send it.
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
    wbits = _GZIP if coding == "gzip" else _deflate_format(body)
    members, left = [], most
    while True:
        member = zlib.decompressobj(wbits)
        try:
            # One byte above the limit, to notice that it is exceeded; 0 would mean no limit.
            data = member.decompress(body, left + 1)
        except zlib.error as error:
            raise BodyEncodingError(f"the body is not {coding}: {error}") from None
        left -= len(data)
        if left < 0:
            raise BodyTooLongError(why)
        if not member.eof:
            raise BodyEncodingError(f"the body is not {coding}: it ends too early")
        members.append(data)
        body = member.unused_data
        if not body.strip(b"\0"):  # members may follow each other, and zeros the last
            return data if len(members) == 1 else b"".join(members)
        if coding != "gzip":
            raise BodyEncodingError("the body is not deflate: it has a tail")
        if len(members) > _MAX_GZIP_MEMBERS:
            raise BodyEncodingError("the body has too many gzip members")


def _deflate_format(body: bytes) -> int:
    """zlib's number for the format: a zlib header is a multiple of 31 and names the method 8."""
    header = int.from_bytes(body[:2].ljust(2, b"\1"))
    return zlib.MAX_WBITS if header % 31 == 0 and header >> 8 & 15 == 8 else -zlib.MAX_WBITS


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
