"""Requests on their way from bytes to the sink: small ones at once, large ones elsewhere.

All listeners share one thread. A request of some mebibytes takes it seconds to read, in which
nobody else would be answered, so such a request is read in another, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from functools import partial

from wattspan.access.crowd import Shares
from wattspan.encoding import TooLongError, gunzip
from wattspan.spanfeed.delivery import BusyError
from wattspan.spanfeed.errors import TooLargeError
from wattspan.spanfeed.otlp import Intake, Read, Refused
from wattspan.web.limits import FairLock
from wattspan.web.message import Peer

LARGE = 256 * 1024
"""Bytes that take the listeners' thread a few hundredths of a second."""

MOST_JSON = 8 << 20
"""Bytes of JSON in a request: it takes ten times as long as the same spans in protobuf."""

MOST_WAITING = 8
"""Large requests that are held at a time, half of them of one owner at most.

The senders of more are asked to come again.
"""


class Reader:
    """Reads for one intake. Used in the receivers' thread only."""

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self._lock = FairLock()
        self._apart = intake.decoder()
        self._places = Shares(MOST_WAITING)

    async def take(
        self, body: bytes, peer: Peer, *, json: bool = False, zipped: bool = False
    ) -> Refused:
        """As ``Intake.take``; BadEncodingError and TooLongError of what is compressed as well."""
        most = min(self.intake.max_request, MOST_JSON) if json else self.intake.max_request
        if zipped and len(body) <= LARGE:
            try:
                body, zipped = gunzip(body, min(LARGE, most)), False
            except TooLongError:
                if most <= LARGE:
                    raise
        if len(body) <= LARGE and not zipped:
            read = self.intake.read(body, json=json)
        else:
            work = partial(self._decode, body, most, json=json, zipped=zipped)
            read = await self._read(work, peer.whose)
        return self.intake.deliver(read, peer)

    async def _read(self, work: partial[Read], owner: Hashable) -> Read:
        if not self._places.take(owner):
            raise BusyError
        # A task of its own: what is being read goes on being read when its sender has gone.
        job = asyncio.ensure_future(self._in_turn(work, owner))
        job.add_done_callback(partial(self._over, owner))
        return await asyncio.shield(job)

    async def _in_turn(self, work: partial[Read], owner: Hashable) -> Read:
        async with self._lock.of(owner):
            return await asyncio.get_running_loop().run_in_executor(None, work)

    def _over(self, owner: Hashable, job: asyncio.Future[Read]) -> None:
        self._places.give_back(owner)
        if not job.cancelled():
            job.exception()  # its sender hears of it, if it is still there

    def _decode(self, body: bytes, most: int, *, json: bool, zipped: bool) -> Read:
        """In the other thread."""
        if zipped:
            body = gunzip(body, most)
        if len(body) > most:
            kind = "JSON" if json else "protobuf"
            raise TooLargeError(f"a request in {kind} has at most {most} bytes")
        return self.intake.read(body, json=json, decoder=self._apart)
