"""The client of the capper's socket, and the command that starts a capper."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from wattspan.capper import protocol
from wattspan.capper.protocol import RefusedReply, StateReply
from wattspan.model import SECOND, CapKey, CapRow
from wattspan.ports import CapsError, CapTotals, Clock
from wattspan.util.throttle import RetryBackoff

SOCKET_UNIT: Final = "wattspan-capper.socket"
_UNITS = (
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
)
TIMEOUT: Final = 1.0
_FIRST_DELAY, _MAX_DELAY = SECOND // 2, 30 * SECOND
_MAX_REPLY_BYTES = 4 * 1024 * 1024
_Reply = StateReply | RefusedReply


def has_capper_unit(root: Path = Path("/")) -> bool:
    """True if systemd runs the host with this root directory, and has the capper's socket unit.

    A capper that is started by hand would take the lock that the unit's capper needs.
    """
    booted = (root / "run/systemd/system").is_dir()
    return booted and any((root / place / SOCKET_UNIT).exists() for place in _UNITS)


def capper_start_command(root: Path = Path("/")) -> str:
    """The command by which root starts a capper."""
    return f"systemctl enable --now {SOCKET_UNIT}" if has_capper_unit(root) else "wattspan capper"


class CapperClient:
    """ports.Caps over the capper's socket. Belongs to one thread.

    It connects to a missing capper at growing intervals; between them every call fails at once.
    Leases end with the connection, so their holder asks anew after it.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        who: str,
        timeout: float = TIMEOUT,
        root: Path = Path("/"),
    ) -> None:
        """``who`` names the client; ``timeout`` is the seconds that one call may take.

        ``root`` is the host's root directory, for the start command in errors.
        """
        self.path = path
        self.state: StateReply | None = None
        """The newest reply, with the lease, the ceiling and the counts beside the rows."""
        self._clock, self._who, self._timeout, self._root = clock, who, timeout, root
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._decoder: msgspec.json.Decoder[_Reply] = msgspec.json.Decoder(_Reply)
        self._backoff = RetryBackoff(_FIRST_DELAY, _MAX_DELAY, random.random)
        self._failure = CapsError("")

    @property
    def totals(self) -> CapTotals:
        state = self.state
        if state is None:
            return CapTotals()
        return CapTotals(state.writes, state.restores, state.ceiling, state.suspended)

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        return self._rows(protocol.RenewRequest() if renew else protocol.StatusRequest())

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        requested = [protocol.RequestedCap(*key, value) for key, value in caps.items()]
        return self._rows(protocol.HoldRequest(job, requested, why))

    def release(self, job: str = "") -> None:
        self._call(protocol.ReleaseRequest(job))

    def accept(self) -> tuple[CapRow, ...]:
        """Take foreign limits as the originals. For root."""
        return self._rows(protocol.AcceptRequest())

    def restore(self) -> tuple[int, tuple[CapRow, ...]]:
        """Restore everything: the number of restored limits, and all rows. For root."""
        before = self._call(protocol.StatusRequest()).restores
        after = self._call(protocol.RestoreRequest())
        return after.restores - before, tuple(map(protocol.cap_row, after.rows))

    def close(self) -> None:
        """End the connection, and with it every lease."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._received.clear()

    # --------------------------------------------------------------------------- inner workings

    def _rows(self, request: protocol.CapperRequest) -> tuple[CapRow, ...]:
        return tuple(map(protocol.cap_row, self._call(request).rows))

    def _call(self, request: protocol.CapperRequest) -> StateReply:
        deadline = self._clock.monotonic() + round(self._timeout * SECOND)
        connection = self._socket or self._connect(deadline)
        return self._exchange(connection, request, deadline)

    def _connect(self, deadline: int) -> socket.socket:
        if not self._backoff.is_due(self._clock.monotonic()):
            raise self._last_failure()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._timeout)
            connection.connect(str(self.path))
        except OSError as error:
            connection.close()
            raise self._unreachable(error) from None
        self._socket = connection
        self._exchange(connection, protocol.HelloRequest(self._who), deadline)
        self._backoff.reset()
        return connection

    def _exchange(
        self, connection: socket.socket, request: protocol.CapperRequest, deadline: int
    ) -> StateReply:
        try:
            connection.settimeout(self._time_left(deadline))
            # A capper that refuses every request of a user replies and closes before it reads.
            with suppress(BrokenPipeError):
                connection.sendall(msgspec.json.encode(request) + b"\n")
            reply = self._decoder.decode(self._line(connection, deadline))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise self._unreachable(error) from None
        if isinstance(reply, RefusedReply):
            refusal = CapsError(reply.sentence, reply.reason, reply.device)
            if isinstance(request, protocol.HelloRequest):  # the next reply would be the same
                self._disconnect(refusal)
            raise refusal
        self.state = reply
        return reply

    def _line(self, connection: socket.socket, deadline: int) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            connection.settimeout(self._time_left(deadline))
            received = connection.recv(256 * 1024)
            if not received:
                raise ConnectionResetError
            self._received += received
            if len(self._received) > _MAX_REPLY_BYTES:
                raise ValueError(f"more than {_MAX_REPLY_BYTES} bytes")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _time_left(self, deadline: int) -> float:
        """Seconds until the deadline; TimeoutError if it is over."""
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError
        return left / SECOND

    def _unreachable(self, error: Exception) -> CapsError:
        return self._disconnect(
            CapsError(
                f"No capper answers on {self.path}: {_cause(error)}. Start one with"
                f" `{capper_start_command(self._root)}`, as root; the connection is retried."
            )
        )

    def _disconnect(self, failure: CapsError) -> CapsError:
        """End the connection, and let every call fail in the same way for a while."""
        self.close()
        self._backoff.failed(self._clock.monotonic())
        self._failure = failure
        return self._last_failure()

    def _last_failure(self) -> CapsError:
        return CapsError(str(self._failure), self._failure.refusal, self._failure.device)


def _cause(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "it takes too long"
        case FileNotFoundError():
            return "there is none"
        case ConnectionRefusedError():
            return "no process listens"
        case ConnectionError():
            return "the connection was closed"
        case OSError():
            return (error.strerror or str(error)).lower()
    return f"invalid response ({error})"
