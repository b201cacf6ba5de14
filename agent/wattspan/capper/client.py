"""How an operator starts the capper of a host: by its unit, where systemd has one.

The way to the capper: one connection, short patience, no storm of attempts.
"""

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

SOCKET_UNIT: Final = "wattspan-capper.socket"
_UNITS = (
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
)


def has_capper_unit(root: Path = Path("/")) -> bool:
    """Whether systemd runs the host whose root is there, and knows the capper's socket.

    One that is started by hand would take the lock that the unit's capper needs.
    """
    booted = (root / "run/systemd/system").is_dir()
    return booted and any((root / place / SOCKET_UNIT).exists() for place in _UNITS)


def capper_start_command(root: Path = Path("/")) -> str:
    """What root runs to have a capper."""
    return f"systemctl enable --now {SOCKET_UNIT}" if has_capper_unit(root) else "wattspan capper"


TIMEOUT = 1.0
_FIRST, _LONGEST = SECOND // 2, 30 * SECOND
_MAX_REPLY_BYTES = 4 * 1024 * 1024

_Reply = StateReply | RefusedReply


class CapperClient:
    """ports.Caps over the capper's socket. Belongs to one thread.

    When the capper is away it is looked for at growing intervals; between them every call fails
    at once. Its leases end with the connection, so whoever holds something asks for it anew.
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
        """``who`` is shown to the operator; ``timeout`` is the seconds that one call may take.

        ``root`` is the host's, and tells how a capper is started there.
        """
        self.path = path
        self.state: StateReply | None = None
        """The newest answer, with the lease, the ceiling and the counts beside the rows."""
        self._clock, self._who, self._timeout, self._root = clock, who, timeout, root
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._decoder: msgspec.json.Decoder[_Reply] = msgspec.json.Decoder(_Reply)
        self._delay = _FIRST
        self._not_before = 0
        self._why = CapsError("")

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
        self._ask(protocol.ReleaseRequest(job))

    def accept(self) -> tuple[CapRow, ...]:
        """Take foreign limits as the originals. For root."""
        return self._rows(protocol.AcceptRequest())

    def restore(self) -> tuple[int, tuple[CapRow, ...]]:
        """Restore everything: the number of restored limits, and all rows. For root."""
        before = self._ask(protocol.StatusRequest()).restores
        after = self._ask(protocol.RestoreRequest())
        return after.restores - before, tuple(map(protocol.cap_row, after.rows))

    def close(self) -> None:
        """End the connection, and with it every lease."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._received.clear()

    # --------------------------------------------------------------------------- inner workings

    def _rows(self, request: protocol.CapperRequest) -> tuple[CapRow, ...]:
        return tuple(map(protocol.cap_row, self._ask(request).rows))

    def _ask(self, request: protocol.CapperRequest) -> StateReply:
        deadline = self._clock.monotonic() + round(self._timeout * SECOND)
        if self._socket is None:
            self._connect(deadline)
        return self._exchange(request, deadline)

    def _connect(self, deadline: int) -> None:
        now = self._clock.monotonic()
        if now < self._not_before:
            raise self._again()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._timeout)
            connection.connect(str(self.path))
        except OSError as error:
            connection.close()
            raise self._lost(_cause(error)) from None
        self._socket = connection
        self._exchange(protocol.HelloRequest(self._who), deadline)
        self._delay = _FIRST

    def _exchange(self, request: protocol.CapperRequest, deadline: int) -> StateReply:
        assert self._socket is not None  # noqa: S101 - it was connected just now
        try:
            self._patience(deadline)
            # A capper that refuses whoever connects says so and closes before it reads.
            with suppress(BrokenPipeError):
                self._socket.sendall(msgspec.json.encode(request) + b"\n")
            answer = self._decoder.decode(self._line(deadline))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise self._lost(_cause(error)) from None
        if isinstance(answer, RefusedReply):
            refusal = CapsError(answer.sentence, answer.reason, answer.device)
            if isinstance(request, protocol.HelloRequest):  # it will say so again
                self._leave(refusal)
            raise refusal
        self.state = answer
        return answer

    def _line(self, deadline: int) -> bytes:
        assert self._socket is not None  # noqa: S101 - it was connected just now
        while (end := self._received.find(b"\n")) < 0:
            self._patience(deadline)
            got = self._socket.recv(256 * 1024)
            if not got:
                raise ConnectionResetError
            self._received += got
            if len(self._received) > _MAX_REPLY_BYTES:
                raise ValueError("its answer has no end")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _patience(self, deadline: int) -> None:
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError
        assert self._socket is not None  # noqa: S101 - it was connected just now
        self._socket.settimeout(left / SECOND)

    def _lost(self, cause: str) -> CapsError:
        """Why nothing was answered; the capper is left alone for a while."""
        return self._leave(
            CapsError(
                f"No capper answers on {self.path}: {cause}. Start one with"
                f" `{capper_start_command(self._root)}`, as root; it is looked for again."
            )
        )

    def _leave(self, why: CapsError) -> CapsError:
        """End the connection, and let every call fail for a while as this one has."""
        self.close()
        delay = self._delay - round(self._delay / 2 * random.random())  # noqa: S311 - not a secret
        self._not_before = self._clock.monotonic() + delay
        self._delay = min(2 * self._delay, _LONGEST)
        self._why = why
        return self._again()

    def _again(self) -> CapsError:
        return CapsError(str(self._why), self._why.refusal, self._why.device)


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it takes too long"
    if isinstance(error, FileNotFoundError):
        return "there is none"
    if isinstance(error, ConnectionError):
        return "nobody listens" if isinstance(error, ConnectionRefusedError) else "it has gone"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return f"it talks nonsense ({error})"
