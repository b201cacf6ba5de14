"""OTLP/gRPC, on grpclib's HTTP/2: an extra, imported only where the address asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wattspan.model import SECOND
from wattspan.model.settings import Listen
from wattspan.otlp.destination import Destination
from wattspan.otlp.grpc_response import (
    ACCEPTED_ENCODINGS,
    GrpcReply,
    frame_message,
    result_of_reply,
)
from wattspan.otlp.transport import (
    CONNECT_TIMEOUT,
    IDLE_TIMEOUT,
    RESPONSE_TIMEOUT,
    ExportResult,
    ExportStatus,
    describe_os_error,
    retry_result,
)
from wattspan.ports import Clock, ConfigError
from wattspan.util.encoding import gzip_compress

if TYPE_CHECKING:
    from wattspan.otlp.grpc_connection import GrpcCall, LenientChannel, ResponseTooLargeError

_NO_GZIP = "does not know gzip, and gets them uncompressed"


def load_grpclib(
    destination: Destination,
) -> tuple[type[LenientChannel], type[GrpcCall], type[ResponseTooLargeError]]:
    """What the extra brings; ConfigError, which names ``destination``, where it is missing."""
    try:
        import grpclib.client  # noqa: F401 - to know of its absence by its name

        from wattspan.otlp.grpc_connection import GrpcCall, LenientChannel, ResponseTooLargeError
    except ImportError as error:
        raise ConfigError(
            f"[{destination.signal.table}] {destination.signal.address} = "
            f'"{destination}" needs gRPC, which is not installed ({error}); '
            "run `pip install wattspan[grpc]`, or name an http:// address."
        ) from error
    return LenientChannel, GrpcCall, ResponseTooLargeError


class GrpcTransport:
    """One channel to one collector, on an event loop that turns only while something is sent."""

    def __init__(
        self,
        destination: Destination,
        headers: Mapping[str, str],
        clock: Clock,
        *,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        answer_within: float = RESPONSE_TIMEOUT,
        compress: bool | None = None,
    ) -> None:
        """``compress`` is by default whether the collector is on another machine."""
        self._new_channel, self._call, self._too_much = load_grpclib(destination)
        self._to = destination
        self._headers = _request_headers(destination, headers)
        self._compress = not destination.here if compress is None else compress
        self._takes_gzip: bool | None = None  # None until it has been tried
        self._to_tell = False
        self._clock = clock
        self._used = 0
        self._trust = trust
        self._answer_within = answer_within
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._task: asyncio.Task[ExportResult] | None = None
        self._aborted = False

    def send(self, body: bytes) -> ExportResult:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._send(body))
        if self._aborted:
            self._task.cancel()
        try:
            return self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            self._hang_up()
            return retry_result("the agent is stopping", perhaps_taken=True)
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
            self._loop.run_until_complete(
                _run_pending_events()
            )  # so that sockets are really closed
            self._loop.close()
        self._loop = None

    # ------------------------------------------------------------------------------- one request

    async def _send(self, body: bytes) -> ExportResult:
        if not self._compress or self._takes_gzip is False:
            answer, _ = await self._request(body, zipped=False)
            return self._telling(answer)
        answer, reply = await self._request(gzip_compress(body), zipped=True)
        if self._takes_gzip is None and reply is not None and reply.blames_encoding:
            return self._telling(await self._without_gzip(body, reply))
        if answer.verdict is ExportStatus.TAKEN:
            self._takes_gzip = True
        return answer

    async def _without_gzip(self, body: bytes, refused: GrpcReply) -> ExportResult:
        """Send as it is what was refused, and so not taken, when it came compressed."""
        answer, reply = await self._request(body, zipped=False)
        if (
            answer.verdict is not ExportStatus.AGAIN
            and reply
            and reply.status[0] != refused.status[0]
        ):
            self._takes_gzip, self._to_tell = False, True
        return answer

    def _telling(self, answer: ExportResult) -> ExportResult:
        """The answer, with a word about gzip the first time that it is taken without."""
        if not self._to_tell or answer.verdict is not ExportStatus.TAKEN:
            return answer
        self._to_tell = False
        return replace(
            answer, why=f"{answer.why}, and it {_NO_GZIP}" if answer.why else f"it {_NO_GZIP}"
        )

    async def _request(
        self, message: bytes, *, zipped: bool
    ) -> tuple[ExportResult, GrpcReply | None]:
        """What became of one request, and the reply that says so; None where there is none."""
        from grpclib.exceptions import ProtocolError, StreamTerminatedError

        if (unconnected := await self._connect()) is not None:
            return unconnected, None
        encoding = {"grpc-encoding": "gzip"} if zipped else {}
        call = self._call(self._headers | encoding)
        remedy = ""
        try:
            async with asyncio.timeout(self._answer_within):
                await call.make(
                    await self._channel.__connect__(), frame_message(message, zipped=zipped)
                )
        except TimeoutError:
            why = f"it did not answer within {self._answer_within:g} s"
        except self._too_much as error:
            why = str(error)
        except (StreamTerminatedError, ProtocolError, OSError, ValueError) as error:
            why = f"the connection was lost: {describe_os_error(error)}"
        except Exception as error:  # noqa: BLE001 - h2 and hpack have errors of their own
            why, remedy = (
                f"it does not speak gRPC: {describe_os_error(error)}",
                self._to.signal.away,
            )
        else:
            self._used = self._clock.monotonic()
            return result_of_reply(call.reply, self._to.signal), call.reply
        if call.reply.failed:  # it did not care to read everything
            return result_of_reply(call.reply, self._to.signal), call.reply
        self._hang_up()
        return retry_result(why, remedy, perhaps_taken=call.sent, unfinished=not call.sent), None

    async def _connect(self) -> ExportResult | None:
        """Have a connection; an answer if there can be none."""
        if self._clock.monotonic() - self._used > IDLE_TIMEOUT * SECOND:
            self._let_go()
        try:
            if self._channel is None:
                self._channel = self._opened()
            await _run_pending_events()
            async with asyncio.timeout(CONNECT_TIMEOUT):
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
            return self._unconnected(
                f"no connection within {CONNECT_TIMEOUT} s", self._to.signal.away
            )
        except (OSError, ValueError) as error:
            return self._unconnected(describe_os_error(error), self._to.signal.away)
        return None

    def _unconnected(self, why: str, remedy: str) -> ExportResult:
        self._hang_up()
        return retry_result(why, remedy)

    def _opened(self) -> Any:
        if self._to.socket:
            return self._new_channel(path=self._to.socket)
        context: ssl.SSLContext | None = None
        if self._to.tls:
            context = self._trust()
            context.set_alpn_protocols(["h2"])
        return self._new_channel(self._to.host, self._to.port, ssl=context)

    def _hang_up(self) -> None:
        """Let go of a connection that is of no use; what answers next may be another collector."""
        self._takes_gzip = None
        self._let_go()

    def _let_go(self) -> None:
        if self._takes_gzip:  # that it takes none is not found out for each connection
            self._takes_gzip = None
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


async def _run_pending_events() -> None:
    """Let the loop see what happened to its connections while it did not turn.

    A close is noticed in the first turn, told to the transport in the second and to grpclib in the
    third.
    """
    for _ in range(4):
        await asyncio.sleep(0)


def _request_headers(to: Destination, headers: Mapping[str, str]) -> dict[str, str]:
    """What a call begins with, those of HTTP/2 first."""
    from grpclib.metadata import USER_AGENT

    return {
        ":method": "POST",
        ":scheme": "https" if to.tls else "http",
        ":path": to.signal.method,
        ":authority": "localhost" if to.socket else Listen.written(to.host, to.port),
        "user-agent": USER_AGENT,
        **headers,
        "te": "trailers",  # codespell:ignore te
        "content-type": "application/grpc",
        "grpc-accept-encoding": ACCEPTED_ENCODINGS,
    }
