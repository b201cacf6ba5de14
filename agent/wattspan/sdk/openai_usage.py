"""ASGI middleware that adds the energy of a request to ``usage`` of an OpenAI-compatible response.

    app.add_middleware(EnergyUsageMiddleware)          # FastAPI, Starlette
    app = EnergyUsageMiddleware(app)                   # any ASGI application

A request with the header ``X-Energy: 1`` gets ``usage.energy`` in its response: ``joules``,
``input_joules``, ``output_joules``, ``uncertainty_joules``, and the ``status`` ``provisional``: the
energy settles later, when all concurrent requests are known. If the agent knows no energy,
``status`` is ``unavailable`` and ``reason`` names the cause. Streamed responses have the energy in
the event with ``usage`` (``stream_options.include_usage``). Other responses remain unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import monotonic
from typing import Any

from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Ask = Callable[[Mapping[str, str]], Mapping[str, Any]]

DEADLINE = 2.0
"""Seconds that a response waits for the agent at most, in total."""

MAX_BODY = 4 << 20
"""Responses with more bytes remain unchanged."""

_HEADER = b"x-energy"
_YES = frozenset((b"1", b"true"))
_EVENT = b"data:"


def ask_agent(parameters: Mapping[str, str]) -> Mapping[str, Any]:
    """The agent's estimate for a request of this process; MeasurementError without any."""
    return request_json("/v1/inference", {"pid": "self", **parameters})


class EnergyUsageMiddleware:
    """Adds the energy to responses of ``app``; ``ask`` blocks and runs in a thread.

    It asks once a response and waits ``deadline`` seconds at most. A failure of any kind is the
    reason why the energy is unavailable; the response itself remains.
    """

    def __init__(
        self, app: Application, ask: Ask = ask_agent, *, deadline: float = DEADLINE
    ) -> None:
        self._app, self._ask, self._deadline = app, ask, deadline

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        asked = any(name == _HEADER and value.strip() in _YES for name, value in headers)
        if scope["type"] != "http" or not asked:
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _EnergyResponse(send, self._ask, self._deadline))


class _EnergyResponse:
    """The ``send`` of one request."""

    def __init__(self, send: Send, ask: Ask, deadline: float) -> None:
        self._send, self._ask, self._deadline = send, ask, deadline
        self._asked = False
        self._began = monotonic()
        self._start: Message | None = None  # held until the whole body is known
        self._body = b""
        self._events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._events:
            body = message.get("body", b"")
            if b'"usage"' in body:
                message = {**message, "body": await self._with_energy_in_events(body)}
            await self._send(message)
        elif self._start is None:
            await self._send(message)
        else:
            await self._collect(message)

    async def _begin(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        kind = headers.get(b"content-type", b"").split(b";")[0].strip()
        encoded = headers.get(b"content-encoding", b"identity") != b"identity"
        if not encoded and kind == b"application/json":
            self._start = message
            return
        self._events = not encoded and kind == b"text/event-stream"
        if self._events:
            message = _with_length(message, None)
        await self._send(message)

    async def _collect(self, message: Message) -> None:
        """Hold a part of a JSON body; send all with the last part, or if it is too long."""
        assert self._start is not None  # noqa: S101 - the caller has checked it
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if more and len(self._body) <= MAX_BODY:
            return
        body = self._body if more else await self._with_energy(self._body)
        start, self._start = self._start, None
        await self._send(start if body is self._body else _with_length(start, len(body)))
        await self._send({**message, "body": body})

    async def _with_energy_in_events(self, body: bytes) -> bytes:
        """The events with the energy in each one that has token counts."""
        lines = body.split(b"\n")
        for i, line in enumerate(lines):
            if line.startswith(_EVENT):
                data = line.removeprefix(_EVENT)
                found = await self._with_energy(data)
                lines[i] = line if found is data else _EVENT + b" " + found
        return b"\n".join(lines)

    async def _with_energy(self, body: bytes) -> bytes:
        """The document with the energy in its ``usage``; the same object without token counts."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return body
        usage = document.get("usage") if isinstance(document, dict) else None
        if not isinstance(usage, dict):
            return body
        if self._asked:
            return body
        self._asked = True
        time = f"{(monotonic() - self._began) * 1e3:.0f}ms"
        parameters = {**_tokens(usage), "model": str(document.get("model") or ""), "time": time}
        energy: Any
        try:
            asking = asyncio.to_thread(self._ask, parameters)
            energy = dict(await asyncio.wait_for(asking, self._deadline))
            json.dumps(energy)
        except TimeoutError:
            reason = f"The agent did not answer within {self._deadline:g} s."
            energy = {"status": "unavailable", "reason": reason}
        except Exception as error:  # noqa: BLE001 - the response is good without the energy
            reason = str(error) if isinstance(error, MeasurementError) else ""
            reason = reason or f"Invalid response of the agent ({type(error).__name__})."
            energy = {"status": "unavailable", "reason": reason}
        usage["energy"] = energy
        try:
            return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        except ValueError:  # a lone surrogate, which JSON may contain but UTF-8 may not
            return body


def _tokens(usage: Mapping[str, Any]) -> dict[str, str]:
    """The token counts of Chat Completions (``prompt_tokens``) or Responses (``input_tokens``)."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    counts = {
        "prompt": usage.get("prompt_tokens", usage.get("input_tokens")),
        "completion": usage.get("completion_tokens", usage.get("output_tokens")),
        "cached": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    return {name: str(count) for name, count in counts.items() if isinstance(count, int)}


def _with_length(start: Message, length: int | None) -> Message:
    """A start of a response with another ``content-length``, or none."""
    headers = [(n, v) for n, v in start.get("headers", ()) if n.lower() != b"content-length"]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {**start, "headers": headers}
