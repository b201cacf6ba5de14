"""What may be asked of the kernel about processes and connections, and at what expense.

Whether a process was born when somebody says it was.

Which processes run in a container, and which of them has a pid there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

from wattspan.model import MILLISECOND, SECOND, Consumer, Instant
from wattspan.ports import Clock


class ProcessSnapshot(Protocol):
    """A process that lives."""

    @property
    def consumer(self) -> Consumer: ...
    @property
    def parent(self) -> int: ...
    @property
    def born(self) -> int:
        """Nanoseconds since boot, in which the host's sleep counts; a clock tick too early."""
        ...

    @property
    def users(self) -> frozenset[int]:
        """Real, effective, saved and of the file system."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Its pid in each pid namespace, from ours inwards."""
        ...

    @property
    def copied(self) -> bool:
        """It was forked and runs no program of its own since."""
        ...

    @property
    def kernel(self) -> bool: ...


class SocketOwner(Protocol):
    """Whose a socket is."""

    @property
    def user(self) -> int: ...
    @property
    def inode(self) -> int: ...


class ProcessLookup(Protocol):
    """Process lookups; None for a process that is gone or hidden (``ProcessInspector``)."""

    def identify(self, pid: int) -> Consumer | None: ...
    def look(self, pid: int) -> ProcessSnapshot | None: ...
    def pids(self) -> list[int]: ...
    def owner(self, pid: int) -> int | None: ...
    def cgroup(self, pid: int) -> str: ...
    def owner_of(self, end: tuple[str, int], other: tuple[str, int]) -> SocketOwner | None: ...
    def holds(self, pid: int, inode: int) -> bool | None: ...


class LookupBudget:
    """Keeps what is slow from being asked for without end: time, earned at a rate.

    A sender can make us look through every process of the host, so all such looking together
    may take one part in ``share`` of the time, and ``most`` nanoseconds at a stretch.
    """

    def __init__(self, clock: Clock, share: int = 20, most: int = SECOND // 4) -> None:
        self._clock = clock
        self._share = share
        self._most = most
        self._left = most
        self._earned = clock.monotonic()
        self._began = 0
        self.refused = 0

    def __enter__(self) -> bool:
        """Whether there is time for one more look; what follows is paid for, and may overdraw."""
        self._began = self._clock.monotonic()
        self._left = min(self._most, self._left + (self._began - self._earned) // self._share)
        self._earned = self._began
        if self._left <= 0:
            self.refused += 1
        return self._left > 0

    def __exit__(self, *_: object) -> None:
        self._left -= self._clock.monotonic() - self._began


START_TIME_TOLERANCE = 1500 * MILLISECOND
"""The kernel counts births in hundredths of a second, many libraries the boot in whole ones."""

_MAX_BOOT_TIMES = 8
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def unix_time(text: str) -> int | None:
    """Unix nanoseconds of an ISO 8601 date and time, UTC unless it says; None if it is none."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError):
        return None


class StartTimeMatcher:
    """Compares times of birth by the wall with those since boot.

    A time by the wall is as good as the clock was when it was taken: where the clock was set
    since, what fits its former setting, as far as it was seen, is right as well.
    """

    def __init__(self) -> None:
        self._boots: list[int] = []  # Unix nanoseconds, by each setting of the clock

    def observe(self, now: Instant) -> None:
        boot = now.wall - now.mono - now.asleep
        if not self._boots or abs(boot - self._boots[-1]) > START_TIME_TOLERANCE // 3:
            self._boots.append(boot)
            del self._boots[:-_MAX_BOOT_TIMES]

    def fits(self, living: ProcessSnapshot, created: int) -> bool:
        """Whether ``living`` can have been born at Unix time ``created``."""
        return any(
            abs(boot + living.born - created) <= START_TIME_TOLERANCE for boot in self._boots
        )

    def before(self, created: int, living: ProcessSnapshot) -> bool:
        """Whether Unix time ``created`` was, by any setting, before ``living`` was born."""
        return any(created <= boot + living.born + START_TIME_TOLERANCE for boot in self._boots)


CACHE_TTL = SECOND
"""How long a look at all processes serves."""

_SHORT_ID_LENGTH = 12
_ID = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{64}|[0-9a-f]{32}-[0-9]{1,20})(?![0-9a-f])")
_SHORT_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])")


def container_id(text: str) -> str:
    """The id in a claim, whatever a runtime puts around it; "" if there is none.

    64 hexadecimal digits, the first 12 of them, or as Amazon's tasks have it.
    """
    text = text.lower()
    match = _ID.search(text) or _SHORT_ID.search(text)
    return match[0] if match else ""


class ContainerProcesses:
    """Containers by the names of their cgroups.

    Nested containers have both ids in their path: who runs in the inner one runs in both.
    """

    def __init__(self, kernel: ProcessLookup, clock: Clock, allowance: LookupBudget) -> None:
        self._kernel = kernel
        self._clock = clock
        self._allowance = allowance
        self._pids: dict[str, list[tuple[str, int]]] = {}  # by short id: whole id and pid
        self._looked: int | None = None

    def has(self, container: str, living: ProcessSnapshot) -> bool | None:
        """Whether ``living`` runs in the container; None: its cgroup names none at all."""
        ids = _ID.findall(self._kernel.cgroup(living.consumer.pid))
        return any(_same_container(each, container) for each in ids) if ids else None

    def members(self, container: str) -> Sequence[ProcessSnapshot] | None:
        """The processes of a container; none if it is not here, None if now is no time to look."""
        looked = self._look()
        pids = [
            pid
            for whole, pid in self._pids.get(container[:_SHORT_ID_LENGTH], ())
            if _same_container(whole, container)
        ]
        living = [one for pid in pids if (one := self._kernel.look(pid)) is not None]
        # a pid may have another process by now
        living = [one for one in living if self.has(container, one)]
        return living if looked or living else None

    def neighbours(self, living: ProcessSnapshot) -> Sequence[ProcessSnapshot] | None:
        """Who is in the same cgroup; None if now is no time to look."""
        with self._allowance as allowed:
            if not allowed:
                return None
            kernel = self._kernel
            text = kernel.cgroup(living.consumer.pid)
            pids = [pid for pid in kernel.pids() if kernel.cgroup(pid) == text]
            return [found for pid in pids if (found := kernel.look(pid)) is not None]

    # ------------------------------------------------------------------------------- details

    def _look(self) -> bool:
        """Look at the cgroup of every process, unless that was done just now."""
        now = self._clock.monotonic()
        if self._looked is not None and now - self._looked < CACHE_TTL:
            return True
        with self._allowance as allowed:
            if allowed:
                pids: dict[str, list[tuple[str, int]]] = defaultdict(list)
                for pid in self._kernel.pids():
                    for whole in set(_ID.findall(self._kernel.cgroup(pid))):
                        pids[whole[:_SHORT_ID_LENGTH]].append((whole, pid))
                self._pids, self._looked = dict(pids), now
        return allowed


def find_by_pid(pid: int, among: Iterable[ProcessSnapshot]) -> ProcessSnapshot | None:
    """The only one that calls itself ``pid``, or else the only one that is called so by others."""
    all_of_them = list(among)
    innermost = [living for living in all_of_them if living.pids[-1] == pid]
    found = innermost or [living for living in all_of_them if pid in living.pids]
    return found[0] if len(found) == 1 else None


def _same_container(whole: str, claimed: str) -> bool:
    return whole == claimed or (len(claimed) == _SHORT_ID_LENGTH and whole.startswith(claimed))
