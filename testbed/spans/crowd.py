"""A crowd of processes that send spans: ``python testbed/spans/crowd.py SOCKET COUNT PERIOD``.

Each process sends one span over a connection of its own, and again every PERIOD seconds; 0 for
once. They begin one after the other, 200 a second, and end with the standard input of this one.
It prints a line when all have sent their first span.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from testbed.spans.batches import Batches

RATE = 200
HEAD = (
    "POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    "Content-Length: {}\r\n\r\n"
)


def send(where: str, body: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):
        one.settimeout(10)
        one.connect(where)
        one.sendall(HEAD.format(len(body)).encode() + body)
        one.recv(4096)


def live(where: str, start: float, period: float) -> None:
    """The life of one process."""
    batches = Batches(1)
    due = start
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        send(where, batches.raw())
        if not period:
            signal.pause()
        due += period


def main() -> None:
    where, count, period = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    Batches(1)  # the children share its modules
    pids, began = list[int](), time.monotonic() + 0.5
    for number in range(count):
        pid = os.fork()
        if not pid:
            live(where, began + number / RATE, period)
        pids.append(pid)
        time.sleep(max(0.0, began - 0.4 + number / RATE - time.monotonic()))
    time.sleep(1)
    print("sent", flush=True)
    select.select([sys.stdin], [], [])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
