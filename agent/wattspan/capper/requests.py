"""What each request does, whoever brings it; the answer to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from wattspan.capper import protocol
from wattspan.capper.access import RefusalLog
from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.ceilings import PowerCeilings, imposed_limits
from wattspan.capper.journal import JournalError
from wattspan.capper.manager import CapManager
from wattspan.capper.protocol import KnobRow, RefusalReason, RefusedReply, StateReply
from wattspan.config import CapsSettings
from wattspan.http.rate_limiter import RateLimiter
from wattspan.model import CapKey, CapRow
from wattspan.ports import CapsError, Clock
from wattspan.util.peer_credentials import PeerCredentials
from wattspan.util.text import printable

MAX_JOBS = 64
MOVES_A_SECOND, MOVES_AT_ONCE = 2, 60
"""How often one user may move one knob, or its ceiling; a tuner does so once each half second."""


class WriteCounts(Protocol):
    """Counts what was written."""

    writes: int
    restores: int


class RequestHandler:
    """Answers requests. Every answer is the state after it, or why it was not carried out."""

    def __init__(
        self,
        keeper: CapManager,
        tally: WriteCounts,
        ceilings: PowerCeilings,
        settings: CapsSettings,
        clock: Clock,
        record: Callable[[AuditEvent], None],
    ) -> None:
        self.ending = False
        self.trouble = ""
        """Why what is imposed cannot be had, if it cannot."""
        self._keeper, self._tally = keeper, tally
        self._ceilings, self._settings = ceilings, settings
        self._refusals = RefusalLog(clock, record)
        self._clock, self._record = clock, record
        self._short = 0
        self._pace = RateLimiter(MOVES_A_SECOND, MOVES_AT_ONCE)
        self._introduced: set[int] = set()

    def settle_for(self, settings: CapsSettings) -> None:
        """Impose what other settings say, from the next turn on."""
        self._settings = settings
        self._ceilings.settle_for(settings)

    def answer(
        self, holder: int, peer: PeerCredentials, request: protocol.CapperRequest
    ) -> StateReply | RefusedReply:
        """Carry out one request of the connection ``holder``."""
        try:
            self._do(holder, peer, request)
        except CapsError as error:
            return self._refused(holder, peer, request, error)
        except JournalError as error:
            wrapped = CapsError(str(error), RefusalReason.NO_JOURNAL)
            return self._refused(holder, peer, request, wrapped)
        self._refusals.granted(holder)
        return self.state()

    def gone(self, holder: int) -> None:
        """The connection has ended."""
        self._introduced.discard(holder)
        self._refusals.granted(holder)
        self._keeper.gone(holder)

    def turn(self) -> None:
        """What is to be done every second."""
        self._keeper.look()
        self._impose()
        self._keeper.turn()
        self._refusals.turn()

    def close(self) -> None:
        """Have on record what is not there yet."""
        self._refusals.close()

    @property
    def next_lapse(self) -> int | None:
        """When a turn is due before the second is over: a lease lapses."""
        return self._keeper.leases.next_lapse

    def state(self) -> StateReply:
        return StateReply(
            rows=[_knob_row(row) for row in self._keeper.rows()],
            lease=self._keeper.leases.longest,
            ceiling=self._ceilings.limit,
            writes=self._tally.writes,
            restores=self._tally.restores,
            pid=os.getpid(),
            suspended=self._keeper.suspended,
            ceilings=list(self._ceilings.rows),
            short=self._short,
        )

    # --------------------------------------------------------------------------- inner workings

    def _do(self, holder: int, peer: PeerCredentials, request: protocol.CapperRequest) -> None:
        if self.ending and not isinstance(request, protocol.StatusRequest):
            raise CapsError("The capper is on its way out.", RefusalReason.ENDING)
        match request:
            case protocol.HelloRequest():
                self._greet(holder, request)
            case protocol.HoldRequest():
                self._hold(holder, peer, request)
            case protocol.RenewRequest():
                self._keeper.renew(holder)
            case protocol.ReleaseRequest():
                self._keeper.release(holder, request.job)
            case protocol.CeilingRequest():
                why = _printable_prefix(request.why, protocol.MAX_REASON_LENGTH)
                if peer.uid != 0:
                    self._check_pace(peer, None)
                self._ceilings.ask(request.limit, why, request.ttl, peer)
                self.turn()
            case protocol.RestoreRequest():
                self._only_root(peer, "give everything back")
                self._restore(peer)
            case protocol.AcceptRequest():
                self._only_root(peer, "accept what somebody else has set")
                count = self._keeper.accept()
                self._note_command(peer, f"accept: {count} limits of somebody else")

    def _restore(self, peer: PeerCredentials) -> None:
        troubles = self._keeper.restore()
        failed = f", {len(troubles)} could not be given back" if troubles else ""
        self._note_command(peer, f"restore: everything is given back{failed}")
        self._ceilings.lift_all(peer)
        if troubles:
            sentence = " ".join(map(str, troubles))
            raise CapsError(sentence, troubles[0].refusal, troubles[0].device)

    def _note_command(self, peer: PeerCredentials, why: str) -> None:
        now = self._clock.now().wall
        self._record(
            AuditEvent(at=now, deed=AuditAction.COMMAND, why=why, pid=peer.pid, uid=peer.uid)
        )

    def _greet(self, holder: int, request: protocol.HelloRequest) -> None:
        if request.version != protocol.VERSION:
            raise CapsError(
                f"This capper speaks version {protocol.VERSION} of its protocol, not"
                f" {request.version}; restart whichever is older.",
                RefusalReason.MALFORMED,
            )
        self._introduced.add(holder)

    def _hold(self, holder: int, peer: PeerCredentials, request: protocol.HoldRequest) -> None:
        if holder not in self._introduced:
            raise CapsError("Say hello first.", RefusalReason.MALFORMED)
        wishes = {CapKey(one.knob, one.device): one.value for one in request.caps}
        if len(wishes) != len(request.caps):
            raise CapsError("A hold names each knob once.", RefusalReason.MALFORMED)
        if len(self._keeper.leases.jobs(holder) | {request.job}) > MAX_JOBS:
            raise CapsError(f"One peer holds for {MAX_JOBS} jobs at most.", RefusalReason.MALFORMED)
        held = self._keeper.leases.grant_of(holder, request.job)
        for key, value in wishes.items():
            if held is None or not held.asked.get(key) == held.caps.get(key) == value:
                self._check_pace(peer, key)
        self._keeper.hold(
            holder,
            request.job,
            wishes,
            _printable_prefix(request.why, protocol.MAX_REASON_LENGTH),
            lease=request.lease,
            peer=peer,
        )

    def _check_pace(self, peer: PeerCredentials, key: CapKey | None) -> None:
        """CapsError if the user moves a knob, or its ceiling if ``key`` is None, too often."""
        if not self._pace.admits((peer.uid, key), self._clock.monotonic()):
            thing = "its ceiling" if key is None else f"the {key.knob} of {key.device}"
            raise CapsError(
                f"User {peer.uid} moves {thing} more than {MOVES_A_SECOND} times a second; ask"
                " more slowly.",
                RefusalReason.TOO_OFTEN,
                "" if key is None else key.device,
            )

    @staticmethod
    def _only_root(peer: PeerCredentials, what: str) -> None:
        if peer.uid not in (0, os.geteuid()):
            raise CapsError(f"Only root may {what}.", RefusalReason.NOT_ALLOWED)

    def _impose(self) -> None:
        self._ceilings.poll()
        imposed = imposed_limits(
            self._settings,
            self._ceilings.configured,
            self._keeper,
            others=self._ceilings.imposed_by_others,
        )
        self._keeper.impose(imposed)
        self.trouble, self._short = "", imposed.short
        if imposed.short and imposed.limit is not None:
            self.trouble = (
                f"A ceiling of {imposed.limit / 1000:g} W cannot be kept: the devices' floors"
                f" take {imposed.short / 1000:g} W more. Raise the ceiling, or lower"
                " [caps] floor_watts and [autotune] floor."
            )

    def _refused(
        self, holder: int, peer: PeerCredentials, request: protocol.CapperRequest, error: CapsError
    ) -> RefusedReply:
        if isinstance(
            request, protocol.CeilingRequest | protocol.RestoreRequest | protocol.AcceptRequest
        ):
            self._refusals.granted(holder)  # each refused command has a row, repeated or not
        self._refusals.refused(holder, peer, getattr(request, "job", ""), error)
        return RefusedReply(
            reason=RefusalReason(error.refusal), sentence=str(error), device=error.device
        )


def _printable_prefix(text: str, most: int) -> str:
    """Fit to be shown to a person, and bounded."""
    return printable(text[:most], " ")


def _knob_row(row: CapRow) -> KnobRow:
    state, since = row.state, row.since
    return KnobRow(
        knob=state.key.knob,
        device=state.key.device,
        name=state.name,
        aliases=state.aliases,
        minimum=state.minimum,
        default=state.default,
        maximum=state.maximum,
        requested=state.requested,
        enforced=state.enforced,
        original=row.original,
        wanted=row.wanted,
        ceiling=row.ceiling,
        holder=row.holder,
        why=row.why,
        since_mono=None if since is None else since.mono,
        since_wall=None if since is None else since.wall,
        expires=row.expires,
        foreign=row.foreign,
        lost=row.lost,
        usable=row.usable,
        trouble=row.trouble,
    )
