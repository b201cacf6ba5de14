"""One HTTP/1.1 connection: h11 parses, this class enforces the limits and the access policy.

Requests are answered one at a time, in order. A rejection ends the connection, but the socket
stays open for a while and discards what still arrives: closing it at once would reset the
connection, and the client would lose the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from http import HTTPStatus
from http.client import responses
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from wattspan import __version__
from wattspan.http.access_policy import OPEN_ACCESS, AccessPolicy
from wattspan.http.limits import ConnectionState, RejectionReason, ServerCapacity
from wattspan.http.messages import (
    Handler,
    HttpRequest,
    HttpResponse,
    SimpleRequest,
    framing_fault,
    plain_response,
    request_head,
    response_head,
    simple_request,
)
from wattspan.util.unix_sockets import ACKNOWLEDGEMENTS

Log = Callable[[str], None]

_SERVER = f"wattspan/{__version__}"

_MANY, _TINY = 1000, 16
"""A body of more than ``_MANY`` pieces with less than ``_TINY`` bytes on average is rejected."""


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
    """A connection of one client. Used in the server's thread only."""

    def __init__(
        self,
        handler: Handler,
        capacity: ServerCapacity,
        date: Callable[[], str],
        log: Log,
        policy: AccessPolicy = OPEN_ACCESS,
    ) -> None:
        self._policy = policy
        self._handler, self._capacity, self._date, self._log = handler, capacity, date, log
        self._limits = capacity.limits
        self._h11 = self._parser()
        self._transport = cast(asyncio.Transport, None)  # set by connection_made
        self._timer: asyncio.TimerHandle | None = None
        self._request: h11.Request | SimpleRequest | None = None
        self._head = bytearray()  # the bytes of an incomplete head
        self._left: int | None = None  # bytes of a simple request that are missing
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()
        self._pieces = 0
        self._reserved = 0
        self._task: asyncio.Task[None] | None = None
        self._acknowledged = False  # the present request, by a response 100
        self._answering = False  # from the last byte of a request until its response is written
        self._delayed = False  # the request exceeds the rate, and its rejection is delayed
        self._writable = True
        self._ending = False  # no further response follows
        self._peer_closed = False  # the client has closed its sending half
        self._owner: Hashable = None

    @property
    def answering(self) -> bool:
        """True if a request is being answered."""
        return self._answering and not self._ending

    def close(self) -> None:
        """Abort the connection."""
        self._release()
        self._transport.abort()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._peer = self._capacity.peer(transport)
        self._owner = self._peer.quota_owner
        if self._capacity.add(self, self._owner, self._policy.count_rejection):
            self._set_idle()
        elif self._capacity.overloaded:
            self.close()
        else:
            self._answer_last(503, "Too many connections are open.", {"Retry-After": "1"})

    def data_received(self, data: bytes) -> None:
        if self._ending or self._delayed:
            return
        if self._answering:
            # Pipelined bytes are kept; reading stops, so that they stay few.
            self._h11.receive_data(data)
            self._transport.pause_reading()
        elif self._capacity.set_state(
            self, ConnectionState.WAITING
        ) is not ConnectionState.IDLE or self._admit_request(data):
            self._receive(data)
            self._advance()

    def eof_received(self) -> bool:
        self._peer_closed = True
        if self._ending:
            return False
        if self._delayed:
            return True
        self._h11.receive_data(b"")
        if self._left and not self._answering:
            self._refuse(400, "The request is not valid HTTP: its body is incomplete.")
        elif not self._answering:
            self._advance()
        return True  # a half-closed client still waits for its response

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        if self._task is not None:
            self._task.cancel()  # the client is gone

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._answering and self._task is None and not self._ending:
            self._next_request()

    # ---------------------------------------------------------------------------- receiving

    def _admit_request(self, data: bytes | bytearray) -> bool:
        """True if the rate of the owner permits the request that begins with ``data``."""
        if self._capacity.admits(self._owner):
            self._set_timer(self._limits.receive, self._too_slow)
            return True
        # A rejection costs as much as a response, so it is delayed, and nothing is read until then.
        self._delayed, self._h11 = True, self._parser()
        self._transport.pause_reading()
        late = bytes(data) if _path(bytes(data[:256])) in self._policy.open_paths else b""
        self._head = bytearray()
        self._set_timer(
            self._limits.rejection_delay,
            partial(self._read_late, late) if late else self._too_often,
        )
        return False

    def _read_late(self, data: bytes) -> None:
        """Read a request of an open path that exceeded the rate."""
        self._delayed = False
        self._set_timer(self._limits.receive, self._too_slow)
        self._transport.resume_reading()
        self._receive(data)
        if self._peer_closed:
            self._h11.receive_data(b"")
        self._advance()

    def _receive(self, data: bytes) -> None:
        simple = simple_request(data) if self._request is None and not self._head else None
        if simple is not None:
            self._left = simple.length
            self._handle_head(simple)
            data = data[simple.size :]
        if self._left is not None:
            self._receive_body(data, self._left)
            return
        if self._request is None:
            self._head += data
        self._h11.receive_data(data)

    def _receive_body(self, data: bytes, left: int) -> None:
        """Take the next part of the body of a simple request."""
        part, rest = data[:left], data[left:]
        if part and not self._ending:
            self._handle_data(part)
        if self._ending:
            return
        self._left = left - len(part)
        if rest:  # the next request
            self._h11.receive_data(rest)
        if not self._left:
            self._handle_end()

    def _advance(self) -> None:
        """Process the received events until more data is needed or a request is complete."""
        try:
            while not self._answering and not self._ending:
                event = self._h11.next_event()
                if event is h11.NEED_DATA:
                    if self._h11.they_are_waiting_for_100_continue:
                        self._acknowledged = True
                        self._send(h11.InformationalResponse(status_code=100, headers=[]))
                    return
                self._handle_event(event)
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"The request is not valid HTTP: {error}.")

    def _handle_event(self, event: Any) -> None:
        match event:
            case h11.Request():
                self._handle_head(event)
            case h11.Data():
                self._handle_data(event.data)
            case h11.EndOfMessage():
                self._handle_end()
            case _:  # h11.ConnectionClosed
                self._shut_down()

    def _handle_head(self, request: h11.Request | SimpleRequest) -> None:
        self._request = request
        simple = isinstance(request, SimpleRequest)  # its framing has been checked
        fault = "" if simple else framing_fault(request_head(self._head))
        self._head = bytearray()
        self._headers = _joined_headers(request)
        size = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        length = int(self._headers.get("content-length", 0))
        path = request.target.partition(b"?")[0].decode("latin-1")
        if fault:
            self._refuse(400, f"The request is not valid HTTP: {fault}.")
        elif request.http_version not in (b"1.0", b"1.1"):
            self._refuse(505, "This server supports HTTP/1.1 only.")
        elif refusal := self._policy.refusal(path, self._headers):
            self._refuse(*refusal)
        elif size > self._limits.head:  # h11 checks the size of incomplete heads only
            self._refuse(431, f"A request's head has at most {self._limits.head} bytes.")
        elif length > self._limits.body:
            self._too_large()

    def _handle_data(self, data: bytes) -> None:
        size = len(data)
        self._pieces += 1
        if len(self._body) + size > self._limits.body:
            self._too_large()
        elif self._pieces > _MANY and len(self._body) < _TINY * self._pieces:
            self._refuse(400, "The chunks of the body are too small.")
        elif not self._capacity.reserve(size, self._owner):
            self._refuse(503, "Too much is being received.", {"Retry-After": "1"})
        else:
            self._reserved += size
            self._body += data

    def _handle_end(self) -> None:
        try:
            request = self._complete_request()
        except ValueError as error:
            self._refuse(400, f"The request target is not a URL: {error}.")
            return
        self._set_timer(None)
        self._answering = True
        self._task = asyncio.get_running_loop().create_task(self._answer(request))

    def _complete_request(self) -> HttpRequest:
        head = cast("h11.Request | SimpleRequest", self._request)  # set by _handle_head
        target = urlsplit(head.target.decode("latin-1"))
        body, self._body = bytes(self._body), bytearray()
        return HttpRequest(
            method=head.method.decode("latin-1"),
            path=unquote(target.path),
            query=dict(parse_qsl(target.query, keep_blank_values=True)),
            headers=self._headers,
            body=body,
            peer=self._peer,
            acknowledge=self._acknowledge,
        )

    def _acknowledge(self) -> None:
        """Send a response 100: one, as clients may refuse several, or as many as this one wants."""
        again = ACKNOWLEDGEMENTS.lower() in self._headers
        if self._ending or (self._acknowledged and not again):
            return
        self._acknowledged = True
        if self._left is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._request is not None and self._request.http_version == b"1.1":
            self._send(h11.InformationalResponse(status_code=100, headers=[]))

    # ---------------------------------------------------------------------------- answering

    async def _answer(self, request: HttpRequest) -> None:
        try:
            async with self._capacity.turn(self._owner):
                self._capacity.set_state(self, ConnectionState.BUSY)
                response = await self._handler(request)
        except Exception as error:  # noqa: BLE001 - a failure concerns one request only
            self._log(f"A request for {request.path!r} could not be answered: {error!r}.")
            response = HttpResponse(500, b"The agent failed to answer; its log has the cause.\n")
        self._task = None
        if self._ending:
            return
        try:
            self._respond(response)
        except (h11.LocalProtocolError, ValueError) as error:
            self._log(f"A request for {request.path!r} was answered wrongly: {error}.")
            self.close()
        if not self._ending:
            self._next_request()

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
        reason = responses.get(response.status, "")
        if self._left is not None and "Connection" not in response.headers:
            closes = isinstance(self._request, SimpleRequest) and self._request.closes
            if closes:
                headers.append(("Connection", "close"))
            self._transport.write(response_head(response.status, reason, headers) + response.body)
            self._end_response()
            if closes:
                self._shut_down()
            return
        head = h11.Response(status_code=response.status, headers=headers, reason=reason)
        bodiless = self._request is not None and self._request.method == b"HEAD"
        body = [] if bodiless else [h11.Data(data=response.body)]
        self._send(head, *body, h11.EndOfMessage())
        self._end_response()
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._shut_down()

    def _end_response(self) -> None:
        self._capacity.release(self._reserved, self._owner)
        self._reserved = self._pieces = 0
        self._capacity.set_state(self, ConnectionState.WAITING)  # until the response is written

    def _next_request(self) -> None:
        """Once the response is written: read the next request, which may be buffered already."""
        if not self._writable:
            self._set_timer(self._limits.send, self.close)
            return
        if self._left is None:
            self._h11.start_next_cycle()
        self._request, self._answering, self._left = None, False, None
        self._acknowledged = False
        self._head = bytearray(self._h11.trailing_data[0])
        if not self._head:
            self._set_idle()
        elif not self._admit_request(self._head):
            return
        self._transport.resume_reading()
        if self._head or self._peer_closed:
            self._advance()

    def _refuse(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        """Count a rejection, and respond instead of the handler."""
        self._policy.count_rejection(_REJECTION_REASONS.get(status, RejectionReason.MALFORMED))
        self._answer_last(status, sentence, headers)

    def _answer_last(
        self, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Respond instead of the handler, and end the connection."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.close()
            return
        closing = {**(headers or {}), "Connection": "close"}
        self._respond(plain_response(status, sentence, closing))

    def _too_large(self) -> None:
        self._refuse(413, self._limits.body_message.format(body=self._limits.body))

    def _too_often(self) -> None:
        self._refuse(429, self._capacity.rate_message, {"Retry-After": "1"})

    def _too_slow(self) -> None:
        self._refuse(408, "The request took too long to arrive.")

    # ------------------------------------------------------------------------------- ending

    def _shut_down(self) -> None:
        """Send no more responses, and discard for a while what the client still sends."""
        self._ending = True
        self._capacity.set_state(self, ConnectionState.WAITING)
        self._body.clear()
        if self._peer_closed:
            self._transport.close()
            self._set_timer(self._limits.send, self.close)
        else:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._transport.resume_reading()
            patience = self._limits.linger if self._writable else self._limits.send
            self._set_timer(patience, self.close)

    def _release(self) -> None:
        self._ending = True
        self._set_timer(None)
        self._capacity.remove(self)
        self._capacity.release(self._reserved, self._owner)
        self._reserved = 0

    # ------------------------------------------------------------------------------ helpers

    def _parser(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head)

    def _set_idle(self) -> None:
        self._capacity.set_state(self, ConnectionState.IDLE)
        self._set_timer(self._limits.idle, self.close)

    def _send(self, *events: Any) -> None:
        self._transport.write(b"".join(filter(None, map(self._h11.send, events))))

    def _set_timer(self, seconds: float | None, then: Callable[[], None] = lambda: None) -> None:
        """Call ``then`` in ``seconds``; this replaces an earlier timer. None cancels it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, then)


def _joined_headers(request: h11.Request | SimpleRequest) -> dict[str, str]:
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
