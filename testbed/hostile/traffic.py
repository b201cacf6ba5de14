"""Clients of the agent: one that behaves well, and several that do not.

Each program prints JSON, or lines, and runs until its time or standard input is over.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from testbed.hostile.bodies import compress, span_template, understood
from testbed.http2 import Http2Client, framed
from testbed.span_senders import ByHand

TIMEOUT = 30.0  # seconds
_TIMEVAL = struct.Struct("ll")
Answers = Counter[str]


def connect(target: str, timeout: float = TIMEOUT) -> socket.socket:
    """A connection to ``unix:PATH`` or ``tcp:HOST:PORT``."""
    kind, _, rest = target.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        # A blocking connect waits for room in the backlog; one with a timeout of Python fails.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(timeout), 0))
        try:
            connection.connect(rest)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(timeout)
        return connection
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def http_client(target: str) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("localhost", timeout=TIMEOUT)
    client.sock = connect(target)
    return client


def asked(target: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> str:
    """The status of one request on a connection of its own, or the name of the error."""
    try:
        with contextlib.closing(http_client(target)) as client:
            client.request(method, path, body, headers)
            answer = client.getresponse()
            answer.read()
            return str(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__


def called(target: str, message: bytes, encoding: str = "") -> str:
    """As ``asked``, by gRPC; ``message`` is already compressed if an encoding is given."""
    try:
        with contextlib.closing(connect(target)) as connection:
            data = framed(message, compressed=int(bool(encoding)))
            answer = Http2Client(connection).call(data, grpc_encoding=encoding)
            return f"grpc {answer.status}"
    except (OSError, ValueError) as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - h2 has errors of many kinds
        return type(error).__name__


def in_parallel(count: int, work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tell(answers: Answers) -> None:
    print(json.dumps(answers), flush=True)


# ------------------------------------------------------------------------------ the other user


def honest(
    *,
    spans: Sequence[str],
    grpc: Sequence[str],
    metrics: str,
    capper: str,
    pace: float,
    batch: int,
) -> None:
    """Send spans, scrape, ask for health and for caps every ``pace`` seconds until the input ends.

    Large exports are ten times rarer.

    Each request has its own connection and is reported as a line: kind, moment, seconds, status.
    """
    small, large = span_template(3), span_template(batch, text=200)
    stop = threading.Event()
    kinds: list[tuple[str, float, Callable[[], str]]] = [
        ("metrics", pace, lambda: asked(metrics, "GET", "/metrics", b"", {})),
        ("healthz", pace, lambda: asked(metrics, "GET", "/healthz", b"", {})),
        ("caps", pace, lambda: _asked_capper(capper)),
    ]
    for target in spans:
        way = target.partition(":")[0]
        kinds += [
            (f"spans/{way}", pace, lambda target=target: _export(target, small)),
            (f"batch/{way}", 10 * pace, lambda target=target: _export(target, large)),
        ]
    for target in grpc:
        way = target.partition(":")[0]
        kinds.append((f"grpc/{way}", pace, lambda target=target: called(target, _now(small))))

    def work(number: int) -> None:
        kind, every, ask = kinds[number]
        due = time.monotonic() + every * number / len(kinds)
        while not stop.wait(max(0.0, due - time.monotonic())):
            at = time.monotonic()
            status = ask()
            sys.stdout.write(f"{kind} {at:.6f} {time.monotonic() - at:.6f} {_number(status)}\n")
            sys.stdout.flush()
            due = max(due + every, time.monotonic())

    threading.Thread(target=in_parallel, args=(len(kinds), work), daemon=True).start()
    sys.stdin.read()
    stop.set()


def _asked_capper(path: str) -> str:
    """200 if the capper reports its status, 503 if it refuses."""
    try:
        with contextlib.closing(connect(f"unix:{path}")) as one:
            one.sendall(b'{"do":"status"}\n')
            answer = one.makefile("rb").readline()
    except OSError as error:
        return type(error).__name__
    return "200" if answer.startswith(b'{"is":"state"') else "503" if answer else "no answer"


def _number(status: str) -> int:
    if status == "grpc 0":
        return 200
    return int(status) if status.isdecimal() else 503 if status.startswith("grpc") else 0


def _now(template: bytes) -> bytes:
    now = time.time_ns()
    times = {b"STARTED_": now - 5_000_000, b"FINISHED": now}
    for mark, at in times.items():
        template = template.replace(mark, struct.pack("<Q", at))
    return template


def _export(target: str, template: bytes) -> str:
    kind = {"Content-Type": "application/x-protobuf"}
    return asked(target, "POST", "/v1/traces", _now(template), kind)


# -------------------------------------------------------------------------------- whole requests


def requests(
    *,
    targets: Sequence[str],
    bodies: Sequence[dict[str, Any]],
    parallel: int,
    seconds: float,
    count: int = 1_000_000,
    path: str = "/v1/traces",
    method: str = "POST",
) -> None:
    """Send every body to every target, again and again, over several connections at a time."""
    found = [understood(one) for one in bodies]
    build = cache(lambda number: found[number].build())
    for number in range(len(found)):
        build(number)

    def send(number: int) -> str:
        target, body = targets[number % len(targets)], found[number // len(targets) % len(found)]
        built = build(number // len(targets) % len(found))
        headers = {"Content-Type": body.content_type}
        if body.header:
            headers["Content-Encoding"] = body.header
        return asked(target, method, path, built, headers)

    tell(_repeated(send, parallel, seconds, count))


def calls(
    *,
    targets: Sequence[str],
    bodies: Sequence[dict[str, Any]],
    parallel: int,
    seconds: float,
    count: int = 1_000_000,
) -> None:
    """As ``requests``, by gRPC: each body plain and, where it is not compressed, as gzip."""
    found = [understood(one) for one in bodies]
    built = [(body.build(), "gzip" if body.encodings else "") for body in found]
    built += [(compress(body, "gzip"), "gzip") for body, encoding in built if not encoding]

    def send(number: int) -> str:
        body, encoding = built[number // len(targets) % len(built)]
        return called(targets[number % len(targets)], body, encoding)

    tell(_repeated(send, parallel, seconds, count))


def _repeated(send: Callable[[int], str], parallel: int, seconds: float, count: int) -> Answers:
    answers: Answers = Counter()
    numbers = iter(range(count))
    lock = threading.Lock()
    until = time.monotonic() + seconds

    def work(_: int) -> None:
        while time.monotonic() < until:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            status = send(number)
            with lock:
                answers[status] += 1
            if not status.isdecimal() and not status.startswith("grpc"):
                time.sleep(0.05)  # refused connections are not counted by the million

    in_parallel(parallel, work)
    return answers


# ---------------------------------------------------------------------------------- slow clients


def slow(
    *, targets: Sequence[str], first: str, count: int, seconds: float, every: float, then: str = ""
) -> None:
    """Hold ``count`` connections to each target that have sent ``first`` and read nothing.

    ``then`` is sent every so many seconds. A connection that was closed is opened again.
    """
    held: list[tuple[str, socket.socket | None]] = [
        (target, None) for _ in range(count) for target in targets
    ]
    answers: Answers = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.monotonic()
        for number, (target, connection) in enumerate(held):
            if time.monotonic() > until:
                break
            held[number] = (target, _kept(target, connection, first, then, answers))
        time.sleep(max(0.0, begun + every - time.monotonic()))
    tell(answers)


def _kept(
    target: str, connection: socket.socket | None, first: str, then: str, answers: Answers
) -> socket.socket | None:
    try:
        if connection is not None:
            connection.send(then.encode("latin-1")) if then else _alive(connection)
            return connection
        connection = connect(target, 2.0)
        answers["opened"] += 1
        connection.sendall(first.encode("latin-1"))
        connection.setblocking(False)
    except BlockingIOError:
        return connection
    except OSError as error:
        if connection is not None:
            connection.close()
        answers[type(error).__name__] += 1
        return None
    else:
        return connection


def _alive(connection: socket.socket) -> None:
    """ConnectionError if the peer has closed; its data stays unread."""
    if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
        raise ConnectionResetError


# ------------------------------------------------------------------------------ the side channel


def announce(*, run_dir: str, how: str, seconds: float, rings: int) -> None:
    """Abuse feed.sock: ``flood`` announces spans, ``skip`` breaks the protocol, ``hello`` lies."""
    until = time.monotonic() + seconds
    answers: Answers = Counter()
    held: list[ByHand] = []
    while time.monotonic() < until:
        try:
            if how == "hello":
                with contextlib.closing(connect(f"unix:{run_dir}/feed.sock", 2.0)) as client:
                    client.sendall(os.urandom(64))
                answers["lies"] += 1
                continue
            if len(held) < rings:
                held.append(ByHand(Path(run_dir)))
                answers["rings"] += 1
            for one in held:
                if how == "skip":
                    one.skip(65_536 << 30)
                one.flood(time.monotonic_ns(), 4096)
                answers["records"] += 4096
            if how == "skip":
                for one in held:
                    one.close()
                held.clear()
        except OSError as error:
            answers[type(error).__name__] += 1
            time.sleep(0.02)
    tell(answers)


# ------------------------------------------------------------------------------------ the capper


def caps(
    *,
    socket_path: str,
    lines: Sequence[str],
    parallel: int,
    seconds: float,
    reads: bool = True,
    keeps: bool = True,
) -> None:
    """Send lines to the capper's socket over several connections, again and again.

    Each line is answered before the next is sent, unless nothing is read. Without ``keeps`` the
    connection is closed after the last line.
    """
    answers: Answers = Counter()
    lock = threading.Lock()
    until = time.monotonic() + seconds

    def note(word: str) -> None:
        with lock:
            answers[word] += 1

    def work(_: int) -> None:
        while time.monotonic() < until:
            try:
                with contextlib.closing(connect(f"unix:{socket_path}", 2.0)) as one:
                    _converse(one, lines, until, note, reads=reads, keeps=keeps)
            except OSError as error:
                note(type(error).__name__)
                time.sleep(0.02)

    in_parallel(parallel, work)
    tell(answers)


def _converse(
    connection: socket.socket,
    lines: Iterable[str],
    until: float,
    note: Callable[[str], None],
    *,
    reads: bool,
    keeps: bool,
) -> None:
    answers = connection.makefile("rb")
    lines = list(lines)
    while time.monotonic() < until:
        for line in lines:
            connection.sendall(line.encode() + b"\n")
            if reads:
                told = answers.readline()
                if not told:
                    raise ConnectionResetError
                word = json.loads(told)
                note(str(word.get("reason", word["is"])))
                time.sleep(0.005)  # below the rate at which a connection is closed
            else:
                note("sent")
        if not keeps:
            return


def ask_capper(path: str, *requests: dict[str, object]) -> list[dict[str, Any]]:
    """The answers to requests to a capper, on one connection."""
    with contextlib.closing(connect(f"unix:{path}", 20.0)) as one:
        answers = one.makefile("rb")
        found = []
        for request in requests:
            one.sendall(json.dumps(request).encode() + b"\n")
            found.append(json.loads(answers.readline()))
        return found


def hold(*, socket_path: str, watts: dict[str, int], lease: float = 0.0) -> None:
    """Hold caps as a tuner does and renew them, until standard input ends.

    ``watts`` are by knob and device, such as ``gpu_power gpu:GPU-1``. It prints "held", and the
    refusal if there is one.
    """
    wishes = []
    for name, value in watts.items():
        knob, _, device = name.partition(" ")
        wishes.append({"knob": knob, "device": device, "value": value * 1000})
    with contextlib.closing(connect(f"unix:{socket_path}", 20.0)) as one:
        answers = one.makefile("rb")

        def ask(**request: object) -> str:
            one.sendall(json.dumps(request).encode() + b"\n")
            told = json.loads(answers.readline() or b'{"is":"gone"}')
            return str(told.get("sentence", told["is"]))

        ask(do="hello", who="the schedule of attacks")
        request = {"do": "hold", "job": "attack", "caps": wishes, "lease": round(lease * 1e9)}
        print(ask(**request), flush=True)
        threading.Thread(target=_renew, args=(ask, request), daemon=True).start()
        sys.stdin.read()


def _renew(ask: Callable[..., str], request: dict[str, object]) -> None:
    """A move down is made in steps: it is asked for again until it is done."""
    with contextlib.suppress(OSError, ValueError):
        while True:
            time.sleep(0.1)
            ask(**request)


PROGRAMS: dict[str, Callable[..., None]] = {
    "honest": honest,
    "requests": requests,
    "calls": calls,
    "slow": slow,
    "announce": announce,
    "caps": caps,
    "hold": hold,
}
