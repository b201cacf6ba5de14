"""The parts of gRPC that clients and servers share: status codes and the frame of a message."""

from __future__ import annotations

import struct
from enum import IntEnum

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
