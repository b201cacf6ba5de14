"""One HTTP/1.1 connection: h11 says what the bytes mean, this says what may come of them.

A client gets one answer at a time, in order. What it may not do is answered by the proper
status and ends the connection, after a while in which what it still sends is thrown away: a
socket closed in the face of a sender would take the answer with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from wattspan import __version__
from wattspan.http.access_policy import OPEN_ACCESS, AccessPolicy
from wattspan.http.connection_limiter import RejectionReason
from wattspan.http.limits import ServerCapacity
from wattspan.http.messages import (
    Handler,
    HttpRequest,
    HttpResponse,
    framing_fault,
    plain_response,
    request_head,
)

Log = Callable[[str], None]

_SERVER = f"wattspan/{__version__}"

_MANY, _TINY = 1000, 16
"""A body of more than many pieces that are tiny on average takes more time than it is worth."""


_REJECTION_REASONS = {
    401: RejectionReason.TOKEN,
    403: RejectionReason.NAME,
    421: RejectionReason.NAME,
    408: RejectionReason.SLOW,
    413: RejectionReason.TOO_LARGE,
    429: RejectionReason.RATE,
    431: RejectionReason.TOO_LARGE,
    503: RejectionReason.CROWDED,  # too many bodies at a time
}


class HttpConnection(asyncio.Protocol):
    """Used in the server's thread only."""

    def __init__(
        self,
        handler: Handler,
        room: ServerCapacity,
        date: Callable[[], str],
        log: Log,
        door: AccessPolicy = OPEN_ACCESS,
    ) -> None:
        self._door = door
        self._handler, self._room, self._date, self._log = handler, room, date, log
        self._limits = room.limits
        self._h11 = self._parser()
        self._transport = cast(asyncio.Transport, None)  # until it is made
        self._timer: asyncio.TimerHandle | None = None
        self._request: h11.Request | None = None
        self._head = bytearray()  # what was received of a request until its head is whole
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()
        self._pieces = 0
        self._held = 0
        self._task: asyncio.Task[None] | None = None
        self._answering = False  # from a request's last byte until the answer to it is taken
        self._held_off = False  # it asks too often, and is not told so yet
        self._writable = True
        self._ending = False  # answered for the last time
        self._peer_done = False  # it has sent all it will
        self._whose: Hashable = None

    @property
    def answering(self) -> bool:
        """Whether somebody waits for an answer."""
        return self._answering and not self._ending

    def close(self) -> None:
        """End it at once."""
        self._leave()
        self._transport.abort()

    # ------------------------------------------------------------------ what the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._peer = self._room.peer(transport)
        self._whose = self._peer.whose
        if self._room.enter(self, self._whose, self._door.refused):
            self._rest()
        elif self._room.overrun:
            self.close()
        else:
            self._answer_last(503, "Too many connections are open.", {"Retry-After": "1"})

    def data_received(self, data: bytes) -> None:
        if self._ending or self._held_off:
            return
        if self._answering:
            # It talks on while it is answered: it must wait, for what it says is to be kept.
            self._h11.receive_data(data)
            self._transport.pause_reading()
        elif not self._room.wake(self) or self._begins(data):
            self._receive(data)
            self._advance()

    def eof_received(self) -> bool:
        self._peer_done = True
        if self._ending:
            return False
        if self._held_off:
            return True
        self._h11.receive_data(b"")
        if not self._answering:
            self._advance()
        return True  # it may have closed its own half only, and wait for an answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self._task is not None:
            self._task.cancel()  # nobody is there to be answered

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._answering and self._task is None and not self._ending:
            self._next()

    # ---------------------------------------------------------------------------- receiving

    def _begins(self, data: bytes | bytearray) -> bool:
        """Whether the request that begins with ``data`` is read now, by the rate of its owner."""
        if self._room.hears(self._whose):
            self._await(self._limits.receive, self._too_slow)
            return True
        # A refusal costs as much as an answer, so it waits, and nothing more is read until then.
        self._held_off, self._h11 = True, self._parser()
        self._transport.pause_reading()
        late = bytes(data) if _path(bytes(data[:256])) in self._door.open_paths else b""
        self._head = bytearray()
        self._await(self._limits.hold, partial(self._read_late, late) if late else self._too_often)
        return False

    def _read_late(self, data: bytes) -> None:
        """Read a request of an open path that exceeded the rate."""
        self._held_off = False
        self._await(self._limits.receive, self._too_slow)
        self._transport.resume_reading()
        self._receive(data)
        if self._peer_done:
            self._h11.receive_data(b"")
        self._advance()

    def _receive(self, data: bytes) -> None:
        if self._request is None:
            self._head += data
        self._h11.receive_data(data)

    def _advance(self) -> None:
        """Go on with what has arrived, until more is needed or a request is whole."""
        try:
            while not self._answering and not self._ending:
                event = self._h11.next_event()
                if event is h11.NEED_DATA:
                    if self._h11.they_are_waiting_for_100_continue:
                        self._send(h11.InformationalResponse(status_code=100, headers=[]))
                    return
                self._take(event)
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"This is not HTTP as it should be: {error}.")

    def _take(self, event: Any) -> None:
        match event:
            case h11.Request():
                self._begin(event)
            case h11.Data():
                self._gather(event.data)
            case h11.EndOfMessage():
                self._finish()
            case _:  # h11.ConnectionClosed: it has said all it wanted
                self._end()

    def _begin(self, request: h11.Request) -> None:
        self._request = request
        fault, self._head = framing_fault(request_head(self._head)), bytearray()
        self._headers = _joined_headers(request)
        size = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        length = int(self._headers.get("content-length", 0))
        path = request.target.partition(b"?")[0].decode("latin-1")
        if fault:
            self._refuse(400, f"This is not HTTP as it should be: {fault}.")
        elif request.http_version not in (b"1.0", b"1.1"):
            self._refuse(505, "Only HTTP/1.1 is spoken here.")
        elif refusal := self._door.refusal(path, self._headers):
            self._refuse(*refusal)
        elif size > self._limits.head:  # h11 looks at what arrives in pieces only
            self._refuse(431, f"A request's head has at most {self._limits.head} bytes.")
        elif length > self._limits.body:
            self._too_large()

    def _gather(self, data: bytes) -> None:
        size = len(data)
        self._pieces += 1
        if len(self._body) + size > self._limits.body:
            self._too_large()
        elif self._pieces > _MANY and len(self._body) < _TINY * self._pieces:
            self._refuse(400, "The body comes in chunks too small to be worth reading.")
        elif not self._room.take(size, self._whose):
            self._refuse(503, "Too much is being received.", {"Retry-After": "1"})
        else:
            self._held += size
            self._body += data

    def _finish(self) -> None:
        try:
            request = self._whole()
        except ValueError as error:
            self._refuse(400, f"The request's target is no URL: {error}.")
            return
        self._await(None)
        self._answering = True
        self._task = asyncio.get_running_loop().create_task(self._answer(request))

    def _whole(self) -> HttpRequest:
        head = cast(h11.Request, self._request)  # a body that ends has a head
        target = urlsplit(head.target.decode("latin-1"))
        body, self._body = bytes(self._body), bytearray()
        return HttpRequest(
            method=head.method.decode("latin-1"),
            path=unquote(target.path),
            query=dict(parse_qsl(target.query, keep_blank_values=True)),
            headers=self._headers,
            body=body,
            peer=self._peer,
        )

    # ---------------------------------------------------------------------------- answering

    async def _answer(self, request: HttpRequest) -> None:
        try:
            async with self._room.turn(self._whose):
                self._room.answer(self)
                response = await self._handler(request)
        except Exception as error:  # noqa: BLE001 - one request's trouble is not the server's
            self._log(f"A request for {request.path!r} could not be answered: {error!r}.")
            response = HttpResponse(500, b"Something went wrong in the agent; its log says what.\n")
        self._task = None
        if self._ending:
            return
        try:
            self._respond(response)
        except h11.LocalProtocolError as error:
            self._log(f"A request for {request.path!r} was answered wrongly: {error}.")
            self.close()
        if not self._ending:
            self._next()

    def _respond(self, response: HttpResponse) -> None:
        headers = [
            ("Date", self._date()),
            ("Server", _SERVER),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Type", response.content_type),
            *response.headers.items(),
        ]
        if response.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            headers.append(("Content-Length", str(len(response.body))))
        head = h11.Response(
            status_code=response.status, headers=headers, reason=_rejection_reason(response.status)
        )
        bodiless = self._request is not None and self._request.method == b"HEAD"
        body = [] if bodiless else [h11.Data(data=response.body)]
        self._send(head, *body, h11.EndOfMessage())
        self._room.give_back(self._held, self._whose)
        self._held = self._pieces = 0
        self._room.wake(self)  # until the answer is taken
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._end()

    def _next(self) -> None:
        """Once the answer is taken: the next request, of which a part may be here already."""
        if not self._writable:
            self._await(self._limits.send, self.close)
            return
        self._h11.start_next_cycle()
        self._request, self._answering = None, False
        self._head = bytearray(self._h11.trailing_data[0])
        if not self._head:
            self._rest()
        elif not self._begins(self._head):
            return
        self._transport.resume_reading()
        self._advance()

    def _refuse(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        """Count a rejection, and answer in the handler's place."""
        self._door.refused(_REJECTION_REASONS.get(status, RejectionReason.MALFORMED))
        self._answer_last(status, sentence, headers)

    def _answer_last(
        self, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer in the handler's place, and end the connection."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.close()
            return
        closing = {**(headers or {}), "Connection": "close"}
        self._respond(plain_response(status, sentence, closing))

    def _too_large(self) -> None:
        self._refuse(413, f"A request has at most {self._limits.body} bytes.")

    def _too_often(self) -> None:
        self._refuse(429, self._room.too_often, {"Retry-After": "1"})

    def _too_slow(self) -> None:
        self._refuse(408, "The request took too long to arrive.")

    # ------------------------------------------------------------------------------- ending

    def _end(self) -> None:
        """No more answers. What the client still sends is thrown away for a while."""
        self._ending = True
        self._room.wake(self)
        self._body.clear()
        if self._peer_done:
            self._transport.close()
            self._await(self._limits.send, self.close)
        else:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._transport.resume_reading()
            patience = self._limits.linger if self._writable else self._limits.send
            self._await(patience, self.close)

    def _leave(self) -> None:
        self._ending = True
        self._await(None)
        self._room.leave(self)
        self._room.give_back(self._held, self._whose)
        self._held = 0

    # -------------------------------------------------------------------------------- small

    def _parser(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head)

    def _rest(self) -> None:
        self._room.rest(self)
        self._await(self._limits.idle, self.close)

    def _send(self, *events: Any) -> None:
        self._transport.write(b"".join(filter(None, map(self._h11.send, events))))

    def _await(self, seconds: float | None, then: Callable[[], None] = lambda: None) -> None:
        """Let ``then`` happen in ``seconds``, unless something else is awaited before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, then)


def _rejection_reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _joined_headers(request: h11.Request) -> dict[str, str]:
    """The headers by name; the values of a repeated one as a list."""
    headers: dict[str, str] = {}
    for raw, value in request.headers:
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers


def _path(data: bytes) -> str:
    """The path of the request line that ``data`` begins with; "" if it is not whole."""
    _, _, rest = data.partition(b" ")
    target, end, _ = rest.partition(b" ")
    return target.partition(b"?")[0].decode("latin-1") if end else ""
