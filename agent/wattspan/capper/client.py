"""The way to the capper: one connection, short patience, no storm of attempts."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from wattspan.capper import protocol
from wattspan.capper.protocol import Refused, Row, State
from wattspan.capper.starting import start_command
from wattspan.model import SECOND, CapKey, CapRow, Instant, KnobState
from wattspan.ports import CapsError, CapTotals, Clock

TIMEOUT = 1.0
_FIRST, _LONGEST = SECOND // 2, 30 * SECOND
_LONGEST_ANSWER = 4 * 1024 * 1024

_Answer = State | Refused


class Restoring(NamedTuple):
    """What a capper says after giving everything back."""

    restored: int
    rows: tuple[CapRow, ...]


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
        self.state: State | None = None
        """The newest answer, with the lease, the ceiling and the counts beside the rows."""
        self._clock, self._who, self._timeout, self._root = clock, who, timeout, root
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._decoder: msgspec.json.Decoder[_Answer] = msgspec.json.Decoder(_Answer)
        self._delay = _FIRST
        self._not_before = 0
        self._why = CapsError("")

    @property
    def totals(self) -> CapTotals:
        state = self.state
        if state is None:
            return CapTotals()
        return CapTotals(state.writes, state.restores, state.ceiling, state.suspended)

    def rows(self) -> tuple[CapRow, ...]:
        return _rows(self._ask(protocol.Status()))

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        wishes = [protocol.Wish(key.knob, key.device, value) for key, value in caps.items()]
        return _rows(self._ask(protocol.Hold(job, wishes, why)))

    def renew(self) -> None:
        self._ask(protocol.Renew())

    def release(self, job: str = "") -> None:
        self._ask(protocol.Release(job))

    def accept(self) -> tuple[CapRow, ...]:
        """Have what somebody else has set taken as the original. For root."""
        return _rows(self._ask(protocol.Accept()))

    def restore(self) -> Restoring:
        """Have everything given back, whoever holds it. For root."""
        before = self._ask(protocol.Status()).restores
        after = self._ask(protocol.Restore())
        return Restoring(after.restores - before, _rows(after))

    def close(self) -> None:
        """End the connection, and with it every lease."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._received.clear()

    # --------------------------------------------------------------------------- inner workings

    def _ask(self, request: protocol.Request) -> State:
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
        self._exchange(protocol.Hello(self._who), deadline)
        self._delay = _FIRST

    def _exchange(self, request: protocol.Request, deadline: int) -> State:
        assert self._socket is not None  # noqa: S101 - it was connected just now
        try:
            self._patience(deadline)
            # A capper that refuses whoever connects says so and closes before it reads.
            with suppress(BrokenPipeError):
                self._socket.sendall(msgspec.json.encode(request) + b"\n")
            answer = self._decoder.decode(self._line(deadline))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise self._lost(_cause(error)) from None
        if isinstance(answer, Refused):
            refusal = CapsError(answer.sentence, answer.reason, answer.device)
            if isinstance(request, protocol.Hello):  # it will say so again
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
            if len(self._received) > _LONGEST_ANSWER:
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
                f" `{start_command(self._root)}`, as root; it is looked for again."
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


def _rows(state: State) -> tuple[CapRow, ...]:
    """What a capper tells of its knobs, in the model's words."""
    return tuple(_row(one) for one in state.rows)


def _row(told: Row) -> CapRow:
    state = KnobState(
        CapKey(told.knob, told.device),
        told.name,
        minimum=told.minimum,
        default=told.default,
        maximum=told.maximum,
        requested=told.requested,
        enforced=told.enforced,
        aliases=told.aliases,
    )
    since = None
    if told.since_mono is not None and told.since_wall is not None:
        since = Instant(told.since_mono, told.since_wall)
    return CapRow(
        state,
        original=told.original,
        wanted=told.wanted,
        ceiling=told.ceiling,
        holder=told.holder,
        why=told.why,
        since=since,
        expires=told.expires,
        foreign=told.foreign,
        lost=told.lost,
        usable=told.usable,
        trouble=told.trouble,
    )
