"""Families of processes: descendants, also those that have ended, and the services of senders.

The process that sends spans may not be the one that uses a GPU: API servers and GPU workers are
siblings below a launcher. The *service* of a sender is the smallest subtree that holds the sender
and a user of a GPU, of one principal, in one group, and with no unrelated sender in it. A program
that starts unrelated ones (a shell, a multiplexer, a service manager, a step of a scheduler) is no
launcher: what it starts stays apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from wattspan.model import SECOND, Consumer, Payer, Principal
from wattspan.sharing.fair_pool import FairPool, share_path
from wattspan.sharing.pools import PoolName, Pools

MAX_PROCESSES = PoolName.FAMILIES.limit
"""Running processes with a known parent, and as many ended ones; the user with most loses."""

REMOVAL_INTERVAL = 10 * SECOND
"""Ended processes are removed together, because each removal reads all parents."""

_INIT = 1
_MAX_DEPTH = 64  # launchers above a sender


@dataclass(frozen=True, slots=True)
class _Member:
    """A process; its ``parent`` is the one that had this pid at ``born``, in ticks since boot."""

    parent: int
    born: int
    container: str = ""
    principal: Principal | None = None
    groups: tuple[Hashable, ...] = ()
    starts_others: bool = False


class ServiceProcesses(NamedTuple):
    """The processes of a service; ``launcher`` is the one above the sender, None for none.

    ``apart`` are those of unrelated senders in the same container.
    """

    members: frozenset[Payer]
    launcher: Consumer | None = None
    apart: frozenset[Payer] = frozenset()


class ProcessFamilies:
    """Parents, containers and principals of processes that run, or ended recently.

    When an ended process is removed, its children become those of its own parent: the families
    of both stay whole.
    """

    def __init__(self, lifetime: int, pools: Pools | None = None) -> None:
        """``lifetime``: nanoseconds for which an ended process is kept."""
        self._lifetime = lifetime
        pools = pools or Pools()
        # Apart, so that many short-lived processes displace no running one.
        self._running: FairPool[Consumer] = pools.make(PoolName.FAMILIES)
        self._kept: FairPool[Consumer] = pools.make(PoolName.FAMILIES)
        self._known: dict[Consumer, _Member] = {}
        self._children: dict[int, list[Consumer]] | None = None  # by the parent's pid
        self._by_pid: dict[int, list[Consumer]] = {}
        self._ended: deque[tuple[int, Payer]] = deque()
        self._removed_at = 0
        self._forgotten: set[Payer] = set()  # ended ones that are to be removed before their time

    def __len__(self) -> int:
        return len(self._known)

    def add(
        self,
        consumer: Consumer,
        parent: int,
        container: str = "",
        principal: Principal | None = None,
        *,
        groups: tuple[Hashable, ...] = (),
        starts_others: bool = False,
    ) -> None:
        """Add a process, or describe it anew: it keeps its first parent when that has ended.

        ``groups`` identify its cgroup; ``starts_others`` is True for a program whose children are
        unrelated, such as a shell.
        """
        before = self._known.pop(consumer, _Member(parent, consumer.started))
        # It becomes the last one described.
        self._known[consumer] = _Member(
            before.parent,
            before.born,
            container or before.container,
            before.principal if principal is None else principal,
            groups,
            starts_others,
        )
        self._place(consumer, self._kept if consumer in self._kept else self._running)

    def _place(self, consumer: Consumer, pool: FairPool[Consumer]) -> None:
        """Give a known process a place of its principal in ``pool``, and in no other."""
        self._running.remove(consumer)
        self._kept.remove(consumer)
        admission = pool.admit(consumer, share_path(self._known[consumer].principal))
        for lost in admission.displaced if admission else (consumer,):
            del self._known[lost]
        self._children = None

    def known(self, payers: Collection[Payer]) -> frozenset[Payer]:
        """Those that run, or ended recently."""
        return frozenset(self._known.keys() & payers)

    def end(self, payer: Payer, now: int) -> None:
        """The process has ended."""
        self._ended.append((now, payer))
        if isinstance(payer, Consumer) and payer in self._known:
            self._place(payer, self._kept)
        if len(self._ended) > 3 * MAX_PROCESSES:
            self._forgotten.update(one for _, one in self._ended if not self._is_kept(one))
            self._ended = deque(each for each in self._ended if self._is_kept(each[1]))

    def _is_kept(self, payer: Payer) -> bool:
        return isinstance(payer, Consumer) and payer in self._kept

    def remove_ended(self, now: int) -> set[Payer]:
        """Remove the processes that ended long ago, if a removal is due; returns them."""
        if now - self._removed_at < REMOVAL_INTERVAL:
            return set()
        self._removed_at = now
        removed, self._forgotten = self._forgotten, set()
        while self._ended and now - self._ended[0][0] > self._lifetime:
            removed.add(self._ended.popleft()[1])
        gone = [one for one in removed if isinstance(one, Consumer)]
        self._inherit({one: self._known[one] for one in gone if one in self._known})
        for one in gone:
            self._known.pop(one, None)
            self._running.remove(one)
            self._kept.remove(one)
        return removed

    def _inherit(self, gone: dict[Consumer, _Member]) -> None:
        """Give the children of the processes in ``gone`` their next remaining ancestor."""
        if not gone:
            return
        self._indexed()
        self._children, pids = None, {one.pid for one in gone}
        for consumer, member in self._known.items():
            found, born = member.parent, member.born
            above = self._parent(found, born) if found in pids else None
            while above is not None and above in gone:
                found, born = gone[above].parent, gone[above].born
                above = self._parent(found, born)
            if found != member.parent:
                self._known[consumer] = replace(member, parent=found, born=born)

    def family(self, root: Consumer) -> set[Payer]:
        """``root`` and its descendants, without those of another process that reused a pid."""
        children = self._indexed()
        found: set[Payer] = {root}
        queue = [root]
        while queue:
            one = queue.pop()
            pid, born = one.pid, one.started
            others = self._by_pid.get(pid, ()) if pid in children else ()
            reused = min((two.started for two in others if two.started > born), default=inf)
            for child in children.get(pid, ()):
                if child not in found and born <= self._known[child].born < reused:
                    found.add(child)
                    queue.append(child)
        return found

    def _indexed(self) -> dict[int, list[Consumer]]:
        """The children by the parent's pid; the processes by pid are renewed with them."""
        if self._children is None:
            self._children, self._by_pid = {}, {}
            for consumer, member in self._known.items():
                self._children.setdefault(member.parent, []).append(consumer)
                self._by_pid.setdefault(consumer.pid, []).append(consumer)
        return self._children

    def _parent(self, pid: int, born: int) -> Consumer | None:
        """The process that had ``pid`` at ``born``, in ticks since boot; None if it is unknown."""
        elders = [one for one in self._by_pid.get(pid, ()) if one.started <= born]
        return max(elders, key=attrgetter("started"), default=None)

    def service(
        self,
        consumer: Consumer,
        gpu_users: Collection[Payer] = (),
        senders: Mapping[Consumer, str] | None = None,
    ) -> ServiceProcesses:
        """The processes of the service of a sender.

        These are the processes of its principal in its container and its family, without the
        families of unrelated senders in the container; if none of them is among ``gpu_users``,
        those of the nearest launcher whose family has one. ``senders`` are the services of all
        senders: those of one service with one parent are related.
        """
        senders = senders or {}
        own, apart = self._own(consumer, senders)
        if not gpu_users or not own.isdisjoint(gpu_users):
            return ServiceProcesses(frozenset(own), None, frozenset(apart))
        launcher = consumer
        for _ in range(_MAX_DEPTH):
            above = self._launcher(launcher)
            if above is None:
                break
            launcher = above
            family = self._of_principal(self.family(launcher), self._known[consumer].principal)
            strangers = family.intersection(senders) - own
            if not all(self._is_related(consumer, one, senders) for one in strangers):
                break
            if not family.isdisjoint(gpu_users):
                return ServiceProcesses(frozenset(own | family), launcher)
        return ServiceProcesses(frozenset(own), None, frozenset(apart))

    def _launcher(self, consumer: Consumer) -> Consumer | None:
        """The parent of a process, if it may be the launcher of a service."""
        own = self._known.get(consumer)
        if own is None or own.principal is None or own.parent <= _INIT:
            return None
        self._indexed()
        parent = self._parent(own.parent, own.born)
        if parent is None:
            return None
        above = self._known[parent]
        same = above.principal, above.container, above.groups
        if above.starts_others or same != (own.principal, own.container, own.groups):
            return None
        return parent

    def _is_related(
        self, consumer: Consumer, other: Payer, senders: Mapping[Consumer, str]
    ) -> bool:
        """True for two senders of one service that one process started."""
        return (
            isinstance(other, Consumer)
            and senders.get(consumer) == senders[other]
            and self._known[consumer].parent == self._known[other].parent
        )

    def _own(
        self, consumer: Consumer, senders: Mapping[Consumer, str]
    ) -> tuple[set[Payer], set[Payer]]:
        """The processes of ``consumer``'s principal in its container and its family.

        A user may name containers like another's. Root starts processes of other users: all
        descendants of its processes belong to its service. The second set has the families of
        unrelated senders in the container, such as those of a second engine in a system container.
        """
        own, apart = self._known.get(consumer), set[Payer]()
        if own is None or own.principal is None:
            return {consumer}, apart
        found = self.family(consumer)
        if own.principal.user != 0:
            found = self._of_principal(found, own.principal)
        if own.container:
            inside: set[Payer] = {
                one
                for one, member in self._known.items()
                if member.container == own.container and member.principal == own.principal
            }
            for sender in senders.keys() & (inside - found):
                family = self.family(sender)
                if consumer not in family and not self._is_related(consumer, sender, senders):
                    apart |= family - found
            found |= inside - apart
        return found, apart

    def _of_principal(self, members: set[Payer], principal: Principal | None) -> set[Payer]:
        return {
            one
            for one in members
            if isinstance(one, Consumer)
            and (member := self._known.get(one)) is not None
            and member.principal == principal
        }
