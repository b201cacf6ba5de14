"""Requests on their way from bytes to the sink: small ones at once, large ones elsewhere.

All listeners share one thread. A request of some mebibytes takes it seconds to read, in which
nobody else would be answered, so such a request is read in another, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from functools import partial

from wattspan.http.connection_limiter import FairQuota
from wattspan.http.messages import Peer
from wattspan.spanfeed.delivery import BusyError
from wattspan.spanfeed.errors import TooLargeError
from wattspan.spanfeed.otlp import Decoder, Intake, Read, Refused
from wattspan.util.encoding import BodyTooLongError, gzip_decompress

LARGE = 256 * 1024
"""Bytes that take the listeners' thread a few hundredths of a second."""

MOST_JSON = 8 << 20
"""Bytes of JSON in a request: it takes ten times as long as the same spans in protobuf."""

MOST_WAITING = 8
"""Large requests that are held at a time, half of them of one owner at most.

The senders of more are asked to come again.
"""

_Outcome = Read | Exception
_Work = Callable[[], _Outcome]


class Reader:
    """Reads for one intake. Used in the receivers' thread only.

    A traceback holds the local variables of every function that an error has passed through. So
    errors are returned without their tracebacks, and raised where no body is left.
    """

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self._apart = intake.decoder()
        self._places = FairQuota(MOST_WAITING)

    async def take(
        self, body: bytes, peer: Peer, *, json: bool = False, zipped: bool = False
    ) -> Refused:
        """As ``Intake.take``; BadEncodingError and TooLongError of what is compressed as well."""
        most = min(self.intake.max_request, MOST_JSON) if json else self.intake.max_request
        work = partial(self._attempt, body, json=json, zipped=zipped)
        large = len(body) > LARGE
        del body
        outcome = None if large else work(min(LARGE, most))
        if outcome is None or (isinstance(outcome, BodyTooLongError) and most > LARGE):
            outcome = await self._read(partial(work, most, self._apart), peer.whose)
        del work
        if isinstance(outcome, Read):
            return self.intake.deliver(outcome, peer)
        try:
            raise outcome
        finally:
            del outcome  # its traceback refers to this function

    async def _read(self, work: _Work, owner: Hashable) -> _Outcome:
        if not self._places.take(owner):
            return BusyError()
        # A task of its own: what is being read goes on being read when its sender has gone.
        job = asyncio.ensure_future(self._in_turn(work, owner))
        job.add_done_callback(partial(self._over, owner))
        return await asyncio.shield(job)

    async def _in_turn(self, work: _Work, owner: Hashable) -> _Outcome:
        async with self.intake.turn.of(owner):
            return await asyncio.get_running_loop().run_in_executor(None, work)

    def _over(self, owner: Hashable, job: asyncio.Future[_Outcome]) -> None:
        self._places.give_back(owner)
        if not job.cancelled():
            job.exception()  # its sender hears of it, if it is still there

    def _attempt(
        self, body: bytes, most: int, decoder: Decoder | None = None, *, json: bool, zipped: bool
    ) -> _Outcome:
        """Decode a body; with a ``decoder`` of its own, in any thread."""
        try:
            if zipped:
                body = gzip_decompress(body, most)
            if len(body) <= most:
                return self.intake.read(body, json=json, decoder=decoder)
            kind = "JSON" if json else "protobuf"
            return TooLargeError(f"a request in {kind} has at most {most} bytes")
        except Exception as error:  # noqa: BLE001 - `take` raises it again
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return error
