"""An application whose spans' true energy is known. Standard library only; a process of its own.

Reads one line of JSON from standard input, a :class:`Plan`, runs it, sends its spans to the agent
as OTLP/JSON over the agent's Unix socket, and prints a line of JSON for each span: its true energy.
CPU truth is the process's own CPU clock, read at every edge of every
span; the law of the emulated host makes joules of it. GPU truth is the emulated host's.

With ``zeus`` a ZeusMonitor in this process measures the same intervals.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

GETTING_KNOWN = 3.0  # seconds between a process's first span and the first that is judged
SLICE = 0.005  # seconds; of each, a part is worked and the rest slept
SERVICE = "truth"


class Edge(NamedTuple):
    at: float  # seconds into the trial
    opens: bool
    span: int


class Trial(NamedTuple):
    """Scenario: spans begin and end, and between the given times a load is kept up.

    ``parents`` names for each span the one around it, -1 for none. ``load`` is (until, part of a
    CPU, part of a GPU).
    """

    kind: str
    seconds: float
    edges: list[Edge]
    parents: list[int]
    load: list[tuple[float, float, float]]


class Mark(NamedTuple):
    """One edge as it really happened."""

    edge: Edge
    mono: int
    wall: int
    cpu: int


# ---------------------------------------------------------------------------------- plans


def trials(
    kinds: Sequence[str], lengths: Sequence[float], repeats: Sequence[int], seed: int
) -> Iterator[Trial]:
    """Every kind in every length, so often; shuffled, so that drift falls on all alike."""
    draw = random.Random(seed)
    todo = [
        (kind, seconds)
        for kind in kinds
        for seconds, repeat in zip(lengths, repeats, strict=True)
        for _ in range(repeat)
    ]
    draw.shuffle(todo)
    for kind, seconds in todo:
        yield MAKERS[kind](draw, seconds)


def _single(draw: random.Random, seconds: float) -> Trial:
    """Rest, a busy span, rest: the span begins and ends with its load."""
    start = draw.uniform(0.05, 0.35)
    end = start + seconds
    rest = end + draw.uniform(0.05, 0.35)
    load = [(start, 0.0, 0.0), (end, draw.choice((1.0, 0.6)), draw.uniform(0.4, 0.95))]
    return Trial(
        "single", seconds, [Edge(start, True, 0), Edge(end, False, 0)], [-1], [*load, (rest, 0, 0)]
    )


def _recurring(draw: random.Random, seconds: float) -> Trial:
    """As ``single``: repeated so often that the power of the span's name is known."""
    return _single(draw, seconds)._replace(kind="recurring")


def _inside(draw: random.Random, seconds: float) -> Trial:
    """The load changes continuously, independent of the span."""
    start = draw.uniform(0.05, 0.35)
    end = start + seconds
    rest = end + draw.uniform(0.05, 0.35)
    edges = [Edge(start, True, 0), Edge(end, False, 0)]
    return Trial("inside", seconds, edges, [-1], _varied(draw, rest))


def _nested(draw: random.Random, seconds: float) -> Trial:
    """A span around a span around a span."""
    outer = draw.uniform(0.05, 0.35)
    middle, inner = outer + 0.2 * seconds, outer + 0.4 * seconds
    edges = [Edge(at, True, i) for i, at in enumerate((outer, middle, inner))]
    ends = (outer + seconds, outer + 0.9 * seconds, outer + 0.7 * seconds)
    edges += [Edge(at, False, i) for i, at in enumerate(ends)]
    load = _varied(draw, outer + seconds + 0.2)
    return Trial("nested", seconds, sorted(edges), [-1, 0, 1], load)


def _concurrent(draw: random.Random, seconds: float, count: int = 64) -> Trial:
    """Spans that overlap by the dozen, as in a server that waits a lot."""
    edges = []
    for span in range(count):
        start = 0.1 + draw.uniform(0.0, seconds)
        edges += [
            Edge(start, True, span),
            Edge(start + seconds * draw.uniform(0.9, 1.1), False, span),
        ]
    edges.sort()
    load = _varied(draw, edges[-1].at + 0.2)
    return Trial("concurrent", seconds, edges, [-1] * count, load)


def _varied(draw: random.Random, until: float) -> list[tuple[float, float, float]]:
    load, at = [], 0.0
    while at < until:
        at += draw.uniform(0.03, 0.3)
        load.append((at, draw.choice((1.0, 1.0, 0.7, 0.4)), draw.choice((0.9, 0.6, 0.3))))
    return load


MAKERS = {
    "single": _single,
    "recurring": _recurring,
    "inside": _inside,
    "nested": _nested,
    "concurrent": _concurrent,
}


# ------------------------------------------------------------------------------------- doing it


class Board:
    """This process on an emulated board, if it uses one, with the source of the truth."""

    def __init__(self, door: str, gpu: int | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(door)
        self._file = self._socket.makefile("rw")
        self.gpu = gpu
        self._load = 0.0
        if gpu is not None:
            self.ask(do="attach", gpu=gpu, load=0.0)

    def load(self, part: float) -> None:
        if self.gpu is not None and part != self._load:
            self._load = part
            self.ask(do="load", gpu=self.gpu, load=part)

    def truths(self, times: Sequence[int]) -> list[dict[str, Any]]:
        return list(self.ask(do="truth", at=list(times))["at"])

    def ask(self, **question: object) -> dict[str, Any]:
        self._file.write(json.dumps(question) + "\n")
        self._file.flush()
        answer: dict[str, Any] = json.loads(self._file.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def perform(trial: Trial, board: Board, windows: Windows | None) -> list[Mark]:
    """Do it; when every edge really was. Zeus's windows hug the first span."""
    marks: list[Mark] = []
    edges = iter(trial.edges)
    edge = next(edges)
    ends = [until for until, _, _ in trial.load]
    start = time.monotonic()
    while (now := time.monotonic() - start) < ends[-1] or edge is not None:
        until, cpu, gpu = trial.load[min(bisect_right(ends, now), len(ends) - 1)]
        while edge is not None and edge.at <= now:
            if windows is not None and edge.span == 0 and edge.opens:
                windows.begin()
            board.load(gpu)
            marks.append(Mark(edge, time.monotonic_ns(), time.time_ns(), time.process_time_ns()))
            if windows is not None and edge.span == 0 and not edge.opens:
                windows.end()
            edge = next(edges, None)
        board.load(gpu)
        until = min(until, edge.at if edge is not None else until)
        _work(start + now, min(SLICE, max(0.0, until - now)), cpu)
    board.load(0.0)
    return marks


def _work(start: float, seconds: float, part: float) -> None:
    """Be busy for a part of some time, and sleep for the rest."""
    busy_until, total = start + seconds * part, 0
    while time.monotonic() < busy_until:
        for i in range(200):
            total += i * i
    time.sleep(max(0.0, start + seconds - time.monotonic()))


# ------------------------------------------------------------------------------------ the truth


def divided(
    trial: Trial, marks: Sequence[Mark], course: Sequence[int]
) -> tuple[list[float], list[int]]:
    """Exclusive and inclusive parts of a rising quantity, given at each mark, for every span.

    At every moment the spans without an open child share alike.
    """
    exclusive = [0.0] * len(trial.parents)
    first: dict[int, int] = {}
    inclusive = [0] * len(trial.parents)
    open_spans: set[int] = set()
    for place, mark in enumerate(marks):
        if place:
            around = {trial.parents[span] for span in open_spans}
            leaves = open_spans - around
            for span in leaves:
                exclusive[span] += (course[place] - course[place - 1]) / len(leaves)
        span = mark.edge.span
        if mark.edge.opens:
            open_spans.add(span)
            first[span] = course[place]
        else:
            open_spans.remove(span)
            inclusive[span] = course[place] - first[span]
    return exclusive, inclusive


def told(trial: Trial, marks: Sequence[Mark], board: Board) -> list[dict[str, Any]]:
    """The spans of a trial as values: their times and their true energy."""
    cpu = divided(trial, marks, [mark.cpu for mark in marks])
    gpu = None
    if board.gpu is not None:
        pid = str(os.getpid())
        moments = board.truths([mark.mono for mark in marks])
        spent = [moment["gpus"][board.gpu]["processes"].get(pid, 0) for moment in moments]
        gpu = divided(trial, marks, spent)
    began = {mark.edge.span: mark for mark in marks if mark.edge.opens}
    ended = {mark.edge.span: mark for mark in marks if not mark.edge.opens}
    trace = os.urandom(16).hex()
    ids = [os.urandom(8).hex() for _ in trial.parents]
    return [
        {
            "kind": trial.kind,
            "seconds": trial.seconds,
            "depth": _depth(trial, span),
            "trace": trace,
            "id": ids[span],
            "parent": ids[parent] if parent >= 0 else "",
            "start": began[span].wall,
            "end": ended[span].wall,
            "cpu_exclusive": cpu[0][span],  # nanoseconds of CPU time
            "cpu_inclusive": cpu[1][span],
            "gpu_exclusive": None if gpu is None else gpu[0][span],  # microjoules
            "gpu_inclusive": None if gpu is None else gpu[1][span],
        }
        for span, parent in enumerate(trial.parents)
    ]


def _depth(trial: Trial, span: int) -> int:
    return 0 if trial.parents[span] < 0 else 1 + _depth(trial, trial.parents[span])


# -------------------------------------------------------------------------------- to the agent


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def send(path: str, spans: Sequence[dict[str, Any]]) -> None:
    """Send spans as OTLP/JSON."""
    body = {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [{"key": "service.name", "value": {"stringValue": SERVICE}}]
                },
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": span["trace"],
                                "spanId": span["id"],
                                "parentSpanId": span["parent"],
                                "name": span.get("name") or f"{span['kind']} {span['seconds']} s",
                                "kind": 1,
                                "startTimeUnixNano": str(span["start"]),
                                "endTimeUnixNano": str(span["end"]),
                            }
                            for span in spans
                        ]
                    }
                ],
            }
        ]
    }
    connection = UnixConnection(path)
    connection.request("POST", "/v1/traces", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the agent answered {answer.status}: {said!r}")


def introduce(path: str) -> None:
    """A first span, which is not judged: from now on the agent looks at this process closely.

    (Under ``opentelemetry-instrument`` the side channel does it before there is any span.)
    """
    now = time.time_ns()
    hello = {"trace": os.urandom(16).hex(), "id": os.urandom(8).hex(), "parent": ""}
    send(path, [{**hello, "name": "hello", "start": now - 1_000_000, "end": now}])


# ---------------------------------------------------------------------------------------- Zeus


class Windows:
    """ZeusMonitor windows around the first span of each trial."""

    def __init__(self, gpu: int | None) -> None:
        from zeus.monitor import ZeusMonitor

        self._monitor = ZeusMonitor(gpu_indices=[] if gpu is None else [gpu])
        self._gpu = gpu
        self._times: list[int] = []
        self._found: Any = None

    def begin(self) -> None:
        before = time.monotonic_ns()
        self._monitor.begin_window("span", sync_execution=False)
        self._times = [(before + time.monotonic_ns()) // 2]

    def end(self) -> None:
        before = time.monotonic_ns()
        self._found = self._monitor.end_window("span", sync_execution=False)
        self._times.append((before + time.monotonic_ns()) // 2)

    def told(self, board: Board) -> dict[str, float | None]:
        """Joules of the whole devices: as Zeus says, and as they truly were."""
        early, late = board.truths(self._times)
        cpus = self._found.cpu_energy or {}
        facts: dict[str, float | None] = {
            "cpu": sum(cpus.values()) if cpus else None,
            "cpu_true": sum(
                late["zones"][zone] - early["zones"][zone]
                for zone in late["zones"]
                if zone.count(":") == 1
            )
            / 1e6,
            "gpu": None,
        }
        if self._gpu is not None:
            boards = (early["gpus"][self._gpu], late["gpus"][self._gpu])
            facts["gpu"] = self._found.gpu_energy[self._gpu]
            facts["gpu_true"] = (boards[1]["energy"] - boards[0]["energy"]) / 1e6
        return facts


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    board = Board(plan["door"], plan["gpu"])
    windows = Windows(plan["gpu"]) if plan["zeus"] else None
    introduce(plan["socket"])
    time.sleep(GETTING_KNOWN)
    for trial in trials(plan["kinds"], plan["lengths"], plan["repeats"], plan["seed"]):
        marks = perform(trial, board, windows)
        spans = told(trial, marks, board)
        send(plan["socket"], spans)
        if windows is not None:
            spans[0]["zeus"] = windows.told(board)
        for span in spans:
            print(json.dumps(span), flush=True)


if __name__ == "__main__":
    main()
