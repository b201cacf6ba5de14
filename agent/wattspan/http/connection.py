"""One HTTP/1.1 connection: h11 says what the bytes mean, this says what may come of them.

A client gets one answer at a time, in order. What it may not do is answered by the proper
status and ends the connection, after a while in which what it still sends is thrown away: a
socket closed in the face of a sender would take the answer with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from wattspan.http.access_policy import CHALLENGES, OPEN_ACCESS, AccessPolicy
from wattspan.http.connection_limiter import RejectionReason
from wattspan.http.limits import ServerCapacity
from wattspan.http.messages import Handler, HttpRequest, HttpResponse, framing_fault, request_head

Log = Callable[[str], None]

_MANY, _TINY = 1000, 16
"""A body of more than many pieces that are tiny on average takes more time than it is worth."""


_REJECTION_REASONS = {
    401: RejectionReason.TOKEN,
    403: RejectionReason.NAME,
    408: RejectionReason.SLOW,
    413: RejectionReason.TOO_LARGE,
    429: RejectionReason.RATE,
    431: RejectionReason.TOO_LARGE,
    503: RejectionReason.CROWDED,
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
        if self._room.enter(self, self._whose):
            self._rest()
        elif self._room.overrun:
            self._door.refused(RejectionReason.CROWDED)
            self.close()
        else:
            self._refuse(503, "Too many connections are open.", {"Retry-After": "1"})

    def data_received(self, data: bytes) -> None:
        if self._ending or self._held_off:
            return
        if self._answering:
            # It talks on while it is answered: it must wait, for what it says is to be kept.
            self._h11.receive_data(data)
            self._transport.pause_reading()
        elif not self._room.wake(self) or self._begins():
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

    def _begins(self) -> bool:
        """The first bytes of a request are here: whether it is heard at all."""
        if self._room.hears(self._whose):
            self._await(self._limits.receive, self._too_slow)
            return True
        # Nothing of it is kept, and what it costs to refuse it is not spent before its time.
        self._held_off, self._h11 = True, self._parser()
        self._transport.pause_reading()
        self._await(self._limits.hold, self._too_often)
        return False

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
        length = None
        size = len(request.target)
        authorization, origin = "", False
        for name, value in request.headers:
            size += len(name) + len(value)
            if name == b"content-length":
                length = int(value)
            elif name == b"authorization":
                authorization = value.decode("latin-1")
            elif name == b"origin":
                origin = True
        if fault:
            self._refuse(400, f"This is not HTTP as it should be: {fault}.")
        elif request.http_version not in (b"1.0", b"1.1"):
            self._refuse(505, "Only HTTP/1.1 is spoken here.")
        elif origin and not self._door.browsers:
            # A page from anywhere may let its own name lead to this machine.
            self._refuse(403, "Requests of web pages are not taken here.")
        elif not self._door.admits(authorization):
            challenge = {"WWW-Authenticate": CHALLENGES}
            self._refuse(401, "A token of the agent's token_file is needed.", challenge)
        elif size > self._limits.head:  # h11 looks at what arrives in pieces only
            self._refuse(431, f"A request's head has at most {self._limits.head} bytes.")
        elif length is not None and length > self._limits.body:
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
        headers: dict[str, str] = {}
        for raw, value in head.headers:
            name, text = raw.decode("latin-1"), value.decode("latin-1")
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        body, self._body = bytes(self._body), bytearray()
        return HttpRequest(
            method=head.method.decode("latin-1"),
            path=unquote(target.path),
            query=dict(parse_qsl(target.query, keep_blank_values=True)),
            headers=headers,
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
            ("Content-Type", response.content_type),
            *response.headers.items(),
        ]
        if response.status != HTTPStatus.NO_CONTENT:
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
        elif not self._begins():
            return
        self._transport.resume_reading()
        self._advance()

    def _refuse(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        """Answer in the handler's place, for the last time."""
        self._door.refused(_REJECTION_REASONS.get(status, RejectionReason.MALFORMED))
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.close()
            return
        headers = {**(headers or {}), "Connection": "close"}
        self._respond(HttpResponse(status, f"{sentence}\n".encode(), headers=headers))

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
