"""Spans of a demo's jobs: what instrumented programs would say of the work on the emulated GPUs.

The work goes on inside the emulated host; a job looks how far it has come, and tells of each
training step and each request as a span, in OTLP/JSON over the agent's Unix socket, as any
program in any language could.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from wattspan.model import MILLISECOND, SECOND

SAMPLES = 256  # in a training step
MODEL = "emulated-70b"
_KEPT = 1000  # spans that wait for an agent


class Progress(NamedTuple):
    """How far work had come at one time: units done, and units that had come in."""

    at: int
    done: float
    arrived: float


class Call(NamedTuple):
    """One finished piece of work, as a span will tell of it. Unix nanoseconds."""

    name: str
    start: int
    end: int
    attributes: dict[str, int | str]


class Follower(Protocol):
    def see(self, now: Progress) -> Iterator[Call]:
        """What has been finished since the last look."""
        ...


@dataclass(slots=True)
class Steps:
    """Training: one step after the other."""

    last: Progress | None = None
    began: int | None = None

    def see(self, now: Progress) -> Iterator[Call]:
        last, self.last = self.last, now
        if last is None:
            return
        for end in _passed(last.at, last.done, now.at, now.done):
            if self.began is not None:  # the first was begun before anybody looked
                yield Call("train_step", self.began, end, {"samples": SAMPLES})
            self.began = end


@dataclass(slots=True)
class Requests:
    """Serving: requests come, wait, and are served in the order of their coming."""

    last: Progress | None = None
    waiting: deque[int] = field(default_factory=deque)
    draw: random.Random = field(default_factory=lambda: random.Random(5))  # noqa: S311

    def see(self, now: Progress) -> Iterator[Call]:
        last, self.last = self.last, now
        if last is None:
            return
        came = round(now.arrived) - round(last.arrived)
        # A burst comes in one moment; half-way between two looks is the best guess.
        self.waiting.extend([(last.at + now.at) // 2] * came)
        for end in _passed(last.at, last.done, now.at, now.done):
            if self.waiting:
                start = min(self.waiting.popleft(), end)
                yield Call("chat", start, end, self._tokens())

    def _tokens(self) -> dict[str, int | str]:
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.usage.input_tokens": self.draw.randint(200, 1800),
            "gen_ai.usage.output_tokens": self.draw.randint(120, 280),
        }


def _passed(start: int, low: float, end: int, high: float) -> Iterator[int]:
    """When each whole number between ``low`` and ``high`` was reached, by a straight line."""
    tiny = 1e-6  # 59.9999 requests are sixty
    for whole in range(int(low + tiny) + 1, int(high + tiny) + 1):
        yield start + round((end - start) * min(1.0, (whole - low) / (high - low)))


FOLLOWERS: dict[str, Callable[[], Follower]] = {"steps": Steps, "requests": Requests}


class Teller:
    """Sends calls as spans to the agent at a Unix socket, together and not often.

    An agent that is not there is no reason to stop: what it misses waits a little, then goes.
    """

    def __init__(self, path: Path, service: str, every: int = SECOND // 2) -> None:
        self._path, self._service, self._every = path, service, every
        self._trace = os.urandom(12)
        self._number = 0
        self._waiting: deque[dict[str, object]] = deque(maxlen=_KEPT)
        self._due = 0

    def tell(self, call: Call) -> None:
        self._number += 1
        self._waiting.append(
            {
                "traceId": (self._trace + self._number.to_bytes(4, "big")).hex(),
                "spanId": os.urandom(8).hex(),
                "name": call.name,
                "kind": 1,
                "startTimeUnixNano": str(call.start),
                "endTimeUnixNano": str(call.end),
                "attributes": [
                    {"key": key, "value": _value(value)} for key, value in call.attributes.items()
                ],
            }
        )

    def send(self, now: int) -> None:
        """Send what waits, if it is time to. ``now`` is of any clock, always the same."""
        if now < self._due or not self._waiting:
            return
        self._due = now + self._every
        resource = {"attributes": [{"key": "service.name", "value": _value(self._service)}]}
        scopes = [{"scope": {"name": "wattspan.demo"}, "spans": list(self._waiting)}]
        body = {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = _UnixConnection(self._path)
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/traces", json.dumps(body), headers)
                answer = connection.getresponse()
                answer.read()
            finally:
                connection.close()
            if answer.status == http.HTTPStatus.OK:
                self._waiting.clear()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=500 * MILLISECOND / SECOND)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _value(value: int | str) -> dict[str, str]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}
