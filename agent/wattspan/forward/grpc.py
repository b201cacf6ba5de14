"""OTLP/gRPC, by grpclib: an extra, imported only where the address asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from wattspan.forward.answers import Answer, again, of_grpc, of_response
from wattspan.forward.destination import Destination
from wattspan.forward.errors import AWAY, reason
from wattspan.forward.status import retry_delay
from wattspan.forward.transport import ANSWER_WITHIN, CONNECT_WITHIN, IDLE
from wattspan.model import SECOND
from wattspan.ports import Clock, ConfigError


class GrpcTransport:
    """One channel to one collector, on an event loop that turns only while something is sent."""

    def __init__(
        self,
        destination: Destination,
        headers: Mapping[str, str],
        clock: Clock,
        *,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        answer_within: float = ANSWER_WITHIN,
    ) -> None:
        try:
            import grpclib.client
        except ImportError as error:
            raise ConfigError(
                f'[spans] forward = "{destination}" needs gRPC, which is not installed '
                f"({error}); run `pip install wattspan[grpc]`, or forward to an http:// address."
            ) from error
        self._grpclib = grpclib.client
        self._to = destination
        self._headers = dict(headers)
        self._clock = clock
        self._used = 0
        self._trust = trust
        self._answer_within = answer_within
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._task: asyncio.Task[Answer] | None = None
        self._aborted = False

    def send(self, body: bytes) -> Answer:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._send(body))
        if self._aborted:
            self._task.cancel()
        try:
            return self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            self._hang_up()
            return again("the agent is stopping", perhaps_taken=True)
        finally:
            self._task = None

    def abort(self) -> None:
        self._aborted = True
        task, loop = self._task, self._loop
        if task is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just finished
                loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        if self._loop is not None:
            self._hang_up()
            self._loop.run_until_complete(_catch_up())  # so that sockets are really closed
            self._loop.close()
        self._loop = None

    # ------------------------------------------------------------------------------- one request

    async def _send(self, body: bytes) -> Answer:
        from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

        if (unconnected := await self._connect()) is not None:
            return unconnected
        sent = False
        try:
            async with (
                asyncio.timeout(self._answer_within),
                self._channel.request(
                    self._to.signal.method, _unary(), bytes, bytes, metadata=self._headers
                ) as stream,
            ):
                await stream.send_message(body, end=True)
                sent = True  # half a message is never taken; from here on it may be
                answer = await stream.recv_message()
        except GRPCError as error:
            return of_grpc(
                error.status.value, error.status.name, error.message or "", error.details
            )
        except TimeoutError:
            why, remedy = f"it did not answer within {self._answer_within:g} s", ""
        except (StreamTerminatedError, ProtocolError, OSError, ValueError) as error:
            why, remedy = f"the connection was lost: {reason(error)}", ""
        except Exception as error:  # noqa: BLE001 - h2 and hpack have errors of their own
            why, remedy = f"it does not speak gRPC: {reason(error)}", AWAY
        else:
            self._used = self._clock.monotonic()
            return of_response(answer or b"", self._to.signal)
        self._hang_up()
        return again(why, remedy, perhaps_taken=sent, unfinished=not sent)

    async def _connect(self) -> Answer | None:
        """Have a connection; an answer if there can be none."""
        if self._clock.monotonic() - self._used > IDLE * SECOND:
            self._hang_up()
        try:
            if self._channel is None:
                self._channel = self._opened()
            await _catch_up()
            async with asyncio.timeout(CONNECT_WITHIN):
                await self._channel.__connect__()
        except ssl.SSLCertVerificationError as error:
            why = f"its certificate is not trusted ({error.verify_message})"
            return self._unconnected(
                why,
                "Install its authority's certificate on this host, or name it by SSL_CERT_FILE.",
            )
        except ssl.SSLError as error:
            why = f"TLS failed ({error.reason or error})"
            return self._unconnected(why, "Does the collector speak TLS there?")
        except TimeoutError:
            return self._unconnected(f"no connection within {CONNECT_WITHIN} s", AWAY)
        except (OSError, ValueError) as error:
            return self._unconnected(reason(error), AWAY)
        return None

    def _unconnected(self, why: str, remedy: str) -> Answer:
        self._hang_up()
        return again(why, remedy)

    def _opened(self) -> Any:
        codecs: dict[str, Any] = {"codec": _codec(), "status_details_codec": _details_codec()}
        if self._to.socket:
            return self._grpclib.Channel(path=self._to.socket, **codecs)
        context: ssl.SSLContext | None = None
        if self._to.tls:
            context = self._trust()
            context.set_alpn_protocols(["h2"])
        return self._grpclib.Channel(self._to.host, self._to.port, ssl=context, **codecs)

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is None:
            return
        # grpclib closes politely, and TLS would wait for the other side's farewell on a loop that
        # no longer turns. There is no public way to the transport.
        protocol = channel._protocol  # noqa: SLF001
        transport = getattr(getattr(protocol, "connection", None), "_transport", None)
        channel.close()
        if transport is not None:
            transport.abort()


async def _catch_up() -> None:
    """Let the loop see what happened to its connections while it did not turn.

    A close is noticed in the first turn, told to the transport in the second and to grpclib in the
    third.
    """
    for _ in range(4):
        await asyncio.sleep(0)


def _unary() -> Any:
    from grpclib.const import Cardinality

    return Cardinality.UNARY_UNARY


def _codec() -> Any:
    """Passes messages through as the bytes that they are."""
    from grpclib.encoding.base import CodecBase

    class Bytes(CodecBase):  # type: ignore[misc]
        __content_subtype__ = "proto"

        def encode(self, message: bytes, message_type: object) -> bytes:
            return message

        def decode(self, data: bytes, message_type: object) -> bytes:
            return data

    return Bytes()


def _details_codec() -> Any:
    """Reads the delay that a failure's details ask for."""
    from grpclib.encoding.base import StatusDetailsCodecBase

    class Delay(StatusDetailsCodecBase):  # type: ignore[misc]
        def encode(self, status: object, message: object, details: object) -> bytes:
            raise NotImplementedError

        def decode(self, status: object, message: object, data: bytes) -> int | None:
            return retry_delay(data)

    return Delay()
