"""What application and agent agree on: the socket, the hello, and the records in the ring.

An application makes a ring in shared memory (a memfd, sealed against shrinking), connects to
``feed.sock`` and sends one hello with the memfd beside it. Nothing else is ever sent, in either
direction: the ring is the message, and the end of the connection is the end of the feed.

A ring holds ``count`` records of 48 bytes, big-endian. Record number n, counted from 1, stands
in slot n % count:

| bytes | what |
|---|---|
| 0-7 | span id |
| 8-15 | id of its parent if that is a span of the same process, else 0; 0 at its end |
| 16-23 | CLOCK_MONOTONIC, nanoseconds |
| 24-31 | CPU time of the thread, nanoseconds |
| 32-35 | native id of the thread |
| 36-39 | 1 the span starts, 2 it ends |
| 40-47 | n, written last |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

SOCKET = "feed.sock"

MAGIC = b"wattspan"
VERSION = 1
HELLO = struct.Struct(">8sHHI")  # magic, version, bytes a record, records in the ring

WRITTEN = struct.Struct(">QQQQIIQ")  # a record as the application writes it: ids are numbers
READ = struct.Struct(">8s8sQQIIQ")  # the same as the agent reads it: ids are bytes
RECORD_SIZE = WRITTEN.size
STARTED, ENDED = 1, 2

RECORDS = 16384
"""What an application's ring holds: 160 ms of the most a Python process can do, 768 KiB."""


def candidates(environ: Mapping[str, str]) -> list[str]:
    """Where the agent's socket may be, the likeliest first."""
    if told := environ.get("WATTSPAN_RUN_DIR"):
        return [f"{told}/{SOCKET}"]
    paths = [f"/run/wattspan/{SOCKET}"]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        paths.append(f"{runtime}/wattspan/{SOCKET}")
    return paths
