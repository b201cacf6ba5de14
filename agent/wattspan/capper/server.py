"""The socket server: one thread and one loop for connections, requests, turns and the end.

A client that sends an invalid request is told so. A client that sends too much or too fast, or
does not read, is disconnected, and its leases end. No input ends the loop. Every request is
answered by the state afterwards, or by a refusal.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from wattspan.capper import protocol
from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.cap_manager import CapManager
from wattspan.capper.ceilings import PowerCeilings
from wattspan.capper.journal import JournalError
from wattspan.capper.planner import imposed_limits, power_range, unmatched_settings
from wattspan.capper.protocol import (
    MAX_LINE_BYTES,
    RefusalReason,
    RefusedReply,
    StateReply,
    knob_row,
)
from wattspan.model import SECOND, CapKey
from wattspan.ports import CapsError, Clock
from wattspan.sharing.pools import RateLimiter
from wattspan.util.text import printable
from wattspan.util.unix_sockets import PeerCredentials, peer_credentials, uids_of

TICK: Final = SECOND
MAX_CONNECTIONS: Final = 64
MAX_CONNECTIONS_PER_USER: Final = 32
"""Below the total, so that no user can exclude root."""
MAX_REQUEST_RATE: Final = 100
MAX_UNREAD_BYTES: Final = 1024 * 1024
"""Bytes of replies that a peer may leave unread."""

_TOO_LONG = f"A request has at most {MAX_LINE_BYTES} bytes."


def refuse_connections(listener: socket.socket, sentence: str) -> None:
    """Refuse every connection that waits on ``listener``."""
    listener.setblocking(False)
    with suppress(OSError):
        while True:
            _refuse(listener.accept()[0], RefusalReason.ENDING, sentence)


def _refuse(connection: socket.socket, reason: RefusalReason, sentence: str) -> None:
    """Send a refusal, and close."""
    with connection, suppress(OSError):
        connection.send(_encode(RefusedReply(reason=reason, sentence=sentence)))


def _encode(reply: StateReply | RefusedReply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


class _DisconnectError(Exception):
    """The connection is to be closed for this reason."""


@dataclass(eq=False, slots=True)
class _ClientConnection:
    socket: socket.socket
    number: int
    peer: PeerCredentials
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class CapperSocketServer:
    """Listens until ``stop`` is called, from a signal handler or from anywhere."""

    def __init__(
        self,
        listener: socket.socket,
        requests: RequestHandler,
        clock: Clock,
        allowed: frozenset[int],
        *,
        alive: Callable[[], None] = lambda: None,
        refusal: Callable[[PeerCredentials], str | None] = lambda _: None,
    ) -> None:
        """``alive`` is called every turn, for a watchdog.

        ``refusal`` is the reason why a peer of user 0 is not root of this host, None if it is.
        """
        self._listener, self._requests, self._clock = listener, requests, clock
        self._allowed, self._alive, self._not_root = allowed, alive, refusal
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _ClientConnection] = {}
        self._numbers = 0
        self._rate = RateLimiter(MAX_REQUEST_RATE, MAX_REQUEST_RATE)
        self._decoder = msgspec.json.Decoder(protocol.AnyRequest)
        self._wake, self._woken = socket.socketpair()
        for one in (listener, self._wake, self._woken):
            one.setblocking(False)
        self._is_listening = False
        self._listen()
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._stopped = False
        self._asked: deque[Callable[[], None]] = deque()

    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """End the loop; safe in a signal handler."""
        self._stopped = True
        with suppress(OSError):
            self._wake.send(b"x")

    def ask(self, act: Callable[[], None]) -> None:
        """Have the loop call ``act`` between two requests; safe in a signal handler."""
        self._asked.append(act)
        with suppress(OSError):
            self._wake.send(b"x")

    def permit(self, allowed: frozenset[int]) -> None:
        """Accept these users from now on; other users are disconnected."""
        self._allowed = allowed
        for connection in list(self._connections.values()):
            if connection.peer.uid not in allowed:
                self._close(connection)

    def follow(self, descriptor: int) -> None:
        """End the loop when ``descriptor`` ends, because its other end was closed."""

        def look(mask: int) -> None:
            with suppress(BlockingIOError):
                if not os.read(descriptor, 4096):
                    self._selector.unregister(descriptor)
                    self.stop()

        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, look)

    def run(self) -> None:
        """Serve; returns once stopped."""
        due = self._clock.monotonic()
        while not self.stopped():
            lapse = self._requests.next_expiry
            if self._clock.monotonic() >= (due if lapse is None else min(due, lapse)):
                self._requests.turn()
                self._alive()
                self._listen()
                due = self._clock.monotonic() + TICK
                lapse = self._requests.next_expiry
            until = due if lapse is None else min(due, lapse)
            wait = max(0, until - self._clock.monotonic())
            for key, mask in self._selector.select(wait / SECOND):
                if self.stopped():
                    break
                key.data(mask)
            while self._asked and not self.stopped():
                self._asked.popleft()()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        self._selector.close()
        for one in (self._wake, self._woken, self._listener):
            one.close()

    # --------------------------------------------------------------------------- inner workings

    def _drain(self, mask: int) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _listen(self) -> None:
        if not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._is_listening = True

    def _accept(self, mask: int) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has gone already
        except OSError:  # most likely no descriptor is free: the listener would stay readable
            self._selector.unregister(self._listener)
            self._is_listening = False  # until the next turn
            return
        try:
            accepted.setblocking(False)
            peer = peer_credentials(accepted)
        except OSError:  # the client has gone already
            accepted.close()
            return
        if (refusal := self._refusal(peer)) is not None:
            _refuse(accepted, RefusalReason.NOT_ALLOWED, refusal)
            return
        self._numbers += 1
        connection = _ClientConnection(accepted, self._numbers, peer)
        self._connections[self._numbers] = connection
        self._selector.register(accepted, selectors.EVENT_READ, partial(self._serve, connection))

    def _refusal(self, peer: PeerCredentials) -> str | None:
        if peer.uid not in self._allowed:
            return f"User {peer.uid} may not ask the capper; name it in [caps] users."
        same = sum(one.peer.uid == peer.uid for one in self._connections.values())
        full = len(self._connections) >= MAX_CONNECTIONS
        if full or (peer.uid and same >= MAX_CONNECTIONS_PER_USER):
            return "The capper has too many connections; close some."
        return self._not_root(peer) if peer.uid == 0 else None

    def _serve(self, connection: _ClientConnection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._receive(connection)
            self._send(connection)
        except _DisconnectError as error:
            self._close(connection, str(error))
        except OSError:
            self._close(connection)

    def _receive(self, connection: _ClientConnection) -> None:
        try:
            received = connection.socket.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError
        connection.received += received
        while (end := connection.received.find(b"\n")) >= 0:
            line = bytes(connection.received[:end])
            del connection.received[: end + 1]
            if not self._rate.admits(connection.number, self._clock.monotonic()):
                raise _DisconnectError(f"More than {MAX_REQUEST_RATE} requests a second.")
            if end > MAX_LINE_BYTES:
                raise _DisconnectError(_TOO_LONG)
            connection.unsent += _encode(self._reply(connection, line))
            if len(connection.unsent) > MAX_UNREAD_BYTES:
                raise _DisconnectError("Replies are not read.")
        if len(connection.received) > MAX_LINE_BYTES:
            raise _DisconnectError(_TOO_LONG)

    def _reply(self, connection: _ClientConnection, line: bytes) -> StateReply | RefusedReply:
        try:
            request = self._decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            cause = printable(str(error)[:200], " ")
            sentence = f"The request is invalid: {cause}. See the reference page on caps."
            return RefusedReply(reason=RefusalReason.MALFORMED, sentence=sentence)
        return self._requests.answer(connection.number, connection.peer, request)

    def _send(self, connection: _ClientConnection) -> None:
        if connection.unsent:
            with suppress(BlockingIOError):
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        key = self._selector.get_key(connection.socket)
        if key.events != wanted:
            self._selector.modify(connection.socket, wanted, key.data)

    def _close(self, connection: _ClientConnection, sentence: str = "") -> None:
        """Close a connection, with a refusal if it has a ``sentence``."""
        self._connections.pop(connection.number, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        if sentence:
            _refuse(connection.socket, RefusalReason.MALFORMED, sentence)
        connection.socket.close()
        self._requests.gone(connection.number)


# ---------------------------------------------------------------------------------- requests

MAX_JOBS = 64
MOVES_PER_SECOND, MOVE_BURST = 2, 60
"""Changes of one knob or its ceiling that one user may make; a tuner makes two a second."""


class RequestHandler:
    """Carries out requests and the turns between them. Belongs to one thread."""

    def __init__(
        self,
        manager: CapManager,
        ceilings: PowerCeilings,
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
        self._manager, self.ceilings = manager, ceilings
        self._refused_before: dict[int, str] = {}
        """The last refusal of each connection, recorded once; a granted request ends it."""
        self._clock, self._record = clock, record
        self._short = 0
        self._rate = RateLimiter(MOVES_PER_SECOND, MOVE_BURST)
        self._introduced: set[int] = set()

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
        self._manager.release(holder, why="its holder has gone")

    def turn(self) -> None:
        """Impose limits, expire leases and reconcile; to be called every second."""
        self._manager.find_devices()
        self._impose()
        self._manager.turn()
        planner = self._manager.planner()
        if not planner.hidden:
            names, states = planner.demand.limits.tunable, [*map(planner.ranged, planner.states)]
            self.unmatched = frozenset(unmatched_settings(self.ceilings.settings, states, names))

    @property
    def next_expiry(self) -> int | None:
        """End of the next lease or allotment, or None: a turn is due then, before the regular."""
        lease = self._manager.leases.next_expiry
        due = (lease, self.ceilings.fleet.expires)
        return min((one for one in due if one is not None), default=None)

    def state(self) -> StateReply:
        manager = self._manager
        return StateReply(
            rows=[knob_row(row) for row in manager.rows()],
            lease=manager.leases.longest,
            ceiling=self.ceilings.limit,
            writes=manager.writes,
            restores=manager.restores,
            resets=manager.resets,
            pid=os.getpid(),
            agent=self._agent,
            suspended=manager.suspended,
            ceilings=list(self.ceilings.rows),
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
                self.ceilings.request(request.limit, _reason(request.why), request.ttl, peer)
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
        fleet = self.ceilings.fleet
        permitted = uids_of(self.ceilings.settings.users)[0] | {0, os.geteuid()}
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
        fleet = self.ceilings.fleet
        if fleet.limit is None:
            return None
        reserve = self.ceilings.settings.reserve_watts * 1000
        sums = power_range(self.ceilings.settings, self._manager.planner())
        return protocol.AllotmentRow(
            limit=fleet.limit,
            safe=fleet.safe,
            until=fleet.until,
            floor=sums.floor + reserve,
            original=sums.original + reserve,
            enforced=None if sums.enforced is None else sums.enforced + reserve,
            held=sums.tuned,
        )

    def _restore(self, peer: PeerCredentials) -> None:
        errors = self._manager.restore()
        failed = f", {len(errors)} could not be restored" if errors else ""
        self._record_command(peer, f"restore: everything is given back{failed}")
        self.ceilings.lift_all(peer)
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
        self.ceilings.poll()
        imposed = imposed_limits(
            self.ceilings.settings,
            self._manager.planner(),
            self.ceilings.configured,
            self.ceilings.requested,
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
