"""Who sends: the process, or at least the user, at the other end of a connection."""

from __future__ import annotations

from typing import NamedTuple

from wattspan.http.messages import Peer
from wattspan.ingest.process_lookup import LookupBudget, ProcessLookup, ProcessSnapshot, SocketOwner
from wattspan.model import MILLISECOND, SECOND, Consumer, Instant

RETRY_AFTER = SECOND
"""When to try once more what there was no time for."""

UNKNOWN_AGE = 5 * SECOND
"""How long a TCP connection of unknown age may be taken for the same by its two ends."""

_NEVER_EXPIRES = 2**63
_TICK = 10 * MILLISECOND
_CONNECTIONS = 1024
_USUAL_OWNERS = 16
_GENERATIONS = 64


class Sender(NamedTuple):
    """As far as the kernel proves it. ``user`` is None for who may be anybody, anywhere."""

    living: ProcessSnapshot | None
    user: int | None


UNKNOWN_SENDER = Sender(None, None)


class SenderResolver:
    """Finds senders. On TCP it looks once at each connection, whatever is sent over it."""

    def __init__(self, kernel: ProcessLookup, asking: LookupBudget, looking: LookupBudget) -> None:
        self._kernel = kernel
        self._asking = asking  # whose a connection is
        self._looking = looking  # which of a user's processes has it
        self._known: dict[Peer, tuple[Sender, int]] = {}  # on TCP, until when
        self._usual: dict[int, None] = {}  # pids that send over TCP, the latest last

    def of(self, peer: Peer, claimed: int | None, now: Instant) -> Sender | None:
        """The sender; None if now is no time to look.

        ``claimed`` is the pid that the spans name, the first to be looked at.
        """
        if peer.address is None or peer.local is None:
            return Sender(self._opener(peer, now), peer.uid)
        known = self._known.get(peer)
        if known is not None and now.mono < known[1]:
            return known[0]
        with self._asking as allowed:
            if not allowed:
                return None
            owner = self._kernel.owner_of(peer.address, peer.local)
        until = _NEVER_EXPIRES if peer.accepted is not None else now.mono + UNKNOWN_AGE
        sender = UNKNOWN_SENDER
        if owner is not None:
            living, looked = self._holder(owner, claimed, peer.accepted, now)
            sender = Sender(living, owner.user)
            until = until if looked else now.mono + RETRY_AFTER
        if len(self._known) >= _CONNECTIONS:
            self._known = dict(list(self._known.items())[_CONNECTIONS // 4 :])
        self._known[peer] = sender, until
        return sender

    # --------------------------------------------------------------------------- Unix sockets

    def _opener(self, peer: Peer, now: Instant) -> ProcessSnapshot | None:
        """Who opened the connection, if it still lives.

        The kernel keeps the pid of whoever connected, also when another process has inherited
        the connection, and the pid, since.
        """
        if peer.pid is None:
            return None
        living = self._kernel.look(peer.pid)
        if living is None or living.kernel:
            return None
        if peer.accepted is None:
            return living if peer.uid is None or peer.uid in living.users else None
        return living if _born_before(peer.accepted, living, now) else None

    # ------------------------------------------------------------------------------------ TCP

    def _holder(
        self, owner: SocketOwner, claimed: int | None, accepted: int | None, now: Instant
    ) -> tuple[ProcessSnapshot | None, bool]:
        """Who has the socket: who says so, who usually sends, or anybody; and if all was tried."""
        kernel, inode = self._kernel, owner.inode
        if claimed is not None and kernel.holds(claimed, inode):
            return self._noted(kernel.look(claimed)), True
        with self._looking as allowed:
            if not allowed:
                return None, False
            for pid in reversed(self._usual):
                if kernel.holds(pid, inode):
                    return self._noted(self._eldest(pid, inode)), True
            return self._noted(self._search(owner, accepted, now)), True

    def _search(
        self, owner: SocketOwner, accepted: int | None, now: Instant
    ) -> ProcessSnapshot | None:
        """Look through the processes of a socket's user, the newest first, for who opened it.

        The others that have it were forked since. Where the one that opened it is gone, it is
        the only one that is left.
        """
        kernel, inode = self._kernel, owner.inode
        heirs: dict[Consumer, ProcessSnapshot] = {}
        for pid in sorted(kernel.pids(), reverse=True):
            if kernel.owner(pid) in (owner.user, 0) and kernel.holds(pid, inode):
                eldest = self._eldest(pid, inode)
                if eldest is None:
                    continue
                if accepted is None or _born_before(accepted, eldest, now):
                    return eldest
                heirs[eldest.consumer] = eldest
        return next(iter(heirs.values())) if len(heirs) == 1 else None

    def _noted(self, living: ProcessSnapshot | None) -> ProcessSnapshot | None:
        if living is not None:
            self._usual.pop(living.consumer.pid, None)
            self._usual[living.consumer.pid] = None
            if len(self._usual) > _USUAL_OWNERS:
                del self._usual[next(iter(self._usual))]
        return living

    def _eldest(self, pid: int, inode: int) -> ProcessSnapshot | None:
        """The holder from whom the others, as far up as they go, inherited."""
        eldest = living = self._kernel.look(pid)
        for _ in range(_GENERATIONS):
            if living is None or not self._kernel.holds(living.parent, inode):
                break
            eldest = living = self._kernel.look(living.parent)
        return eldest


def _born_before(accepted: int, living: ProcessSnapshot, now: Instant) -> bool:
    return living.born <= accepted + now.asleep + _TICK
