"""Messages and attributes of Linux netlink."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

GENERIC = 16  # NETLINK_GENERIC
CONNECTOR = 11  # NETLINK_CONNECTOR
ERROR = 2  # NLMSG_ERROR
REQUEST, ACK = 1, 4
_SO_RCVBUFFORCE = 33
_HEADER = struct.Struct("=IHHII")
HEADER = _HEADER.size
_CODE = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")
_BUFFER = 4 << 20  # enough for some thousand exits between two polls; allocated on demand
MAX_DATAGRAM = 8192
"""Longer than all expected messages; a small buffer is cheap to allocate for each read."""


def open_netlink(protocol: int, groups: int = 0) -> socket.socket:
    """A bound netlink socket with a receive buffer large enough for bursts.

    OSError if the kernel does not permit or support it.
    """
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, protocol)
    try:
        link.bind((0, groups))
        try:
            link.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        except OSError:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    except OSError:
        link.close()
        raise
    return link


def message(kind: int, flags: int, payload: bytes, sequence: int = 1) -> bytes:
    return _HEADER.pack(_HEADER.size + len(payload), kind, flags, sequence, 0) + payload


def messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """The (type, payload) of every whole message in a datagram; a cut one ends it."""
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, _, _, _ = _HEADER.unpack_from(datagram, at)
        if length < _HEADER.size or at + length > len(datagram):
            return
        yield kind, datagram[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def attributes(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """The (type, value) of every whole attribute; a cut one ends it."""
    at = 0
    while at + _ATTRIBUTE.size <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, at)
        if length < _ATTRIBUTE.size or at + length > len(payload):
            return
        yield kind & 0x3FFF, payload[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def raise_error(payload: bytes) -> None:
    """Raise the error of an NLMSG_ERROR; return for an acknowledgement."""
    if len(payload) < _CODE.size:
        raise OSError(errno.EBADMSG, "the kernel's error message is truncated")
    code = -_CODE.unpack_from(payload)[0]
    if code:
        raise OSError(code, os.strerror(code) if code in errno.errorcode else "unknown error")
