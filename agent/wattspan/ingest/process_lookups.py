"""Lookups that find and prove processes, in bounded time: by container, pid and start time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import NamedTuple, Protocol

from wattspan.model import MILLISECOND, SECOND, Consumer, Instant, Principal
from wattspan.ports import Clock
from wattspan.processes.cgroup_names import container_ids
from wattspan.processes.inspector import LiveProcess, SocketOwner
from wattspan.sharing.fair_pool import SharePath, share_path


class ProcessLookup(Protocol):
    """Process lookups; None for an ended or hidden process (``ProcessInspector``).

    ``shortage`` is the last error of a lookup without descriptors or memory, each another object:
    its answer proves nothing.
    """

    @property
    def shortage(self) -> OSError | None: ...
    def identify(self, pid: int) -> Consumer | None: ...
    def look(self, pid: int) -> LiveProcess | None: ...
    def pids(self) -> list[int]: ...
    def user_id(self, pid: int) -> int | None: ...
    def cgroup(self, pid: int) -> str | None: ...
    def principal(self, pid: int) -> Principal | None: ...
    def socket_principal(self, owner: SocketOwner) -> Principal | None: ...
    def owner_of(self, end: tuple[str, int], other: tuple[str, int]) -> SocketOwner | None: ...
    def holds(self, pid: int, inode: int) -> bool | None: ...


class RequestLookup:
    """Process lookups of one request until `forget`: each process is read once.

    So the claims of a request share the lookups of its sender and of the ancestors.
    """

    def __init__(self, kernel: ProcessLookup) -> None:
        self._kernel, self._before = kernel, kernel.shortage
        self.look = cache(kernel.look)
        self.identify = cache(kernel.identify)
        self.principal = cache(kernel.principal)
        self.pids, self.user_id, self.cgroup = kernel.pids, kernel.user_id, kernel.cgroup
        self.socket_principal = kernel.socket_principal
        self.owner_of, self.holds = kernel.owner_of, kernel.holds

    @property
    def shortage(self) -> OSError | None:
        return self._kernel.shortage

    @property
    def unsure(self) -> bool:
        """True if a lookup of this request has failed for want of descriptors or memory."""
        return self.shortage is not self._before

    def forget(self) -> None:
        """Read every process anew."""
        self._before = self.shortage
        for answers in self.look, self.identify, self.principal:
            answers.cache_clear()


MAX_ANCESTORS = 64
"""Ancestors of a process that are looked at."""


class Sender(NamedTuple):
    """The evidence of the kernel. ``principal`` is None for an unknown one, perhaps remote.

    ``forwards``: the sender may name processes of any principal.
    """

    process: LiveProcess | None
    principal: Principal | None
    forwards: bool = False


NO_SENDER = Sender(None, None)


def drops(root: Principal, other: Principal | None) -> bool:
    """True if root of the same host or container can have become ``other``."""
    return root.user == 0 and other is not None and other._replace(user=0) == root


def may_name(kernel: ProcessLookup, sender: Sender, found: LiveProcess) -> bool:
    """True if the sender may name ``found`` as the process of its spans.

    Processes of its principal, or workers of root's process that have dropped their privileges.
    """
    principal = sender.principal
    if principal is None or found.principal is None:
        return False
    if found.principal == principal:
        return True
    return (
        sender.process is not None
        and drops(principal, found.principal)
        and _descends(kernel, found, sender.process)
    )


def _descends(kernel: ProcessLookup, process: LiveProcess, ancestor: LiveProcess) -> bool:
    for _ in range(MAX_ANCESTORS):
        if process.consumer == ancestor.consumer:
            return True
        parent = kernel.look(process.parent)
        if parent is None or parent.born > process.born:
            return False
        process = parent
    return False


_MAX_DEBTORS = 256
"""Owners whose spent time is remembered; of more, the one with the least is forgotten."""


class LookupBudget:
    """Bounds the time of slow lookups; a context manager, true if a lookup may start.

    A sender can cause a search through every process of the host. All lookups together may take
    one part in ``share`` of the time, divided equally among the owners that spend it, and then
    among the containers of each. Each may spend ``limit`` nanoseconds at a stretch. A lookup that
    has started may overdraw the budget of its owner. ``total`` is the time of all lookups in
    nanoseconds, without that of inner ones which ``apart`` bounds.
    """

    def __init__(
        self,
        clock: Clock,
        share: int = 20,
        limit: int = SECOND // 4,
        apart: LookupBudget | None = None,
    ) -> None:
        self._clock, self._share, self._limit, self._apart = clock, share, limit, apart
        self._owner: SharePath = ("",)
        self._debts: dict[SharePath, int] = {}  # spent nanoseconds that are not earned yet
        self._earned_at = clock.monotonic()
        self._started_at = self.total = 0

    def charge(self, owner: Hashable) -> None:
        """Charge the next lookups to ``owner``."""
        self._owner = share_path(owner)

    def __enter__(self) -> bool:
        now = self._clock.monotonic()
        earned, self._earned_at = (now - self._earned_at) // self._share, now
        owners = Counter(path[0] for path in self._debts)
        self._debts = {
            path: left
            for path, debt in self._debts.items()
            if (left := debt - earned // len(owners) // owners[path[0]]) > 0
        }
        self._started_at = self._time()
        return self._debts.get(self._owner, 0) < self._limit

    def lasts(self, longest: int) -> bool:
        """True if the present lookup has taken at least ``longest`` nanoseconds."""
        return self._time() - self._started_at >= longest

    def __exit__(self, *_: object) -> None:
        took = self._time() - self._started_at
        self.total += took
        self._debts[self._owner] = self._debts.get(self._owner, 0) + took
        if len(self._debts) > _MAX_DEBTORS:
            del self._debts[min(self._debts, key=lambda path: self._debts[path])]

    def _time(self) -> int:
        return self._clock.monotonic() - (self._apart.total if self._apart else 0)


START_TIME_TOLERANCE = 1500 * MILLISECOND
"""The kernel counts start times in 1/100 s, many libraries count the boot time in seconds."""

_MAX_BOOT_TIMES = 8
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def unix_time(text: str) -> int | None:
    """Unix nanoseconds of an ISO 8601 time, UTC without an offset; None if it is malformed."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError):
        return None


class StartTimeMatcher:
    """Compares claimed start times, by the wall clock, with the kernel's, since boot.

    Wall-clock times depend on the setting of the clock. After the clock was set, times that match
    one of its last settings are correct as well.
    """

    def __init__(self) -> None:
        self._boots: list[int] = []  # Unix nanoseconds, one for each setting of the clock

    def observe(self, now: Instant) -> None:
        boot = now.wall - now.since_boot
        if not self._boots or abs(boot - self._boots[-1]) > START_TIME_TOLERANCE // 3:
            self._boots.append(boot)
            del self._boots[:-_MAX_BOOT_TIMES]

    def matches(self, process: LiveProcess, created: int) -> bool:
        """True if ``process`` can have started at Unix time ``created``."""
        return any(
            abs(boot + process.born - created) <= START_TIME_TOLERANCE for boot in self._boots
        )

    def is_before(self, created: int, process: LiveProcess) -> bool:
        """True if Unix time ``created`` is before the start of ``process`` by any setting."""
        return any(created <= boot + process.born + START_TIME_TOLERANCE for boot in self._boots)


CACHE_TTL = SECOND
"""Age up to which a search through all processes is reused."""

_SHORT_ID_LENGTH = 12
_ID = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{64}|[0-9a-f]{32}-[0-9]{1,20})(?![0-9a-f])")
_SHORT_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])")


def container_id(text: str) -> str:
    """The id in a claim, without the decoration of runtimes; "" if there is none.

    64 hexadecimal digits, the first 12 of them, or the id of an Amazon ECS task.
    """
    text = text.lower()
    match = _ID.search(text) or _SHORT_ID.search(text)
    return match[0] if match else ""


_HOST_ID = re.compile("[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_elsewhere(host: str, known: Collection[str]) -> bool:
    """True if a `host.id` is that of another host than the one with the ids ``known``.

    Ids of one form are compared: 32 digits, or a UUID. Others, as of clouds, are of any host.
    """
    host = host.strip().lower()
    if not _HOST_ID.fullmatch(host) or not any(len(one) == len(host) for one in known):
        return False
    return host.replace("-", "") not in {one.replace("-", "") for one in known}


def is_inner(process: LiveProcess | None, pid: int) -> bool:
    """True if ``pid`` is not the one here of a sender in a pid namespace, which are all alike."""
    return process is not None and len(process.pids) > 1 and pid != process.consumer.pid


class ContainerProcesses:
    """The processes of containers, by the names of their cgroups.

    The path of a nested container has both ids: a process of the inner one belongs to both.
    """

    def __init__(self, kernel: RequestLookup, clock: Clock, budget: LookupBudget) -> None:
        self._kernel = kernel
        self._clock = clock
        self._budget = budget
        self._pids: dict[str, list[int]] = {}  # by short id, and by what is before it in a path
        self._searched_at: int | None = None

    def contains(self, container: str, process: LiveProcess) -> bool | None:
        """True if ``process`` runs in the container; None if its cgroup names no container."""
        ids = container_ids(self._kernel.cgroup(process.consumer.pid) or "")
        return any(is_same_container(each, container) for each in ids) if ids else None

    def members(self, container: str) -> Sequence[LiveProcess] | None:
        """The processes of a container, none for an unknown one; None if the budget is spent.

        Those of its pod for a sandbox, in which only a pause waits: detectors of containers in a
        pod read the id of its sandbox.
        """
        complete = self._search()
        found = self._present(container[:_SHORT_ID_LENGTH], container)
        if [one.name for one in found] == ["pause"]:
            text = self._kernel.cgroup(found[0].consumer.pid) or ""
            if "kubepods" in (above := text.partition(container)[0]):
                found = self._present(above, container, inside=False)
        return found if complete or found else None

    def _present(self, key: str, container: str, *, inside: bool = True) -> list[LiveProcess]:
        """The processes found under ``key`` that are in the container, or in others beside it."""
        # a pid may have been reused since the search
        return [
            one
            for one in map(self._kernel.look, self._pids.get(key, ()))
            if one is not None
            and self.contains(container, one) is inside
            and (inside or key in (self._kernel.cgroup(one.consumer.pid) or ""))
        ]

    def neighbours(self, process: LiveProcess) -> Sequence[LiveProcess] | None:
        """The processes of the same cgroup; None if the budget is spent."""
        with self._budget as allowed:
            if not allowed:
                return None
            kernel = self._kernel
            cgroup = kernel.cgroup(process.consumer.pid)
            pids = [pid for pid in kernel.pids() if kernel.cgroup(pid) == cgroup]
            return [found for pid in pids if (found := kernel.look(pid)) is not None]

    def _search(self) -> bool:
        """Read the cgroup of every process, unless that was done within ``CACHE_TTL``.

        A result that may lack processes is not used again.
        """
        now = self._clock.monotonic()
        if self._searched_at is not None and now - self._searched_at < CACHE_TTL:
            return True
        with self._budget as allowed:
            if allowed:
                pids: dict[str, list[int]] = defaultdict(list)
                for pid in self._kernel.pids():
                    for whole in container_ids(text := self._kernel.cgroup(pid) or ""):
                        pids[whole[:_SHORT_ID_LENGTH]].append(pid)
                        pids[text.partition(whole)[0]].append(pid)
                self._pids = dict(pids)
                self._searched_at = None if self._kernel.unsure else now
        return allowed


def find_by_pid(pid: int, candidates: Sequence[LiveProcess]) -> LiveProcess | None:
    """The only process with ``pid`` in its own namespace, else the only one with it in any."""
    innermost = [process for process in candidates if process.pids[-1] == pid]
    found = innermost or [process for process in candidates if pid in process.pids]
    return found[0] if len(found) == 1 else None


def is_same_container(whole: str, claimed: str) -> bool:
    return whole == claimed or (len(claimed) == _SHORT_ID_LENGTH and whole.startswith(claimed))
