"""The messages on ``capper.sock``: one JSON object per line, one reply to each request.

Power is in milliwatts, clocks are in megahertz, times are monotonic nanoseconds of this host.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from wattspan.model import CapKey, CapRow, Instant, Knob, KnobState, ModelEnum

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
    """Why a request was refused."""

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


class StatusRequest(CapperRequest, frozen=True, tag="status"):
    """Ask for the state."""


class RestoreRequest(CapperRequest, frozen=True, tag="restore"):
    """Restore every limit, imposed ones too, and lift the ceilings of all users. For root.

    Foreign limits stay. Nothing is set again before the capper is restarted.
    """


class AcceptRequest(CapperRequest, frozen=True, tag="accept"):
    """Take foreign limits as the originals, which may be capped. For root."""


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


_STATE_FIELDS = ("name", "aliases", "minimum", "default", "maximum", "requested", "enforced")
_ROW_FIELDS = (
    *("original", "wanted", "ceiling", "holder", "why", "expires"),
    *("foreign", "lost", "usable", "trouble"),
)


def knob_row(row: CapRow) -> KnobRow:
    """A row as it is sent."""
    fields = {name: getattr(row.state, name) for name in _STATE_FIELDS}
    fields |= {name: getattr(row, name) for name in _ROW_FIELDS}
    return KnobRow(
        knob=row.state.key.knob,
        device=row.state.key.device,
        since_mono=None if row.since is None else row.since.mono,
        since_wall=None if row.since is None else row.since.wall,
        **fields,
    )


def cap_row(sent: KnobRow) -> CapRow:
    """A row as it was received."""
    since = None
    if sent.since_mono is not None and sent.since_wall is not None:
        since = Instant(sent.since_mono, sent.since_wall)
    state = {name: getattr(sent, name) for name in _STATE_FIELDS}
    fields = {name: getattr(sent, name) for name in _ROW_FIELDS}
    return CapRow(KnobState(CapKey(sent.knob, sent.device), **state), since=since, **fields)


class CeilingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ceiling in force, over all devices together.

    ``source`` is ``configuration``, ``file`` or ``socket``; ``uid`` is the owner's, ``limit`` is
    in milliwatts, ``expires`` is monotonic time, None for a ceiling without an end.
    """

    source: str
    limit: int
    uid: int | None = None
    why: str = ""
    expires: int | None = None


class StateReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="state"):
    """The reply to every request that was carried out."""

    rows: list[KnobRow]
    lease: int
    ceiling: int | None = None
    writes: int = 0
    restores: int = 0
    version: int = VERSION
    pid: int = 0
    suspended: bool = False
    """Everything was restored on request, and nothing is set before a restart."""
    ceilings: list[CeilingRow] = []
    short: int = 0
    """Milliwatts by which the devices' floors exceed the ceiling."""


class RefusedReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="refused"):
    """The reply to a refused request; ``sentence`` names the thing, the cause and the remedy."""

    reason: RefusalReason
    sentence: str
    device: str = ""
