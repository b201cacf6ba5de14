"""Real processes that send spans of their own to a real agent, over its sockets, by hand."""

from __future__ import annotations

import http.client
import os
import socket
from array import array
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from testbed.otlp import PROTOBUF, request
from wattspan.sdk.ring import HELLO, MAGIC, RECORD_SIZE, STARTED, VERSION, WRITE_FORMAT

TRACE = bytes(range(16))


def made(
    name: str, start: int, end: int, *, id: bytes | None = None, parent: bytes = b"",
    trace: bytes = TRACE,
) -> Span:  # fmt: skip
    """A span; times are Unix nanoseconds."""
    return Span(
        trace_id=trace,
        span_id=id or os.urandom(8),
        parent_span_id=parent,
        name=name,
        start_time_unix_nano=start,
        end_time_unix_nano=end,
    )


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float = 20) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def __enter__(self) -> UnixConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def post(
    connection: http.client.HTTPConnection,
    spans: Iterable[Span],
    service: str = "service",
    **resource: str | int,
) -> http.client.HTTPResponse:
    """Send spans as one request; the answer, with its body read."""
    told = {"service.name": service} | {k.replace("__", "."): v for k, v in resource.items()}
    return post_message(connection, request(*spans, resource=told))


def post_message(
    connection: http.client.HTTPConnection, message: ExportTraceServiceRequest
) -> http.client.HTTPResponse:
    connection.request(
        "POST", "/v1/traces", message.SerializeToString(), {"Content-Type": PROTOBUF}
    )
    answer = connection.getresponse()
    answer.read()
    return answer


def send(run_dir: Path, spans: Iterable[Span], service: str = "service") -> int:
    """Send spans of this very process by the Unix socket; the status of the answer."""
    with closing(UnixConnection(run_dir / "otlp.sock")) as connection:
        return post(connection, spans, service).status


class Scrape:
    """A page of metrics, to be summed over."""

    def __init__(self, text: str) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name, by one of their labels."""
        found: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == name:
                found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
        return found


class ByHand:
    """The application's end of the side channel, with records that no honest one writes."""

    def __init__(self, run_dir: Path, records: int = 1 << 16) -> None:
        self._count = records
        self._next = 1
        self._memory = os.memfd_create("by-hand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory, records * RECORD_SIZE)
        import fcntl

        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(run_dir / "feed.sock"))
        hello = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, records)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [self._memory]))
        self._socket.sendmsg([hello], [rights])

    def write(self, records: Sequence[tuple[int, int, int, int, int, int]]) -> None:
        """Records as (id, parent, time, cpu, thread, kind), one after the other."""
        for record in records:
            slot = self._next % self._count
            os.pwrite(self._memory, WRITE_FORMAT.pack(*record, self._next), slot * RECORD_SIZE)
            self._next += 1

    def flood(self, at: int, count: int) -> None:
        """Announce ``count`` spans that begin at ``at`` and never end, at full speed."""
        left = count
        while left:
            slot = self._next % self._count
            some = min(left, self._count - slot, 4096)
            body = b"".join(
                WRITE_FORMAT.pack(number | 1 << 60, 0, at, 0, 1, STARTED, number)
                for number in range(self._next, self._next + some)
            )
            os.pwrite(self._memory, body, slot * RECORD_SIZE)
            self._next += some
            left -= some

    def skip(self, records: int) -> None:
        """Skip so many sequence numbers."""
        self._next += records

    def close(self) -> None:
        self._socket.close()
        os.close(self._memory)

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
