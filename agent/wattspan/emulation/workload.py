"""The process of a demo's job: real CPU time, and spans of its emulated work.

It keeps one CPU busy to a given degree until its standard input ends, so that there is a process
to measure: its CPU time is real, and so, by the emulated law, its energy is known.

The emulated work is inside the emulated host. With ``--spans`` the process asks for its finished
units and sends each training step and each request as a span, in OTLP/JSON over the agent's Unix
socket, as any program in any language could.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import select
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from wattspan.clock import SystemClock
from wattspan.emulation.control import ControlClient
from wattspan.emulation.workloads import CompletedUnit
from wattspan.model import MILLISECOND, SECOND, Instant
from wattspan.ports import WattspanError
from wattspan.util.unix_http import UnixHttpConnection

MODEL = "emulated-70b"
_MAX_QUEUED = 1000  # spans that wait for an agent
_RETRY_TIMEOUT = 10 * SECOND  # with an agent that does not answer, as OTLP's exporters have
_DRIFT = MILLISECOND  # between the two clocks, before the one is set by the other again


class EmulatedSpan(NamedTuple):
    """One finished unit of work as a span. Nanoseconds."""

    name: str
    start: int
    end: int
    attributes: dict[str, int | str]
    parts: tuple[EmulatedSpan, ...] = ()  # spans below it


class SpanGenerator(Protocol):
    def spans_of(self, unit: CompletedUnit) -> Iterator[EmulatedSpan]:
        """The spans of a unit of work."""
        ...


@dataclass(slots=True)
class StepSpans:
    """Training steps; a rank has a child span for its own part."""

    rank: int | None = None

    def spans_of(self, unit: CompletedUnit) -> Iterator[EmulatedSpan]:
        rank: dict[str, int | str] = {} if self.rank is None else {"rank": self.rank}
        own = EmulatedSpan("compute", unit.began, min(unit.computed, unit.ended), dict(rank))
        parts = () if self.rank is None else (own,)
        yield EmulatedSpan(
            "train_step", unit.began, unit.ended, {"samples": unit.work, **rank}, parts
        )


@dataclass(slots=True)
class RequestSpans:
    """Requests, from arrival to end."""

    draw: random.Random = field(default_factory=lambda: random.Random(5))  # noqa: S311

    def spans_of(self, unit: CompletedUnit) -> Iterator[EmulatedSpan]:
        yield EmulatedSpan("chat", unit.began, unit.ended, self._tokens())

    def _tokens(self) -> dict[str, int | str]:
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.usage.input_tokens": self.draw.randint(200, 1800),
            "gen_ai.usage.output_tokens": self.draw.randint(120, 280),
        }


class UnixTimeMapping:
    """Unix time of monotonic times; adjacent spans stay adjacent."""

    def __init__(self, now: Instant) -> None:
        self._offset = now.wall - now.mono

    def update(self, now: Instant) -> None:
        """Follow a step of the clock; a drift of less than a millisecond is ignored."""
        offset = now.wall - now.mono
        if abs(offset - self._offset) > _DRIFT:
            self._offset = offset

    def convert(self, span: EmulatedSpan) -> EmulatedSpan:
        """A span with monotonic times, converted to Unix time."""
        return span._replace(
            start=span.start + self._offset,
            end=span.end + self._offset,
            parts=tuple(self.convert(part) for part in span.parts),
        )


class SpanSender:
    """Sends spans to the agent at a Unix socket, in batches and without blocking.

    Spans wait while the agent is not reachable, up to a limit. The response of a slow agent is
    read at a later call; until then nothing is sent a second time.
    """

    def __init__(self, path: Path, service: str, every: int = SECOND // 2) -> None:
        self._path, self._service, self._interval = path, service, every
        self._trace = os.urandom(12)
        self._number = 0
        self._waiting: deque[dict[str, object]] = deque(maxlen=_MAX_QUEUED)
        self._due = 0
        self._connection: UnixHttpConnection | None = (
            None  # has been sent spans, and has not answered yet
        )
        self._sent: list[dict[str, object]] = []  # those
        self._timeout_at = 0  # when it is waited for no more

    def add(self, span: EmulatedSpan) -> None:
        self._number += 1
        self._add(span, (self._trace + self._number.to_bytes(4, "big")).hex(), "")

    def _add(self, emulated: EmulatedSpan, trace: str, parent: str) -> None:
        span = os.urandom(8).hex()
        self._waiting.append(
            {
                "traceId": trace,
                "spanId": span,
                **({"parentSpanId": parent} if parent else {}),
                "name": emulated.name,
                "kind": 1,
                "startTimeUnixNano": str(emulated.start),
                "endTimeUnixNano": str(emulated.end),
                "attributes": [
                    {"key": key, "value": _value(value)}
                    for key, value in emulated.attributes.items()
                ],
            }
        )
        for part in emulated.parts:
            self._add(part, trace, span)

    def send(self, now: int) -> None:
        """Send the waiting spans if a batch is due. ``now`` is of any clock, always the same."""
        if self._connection is not None:
            self._check_response(self._connection, now)
        if self._connection is not None or now < self._due or not self._waiting:
            return
        self._due, self._timeout_at = now + self._interval, now + _RETRY_TIMEOUT
        self._sent = list(self._waiting)
        self._waiting.clear()
        self._connection = connection = UnixHttpConnection(
            str(self._path), 500 * MILLISECOND / SECOND
        )
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/traces", self._body(), headers)
        except (OSError, http.client.HTTPException):
            self._finish(connection, taken=False)

    def _check_response(self, connection: UnixHttpConnection, now: int) -> None:
        """Read the response if it has arrived."""
        if not select.select([connection.sock], [], [], 0)[0]:
            if now >= self._timeout_at:
                self._finish(connection, taken=False)
            return
        try:
            answer = connection.getresponse()
            answer.read()
            taken = answer.status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            taken = False
        self._finish(connection, taken=taken)

    def _finish(self, connection: UnixHttpConnection, *, taken: bool) -> None:
        connection.close()
        if not taken:
            self._waiting = deque([*self._sent, *self._waiting], maxlen=_MAX_QUEUED)
        self._connection, self._sent = None, []

    def _body(self) -> str:
        resource = {"attributes": [{"key": "service.name", "value": _value(self._service)}]}
        scopes = [{"scope": {"name": "wattspan.demo"}, "spans": self._sent}]
        return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})


def _value(value: int | str) -> dict[str, str]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


PERIOD = 40 * MILLISECOND


def set_process_name(name: str) -> None:
    """Set the process's name in the kernel, up to 15 bytes."""
    Path("/proc/self/comm").write_text(name[:15])


def work(duty: float, clock: SystemClock, report: Callable[[], object]) -> None:
    """Keep the CPU busy for ``duty`` of every period; call ``look`` in between."""
    start = clock.monotonic()
    while True:
        work_until = start + round(duty * PERIOD)
        total = 0
        while clock.monotonic() < work_until:
            for i in range(500):
                total += i * i
        report()
        start += PERIOD
        rest = max(0, start - clock.monotonic()) / 1e9
        if select.select([0], [], [], rest)[0] and not os.read(0, 4096):
            return


def span_generator(kind: str, rank: int | None) -> SpanGenerator:
    """The generator for one kind of work."""
    return StepSpans(rank) if kind == "steps" else RequestSpans()


def span_reporter(
    service: str,
    generator: SpanGenerator,
    gpu: int | None,
    host: Path,
    agent: Path,
    clock: SystemClock,
) -> Callable[[], None]:
    """A function that sends this process's newly finished units to ``agent``."""
    sender, unix = SpanSender(agent, service), UnixTimeMapping(clock.now())
    client: ControlClient | None = None
    seen = 0

    def report() -> None:
        nonlocal client, seen
        try:
            client = client or ControlClient(host)
            answer = client.ask(do="finished", gpu=gpu, since=seen)
        except WattspanError:
            return  # not on its board yet; or the host is about to end, and this process with it
        now, seen = clock.now(), answer["units"]
        unix.update(now)
        for unit in answer["finished"]:
            for span in generator.spans_of(CompletedUnit(*unit)):
                sender.add(unix.convert(span))
        sender.send(now.mono)

    return report


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name")
    options.add_argument("duty", type=float, help="of one CPU, 0 to 1")
    options.add_argument("--cpu", type=int, help="the one to run on")
    options.add_argument("--spans", choices=("steps", "requests"), help="kind of its work")
    options.add_argument("--service", help="the service of its spans; without it, its name")
    options.add_argument("--rank", type=int, help="its rank in a synchronous job")
    options.add_argument(
        "--gpu", type=int, help="index of its GPU; without it, the work is on the CPU"
    )
    options.add_argument("--host", type=Path, help="the emulated host's directory")
    options.add_argument("--agent", type=Path, help="the agent's socket for spans")
    chosen = options.parse_args()
    set_process_name(chosen.name)
    if chosen.cpu is not None and chosen.cpu in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {chosen.cpu})
    clock = SystemClock()
    look: Callable[[], object] = lambda: None  # noqa: E731
    if chosen.spans is not None:
        service, spans = chosen.service or chosen.name, span_generator(chosen.spans, chosen.rank)
        look = span_reporter(service, spans, chosen.gpu, chosen.host, chosen.agent, clock)
    work(chosen.duty, clock, look)


if __name__ == "__main__":
    main()
