"""ASGI middleware that adds the energy of a request to ``usage`` of an OpenAI-compatible response.

    app.add_middleware(EnergyUsageMiddleware)          # FastAPI, Starlette
    app = EnergyUsageMiddleware(app)                   # any ASGI application

A request with the header ``X-Energy: 1`` gets ``usage.energy`` in its response: ``joules``,
``input_joules``, ``output_joules``, ``uncertainty_joules``, and the ``status`` ``provisional``: the
energy settles later, when all concurrent requests are known. If the agent knows no energy,
``status`` is ``unavailable`` and ``reason`` names the cause. Streamed responses have the energy in
the last event with ``usage`` (``stream_options.include_usage``). Other responses remain unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Ask = Callable[[Mapping[str, str]], Mapping[str, Any]]

DEADLINE = 2.0
"""Seconds that a response waits for the agent at most, in total, and that an event is held."""

MAX_BODY = 4 << 20
"""Responses with more bytes remain unchanged."""

_HEADER = b"x-energy"
_YES = frozenset((b"1", b"true"))
_UNCHANGED = frozenset((204, 206, 304))  # without a body, or with a part of one


def ask_agent(parameters: Mapping[str, str]) -> Mapping[str, Any]:
    """The agent's estimate for a request of this process; MeasurementError without any."""
    return request_json("/v1/inference", {"pid": "self", **parameters}, margin=DEADLINE)


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
        response = _EnergyResponse(send, self._ask, self._deadline, scope.get("method"))
        try:
            await self._app(scope, receive, response)
        except Exception:
            with suppress(Exception):  # the client gets all that the application has sent
                await response.release()
            raise
        else:
            await response.release()
        finally:
            response.close()


class _EnergyResponse:
    """The ``send`` of one request. It has to be closed."""

    def __init__(self, send: Send, ask: Ask, deadline: float, method: str | None) -> None:
        self._send, self._ask, self._deadline, self._method = send, ask, deadline, method
        self._began = monotonic()
        self._start: Message | None = None  # held until the whole body is known
        self._body = b""
        self._events: UsageEvents | None = None
        self._timer: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # of the application and the timer

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] != "http.response.body":
            await self.release()  # other messages may be or follow a body, and need the start
            await self._send(message)
        elif self._events is not None:
            await self._pass(self._events, message)
        elif self._start is None:
            await self._send(message)
        else:
            await self._collect(self._start, message)

    async def release(self) -> None:
        """Send everything that is held, unchanged."""
        async with self._turn:
            self._stop_timer()
            start, body = self._start, self._body
            self._start, self._body = None, b""
            if start is not None:
                await self._send(start)
            elif self._events is not None:
                body = self._events.release()
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def close(self) -> None:
        """End the timer. Idempotent."""
        with suppress(Exception):
            self._stop_timer()

    async def _begin(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        changeable = (
            self._method != "HEAD"
            and message.get("status") not in _UNCHANGED
            and headers.get(b"content-encoding", b"identity").strip().lower() == b"identity"
        )
        if changeable and kind == b"application/json":
            self._start = message
            return
        if changeable and kind == b"text/event-stream":
            self._events = UsageEvents(MAX_BODY)
            message = _with_length(message, None)
        await self._send(message)

    async def _collect(self, start: Message, message: Message) -> None:
        """Hold a part of a JSON body; send all with the last part, or if it is too long."""
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if more and len(self._body) <= MAX_BODY:
            return
        body = self._body
        if len(body) <= MAX_BODY:
            body = await self._with_energy(body, self._deadline)
        if body is not self._body:
            start = _with_length(start, len(body))
        self._start, self._body = None, b""
        await self._send(start)
        await self._send({**message, "body": body})

    async def _pass(self, events: UsageEvents, message: Message) -> None:
        """Send the events that need no energy or have it, the others within the deadline."""
        async with self._turn:
            self._stop_timer()
            more = message.get("more_body", False)
            part = events.feed(message.get("body", b""), monotonic(), last=not more)
            body = part.before
            if part.usage is not None:
                if body:
                    await self._send({**message, "body": body, "more_body": True})
                left = part.since + self._deadline - monotonic()
                body = await self._with_energy_in_event(part.usage, left) + part.after
            if body or not more or not message.get("body"):
                await self._send({**message, "body": body})
            since = events.held_since
            if since is not None:
                self._timer = asyncio.create_task(self._release_at(since + self._deadline))

    async def _release_at(self, deadline: float) -> None:
        await asyncio.sleep(max(0.0, deadline - monotonic()))
        async with self._turn:
            assert self._events is not None  # noqa: S101 - else there is no timer
            body = self._events.release()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _stop_timer(self) -> None:
        """Raises the error with which the timer could not send, as for a message."""
        timer, self._timer = self._timer, None
        if timer is not None and not timer.cancel() and not timer.cancelled():
            timer.result()

    async def _with_energy_in_event(self, line: bytes, patience: float) -> bytes:
        data = event_data(line)
        found = await self._with_energy(data, patience)
        return line if found is data else b"data: " + found + line[len(line.rstrip(b"\r\n")) :]

    async def _with_energy(self, body: bytes, patience: float) -> bytes:
        """The document with the energy in its ``usage``; the same object without token counts."""
        try:
            document = json.loads(body.decode())
        except (ValueError, RecursionError):
            return body
        if not has_usage(document):
            return body
        document["usage"]["energy"] = await self._energy(document, patience)
        try:
            text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            return text.encode()
        except (ValueError, RecursionError):  # a lone surrogate, or a number beyond the floats
            return body

    async def _energy(self, document: Mapping[str, Any], patience: float) -> Mapping[str, Any]:
        """The agent's response within ``patience`` seconds, or the reason without one."""
        try:
            time = f"{(monotonic() - self._began) * 1e3:.0f}ms"
            counts = _tokens(document["usage"])
            parameters = {**counts, "model": str(document.get("model") or ""), "time": time}
            asking = asyncio.to_thread(self._ask, parameters)
            energy = dict(await asyncio.wait_for(asking, patience))
            json.dumps(energy, allow_nan=False).encode()
        except TimeoutError:
            reason = f"The agent did not answer within {self._deadline:g} s."
        except Exception as error:  # noqa: BLE001 - the response is good without the energy
            reason = str(error) if isinstance(error, MeasurementError) else ""
            reason = reason or f"Invalid response of the agent ({type(error).__name__})."
        else:
            return energy
        return {"status": "unavailable", "reason": reason}


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


# ------------------------------------------------------------------------- streamed responses

_EVENT = b"data:"
_END = b"[DONE]"
_NEWLINES = (b"\n", b"\r")


class Part(NamedTuple):
    """Bytes of a stream of server-sent events to send, in this order.

    ``usage`` is the line of the last event with token counts, and ``since`` when it was complete.
    """

    before: bytes
    usage: bytes | None = None
    after: bytes = b""
    since: float = 0.0


class UsageEvents:
    """Passes events on, and holds each event with ``usage`` until it is known to be the last.

    Engines with continuous usage have it in every event. An event is not the last one if an event
    with ``usage`` follows, or one with more generated text. Unfinished lines are held as well.
    ``most`` limits the held bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[bytes] = []  # an event with usage, and the lines after it
        self._partial = b""
        self._passing = False  # the rest of a line whose begin was released
        self._over = False
        self._since = 0.0

    @property
    def held_since(self) -> float | None:
        """When the held event was complete, or an unfinished line began; None without any."""
        return self._since if self._held or self._partial else None

    def feed(self, body: bytes, now: float, *, last: bool = False) -> Part:
        """Add a part of the stream that was received at ``now``; ``last`` ends it."""
        if self._over:
            return Part(body)
        fresh = not self._partial
        lines = (self._partial + body).splitlines(keepends=True)
        unfinished = bool(lines) and not last and not lines[-1].endswith(_NEWLINES)
        self._partial = lines.pop() if unfinished else b""
        before: list[bytes] = []
        for number, line in enumerate(lines):
            if self._held and event_data(line) == _END:
                rest = b"".join((*self._held[1:], *lines[number:], self._partial))
                return self._finish(before, rest)
            self._add(line, now, before)
        if last and self._held:
            return self._finish(before, b"".join(self._held[1:]))
        if self._partial and not self._held and (fresh or lines):
            self._since = now
        if self._passing or sum(map(len, self._held)) + len(self._partial) > self._most:
            before.append(self.release())
        return Part(b"".join(before))

    def release(self) -> bytes:
        """Remove and return all held bytes, without waiting for more."""
        found = b"".join((*self._held, self._partial))
        if self._partial:
            self._passing = True
        self._held, self._partial = [], b""
        return found

    def _add(self, line: bytes, now: float, before: list[bytes]) -> None:
        data = b"" if self._passing else event_data(line)
        self._passing = False
        document = _document(data) if data and (self._held or b'"usage"' in data) else None
        counted = has_usage(document)
        if counted or _continues(document):
            before += self._held
            self._held = []
        if counted:
            self._held, self._since = [line], now
        else:
            (self._held or before).append(line)

    def _finish(self, before: list[bytes], after: bytes) -> Part:
        usage = self._held[0]
        self._held, self._partial, self._over = [], b"", True
        return Part(b"".join(before), usage, after, self._since)


def has_usage(document: Any) -> bool:
    """True for a document with token counts."""
    return isinstance(document, dict) and isinstance(document.get("usage"), dict)


def event_data(line: bytes) -> bytes:
    """The data in a line of an event; nothing in other lines."""
    return line.removeprefix(_EVENT).strip() if line.startswith(_EVENT) else b""


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _continues(document: Any) -> bool:
    """True for an event with a part of the generated text after which more follows."""
    choices = document.get("choices") if isinstance(document, dict) else None
    return (
        isinstance(choices, list)
        and bool(choices)
        and not any(isinstance(each, dict) and each.get("finish_reason") for each in choices)
    )
