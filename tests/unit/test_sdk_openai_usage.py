"""The energy in ``usage`` of OpenAI-compatible responses, by ASGI middleware."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from wattspan.sdk import AgentUnavailableError
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
