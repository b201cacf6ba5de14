"""gzip on the way in and on the way out, with a bound on what comes."""

from __future__ import annotations

import zlib

_GZIP = 16 + zlib.MAX_WBITS


RATIO = 200
"""The largest ratio of the decompressed size of a body to its compressed size."""

ANY_RATIO = 1 << 20
"""Bytes after decompression up to which the ratio does not matter."""


class BadEncodingError(ValueError):
    """The body is not what its encoding says."""


class TooLongError(ValueError):
    """The body is longer than is taken."""


def gzipped(body: bytes) -> bytes:
    # Level 1: telemetry is so repetitive that more effort gains little, at several times the cost.
    press = zlib.compressobj(1, wbits=_GZIP)
    return press.compress(body) + press.flush()


def gunzip(body: bytes, most: int) -> bytes:
    """What was compressed; BadEncodingError, or TooLongError for more than ``most`` bytes.

    The same holds for more than ``RATIO`` times the compressed size, from ``ANY_RATIO`` bytes on.
    Decompression ends at the first byte beyond the smaller of the two bounds.
    """
    bound = max(ANY_RATIO, RATIO * len(body))
    if bound < most:
        why = f"the body becomes more than {RATIO} times its size once it is decompressed"
        most = bound
    else:
        why = f"the body has more than {most} bytes once it is decompressed"
    members, left = [], most
    while True:
        member = zlib.decompressobj(_GZIP)
        try:
            # One byte more than there may be, to know that there is one; 0 would mean no limit.
            data = member.decompress(body, left + 1)
        except zlib.error as error:
            raise BadEncodingError(f"the body is not gzip: {error}") from None
        left -= len(data)
        if left < 0:
            raise TooLongError(why)
        if not member.eof:
            raise BadEncodingError("the body is not gzip: it ends too early")
        members.append(data)
        body = member.unused_data
        if not body.strip(b"\0"):  # members may follow each other, and zeros the last
            return data if len(members) == 1 else b"".join(members)
        if len(members) > _MEMBERS:
            raise BadEncodingError("the body has too many gzip members")


_MEMBERS = 32
"""More of them are nobody's, and what follows each is copied."""
