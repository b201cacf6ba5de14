"""Which processes run in a container, and which of them has a pid there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from wattspan.model import SECOND
from wattspan.ports import Clock
from wattspan.spanfeed.evidence import Allowance, Kernel, Living

FRESH = SECOND
"""How long a look at all processes serves."""

_SHORT = 12
_ID = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{64}|[0-9a-f]{32}-[0-9]{1,20})(?![0-9a-f])")
_SHORT_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])")


def container_id(text: str) -> str:
    """The id in a claim, whatever a runtime puts around it; "" if there is none.

    64 hexadecimal digits, the first 12 of them, or as Amazon's tasks have it.
    """
    text = text.lower()
    match = _ID.search(text) or _SHORT_ID.search(text)
    return match[0] if match else ""


class Containers:
    """Containers by the names of their cgroups.

    Nested containers have both ids in their path: who runs in the inner one runs in both.
    """

    def __init__(self, kernel: Kernel, clock: Clock, allowance: Allowance) -> None:
        self._kernel = kernel
        self._clock = clock
        self._allowance = allowance
        self._pids: dict[str, list[tuple[str, int]]] = {}  # by short id: whole id and pid
        self._looked: int | None = None

    def has(self, container: str, living: Living) -> bool | None:
        """Whether ``living`` runs in the container; None: its cgroup names none at all."""
        ids = _ID.findall(self._kernel.cgroup(living.consumer.pid))
        return any(_same(each, container) for each in ids) if ids else None

    def members(self, container: str) -> Sequence[Living] | None:
        """The processes of a container; none if it is not here, None if now is no time to look."""
        looked = self._look()
        pids = [
            pid for whole, pid in self._pids.get(container[:_SHORT], ()) if _same(whole, container)
        ]
        living = [one for pid in pids if (one := self._kernel.look(pid)) is not None]
        # a pid may have another process by now
        living = [one for one in living if self.has(container, one)]
        return living if looked or living else None

    def neighbours(self, living: Living) -> Sequence[Living] | None:
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
        if self._looked is not None and now - self._looked < FRESH:
            return True
        with self._allowance as allowed:
            if allowed:
                pids: dict[str, list[tuple[str, int]]] = defaultdict(list)
                for pid in self._kernel.pids():
                    for whole in set(_ID.findall(self._kernel.cgroup(pid))):
                        pids[whole[:_SHORT]].append((whole, pid))
                self._pids, self._looked = dict(pids), now
        return allowed


def with_pid(pid: int, among: Iterable[Living]) -> Living | None:
    """The only one that calls itself ``pid``, or else the only one that is called so by others."""
    all_of_them = list(among)
    innermost = [living for living in all_of_them if living.pids[-1] == pid]
    found = innermost or [living for living in all_of_them if pid in living.pids]
    return found[0] if len(found) == 1 else None


def _same(whole: str, claimed: str) -> bool:
    return whole == claimed or (len(claimed) == _SHORT and whole.startswith(claimed))
