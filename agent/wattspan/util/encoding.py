"""gzip on the way in and on the way out, with a bound on what comes.

Protobuf's fields of bytes, of texts and of messages, written as the bytes that they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

_GZIP = 16 + zlib.MAX_WBITS


MAX_COMPRESSION_RATIO = 200
"""The largest ratio of the decompressed size of a body to its compressed size."""

RATIO_EXEMPT_BYTES = 1 << 20
"""Bytes after decompression up to which the ratio does not matter."""


class BodyEncodingError(ValueError):
    """The body is not what its encoding says."""


class BodyTooLongError(ValueError):
    """The body is longer than is taken."""


def gzip_compress(body: bytes) -> bytes:
    # Level 1: telemetry is so repetitive that more effort gains little, at several times the cost.
    press = zlib.compressobj(1, wbits=_GZIP)
    return press.compress(body) + press.flush()


def gzip_decompress(body: bytes, most: int) -> bytes:
    """What was compressed; BadEncodingError, or TooLongError for more than ``most`` bytes.

    The same holds for more than ``RATIO`` times the compressed size, from ``ANY_RATIO`` bytes on.
    Decompression ends at the first byte beyond the smaller of the two bounds.
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
            # One byte more than there may be, to know that there is one; 0 would mean no limit.
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
"""More of them are nobody's, and what follows each is copied."""

_LENGTH_DELIMITED = 2  # the wire type
_ONE_BYTE_VARINTS = [bytes((number,)) for number in range(128)]


def varint(number: int) -> bytes:
    if number < len(_ONE_BYTE_VARINTS):
        return _ONE_BYTE_VARINTS[number]
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def length_delimited(number: int, payload: bytes) -> bytes:
    """A field that holds text, or another message."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(payload)) + payload


def encode_message(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """A message of such fields, each with its number.

    Protobuf's own library ends the whole program where it gets no memory for a message of
    thousands of fields (seen with 7.36: it does not look whether there is any).
    """
    parts: list[bytes] = []
    for number, payload in fields:
        parts += (varint(number << 3 | _LENGTH_DELIMITED), varint(len(payload)), payload)
    return b"".join(parts)
