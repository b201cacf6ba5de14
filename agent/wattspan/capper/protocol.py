"""What is said on ``capper.sock``: one JSON object a line, one answer for each request.

Power is in milliwatts, clocks are in megahertz, times are monotonic nanoseconds of this host.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from wattspan.model import CapKey, CapRow, Instant, Knob, KnobState, ModelEnum

VERSION: Final = 1
MAX_LINE_BYTES: Final = 64 * 1024
"""Bytes of one request; whoever sends more is put out."""
MAX_NAME_LENGTH: Final = 200
MAX_REASON_LENGTH: Final = 1000
"""Characters of a reason that are kept; somewhat more is taken, and cut."""
MAX_REQUESTED_CAPS: Final = 256

BoundedName = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
ReasonText = Annotated[str, msgspec.Meta(max_length=4 * MAX_REASON_LENGTH)]

_MAX_SAFE_INTEGER = 2**53
SafeInteger = Annotated[int, msgspec.Meta(ge=-_MAX_SAFE_INTEGER, le=_MAX_SAFE_INTEGER)]
"""A number that every peer can hold; one of a thousand digits would be told on, and break them."""


class RefusalReason(ModelEnum):
    """Why a request was not carried out."""

    MALFORMED = "malformed"
    NOT_ALLOWED = "not_allowed"  # the peer may not ask for that
    UNKNOWN_DEVICE = "unknown_device"
    HELD = "held"  # another job holds it
    FOREIGN = "foreign"  # somebody else has written it; it is let be
    NO_JOURNAL = "no_journal"  # it cannot be written down, so it is not done
    NO_PERMISSION = "no_permission"  # the device refuses
    LOCKED = "locked"  # firmware has locked the register
    NOT_HONOURED = "not_honoured"  # it was written and does not read back
    LOST = "lost"  # the device does not answer
    UNRECOVERED = "unrecovered"  # its original is unknown, for the journal was damaged
    ENDING = "ending"  # the capper is on its way out
    TOO_OFTEN = "too_often"  # the peer's user moves a knob, or sets a ceiling, too often


# ----------------------------------------------------------------------------------- requests


class CapperRequest(msgspec.Struct, frozen=True, tag_field="do", forbid_unknown_fields=True):
    """Base of all requests."""


class HelloRequest(CapperRequest, frozen=True, tag="hello"):
    """Who speaks; the first request of a connection that wants to hold anything."""

    who: BoundedName
    version: SafeInteger = VERSION


class RequestedCap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One knob of one device, and what it shall be at most."""

    knob: Knob
    device: BoundedName
    value: SafeInteger


class HoldRequest(CapperRequest, frozen=True, tag="hold"):
    """Hold exactly these caps for ``job``; what it held and is not named here is given back.

    The lease is the connection's: it lapses when ``lease`` nanoseconds pass without a renewal,
    and when the connection ends. A move down is cut to the largest step, and the answer says
    what stands; asking again goes on from there.
    """

    job: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    caps: Annotated[list[RequestedCap], msgspec.Meta(max_length=MAX_REQUESTED_CAPS)]
    why: ReasonText = ""
    lease: SafeInteger = 0  # 0: the configured one, which is also the longest


class RenewRequest(CapperRequest, frozen=True, tag="renew"):
    """Every lease of this connection begins anew."""


class ReleaseRequest(CapperRequest, frozen=True, tag="release"):
    """Give back what ``job`` holds; "" is everything this connection holds."""

    job: BoundedName = ""


class CeilingRequest(CapperRequest, frozen=True, tag="ceiling"):
    """The host's capped devices together shall never be allowed more than ``limit`` milliwatts.

    For root and ``[caps] ceiling_users``. Each user has one ceiling, and the least of all applies.
    It outlives the connection and ends after ``ttl`` nanoseconds, 24 hours at most, which must be
    given with a limit. A ``limit`` of None lifts the user's own ceiling now.
    """

    limit: SafeInteger | None
    why: ReasonText = ""
    ttl: SafeInteger | None = None


class StatusRequest(CapperRequest, frozen=True, tag="status"):
    """Who holds what."""


class RestoreRequest(CapperRequest, frozen=True, tag="restore"):
    """Give everything back, whoever holds it, imposed caps too. For root.

    Ceilings that were set on the socket are lifted.
    What somebody else has set is left. Nothing is set again before the capper is started anew.
    """


class AcceptRequest(CapperRequest, frozen=True, tag="accept"):
    """What somebody else has set is the original from now on, and may be capped. For root."""


# ------------------------------------------------------------------------------------ answers


class KnobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One knob of one device; see model.CapRow for what each field is."""

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
    """The answer to every request that was carried out."""

    rows: list[KnobRow]
    lease: int
    ceiling: int | None = None
    writes: int = 0
    restores: int = 0
    version: int = VERSION
    pid: int = 0
    suspended: bool = False
    """Everything was given back on request, and nothing is set before a restart."""
    ceilings: list[CeilingRow] = []
    short: int = 0
    """Milliwatts beyond the ceiling that the devices' floors take."""


class RefusedReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="refused"):
    """The answer to one that was not; ``sentence`` names the thing, the cause and the remedy."""

    reason: RefusalReason
    sentence: str
    device: str = ""
