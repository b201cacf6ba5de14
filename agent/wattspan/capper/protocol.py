"""``capper.sock``: the messages, the client, and the command that starts a capper.

Messages are one JSON object per line, with one reply to each request. Power is in milliwatts,
clocks are in megahertz, times are monotonic nanoseconds of this host.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from wattspan.model import SECOND, CapKey, CapRow, Instant, Knob, KnobState, ModelEnum
from wattspan.ports import CapsError, CapTotals, Clock
from wattspan.util.throttle import RetryBackoff
from wattspan.util.unix_sockets import peer_credentials

VERSION: Final = 1
MAX_LINE_BYTES: Final = 64 * 1024
"""Bytes of one request; a client that sends more is disconnected."""
MAX_NAME_LENGTH: Final = 200
MAX_REASON_LENGTH: Final = 1000
"""Characters of a reason that are kept; a longer one is cut."""
MAX_REQUESTED_CAPS: Final = 256

BoundedName = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
ReasonText = Annotated[str, msgspec.Meta(max_length=4 * MAX_REASON_LENGTH)]

_MAX_SAFE_INTEGER = 2**53
SafeInteger = Annotated[int, msgspec.Meta(ge=-_MAX_SAFE_INTEGER, le=_MAX_SAFE_INTEGER)]
"""A number that every JSON parser can hold, since it is passed on to other clients."""


class RefusalReason(ModelEnum):
    """Reason of a refusal."""

    MALFORMED = "malformed"
    NOT_ALLOWED = "not_allowed"  # the peer is not permitted
    UNKNOWN_DEVICE = "unknown_device"
    HELD = "held"  # another job holds it
    FOREIGN = "foreign"  # another program has set it
    NO_JOURNAL = "no_journal"  # it cannot be recorded
    NO_PERMISSION = "no_permission"  # the device refuses
    LOCKED = "locked"  # firmware has locked the register
    NOT_HONOURED = "not_honoured"  # it was written and does not read back
    LOST = "lost"  # the device does not answer
    UNRECOVERED = "unrecovered"  # its original is unknown, for the journal was damaged
    ENDING = "ending"  # the capper is ending
    TOO_OFTEN = "too_often"  # the peer's user moves a knob, or sets a ceiling, too often


# ----------------------------------------------------------------------------------- requests


class CapperRequest(msgspec.Struct, frozen=True, tag_field="do", forbid_unknown_fields=True):
    """Base of all requests."""


class HelloRequest(CapperRequest, frozen=True, tag="hello"):
    """Names the client; required before a hold."""

    who: BoundedName
    version: SafeInteger = VERSION


class RequestedCap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One knob of one device, and its highest setting."""

    knob: Knob
    device: BoundedName
    value: SafeInteger


class HoldRequest(CapperRequest, frozen=True, tag="hold"):
    """Hold exactly these caps for ``job``; its other limits are restored.

    The lease is the connection's: it lapses when ``lease`` nanoseconds pass without a renewal,
    and when the connection ends. A move down is cut to the largest step, and the reply has the
    present limit; a repeated request continues from there.
    """

    job: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    caps: Annotated[list[RequestedCap], msgspec.Meta(max_length=MAX_REQUESTED_CAPS)]
    why: ReasonText = ""
    lease: SafeInteger = 0  # 0: the configured one, which is also the longest


class RenewRequest(CapperRequest, frozen=True, tag="renew"):
    """Renew every lease of this connection."""


class ReleaseRequest(CapperRequest, frozen=True, tag="release"):
    """Restore the limits that ``job`` holds; "" is every job of this connection."""

    job: BoundedName = ""


class CeilingRequest(CapperRequest, frozen=True, tag="ceiling"):
    """Set a ceiling of ``limit`` milliwatts over the host's devices together.

    For root and ``[caps] ceiling_users``. Each user has one ceiling, and the least of all applies.
    It outlives the connection and ends after ``ttl`` nanoseconds, 24 hours at most, which must be
    given with a limit. A ``limit`` of None lifts the user's own ceiling now.
    """

    limit: SafeInteger | None
    why: ReasonText = ""
    ttl: SafeInteger | None = None


class AllotmentRequest(CapperRequest, frozen=True, tag="allot"):
    """Set the ceiling that the fleet allots to this host. For root and ``[caps] users``.

    ``limit`` and ``safe`` are milliwatts of the host, with its reserve; ``until`` is the end by the
    clock since boot in nanoseconds. Then the ceiling falls to the lower one of the two. An end in
    the past ends the present allotment, and sets nothing.
    """

    limit: SafeInteger
    safe: SafeInteger
    until: SafeInteger
    why: ReasonText = ""


class StatusRequest(CapperRequest, frozen=True, tag="status"):
    """Ask for the state."""


class RestoreRequest(CapperRequest, frozen=True, tag="restore"):
    """Restore every limit, imposed ones too, and lift the ceilings of all users. For root.

    Foreign limits stay. Nothing is set again before the capper is restarted.
    """


class AcceptRequest(CapperRequest, frozen=True, tag="accept"):
    """Take foreign limits as the originals, which may be capped. For root."""


AnyRequest = (
    HelloRequest
    | HoldRequest
    | RenewRequest
    | ReleaseRequest
    | CeilingRequest
    | AllotmentRequest
    | StatusRequest
    | RestoreRequest
    | AcceptRequest
)


# ------------------------------------------------------------------------------------ answers


class KnobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One knob of one device; the fields are those of model.CapRow."""

    knob: Knob
    device: str
    name: str
    aliases: tuple[str, ...] = ()
    minimum: int | None = None
    default: int | None = None
    maximum: int | None = None
    requested: int | None = None
    enforced: int | None = None
    original: int | None = None
    wanted: int | None = None
    ceiling: int | None = None
    holder: str = ""
    why: str = ""
    since_mono: int | None = None
    since_wall: int | None = None
    expires: int | None = None
    foreign: bool = False
    lost: bool = False
    usable: bool = True
    trouble: str = ""


_STATE_FIELDS, _ROW_FIELDS = (
    [field.name for field in fields(kind) if field.name in KnobRow.__struct_fields__]
    for kind in (KnobState, CapRow)
)


def knob_row(row: CapRow) -> KnobRow:
    """A row as it is sent."""
    return KnobRow(
        knob=row.state.key.knob,
        device=row.state.key.device,
        since_mono=None if row.since is None else row.since.mono,
        since_wall=None if row.since is None else row.since.wall,
        **{name: getattr(row.state, name) for name in _STATE_FIELDS},
        **{name: getattr(row, name) for name in _ROW_FIELDS},
    )


def cap_row(sent: KnobRow) -> CapRow:
    """A row as it was received."""
    since = None
    if sent.since_mono is not None and sent.since_wall is not None:
        since = Instant(sent.since_mono, sent.since_wall)
    state = {name: getattr(sent, name) for name in _STATE_FIELDS}
    row = {name: getattr(sent, name) for name in _ROW_FIELDS}
    return CapRow(KnobState(CapKey(sent.knob, sent.device), **state), since=since, **row)


class CeilingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ceiling in force, over all devices together.

    ``source`` is ``configuration``, ``fleet``, ``file`` or ``socket``; ``uid`` is the owner's,
    ``limit`` is in milliwatts, ``expires`` is monotonic time, None for a ceiling without an end.
    """

    source: str
    limit: int
    uid: int | None = None
    why: str = ""
    expires: int | None = None


class AllotmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """The allotment of the fleet, and the range of this host's limits, in milliwatts.

    All are of the host with its reserve. ``until`` is the end by the clock since boot, None once it
    has passed. ``floor`` is the lowest sum to which the devices can be limited, ``original`` the
    sum of their original limits; ``enforced`` is the sum of the present ones, None if a device's is
    unknown. ``held`` has the limits that tuners hold, by device, each with the power by which it is
    below that without them.
    """

    limit: int
    safe: int
    until: int | None
    floor: int
    original: int
    enforced: int | None
    held: dict[str, tuple[int, int]] = {}


class StateReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="state"):
    """The reply to every request that was carried out."""

    rows: list[KnobRow]
    lease: int
    ceiling: int | None = None
    writes: int = 0
    restores: int = 0
    resets: int = 0
    """Settings that a reset of their device or driver removed."""
    version: int = VERSION
    pid: int = 0
    agent: int = 0
    """The process of the agent that started the capper; 0 for one of a service."""
    suspended: bool = False
    """Everything was restored on request, and nothing is set before a restart."""
    ceilings: list[CeilingRow] = []
    short: int = 0
    """Milliwatts by which the devices' floors exceed the ceiling."""
    allotment: AllotmentRow | None = None
    """None outside a fleet."""


class RefusedReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="refused"):
    """The reply to a refused request; ``sentence`` names the thing, the cause and the remedy."""

    reason: RefusalReason
    sentence: str
    device: str = ""


# ------------------------------------------------------------------------------------- client

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


class CapperAddress(NamedTuple):
    """A socket of a capper. The process that listens must be of the user ``owner``, or of root.

    None permits every user, for a socket in a directory whose owner the caller trusts. ``shared``:
    it is the socket of another agent's capper.
    """

    path: Path
    owner: int | None = None
    shared: bool = False


Locate = Callable[[], Sequence[CapperAddress]]


class CapperClient:
    """ports.Caps over the capper's socket. Belongs to one thread.

    It connects to a missing capper at growing intervals; between them every call fails at once.
    Leases end with the connection, so their holder asks anew after it.
    """

    def __init__(
        self,
        path: Path | Locate,
        clock: Clock,
        *,
        who: str,
        timeout: float = TIMEOUT,
        root: Path = Path("/"),
        held: Callable[[], str] = lambda: "",
    ) -> None:
        """``who`` names the client; ``timeout`` is the seconds that one call may take.

        ``path`` is the socket, or returns the addresses to try for each new connection: the first
        one on which a process listens. ``root`` is the host's root directory, for the start
        command in errors; ``held`` names the process that keeps another capper from starting.
        """
        self._locate: Locate = (
            path if not isinstance(path, Path) else lambda: (CapperAddress(path),)
        )
        self.address = self._locate()[0]
        """The socket of the last connection or attempt."""
        self._held = held
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
        shared = str(self.address.path) if self.address.shared else ""
        return CapTotals(
            state.writes, state.restores, state.ceiling, state.suspended, shared, state.resets
        )

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        return self._rows(RenewRequest() if renew else StatusRequest())

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        requested = [RequestedCap(*key, value) for key, value in caps.items()]
        return self._rows(HoldRequest(job, requested, why))

    def release(self, job: str = "") -> None:
        self._call(ReleaseRequest(job))

    def allotment(self) -> AllotmentRow:
        """The allotment of the fleet that is in force."""
        return self._allotment(StatusRequest())

    def allot(self, limit: int, safe: int, until: int, why: str) -> AllotmentRow:
        """Set the allotment as AllotmentRequest says; the state afterwards."""
        return self._allotment(AllotmentRequest(limit, safe, until, why))

    def accept(self) -> tuple[CapRow, ...]:
        """Take foreign limits as the originals. For root."""
        return self._rows(AcceptRequest())

    def restore(self) -> tuple[int, tuple[CapRow, ...]]:
        """Restore everything: the number of restored limits, and all rows. For root."""
        before = self._call(StatusRequest()).restores
        after = self._call(RestoreRequest())
        return after.restores - before, tuple(map(cap_row, after.rows))

    def close(self) -> None:
        """End the connection, and with it every lease."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._received.clear()

    # --------------------------------------------------------------------------- inner workings

    def _rows(self, request: CapperRequest) -> tuple[CapRow, ...]:
        return tuple(map(cap_row, self._call(request).rows))

    def _allotment(self, request: CapperRequest) -> AllotmentRow:
        allotment = self._call(request).allotment
        if allotment is None:
            raise CapsError(
                f"The capper on {self.address.path} is in no fleet: set [fleet] endpoints in its"
                " configuration and restart it."
            )
        return allotment

    def _call(self, request: CapperRequest) -> StateReply:
        deadline = self._clock.monotonic() + round(self._timeout * SECOND)
        connection = self._socket or self._connect(deadline)
        return self._exchange(connection, request, deadline)

    def _connect(self, deadline: int) -> socket.socket:
        if not self._backoff.is_due(self._clock.monotonic()):
            raise self._last_failure()
        connection = self._open()
        self._socket = connection
        self._exchange(connection, HelloRequest(self._who), deadline)
        self._backoff.reset()
        return connection

    def _open(self) -> socket.socket:
        """A connection to the first address at which a process listens."""
        first: tuple[CapperAddress, OSError] | None = None
        for address in self._locate():
            self.address = address
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(self._timeout)
                connection.connect(str(address.path))
                _check_owner(connection, address)
            except OSError as error:
                connection.close()
                first = first or (address, error)
                if isinstance(error, _NO_LISTENER):
                    continue
                raise self._unreachable(error) from None
            return connection
        assert first is not None  # noqa: S101 - there is an address
        self.address, cause = first
        raise self._unreachable(cause)

    def _exchange(
        self, connection: socket.socket, request: CapperRequest, deadline: int
    ) -> StateReply:
        try:
            connection.settimeout(self._time_left(deadline))
            # A capper that refuses every request of a user replies and closes before it reads.
            with suppress(BrokenPipeError):
                connection.sendall(msgspec.json.encode(request) + b"\n")
            reply = self._decoder.decode(self._line(connection, deadline))
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreachable(error) from None
        if isinstance(reply, RefusedReply):
            refusal = CapsError(reply.sentence, reply.reason, reply.device)
            if isinstance(request, HelloRequest):  # the next reply would be the same
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
        remedy = self._held() or (
            f"Start one with `{capper_start_command(self._root)}`, as root; the connection is"
            " retried."
        )
        return self._disconnect(
            CapsError(f"No capper answers on {self.address.path}: {_cause(error)}. {remedy}")
        )

    def _disconnect(self, failure: CapsError) -> CapsError:
        """End the connection, and let every call fail in the same way for a while."""
        self.close()
        self._backoff.failed(self._clock.monotonic())
        self._failure = failure
        return self._last_failure()

    def _last_failure(self) -> CapsError:
        return CapsError(str(self._failure), self._failure.refusal, self._failure.device)


class _ImpostorError(ConnectionError):
    """A process of an unexpected user listens."""


_NO_LISTENER = (FileNotFoundError, ConnectionRefusedError, _ImpostorError)


def _check_owner(connection: socket.socket, address: CapperAddress) -> None:
    """OSError unless the listening process is of the address's owner."""
    if address.owner is None:
        return
    uid = peer_credentials(connection).uid
    if uid not in (0, address.owner):
        raise _ImpostorError(f"a process of user {uid} listens there, not of {address.owner}")


def _cause(error: Exception) -> str:
    match error:
        case _ImpostorError():
            return str(error)
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
