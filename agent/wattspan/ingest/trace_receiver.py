"""Trace requests on their way from bytes to the sink, for every transport.

An error rejects a whole request, and the transports put it into their own responses; an invalid
span costs that span only. All listeners share one thread, and a request of some mebibytes takes
seconds to decode. So small requests are decoded at once, and large ones in another thread, one at
a time.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from wattspan.http.limits import FairTurns
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import (
    NOTHING_REQUESTED,
    ExportRequest,
    RequestedAttributes,
    SpanSink,
)
from wattspan.ingest.request_limits import ReceiverBusyError, too_many_bytes
from wattspan.ports import Clock
from wattspan.sharing.fair_pool import share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.util.encoding import BodyTooLongError, decompress

if TYPE_CHECKING:
    from wattspan.ingest.trace_decoder import DecodedRequest, TraceDecoder

LARGE_REQUEST = 256 * 1024
"""Bytes that occupy the listeners' thread for a few hundredths of a second."""

LARGE_JSON_REQUEST = 32 * 1024
"""The same of OTLP/JSON, which becomes protobuf first: 11,000 spans of `{}` take 0.05 s."""

_BYTES_PER_SPAN, _MIN_SPANS = 256, 8192
_BYTES_PER_FIELD, _MIN_FIELDS = 16, 1 << 17


class RejectedSpans(NamedTuple):
    """The number of rejected spans of an accepted request, and the reason."""

    spans: int = 0
    reason: str = ""


EXPECTED_WITHIN = 10_000
"""Received spans after which an attribute that the configuration names should have occurred."""


class _Success(NamedTuple):
    decoded: DecodedRequest
    size: int


_Outcome = _Success | Exception


class TraceReceiver:
    """Decodes requests and passes them to ``sink``. For the receivers' thread.

    ``asked`` are the attributes that are read; ``log`` gets those of the settings that no span has.
    With ``keep``, requests are passed on with their message, to be forwarded.
    """

    def __init__(
        self,
        sink: SpanSink,
        clock: Clock,
        asked: RequestedAttributes = NOTHING_REQUESTED,
        *,
        max_request: int,
        keep: bool = False,
        pools: Pools | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.sink, self._clock, self._log = sink, clock, log
        self._weight = {asked.weight} - {""}
        self._unseen = {name for names in asked.names.values() for name in names} | self._weight
        self._delivered = 0
        self.max_request = int(max_request)

        def make() -> TraceDecoder:
            from wattspan.ingest.trace_decoder import TraceDecoder

            return TraceDecoder(
                asked,
                max_spans=max(_MIN_SPANS, max_request // _BYTES_PER_SPAN),
                max_fields=max(_MIN_FIELDS, max_request // _BYTES_PER_FIELD),
                unseen=self._unseen,
                keep_message=keep,
            )

        # Made on the first request: an agent without spans does without protobuf, 4 MB.
        self.decoder = cache(make)
        self._thread_decoder = cache(make)  # another one, for large requests in another thread
        self._lock = FairTurns(1)  # one large request is decoded at a time
        self._quota = (pools or Pools()).make(PoolName.LARGE_REQUESTS)
        self.forwards = False

    def for_forwarders(self) -> TraceReceiver:
        """This receiver for a socket of those that forward the spans of others."""
        other = copy.copy(self)
        other.forwards = True
        return other

    async def receive(
        self, body: bytes, peer: Peer, *, json: bool = False, coding: str = ""
    ) -> RejectedSpans:
        """Decompress, decode and deliver a request; InvalidBodyError or ReceiverBusyError.

        ``coding`` is one of CODINGS, or "".

        A traceback refers to the local variables of every function that an error has passed
        through. To free a rejected body at once, errors are returned without their tracebacks
        and raised where no body is left.
        """
        limit = self.max_request
        decode = partial(_decode, body, json=json, coding=coding)
        at_once = LARGE_JSON_REQUEST if json else LARGE_REQUEST
        large = len(body) > at_once
        del body
        outcome = None
        if not large:
            outcome = decode(min(at_once, limit), self.decoder)
        if outcome is None or (isinstance(outcome, BodyTooLongError) and limit > at_once):
            outcome = await self._decode_large(
                partial(decode, limit, self._thread_decoder), peer.quota_owner
            )
        del decode
        if isinstance(outcome, _Success):
            return self.deliver(*outcome, peer)
        try:
            raise outcome
        finally:
            del outcome  # its traceback refers to this function

    async def _decode_large(self, decode: Callable[[], _Outcome], owner: Hashable) -> _Outcome:
        if not self._quota.acquire(share_path(owner)):
            return ReceiverBusyError()
        # A task of its own: decoding continues where the sender has disconnected.
        task = asyncio.ensure_future(self._in_thread(decode, owner))
        task.add_done_callback(partial(self._finished, owner))
        return await asyncio.shield(task)

    async def _in_thread(self, decode: Callable[[], _Outcome], owner: Hashable) -> _Outcome:
        async with self._lock.of(owner):
            return await asyncio.get_running_loop().run_in_executor(None, decode)

    def _finished(self, owner: Hashable, task: asyncio.Future[_Outcome]) -> None:
        self._quota.release(share_path(owner))
        if not task.cancelled():
            task.exception()  # marks it as retrieved; the sender got it if it is still connected

    def deliver(self, decoded: DecodedRequest, size: int, peer: Peer) -> RejectedSpans:
        """Pass a decoded request of ``size`` bytes to the sink; the sink's ReceiverBusyError."""
        if decoded.parts:
            self.sink.accept(
                ExportRequest(
                    peer=peer._replace(forwards=self.forwards),
                    received=self._clock.monotonic(),
                    size=size,
                    parts=tuple(decoded.parts),
                    message=decoded.message,
                    skipped=frozenset(decoded.skipped),
                )
            )
            self._report_unseen(sum(len(part.spans) for part in decoded.parts))
        refused = decoded.refused
        for reason, spans in refused.counts.items():
            self.sink.refuse(reason, spans)
        if not refused.total:
            return RejectedSpans()
        were = "span was" if refused.total == 1 else "spans were"
        return RejectedSpans(refused.total, f"{refused.total} {were} refused: {refused.cause}")

    def _report_unseen(self, spans: int) -> None:
        """Log once the names of the configuration that none of the first spans has."""
        before, self._delivered = self._delivered, self._delivered + spans
        if self._unseen and before < EXPECTED_WITHIN <= self._delivered:
            weight = self._unseen & self._weight
            rest = self._unseen - weight
            for key, names in (("[spans] weight", weight), ("[spans.attributes]", rest)):
                if names:
                    self._log(
                        f"{key}: none of {self._delivered} received spans has "
                        f"{', '.join(sorted(names))}. Compare the names with the attributes of "
                        "your spans; other names are unaffected."
                    )


def _decode(
    body: bytes, limit: int, decoder: Callable[[], TraceDecoder], *, json: bool, coding: str
) -> _Outcome:
    try:
        if coding:
            body = decompress(body, limit, coding)
        if len(body) <= limit:
            return _Success(decoder().decode(body, json=json), len(body))
        return too_many_bytes(limit)
    except Exception as error:  # noqa: BLE001 - `take` raises it again
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error
