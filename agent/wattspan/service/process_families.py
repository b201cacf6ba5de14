"""Families of processes: the descendants of a process, also those that have ended."""

from __future__ import annotations

from collections import deque

from wattspan.model import SECOND, Consumer, Payer, Principal

MAX_PROCESSES = 20_000
"""Processes with a known parent, at most; beyond it those described first are forgotten."""

REMOVAL_INTERVAL = 10 * SECOND
"""Ended processes are removed together, because each removal reads all parents."""


class ProcessFamilies:
    """Parents, containers and principals of processes that run, or ended recently.

    When an ended process is removed, its children become those of its own parent: the families
    of both stay whole.
    """

    def __init__(self, lifetime: int) -> None:
        """``lifetime``: nanoseconds for which an ended process is kept."""
        self._lifetime = lifetime
        self._parents: dict[Consumer, int] = {}
        self._containers: dict[Consumer, str] = {}
        self._principals: dict[Consumer, Principal] = {}
        self._ended: deque[tuple[int, Payer]] = deque()
        self._removed_at = 0

    def __len__(self) -> int:
        return len(self._parents)

    def add(
        self,
        consumer: Consumer,
        parent: int,
        container: str = "",
        principal: Principal | None = None,
    ) -> None:
        """Add a process, or describe it anew."""
        self._parents.pop(consumer, None)  # it becomes the last one described
        self._parents[consumer] = parent
        if container:
            self._containers[consumer] = container
        if principal is not None:
            self._principals[consumer] = principal
        if len(self._parents) > MAX_PROCESSES:
            first = next(iter(self._parents))
            del self._parents[first]
            self._containers.pop(first, None)
            self._principals.pop(first, None)

    def end(self, payer: Payer, now: int) -> None:
        """The process has ended."""
        self._ended.append((now, payer))

    def remove_ended(self, now: int) -> set[Payer]:
        """Remove the processes that ended long ago, if a removal is due; returns them."""
        if now - self._removed_at < REMOVAL_INTERVAL:
            return set()
        self._removed_at = now
        removed: set[Payer] = set()
        while self._ended and now - self._ended[0][0] > self._lifetime:
            removed.add(self._ended.popleft()[1])
        heirs = {
            one.pid: (one.started, self._parents.pop(one))
            for one in removed
            if isinstance(one, Consumer) and one in self._parents
        }
        if heirs:
            self._inherit(heirs)
            for one in self._containers.keys() & removed:
                del self._containers[one]
            for one in self._principals.keys() & removed:
                del self._principals[one]
        return removed

    def _inherit(self, heirs: dict[int, tuple[int, int]]) -> None:
        """Give the children of the removed processes their next remaining ancestor.

        ``heirs``: start and parent of each removed process, by pid.
        """
        for consumer, parent in self._parents.items():
            found, born = parent, consumer.started
            while (heir := heirs.get(found)) is not None and heir[0] <= born:
                born, found = heir
            if found != parent:
                self._parents[consumer] = found

    def family(self, root: Consumer) -> set[Payer]:
        """``root`` and its descendants. A reused pid has no children older than itself."""
        children: dict[int, list[Consumer]] = {}
        for consumer, parent in self._parents.items():
            children.setdefault(parent, []).append(consumer)
        found: set[Payer] = {root}
        queue = [root]
        while queue:
            one = queue.pop()
            for child in children.get(one.pid, ()):
                if child not in found and child.started >= one.started:
                    found.add(child)
                    queue.append(child)
        return found

    def service(self, consumer: Consumer) -> set[Payer]:
        """The processes of ``consumer``'s principal in its container and its family.

        A user may name containers like another's. Root starts processes of other users: all
        descendants of its processes belong to its service.
        """
        found = self.family(consumer)
        principal = self._principals.get(consumer)
        if principal is None:
            return {consumer}
        if principal.user != 0:
            found = {
                one
                for one in found
                if isinstance(one, Consumer) and self._principals.get(one) == principal
            }
        container = self._containers.get(consumer)
        if container is not None:
            found.update(
                one
                for one, name in self._containers.items()
                if name == container and self._principals.get(one) == principal
            )
        return found
