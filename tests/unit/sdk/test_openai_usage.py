"""The energy in ``usage`` of OpenAI-compatible responses, by ASGI middleware."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from wattspan.sdk import AgentUnavailableError
from wattspan.sdk.client import request_json
from wattspan.sdk.openai_usage import MAX_BODY, EnergyUsageMiddleware

ENERGY = {"joules": 2.5, "status": "provisional"}
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 40},
}
RESPONSE = {"id": "é", "model": "m", "usage": USAGE}


class Agent:
    """Answers every question alike, and keeps the questions."""

    def __init__(self, answer: Mapping[str, Any] | Exception = ENERGY) -> None:
        self.answer = answer
        self.asked: list[Mapping[str, str]] = []

    def __call__(self, parameters: Mapping[str, str]) -> Mapping[str, Any]:
        self.asked.append(parameters)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def _call(
    agent: Agent,
    *bodies: bytes,
    kind: bytes = b"application/json",
    header: bytes | None = b"1",
    scope: str = "http",
    more: tuple[tuple[bytes, bytes], ...] = (),
) -> tuple[dict[bytes, bytes], bytes]:
    """Headers and body that a client gets from an application that sends ``bodies``."""
    sent: list[dict[str, Any]] = []
    length = str(sum(map(len, bodies))).encode()
    headers = [(b"Content-Type", kind), (b"Content-Length", length), *more]

    async def app(scope, receive, send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(bodies):
            last = number == len(bodies) - 1
            await send({"type": "http.response.body", "body": body, "more_body": not last})
        await send({"type": "http.response.trailers", "headers": []})

    async def send(message) -> None:
        sent.append(message)

    asked = [] if header is None else [(b"x-energy", header)]
    middleware = EnergyUsageMiddleware(app, agent)
    asyncio.run(middleware({"type": scope, "headers": asked}, None, send))
    assert sent[-1]["type"] == "http.response.trailers"
    start, *rest = sent[:-1]
    assert start["type"] == "http.response.start"
    found = {name.lower(): value for name, value in start["headers"]}
    return found, b"".join(each["body"] for each in rest)


@pytest.mark.parametrize("parts", [1, 3])
def test_energy_is_added_to_usage(parts: int) -> None:
    agent, whole = Agent(), json.dumps(RESPONSE).encode()
    size = -(-len(whole) // parts)

    headers, body = _call(agent, *(whole[i : i + size] for i in range(0, len(whole), size)))

    assert json.loads(body) == {**RESPONSE, "usage": {**USAGE, "energy": ENERGY}}
    assert headers[b"content-length"] == str(len(body)).encode()
    (asked,) = agent.asked
    assert asked["time"].endswith("ms")
    assert {**asked, "time": ""} == {
        "prompt": "100",
        "completion": "11",
        "cached": "40",
        "model": "m",
        "time": "",
    }


def test_token_counts_of_the_responses_api_are_read() -> None:
    agent = Agent()
    usage = {
        "input_tokens": 7,
        "output_tokens": 9,
        "input_tokens_details": {"cached_tokens": 2},
    }
    _call(agent, json.dumps({"usage": usage}).encode())

    assert {key: agent.asked[0][key] for key in ("prompt", "completion", "cached")} == {
        "prompt": "7",
        "completion": "9",
        "cached": "2",
    }


@pytest.mark.parametrize("header", [None, b"0", b""])
def test_response_is_unchanged_unless_energy_is_asked_for(header: bytes | None) -> None:
    agent, whole = Agent(), json.dumps(RESPONSE).encode()

    assert _call(agent, whole, header=header)[1] == whole
    assert _call(agent, whole, scope="websocket")[1] == whole
    assert agent.asked == []


def test_unknown_energy_is_unavailable_with_the_reason() -> None:
    agent = Agent(AgentUnavailableError("No wattspan agent answers."))

    _, body = _call(agent, json.dumps(RESPONSE).encode())

    assert json.loads(body)["usage"]["energy"] == {
        "status": "unavailable",
        "reason": "No wattspan agent answers.",
    }


def test_streamed_response_has_the_energy_in_the_event_with_usage() -> None:
    agent = Agent()
    first = b'data: {"choices": [{"delta": {"content": "a"}}], "usage": null}\n\n'
    last = b"data: " + json.dumps(RESPONSE).encode() + b"\n\ndata: [DONE]\n\n"

    headers, body = _call(agent, first, last, kind=b"text/event-stream; charset=utf-8")

    assert body.startswith(first)
    assert body.endswith(b"\n\ndata: [DONE]\n\n")
    event = body[len(first) :].split(b"\n\n")[0].removeprefix(b"data: ")
    assert json.loads(event)["usage"]["energy"] == ENERGY
    assert b"content-length" not in headers
    assert len(agent.asked) == 1


EVENTS = b"text/event-stream"
DONE = b"data: [DONE]\n\n"


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _usage(tokens: int, **fields: Any) -> bytes:
    return _event(**fields, usage={"prompt_tokens": 5, "completion_tokens": tokens})


def _energies(body: bytes) -> list[bool]:
    """For each event with usage, whether it has the energy."""
    lines = [line.removeprefix(b"data:") for line in body.split(b"\n") if b"usage" in line]
    return ["energy" in json.loads(line)["usage"] for line in lines]


TEXT = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
FINISHED = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([_usage(1, **TEXT), _usage(2, **TEXT), _usage(3), DONE], [False, False, True]),
        ([_usage(2, **TEXT), _usage(3, **TEXT), DONE], [False, True]),
        ([_usage(2, **TEXT), _usage(3, **FINISHED), DONE], [False, True]),
        ([_usage(2, **TEXT), _usage(3, **FINISHED)], [False, True]),
        ([_usage(1, **TEXT), _event(**TEXT), _usage(3, **FINISHED)], [False, True]),
        ([_usage(3, **TEXT), _event(**FINISHED), DONE], [True]),
        ([_usage(3), b": a comment\n\n", _event(type="message_stop")], [True]),
        ([_usage(3), DONE, _usage(4)], [True, False]),
    ],
)
@pytest.mark.parametrize("joined", [True, False])
def test_last_event_with_usage_has_the_energy(
    events: list[bytes], expected: list[bool], joined: bool
) -> None:
    agent = Agent()
    sent = [b"".join(events)] if joined else events

    _, body = _call(agent, *sent, kind=EVENTS)

    assert _energies(body) == expected
    assert [asked["completion"] for asked in agent.asked] == ["3"]
    assert body.count(b"\n\n") == len(events)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 7, 50])
def test_event_split_among_messages_has_the_energy(end: bytes, size: int) -> None:
    agent = Agent()
    whole = (_event(**TEXT) + _usage(3) + DONE).replace(b"\n", end)

    _, body = _call(agent, *(whole[i : i + size] for i in range(0, len(whole), size)), kind=EVENTS)

    first, usage, done = body.split(end + end)[:3]
    assert first + end + end == _event(**TEXT).replace(b"\n", end)
    assert json.loads(usage.removeprefix(b"data:"))["usage"]["energy"] == ENERGY
    assert done == b"data: [DONE]"
    assert len(agent.asked) == 1


@pytest.mark.parametrize(
    "body", [b"{}", b"[1]", b"no json", b'{"usage": null}', b'{"error": {"message": "no"}}']
)
def test_response_without_token_counts_is_unchanged(body: bytes) -> None:
    agent = Agent()

    headers, found = _call(agent, body)

    assert found == body
    assert headers[b"content-length"] == str(len(body)).encode()
    assert agent.asked == []


def test_other_kinds_of_responses_are_unchanged() -> None:
    agent, whole = Agent(), json.dumps(RESPONSE).encode()

    assert _call(agent, whole, kind=b"text/html")[1] == whole
    assert _call(agent, whole, more=((b"content-encoding", b"gzip"),))[1] == whole
    assert agent.asked == []


def test_long_response_is_unchanged() -> None:
    agent = Agent()
    parts = b'{"usage": {}, "text": "', b"x" * MAX_BODY, b"x" * 10, b'"}'

    assert _call(agent, *parts)[1] == b"".join(parts)
    assert agent.asked == []


@pytest.mark.parametrize("failure", [ValueError("no"), KeyError("x"), OSError(5, "no")])
def test_failure_of_the_agent_keeps_the_response(failure: Exception) -> None:
    _, body = _call(Agent(failure), json.dumps(RESPONSE).encode())

    assert json.loads(body)["usage"]["energy"]["status"] == "unavailable"


def test_agent_is_asked_once_a_response() -> None:
    agent = Agent()
    event = b"data: " + json.dumps(RESPONSE).encode() + b"\n\n"
    _call(agent, event * 3, event, kind=b"text/event-stream")

    assert len(agent.asked) == 1


def test_silent_agent_delays_a_response_until_the_deadline() -> None:
    released, sent = threading.Event(), []

    def ask(parameters: Mapping[str, str]) -> Mapping[str, Any]:
        released.wait(30)
        return ENERGY

    async def app(scope, receive, send) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(RESPONSE).encode()})

    async def send(message) -> None:
        sent.append(message)
        released.set()

    middleware = EnergyUsageMiddleware(app, ask, deadline=0.01)
    asyncio.run(middleware({"type": "http", "headers": [(b"x-energy", b"1")]}, None, send))

    energy = json.loads(sent[-1]["body"])["usage"]["energy"]
    assert energy["status"] == "unavailable"
    assert "within 0.01 s" in energy["reason"]


def test_response_with_a_lone_surrogate_is_unchanged() -> None:
    whole = json.dumps({**RESPONSE, "text": "\ud800"}).encode()

    assert _call(Agent(), whole)[1] == whole


class Client:
    """Runs an application in the middleware as a server does, and keeps the messages sent."""

    def __init__(
        self, app: Any, agent: Any = None, *, deadline: float = 30.0, fails: int | None = None
    ) -> None:
        self.agent = agent or Agent()
        self.sent: list[dict[str, Any]] = []
        self.received = asyncio.Event()
        self._fails = fails
        self._middleware = EnergyUsageMiddleware(app, self.agent, deadline=deadline)

    async def _send(self, message: dict[str, Any]) -> None:
        if len(self.sent) == self._fails:
            raise OSError("The client has disconnected.")
        self.sent.append(message)
        self.received.set()

    async def call(self, **scope: Any) -> None:
        headers = [(b"x-energy", b"1")]
        await self._middleware(
            {"type": "http", "method": "POST", "headers": headers, **scope}, _receive, self._send
        )

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent)


async def _receive() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def _start(kind: bytes = b"application/json", status: int = 200, **more: bytes) -> dict[str, Any]:
    headers = [(b"content-type", kind), *((n.encode(), v) for n, v in more.items())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def _part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _sending(*messages: dict[str, Any], error: BaseException | None = None) -> Any:
    """An application that sends some messages, and then fails or returns."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    return app


WHOLE = json.dumps(RESPONSE).encode()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [_start()],
        [_start(), _part(WHOLE[:9], True)],
        [_start(EVENTS)],
        [_start(EVENTS), _part(_event(**TEXT), True), _part(_usage(3)[:9], True)],
        [_start(EVENTS), _part(_usage(3), True)],
    ],
    ids=["before the start", "start", "body", "events", "part of an event", "usage"],
)
@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError(), None])
def test_error_of_the_application_propagates_after_all_that_it_sent(
    messages: list[dict[str, Any]], error: BaseException | None
) -> None:
    client = Client(_sending(*messages, error=error))

    if error is None:
        asyncio.run(client.call())
    else:
        with pytest.raises(type(error)) as found:
            asyncio.run(client.call())
        assert found.value is error or isinstance(error, asyncio.CancelledError)

    if not isinstance(error, asyncio.CancelledError):
        assert client.sent[:1] == messages[:1]
        assert client.body == b"".join(each.get("body", b"") for each in messages)
    assert not any(each.get("more_body") is False for each in client.sent)
    assert client.agent.asked == []


@pytest.mark.parametrize("kind", [b"application/json", EVENTS])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_disconnected_client_is_an_error_of_send(kind: bytes, fails: int) -> None:
    parts = [_part(_usage(3), True), _part(DONE, True), _part(b"", True), _part(b"")]
    body = [_part(WHOLE)] if kind != EVENTS else parts
    client = Client(_sending(_start(kind), *body), fails=fails)
    sends = 2 if kind != EVENTS else 4

    if fails < sends:
        with pytest.raises(OSError, match="disconnected"):
            asyncio.run(client.call())
    else:
        asyncio.run(client.call())
    assert len(client.sent) == min(fails, sends)


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        ("HEAD", [_start()]),
        ("HEAD", [_start(), _part(b"")]),
        ("HEAD", [_start(EVENTS)]),
        ("POST", [_start(status=204), _part(b"")]),
        ("GET", [_start(status=304)]),
        ("GET", [_start(status=206), _part(WHOLE)]),
        ("POST", [_start(b"text/plain"), _part(WHOLE)]),
        ("POST", [_start(**{"content-encoding": b"gzip"}), _part(b"\x1f\x8b")]),
        ("POST", [_start(EVENTS, **{"content-encoding": b"br"}), _part(_usage(3))]),
        ("POST", [_start(), _part(b'{"usage": {}, "x": 1e999}')]),
        ("POST", [_start(), _part(b"\xff{}")]),
        ("POST", [_start(), _part(b'{"usage": {}}'.decode().encode("utf-16"))]),
        ("POST", [_start(EVENTS), _part(b"data: no json\n\ndata: {}\n\n")]),
        ("POST", [_start(EVENTS), _part(b'data: "usage"\n\nusage\n', True), _part(b"")]),
    ],
)
def test_message_that_cannot_have_the_energy_is_sent_at_once(
    method: str, messages: list[dict[str, Any]]
) -> None:
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
            sent.append(len(client.sent))

    client = Client(app)
    asyncio.run(client.call(method=method))

    assert client.sent == messages
    if method == "HEAD":
        assert sent == list(range(1, len(messages) + 1))


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_scopes_get_the_original_callables(kind: str) -> None:
    called: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append((scope, receive))
        await send({"type": f"{kind}.startup.complete"})

    client = Client(app)
    asyncio.run(client.call(type=kind))

    assert called == [({**called[0][0], "type": kind}, _receive)]
    assert client.sent == [{"type": f"{kind}.startup.complete"}]


def test_message_without_a_body_releases_the_start() -> None:
    file = {"type": "http.response.pathsend", "path": "/x"}
    client = Client(_sending(_start(), file))

    asyncio.run(client.call())

    assert client.sent == [_start(), file]


def test_event_too_large_to_hold_is_unchanged() -> None:
    agent, event = Agent(), _usage(3, text="x" * MAX_BODY)

    _, body = _call(agent, event[:100], event[100:-50], event[-50:], DONE, kind=EVENTS)

    assert body == event + DONE
    assert agent.asked == []


@pytest.mark.parametrize("held", [_usage(3)[:30], _usage(3)], ids=["unfinished", "usage"])
def test_event_is_not_held_beyond_the_deadline(held: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(_start(EVENTS))
        client.received.clear()
        await send(_part(held, True))
        await asyncio.wait_for(client.received.wait(), 30)
        assert client.body == held
        await send(_part((_usage(3) + _usage(4) + DONE)[len(held) :]))

    client = Client(app, deadline=0.01)
    asyncio.run(client.call())

    assert _energies(client.body)[0] is False
    assert client.sent[-1]["more_body"] is False


def test_late_send_that_fails_is_an_error_of_the_next_send() -> None:
    failed = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(_start(EVENTS))
        await send(_part(_usage(3), True))
        await asyncio.wait_for(failed.wait(), 30)
        with pytest.raises(OSError, match="disconnected"):
            await send(_part(DONE))

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            failed.set()
            raise OSError("The client has disconnected.")

    middleware = EnergyUsageMiddleware(app, Agent(), deadline=0.01)
    scope = {"type": "http", "method": "POST", "headers": [(b"x-energy", b"1")]}
    asyncio.run(middleware(scope, _receive, send))


def test_earlier_events_do_not_wait_for_the_agent() -> None:
    before: list[bytes] = []

    def ask(parameters: Mapping[str, str]) -> Mapping[str, Any]:
        before.append(client.body)
        return ENERGY

    whole = _event(**TEXT) + _usage(3) + DONE
    client = Client(_sending(_start(EVENTS), _part(whole)), ask)
    asyncio.run(client.call())

    assert before == [_event(**TEXT)]


def test_thread_of_a_dripping_agent_ends(tmp_path: Path) -> None:
    """Each read of the response succeeds, so only a limit of the whole query ends it."""
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while not ended.wait(0.01):
                connection.sendall(b"x")

    def ask(parameters: Mapping[str, str]) -> Mapping[str, Any]:
        try:
            return request_json("/", parameters, margin=0.1, directories=(str(tmp_path),))
        finally:
            ended.set()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "api.sock"))
        listener.listen()
        agent = threading.Thread(target=drip, args=(listener,), daemon=True)
        agent.start()
        client = Client(_sending(_start(), _part(WHOLE)), ask, deadline=0.05)
        asyncio.run(client.call())
        assert ended.wait(30)
        agent.join(30)

    assert json.loads(client.body)["usage"]["energy"]["status"] == "unavailable"
