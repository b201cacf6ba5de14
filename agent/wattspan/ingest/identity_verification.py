"""The process that spans belong to: kernel evidence first, then checked claims.

In order of trust: the credentials of the peer of a Unix socket; the kernel's owner of a TCP
connection of this host; claims of a sender that the kernel identifies. A sender may name other
processes of its principal, and root the workers that descend from its process, which may have
dropped privileges. The socket for forwarders is for those that may name any process. Impossible
claims are not believed, and without evidence no process is charged. A principal is fixed when its
connection is accepted: a process that changes it, by exec of a setuid program or by a move to
another container, proves nothing more on that connection.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ResourceClaim
from wattspan.ingest.process_lookups import (
    MAX_ANCESTORS,
    NO_SENDER,
    ContainerProcesses,
    LookupBudget,
    ProcessLookup,
    RequestLookup,
    Sender,
    StartTimeMatcher,
    container_id,
    drops,
    find_by_pid,
    is_elsewhere,
    is_inner,
    is_same_container,
    may_name,
    unix_time,
)
from wattspan.model import MILLISECOND, SECOND, Consumer, Instant, Principal
from wattspan.ports import Clock
from wattspan.processes.inspector import LiveProcess, SocketOwner
from wattspan.sharing.fair_pool import FairCache, FairPool, share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.values import Outcome

# ------------------------------------------------------------------------------------ senders

RETRY_AFTER = SECOND
"""Delay of a search for which there was no time."""

LONGEST_SEARCH = SECOND
"""Time after which a search is given up: all listeners wait, and a user may have thousands of
processes with thousands of descriptors each."""

UNKNOWN_AGE = 5 * SECOND
"""Time for which a TCP connection of unknown age is identified by its two ends."""

_NEVER_EXPIRES = 2**63
_TICK = 10 * MILLISECOND


class SenderResolver:
    """Finds the sender of a connection, and remembers those of TCP connections."""

    def __init__(self, kernel: RequestLookup, searches: LookupBudget, pools: Pools) -> None:
        """``searches`` bounds the time of searches for the process of a connection."""
        self._kernel = kernel
        self._searches = searches
        # Those on TCP, with the time of expiry.
        self._senders: FairCache[Peer, tuple[Sender, int]] = FairCache(pools.make(PoolName.SENDERS))

    def resolve(self, peer: Peer, claimed: int | None, now: Instant) -> Sender:
        """The sender. ``claimed`` is the pid that the spans name, which is tried first.

        Of a TCP connection, NO_SENDER while the lookups of the request are unsure.
        """
        if peer.address is None or peer.local is None:
            return self._connected_by(peer, now)
        known = self._senders.get(peer)
        if known is not None and now.mono < known[1]:
            return known[0]
        owner = self._kernel.owner_of(peer.address, peer.local)
        until = _NEVER_EXPIRES if peer.accepted is not None else now.mono + UNKNOWN_AGE
        sender = NO_SENDER
        if owner is not None:
            process, complete = self._holder(owner, claimed, peer, now)
            sender = self._owning(owner, process)
            until = until if complete else now.mono + RETRY_AFTER
        if self._kernel.unsure:  # another process may have the socket
            return NO_SENDER
        self._senders.store(peer, (sender, until), peer.quota_owner, now.mono)
        return sender

    def _owning(self, owner: SocketOwner, process: LiveProcess | None) -> Sender:
        """The sender by the user and cgroup that created a TCP socket, and its holder.

        Without the unified hierarchy the kernel shows no cgroup: then the holder proves it. The
        user alone may be in any container, so root without a holder proves nothing.
        """
        proven = self._kernel.socket_principal(owner)
        if process is None:
            known = proven or (Principal(owner.user) if owner.user else None)
            return Sender(None, known)
        if proven is None and process.principal is not None and process.principal.user is not None:
            # The user of the socket is that of its creation, before any setuid program.
            proven = process.principal._replace(user=owner.user)
        return _unchanged(process, proven)

    def _connected_by(self, peer: Peer, now: Instant) -> Sender:
        """The process that opened a connection of a Unix socket, if it still runs.

        The kernel keeps the pid of the process that connected, also after another process
        inherited the connection, or got the pid.
        """
        process = None if peer.pid is None else self._kernel.look(peer.pid)
        if process is None or process.kernel:
            return Sender(None, peer.principal, peer.forwards)
        if peer.accepted is None:
            same = peer.uid is None or peer.uid in process.users
        else:
            same = _started_before(peer.accepted, process, now)
        if not same:
            return Sender(None, peer.principal, peer.forwards)
        return _unchanged(process, peer.principal)._replace(forwards=peer.forwards)

    def _holder(
        self, owner: SocketOwner, claimed: int | None, peer: Peer, now: Instant
    ) -> tuple[LiveProcess | None, bool]:
        """The process with the socket, and whether the search was complete.

        The claimed process is tried first, then all processes.
        """
        kernel, inode = self._kernel, owner.inode
        if claimed is not None and kernel.holds(claimed, inode):
            return kernel.look(claimed), True
        with self._searches as allowed:
            if not allowed:
                return None, False
            found = self._search(owner, peer, now)
            return found, found is not None or not self._searches.lasts(LONGEST_SEARCH)

    def _search(self, owner: SocketOwner, peer: Peer, now: Instant) -> LiveProcess | None:
        """The process that opened a socket, among those of its user.

        Known senders of the owner are tried first, then the newest processes. The other holders of
        the socket were forked from it. If it has ended, a single remaining holder counts.
        None after `LONGEST_SEARCH`.
        """
        kernel, inode = self._kernel, owner.inode
        holders: dict[Consumer, LiveProcess] = {}
        known = {
            sender.process.consumer.pid
            for other, (sender, _) in self._senders.items()
            if sender.process is not None and other.quota_owner == peer.quota_owner
        }
        for pid in sorted(kernel.pids(), key=lambda pid: (pid in known, pid), reverse=True):
            if self._searches.lasts(LONGEST_SEARCH):
                return None
            if kernel.user_id(pid) in (owner.user, 0) and kernel.holds(pid, inode):
                eldest = self._eldest(pid, inode)
                if eldest is None:
                    continue
                if peer.accepted is None or _started_before(peer.accepted, eldest, now):
                    return eldest
                holders[eldest.consumer] = eldest
        return next(iter(holders.values())) if len(holders) == 1 else None

    def _eldest(self, pid: int, inode: int) -> LiveProcess | None:
        """The eldest of the ancestors of ``pid`` that have the socket in an unbroken line.

        None after `LONGEST_SEARCH`.
        """
        eldest = process = self._kernel.look(pid)
        for _ in range(MAX_ANCESTORS):
            if self._searches.lasts(LONGEST_SEARCH):
                return None
            if process is None or not self._kernel.holds(process.parent, inode):
                break
            eldest = process = self._kernel.look(process.parent)
        return eldest


def _unchanged(process: LiveProcess, proven: Principal | None) -> Sender:
    """``process``, which had the principal ``proven`` when it connected; no sender if it changed.

    Root that has dropped its privileges since is the sender with its present ones.
    """
    if proven is not None and (process.principal == proven or drops(proven, process.principal)):
        return Sender(process, process.principal)
    return NO_SENDER


def _started_before(accepted: int, process: LiveProcess, now: Instant) -> bool:
    return process.born <= accepted + now.asleep + _TICK


# ------------------------------------------------------------------------------------- claims

# Names of programs, of 15 bytes at most; Beyla and OBI send the spans of other processes.
_COLLECTOR = re.compile(r"(\S+-)?otel\w*-?(col\S*|co?)|alloy|beyla|fluent-bit|obi|vector")


class ClaimVerifier:
    """Verifies the claims of resources; remembers which processes forward spans of others."""

    def __init__(
        self,
        kernel: RequestLookup,
        containers: ContainerProcesses,
        starts: StartTimeMatcher,
        forwarders: FairPool[Consumer],
        *,
        unproven: bool = False,
        hosts: Collection[str] = (),
    ) -> None:
        """``unproven``: believe pids of unidentified senders; ``hosts``: the ids of this host."""
        self._kernel = kernel
        self._unproven, self._hosts = unproven, hosts
        self._containers = containers
        self._starts = starts
        self._forwarders = forwarders

    def verify(self, sender: Sender, claim: ResourceClaim) -> Consumer | Outcome:
        """The process of the spans; NOT_BELIEVED, or UNKNOWN_PROCESS without evidence."""
        container = container_id(claim.container)
        created = unix_time(claim.created) if claim.created else None
        process = sender.process
        if claim.pid is None:
            return self._without_pid(sender, container)
        bare = not container and created is None
        alien = bare and is_elsewhere(claim.host, self._hosts)
        if sender.forwards and (alien or (bare and is_inner(process, claim.pid))):
            return Outcome.UNKNOWN_PROCESS
        if process is not None and (
            self._is_sender(process, claim.pid, container, created)
            or self._is_ancestor(process, claim.pid, created)
        ):
            return process.consumer
        found = self._claimed(claim.pid, container, sender)
        if (
            found is None
            and process is not None
            and self._is_ended_ancestor(process, container, created)
        ):
            return process.consumer
        if isinstance(found, Outcome):
            return found
        if alien:
            return Outcome.UNKNOWN_PROCESS
        if found is None or not self._is_believable(found, sender, created, container):
            return Outcome.NOT_BELIEVED
        if process is not None:
            self._remember_forwarder(process, found)
        return found.consumer

    def is_forwarder(self, consumer: Consumer) -> bool:
        """True if the process has sent spans of other processes."""
        return consumer in self._forwarders

    def _without_pid(self, sender: Sender, container: str) -> Consumer | Outcome:
        """The sender, unless it forwards spans, as collectors do, or claims another container."""
        process = sender.process
        if process is not None and (not container or self._may_be_in(container, process)):
            forwards = sender.forwards or self.is_forwarder(process.consumer)
            forwards = forwards or _COLLECTOR.fullmatch(process.name) is not None
            return Outcome.UNKNOWN_PROCESS if forwards else process.consumer
        members = self._containers.members(container) if container else None
        members = self._proven(members or (), container, sender)
        if len(members) != 1:
            return Outcome.UNKNOWN_PROCESS
        believed = self._is_believable(members[0], sender, None, container)
        return members[0].consumer if believed else Outcome.NOT_BELIEVED

    def _is_sender(
        self, process: LiveProcess, pid: int, container: str, created: int | None
    ) -> bool:
        """True if ``pid`` is the sender's in the agent's pid namespace or in an inner one.

        Every container has the same small pids, so there the start time must match as well.
        """
        if pid not in process.pids or (container and not self._may_be_in(container, process)):
            return False
        return len(process.pids) == 1 or created is None or self._starts.matches(process, created)

    def _is_ancestor(self, process: LiveProcess, pid: int, created: int | None) -> bool:
        """True if the memory of the sender is a copy of that of process ``pid``.

        Until a forked process executes a program, its resource has the pid of its ancestor.
        """
        return any(
            pid in ancestor.pids and (created is None or self._starts.matches(ancestor, created))
            for ancestor in self._copied_ancestors(process)
        )

    def _is_ended_ancestor(self, process: LiveProcess, container: str, created: int | None) -> bool:
        """True if an unused pid can be that of an ended ancestor of the sender."""
        return (
            process.copied
            and not self.is_forwarder(process.consumer)
            and (created is None or self._starts.is_before(created, process))
            and (not container or self._may_be_in(container, process))
        )

    def _copied_ancestors(self, process: LiveProcess) -> Iterator[LiveProcess]:
        """The ancestors with the same memory, from forks without exec, the nearest first."""
        for _ in range(MAX_ANCESTORS):
            parent = self._kernel.look(process.parent) if process.copied else None
            if parent is None:
                return
            yield parent
            process = parent

    def _claimed(self, pid: int, container: str, sender: Sender) -> LiveProcess | Outcome | None:
        """The process ``pid`` in the claimed container, else in the sender's pid namespace."""
        process = sender.process
        if container:
            members = self._containers.members(container)
        elif process is not None and len(process.pids) > 1:
            members = self._containers.neighbours(process)
        else:
            return self._kernel.look(pid)
        if not members:
            return Outcome.UNKNOWN_PROCESS
        proven = self._proven(members, container, sender)
        return find_by_pid(pid, proven) or find_by_pid(pid, members)

    def _proven(
        self, members: Sequence[LiveProcess], container: str, sender: Sender
    ) -> Sequence[LiveProcess]:
        """The members that the sender may name; if it may name any or none, those of root's name.

        A user may give a cgroup of his own the name of another's container. All if there are none.
        """
        if sender.principal is None or sender.forwards:
            proven = [one for one in members if _is_of_container(one.principal, container)]
        else:
            proven = [one for one in members if may_name(self._kernel, sender, one)]
        return proven or members

    def _is_believable(
        self, found: LiveProcess, sender: Sender, created: int | None, container: str
    ) -> bool:
        """True if the claim is possible, and the sender may act for the process."""
        if found.kernel or (created is not None and not self._starts.matches(found, created)):
            return False
        corroborated = created is not None or bool(container)
        # Most containers have a pid 1 of root; the pid 1 of the host sends no spans.
        if found.pids == (1,) and not corroborated:
            return False
        if sender.forwards:
            return True
        if sender.principal is None:
            return self._unproven and corroborated
        return len(found.users) == 1 and may_name(self._kernel, sender, found)

    def _may_be_in(self, container: str, process: LiveProcess) -> bool:
        """True if the process is in the container, or its container is unknown."""
        inside = self._containers.contains(container, process)
        return not self._containers.members(container) if inside is None else inside

    def _remember_forwarder(self, sender: LiveProcess, other: LiveProcess) -> None:
        """Unless ``other`` is the sender or a forked copy of it that inherited its connection."""
        own = {one.consumer for one in (other, *self._copied_ancestors(other))}
        if sender.consumer not in own and not self._kernel.unsure:
            self._forwarders.admit(sender.consumer, share_path(sender.principal))


def _is_of_container(principal: Principal | None, container: str) -> bool:
    """True if root named the cgroup of a container, or a pod, for processes of ``principal``."""
    return principal is not None and bool(
        principal.pod or is_same_container(principal.container, container)
    )


# --------------------------------------------------------------------------------- identities

CERTAIN_TTL = 250 * MILLISECOND
"""Time for which an identity holds unchecked: no host reuses a pid in so short a time."""

UNCERTAIN_TTL = 2 * SECOND
"""Time until an unknown identity is resolved again."""

KEEP_AFTER_EXIT = 60 * SECOND
"""Time after the end of a process in which a forwarder may still send its spans."""

MAX_CHECKS = 256
"""Different claims of one request that are checked; the spans of others have no process."""

_CHECK_TIME_SHARE = 4
"""Checks of claims take at most one part in this many of the listeners' time."""

_CHECK_TIME = SECOND // 10
"""Time that the checks of one owner take at a stretch: that of 256 new claims on a slow host."""

MAX_CLAIM_LENGTH = 512
"""Characters of a claim that are read: more than any genuine one has."""


class SpanIdentity(NamedTuple):
    """The process of the spans of one resource, and the evidence for it.

    ``found`` is NOT_BELIEVED for an impossible claim, UNKNOWN_PROCESS without evidence;
    ``principal`` is that of the process. ``sender`` is the kernel's evidence for the request.
    """

    found: Consumer | Outcome
    principal: Principal | None = None
    sender: Sender = NO_SENDER


_IdentityKey = tuple[Peer, ResourceClaim]


class _CachedIdentity(NamedTuple):
    identity: SpanIdentity
    resolved_at: int
    until: int
    ended_at: int | None = None  # time at which the end of the process was first noticed


class IdentityResolver:
    """Resolves senders and claims to processes. Safe from any thread.

    An identity is a pid with its start time, so a process that gets the same pid later is another
    one. The best time to resolve a sender is while it waits for the response, because then it
    still runs.
    """

    def __init__(
        self,
        clock: Clock,
        kernel: ProcessLookup,
        *,
        unproven: bool = False,
        hosts: Collection[str] = (),
        pools: Pools | None = None,
    ) -> None:
        pools = pools or Pools()
        self._clock = clock
        self._kernel = kernel
        self._request = RequestLookup(kernel)
        self._searches = LookupBudget(clock)
        self._checks = LookupBudget(clock, _CHECK_TIME_SHARE, _CHECK_TIME, self._searches)
        self._starts = StartTimeMatcher()
        self._senders = SenderResolver(self._request, self._searches, pools)
        self._claims = ClaimVerifier(
            self._request,
            ContainerProcesses(self._request, clock, self._searches),
            self._starts,
            pools.make(PoolName.FORWARDERS),
            unproven=unproven,
            hosts=hosts,
        )
        identities = pools.make(PoolName.IDENTITIES)
        self._identities: FairCache[_IdentityKey, _CachedIdentity] = FairCache(identities)
        self._lock = threading.Lock()
        self._starts.observe(clock.now())

    def announcer(self, pid: int, proven: Principal) -> Consumer | Outcome | None:
        """The process of ``pid``, which connected as ``proven``; None if it has ended.

        None too if it cannot be read for want of descriptors or memory. NOT_BELIEVED if it has
        another principal now.
        """
        before, process = self._kernel.shortage, self._kernel.look(pid)
        if process is None or self._kernel.shortage is not before:
            return None
        unchanged = _unchanged(process, proven) is not NO_SENDER
        return process.consumer if unchanged else Outcome.NOT_BELIEVED

    def principal(self, consumer: Consumer) -> Principal | None:
        """The present principal of a process; None if it has ended."""
        same = self._kernel.identify(consumer.pid) == consumer
        return self._kernel.principal(consumer.pid) if same else None

    def may_announce(self, sender: Sender, announcer: Consumer) -> bool | None:
        """True if ``announcer``, of another principal, is a worker of the sender's process.

        None if that cannot be read for want of descriptors or memory.
        """
        before, found = self._kernel.shortage, self._kernel.look(announcer.pid)
        same = found is not None and found.consumer == announcer
        allowed = same and found is not None and may_name(self._kernel, sender, found)
        return allowed if allowed or self._kernel.shortage is before else None

    def resolve(self, peer: Peer, claims: Iterable[ResourceClaim]) -> tuple[SpanIdentity, ...]:
        """The process of the spans of each resource in one request of ``peer``."""
        read = [_read(claim) for claim in claims]
        found: dict[ResourceClaim, SpanIdentity] = {}
        sender, left = NO_SENDER, MAX_CHECKS
        with self._lock:
            self._request.forget()
            for budget in (self._checks, self._searches):
                budget.charge(peer.quota_owner)
            for claim in dict.fromkeys(read):
                known = self._identities.get((peer, claim))
                if known is None or self._clock.monotonic() >= known.until:
                    known = self._checked(peer, claim, known) if left else None
                    left = 0 if known is None else left - 1
                if known is None:
                    found[claim] = SpanIdentity(Outcome.UNKNOWN_PROCESS, sender=sender)
                else:
                    found[claim], sender = known.identity, known.identity.sender
        return tuple(found[claim] for claim in read)

    def _checked(
        self, peer: Peer, claim: ResourceClaim, known: _CachedIdentity | None
    ) -> _CachedIdentity | None:
        """The identity, renewed or resolved; None if the owner's time for checks is spent.

        Without descriptors or memory nothing is proven or refuted: a verified identity stays, and
        another one is unknown and resolved again by the next request.
        """
        with self._checks as allowed:
            if not allowed:
                return None
            now = self._clock.now()
            self._starts.observe(now)
            cached = self._renewed(peer, claim, known, now.mono)
            if cached is None:
                identity = self._verified(peer, claim, now)
                ttl = CERTAIN_TTL if isinstance(identity.found, Consumer) else UNCERTAIN_TTL
                cached = _CachedIdentity(identity, now.mono, now.mono + ttl)
            if self._request.unsure:
                return _presumed(peer, known, now.mono)
            self._identities.store((peer, claim), cached, peer.quota_owner, now.mono)
        return cached

    def _verified(self, peer: Peer, claim: ResourceClaim, now: Instant) -> SpanIdentity:
        sender = self._senders.resolve(peer, claim.pid, now)
        found = self._claims.verify(sender, claim)
        principal = None
        if isinstance(found, Consumer):
            own = sender.process is not None and sender.process.consumer == found
            principal = sender.principal if own else self._request.principal(found.pid)
        return SpanIdentity(found, principal, sender)

    def _renewed(
        self, peer: Peer, claim: ResourceClaim, known: _CachedIdentity | None, now: int
    ) -> _CachedIdentity | None:
        """The known identity if its process still runs unchanged or has ended recently."""
        if known is None or not isinstance(known.identity.found, Consumer):
            return None
        _, principal, sender = known.identity
        found = known.identity.found
        present = self._request.identify(found.pid)
        if present == found:
            stale = _is_stale(peer, known, now)
            ambiguous = claim.pid is None and self._claims.is_forwarder(found)
            changed = self._request.principal(found.pid) != principal or self._has_changed(sender)
            kept = known._replace(until=now + CERTAIN_TTL, ended_at=None)
            return None if stale or ambiguous or changed else kept
        ended_at = now if known.ended_at is None else known.ended_at
        if present is None and now - ended_at < KEEP_AFTER_EXIT:
            return known._replace(until=now + CERTAIN_TTL, ended_at=ended_at)
        return None

    def _has_changed(self, sender: Sender) -> bool:
        """True if the sender's process runs and has another principal than before."""
        process = sender.process
        if process is None or self._request.identify(process.consumer.pid) != process.consumer:
            return False
        return self._request.principal(process.consumer.pid) != sender.principal


def _presumed(peer: Peer, known: _CachedIdentity | None, now: int) -> _CachedIdentity:
    """The verified identity, if there is one, while nothing can be read."""
    verified = known is not None and isinstance(known.identity.found, Consumer)
    if known is not None and verified and not _is_stale(peer, known, now):
        return known
    unix = Sender(None, peer.principal, peer.forwards)
    sender = unix if peer.address is None else NO_SENDER
    return _CachedIdentity(SpanIdentity(Outcome.UNKNOWN_PROCESS, sender=sender), now, now)


def _is_stale(peer: Peer, known: _CachedIdentity, now: int) -> bool:
    """True for a connection of unknown age, which may be another one by now."""
    return peer.accepted is None and now - known.resolved_at >= UNKNOWN_AGE


def _read(claim: ResourceClaim) -> ResourceClaim:
    """The part of a claim that is read, without its names."""
    _, pid, created, container, _, host = claim
    if len(created) + len(container) > MAX_CLAIM_LENGTH:
        half = MAX_CLAIM_LENGTH // 2
        created, container = created[:half], container[:half]
    return ResourceClaim("", pid, created, container, host=host)
