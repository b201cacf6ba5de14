"""Carries out the requests of all connections; the reply is the state afterwards, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable

from wattspan.capper import protocol
from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.ceilings import (
    PowerCeilings,
)
from wattspan.capper.journal import JournalError
from wattspan.capper.lease_manager import CapManager
from wattspan.capper.planner import imposed_limits, power_range, unmatched_settings
from wattspan.capper.protocol import RefusalReason, RefusedReply, StateReply, knob_row
from wattspan.capper.reconciler import Reconciler
from wattspan.config import CapsSettings
from wattspan.http.rate_limiter import RateLimiter
from wattspan.model import CapKey
from wattspan.ports import CapsError, Clock
from wattspan.util.text import printable
from wattspan.util.unix_sockets import PeerCredentials, uids_of

MAX_JOBS = 64
MOVES_PER_SECOND, MOVE_BURST = 2, 60
"""Changes of one knob or its ceiling that one user may make; a tuner makes two a second."""


class RequestHandler:
    """Carries out requests and the turns between them. Belongs to one thread."""

    def __init__(
        self,
        manager: CapManager,
        reconciler: Reconciler,
        ceilings: PowerCeilings,
        settings: CapsSettings,
        clock: Clock,
        record: Callable[[AuditEvent], None],
        agent: int = 0,
    ) -> None:
        """``agent`` as in StateReply."""
        self._agent = agent
        self.ending = False
        self.trouble = ""
        """The cause if imposed limits cannot be kept, else ""."""
        self.unmatched: frozenset[str] = frozenset()
        """A sentence for each setting that matches no device now."""
        self._manager, self._reconciler = manager, reconciler
        self._ceilings, self._settings = ceilings, settings
        self._refused_before: dict[int, str] = {}
        """The last refusal of each connection, recorded once; a granted request ends it."""
        self._clock, self._record = clock, record
        self._short = 0
        self._rate = RateLimiter(MOVES_PER_SECOND, MOVE_BURST)
        self._introduced: set[int] = set()

    def reconfigure(self, settings: CapsSettings) -> None:
        """Impose what other settings say, from the next turn on."""
        self._settings = settings
        self._ceilings.reconfigure(settings)

    def answer(
        self, holder: int, peer: PeerCredentials, request: protocol.CapperRequest
    ) -> StateReply | RefusedReply:
        """Carry out one request of the connection ``holder``."""
        try:
            self._carry_out(holder, peer, request)
        except CapsError as error:
            return self._refused(holder, peer, request, error)
        except JournalError as error:
            wrapped = CapsError(str(error), RefusalReason.NO_JOURNAL)
            return self._refused(holder, peer, request, wrapped)
        self._refused_before.pop(holder, None)
        return self.state()

    def gone(self, holder: int) -> None:
        """The connection has ended."""
        self._introduced.discard(holder)
        self._refused_before.pop(holder, None)
        self._manager.gone(holder)

    def turn(self) -> None:
        """Impose limits, expire leases and reconcile; to be called every second."""
        self._manager.find_devices()
        self._impose()
        self._manager.turn()
        planner = self._manager.planner()
        if not planner.hidden:
            names, states = planner.demand.limits.tunable, planner.states.values()
            self.unmatched = frozenset(unmatched_settings(self._settings, states, names))

    @property
    def next_expiry(self) -> int | None:
        """End of the next lease or allotment, or None: a turn is due then, before the regular."""
        lease = self._manager.leases.next_expiry
        due = (lease, self._ceilings.fleet.expires)
        return min((one for one in due if one is not None), default=None)

    def state(self) -> StateReply:
        return StateReply(
            rows=[knob_row(row) for row in self._manager.rows()],
            lease=self._manager.leases.longest,
            ceiling=self._ceilings.limit,
            writes=self._reconciler.writes,
            restores=self._reconciler.restores,
            resets=self._reconciler.resets,
            pid=os.getpid(),
            agent=self._agent,
            suspended=self._manager.suspended,
            ceilings=list(self._ceilings.rows),
            short=self._short,
            allotment=self._allotment(),
        )

    # --------------------------------------------------------------------------- inner workings

    def _carry_out(
        self, holder: int, peer: PeerCredentials, request: protocol.CapperRequest
    ) -> None:
        if self.ending and not isinstance(request, protocol.StatusRequest):
            raise CapsError("The capper is ending; ask the next one.", RefusalReason.ENDING)
        match request:
            case protocol.HelloRequest():
                self._introduce(holder, request)
            case protocol.HoldRequest():
                self._hold(holder, peer, request)
            case protocol.RenewRequest():
                self._manager.renew(holder)
            case protocol.ReleaseRequest():
                self._manager.release(holder, request.job)
            case protocol.CeilingRequest():
                if peer.uid != 0:
                    self._check_rate(peer, None)
                self._ceilings.request(request.limit, _reason(request.why), request.ttl, peer)
                self.turn()
            case protocol.AllotmentRequest():
                self._allot(peer, request)
            case protocol.RestoreRequest():
                self._require_root(peer, "restore everything")
                self._restore(peer)
            case protocol.AcceptRequest():
                self._require_root(peer, "accept foreign limits")
                count = self._manager.accept()
                self._record_command(peer, f"accept: {count} foreign limits")

    def _allot(self, peer: PeerCredentials, request: protocol.AllotmentRequest) -> None:
        fleet, permitted = (
            self._ceilings.fleet,
            uids_of(self._settings.users)[0] | {0, os.geteuid()},
        )
        if peer.uid not in permitted:
            raise CapsError(
                f"User {peer.uid} may not set the fleet's allotment: name it in [caps] users.",
                RefusalReason.NOT_ALLOWED,
            )
        if request.limit != fleet.limit:
            self._check_rate(peer, None)
        try:
            fleet.allot(request.limit, request.safe, request.until, _reason(request.why), peer)
        finally:  # lower values apply although they could not be stored
            self.turn()

    def _allotment(self) -> protocol.AllotmentRow | None:
        fleet = self._ceilings.fleet
        if fleet.limit is None:
            return None
        reserve = self._settings.reserve_watts * 1000
        sums = power_range(self._settings, self._manager.planner())
        return protocol.AllotmentRow(
            limit=fleet.limit,
            safe=fleet.safe,
            until=fleet.until,
            floor=sums.floor + reserve,
            original=sums.original + reserve,
            enforced=None if sums.enforced is None else sums.enforced + reserve,
        )

    def _restore(self, peer: PeerCredentials) -> None:
        errors = self._manager.restore()
        failed = f", {len(errors)} could not be restored" if errors else ""
        self._record_command(peer, f"restore: everything is given back{failed}")
        self._ceilings.lift_all(peer)
        if errors:
            sentence = " ".join(map(str, errors))
            raise CapsError(sentence, errors[0].refusal, errors[0].device)

    def _record_command(self, peer: PeerCredentials, why: str) -> None:
        now = self._clock.now().wall
        self._record(AuditEvent(at=now, deed=AuditAction.COMMAND, why=why, **peer._asdict()))

    def _introduce(self, holder: int, request: protocol.HelloRequest) -> None:
        if request.version != protocol.VERSION:
            raise CapsError(
                f"This capper speaks version {protocol.VERSION} of its protocol, not"
                f" {request.version}; restart whichever is older.",
                RefusalReason.MALFORMED,
            )
        self._introduced.add(holder)

    def _hold(self, holder: int, peer: PeerCredentials, request: protocol.HoldRequest) -> None:
        if holder not in self._introduced:
            raise CapsError("Send hello first.", RefusalReason.MALFORMED)
        requested = {CapKey(one.knob, one.device): one.value for one in request.caps}
        if len(requested) != len(request.caps):
            raise CapsError("A hold names each knob once.", RefusalReason.MALFORMED)
        grants = self._manager.leases.grants(holder)
        if len(grants.keys() | {request.job}) > MAX_JOBS:
            raise CapsError(f"One peer holds for {MAX_JOBS} jobs at most.", RefusalReason.MALFORMED)
        held = grants.get(request.job)
        for key, value in requested.items():
            if held is None or not held.requested.get(key) == held.granted.get(key) == value:
                self._check_rate(peer, key)
        self._manager.hold(
            holder, request.job, requested, _reason(request.why), lease=request.lease, peer=peer
        )

    def _check_rate(self, peer: PeerCredentials, key: CapKey | None) -> None:
        """CapsError if the user moves a knob, or its ceiling if ``key`` is None, too often."""
        if not self._rate.admits((peer.uid, key), self._clock.monotonic()):
            thing = "its ceiling" if key is None else f"the {key.knob} of {key.device}"
            raise CapsError(
                f"User {peer.uid} moves {thing} more than {MOVES_PER_SECOND} times a second; ask"
                " more slowly.",
                RefusalReason.TOO_OFTEN,
                "" if key is None else key.device,
            )

    @staticmethod
    def _require_root(peer: PeerCredentials, command: str) -> None:
        if peer.uid not in (0, os.geteuid()):
            raise CapsError(f"Only root may {command}.", RefusalReason.NOT_ALLOWED)

    def _impose(self) -> None:
        self._ceilings.poll()
        imposed = imposed_limits(
            self._settings,
            self._manager.planner(),
            self._ceilings.configured,
            self._ceilings.requested,
        )
        self._manager.impose(imposed)
        self.trouble, self._short = "", imposed.short
        if imposed.short and imposed.limit:  # 0 is the fleet's, before its first allotment
            self.trouble = (
                f"A ceiling of {imposed.limit / 1000:g} W cannot be kept: the devices' floors"
                f" take {imposed.short / 1000:g} W more. Raise the ceiling, or lower"
                " [caps] floor_watts and [autotune] floor."
            )

    def _refused(
        self, holder: int, peer: PeerCredentials, request: protocol.CapperRequest, error: CapsError
    ) -> RefusedReply:
        commands = protocol.CeilingRequest | protocol.RestoreRequest | protocol.AcceptRequest
        repeated = self._refused_before.get(holder) == str(error)
        self._refused_before[holder] = str(error)
        if not repeated or isinstance(request, commands):
            self._record(
                AuditEvent(
                    at=self._clock.now().wall,
                    deed=AuditAction.REFUSE,
                    device=error.device,
                    why=str(error),
                    job=getattr(request, "job", ""),
                    **peer._asdict(),
                )
            )
        return RefusedReply(
            reason=RefusalReason(error.refusal), sentence=str(error), device=error.device
        )


def _reason(text: str) -> str:
    """``text`` cut to its permitted length and made printable."""
    return printable(text[: protocol.MAX_REASON_LENGTH], " ")
