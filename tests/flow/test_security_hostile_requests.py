"""Requests that cost the agent much: it answers them within bounds, keeps nothing, and can end."""

from __future__ import annotations

import gzip
import http.client
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from testbed.hostile_otlp import (
    JSON,
    JSONS,
    PERMITTED,
    PERMITTED_JSON,
    PROTOBUF,
    PROTOBUFS,
    Body,
    bombs,
)
from testbed.http2 import Http2Client, framed
from testbed.process_costs import cpu_seconds
from testbed.program import Running
from testbed.span_senders import UnixConnection
from testbed.waiting import eventually

pytestmark = pytest.mark.alone

MIB = 1 << 20
END = 5.0  # seconds within which SIGTERM ends the agent
CPU_BUDGET = 9.0  # loops of `reference`: some 2 s of CPU time, see docs/security.md
MEMORY_LIMIT = 384 * MIB
KEPT = 10_000_000  # bytes
REPEATED = 2
FLOODS = ("attributes", "nested values", "attributes of a resource", "resources", "spans",
          "varint in a span", "searched spans", "cut short")  # fmt: skip
EXPECTED = dict.fromkeys(("varint in a span", "long count"), (200,))  # the span is refused alone
JSON_FLOODS = ("objects", "values in JSON", "long count", "nested arrays", "open string")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path, spans__grpc="127.0.0.1:0") as running:
        yield running.measuring()


def reference() -> float:
    """The CPU time of a loop in Python: the machine's speed changes from one second to the next."""
    before, table = time.process_time(), dict[int, tuple[int, int]]()
    for number in range(2_000_000):
        table[number & 1023] = number, number * number
    return time.process_time() - before


def memory(agent: Running, name: str) -> int:
    """Bytes, from /proc/PID/status."""
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def sent(agent: Running, body: Body) -> int:
    """The status that a body is answered with on the Unix socket."""
    headers = {"Content-Type": body.content_type}
    if body.encoding:
        headers["Content-Encoding"] = body.encoding
    with UnixConnection(agent.run_dir / "otlp.sock", timeout=300) as connection:
        connection.request("POST", "/v1/traces", body.data, headers)
        return connection.getresponse().status


def called(agent: Running, body: Body) -> int | None:
    """The status that a body is answered with over gRPC."""
    encoding = {"grpc_encoding": "gzip"} if body.encoding else {}
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(300)
        connection.connect(str(agent.run_dir / "otlp-grpc.sock"))
        client = Http2Client(connection)
        return client.call(framed(body.data, compressed=bool(body.encoding)), **encoding).status


def packed(name: str, content_type: str, data: bytes) -> Body:
    return Body(name, content_type, "gzip", gzip.compress(data, 6))


def floods(size: int) -> list[Body]:
    """Bodies of every kind that is refused."""
    return [
        *(Body(name, PROTOBUF, "gzip", bomb) for name, bomb in bombs(4 * size).items()),
        *(Body(name, PROTOBUF, "", PROTOBUFS[name](size)) for name in (*FLOODS, "garbage")),
        *(Body(name, JSON, "", JSONS[name](size)) for name in JSON_FLOODS),
        packed("spans in JSON", JSON, JSONS["spans with attributes in JSON"](3 * size)),
        Body("of no known type", "text/plain", "", bytes(size)),
        Body("of no known encoding", PROTOBUF, "br", bytes(size)),
    ]


# ------------------------------------------------------------------------------------- ending


def test_sigterm_ends_the_agent_during_decoding(agent: Running) -> None:
    slow = [
        packed("varint", PROTOBUF, PROTOBUFS["varint"](MIB)),
        Body("fields", PROTOBUF, "", PERMITTED["permitted fields"](0)),
        packed("searched", PROTOBUF, PERMITTED["searched spans of the permitted number"](0)),
        packed("lists", JSON, PERMITTED_JSON["permitted lists"](0)),
    ]
    before = cpu_seconds(agent.process.pid)
    for body in slow:
        for send in (sent, called) if body.content_type == PROTOBUF else (sent,):
            threading.Thread(target=unanswered, args=(send, agent, body), daemon=True).start()
    eventually(lambda: cpu_seconds(agent.process.pid) > before + 0.5, "the agent decodes")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(END) == 0, agent.said


def unanswered(send: Callable[[Running, Body], object], agent: Running, body: Body) -> None:
    """Send a body to an agent that may end before it answers."""
    with suppress(OSError, http.client.HTTPException):
        send(agent, body)


# ---------------------------------------------------------------------------------------- cost


def test_requests_stay_within_cpu_and_memory_budgets(agent: Running) -> None:
    limit = 16 * MIB
    worst = [
        packed("varint", PROTOBUF, PROTOBUFS["varint"](MIB)),
        *(Body(name, PROTOBUF, "", build(limit)) for name, build in PERMITTED.items()),
        *(Body(name, JSON, "", build(limit // 2)) for name, build in PERMITTED_JSON.items()),
        *(Body(name, PROTOBUF, "", PROTOBUFS[name](limit)) for name in FLOODS),
        Body("bomb", PROTOBUF, "gzip", bombs(4 * limit)["bomb"]),
    ]
    Path(f"/proc/{agent.process.pid}/clear_refs").write_text("5")  # the peak is reset
    pace = reference()
    for body in worst:
        before = cpu_seconds(agent.process.pid)
        status = sent(agent, body)
        spent = cpu_seconds(agent.process.pid) - before
        earlier, pace = pace, reference()
        loops = spent / max(earlier, pace)
        assert loops < CPU_BUDGET, f"{body.name}: {spent:.2f} s of CPU time, {loops:.1f} loops"
        assert status in (200, 400, 413, 503), body.name
        peak = memory(agent, "VmHWM")
        assert peak < MEMORY_LIMIT * 3 / 4, f"{body.name}: {peak >> 20} MiB"
    assert agent.end() == 0


def test_refused_requests_leave_no_memory_behind(agent: Running) -> None:
    refused = floods(4 * MIB)
    for body in refused:  # memory of the first request of a kind is reused by the others
        sent(agent, body)
    before = memory(agent, "VmRSS")
    for body in refused:
        for _ in range(REPEATED):
            assert sent(agent, body) in EXPECTED.get(body.name, (400, 413, 415)), body.name
        if body.content_type == PROTOBUF:
            called(agent, body)
    grown = memory(agent, "VmRSS") - before
    assert grown < KEPT, f"{grown / 1e6:.1f} MB"
    assert agent.end() == 0
