"""A coordination service in memory, whose connections tests cut."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from wattspan.fleet.coordination import (
    ABSENT,
    Changes,
    ConflictError,
    KeyChange,
    KeyWrite,
    LeaseEndedError,
    OutcomeUnknownError,
    PrefixState,
    RevisionCondition,
    StoredKey,
    UnreachableError,
    WatchEndedError,
    check_commit,
)
from wattspan.model import SECOND
from wattspan.testing import ManualClock


class MemoryCluster:
    """A coordination service in memory. Its leases end by ``clock``; its clients share its state.

    ``compact`` forgets the changes up to now, as a real service does after some time.
    """

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._keys: dict[str, StoredKey] = {}
        self._sorted: list[str] = []  # its keys
        self._leases: dict[int, tuple[int, int]] = {}  # lifetime and end
        self._log: list[KeyChange] = []
        self._revision = 1
        self._compacted = 0
        self._granted = 0

    def client(self) -> MemoryCoordination:
        return MemoryCoordination(self)

    def read(self, prefix: str) -> PrefixState:
        with self._changed:
            self._end_leases()
            later = islice(self._sorted, bisect_left(self._sorted, prefix), None)
            found = takewhile(lambda key: key.startswith(prefix), later)
            return PrefixState(tuple(self._keys[key] for key in found), self._revision)

    def commit(
        self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
    ) -> int:
        check_commit(writes, conditions)
        with self._changed:
            self._end_leases()
            for condition in conditions:
                entry = self._keys.get(condition.key)
                if (entry.revision if entry else ABSENT) != condition.revision:
                    raise ConflictError(f"{condition.key} was changed by another participant.")
            for write in writes:
                if write.value is not None and write.lease and write.lease not in self._leases:
                    raise LeaseEndedError(f"Lease {write.lease} has ended.")
            self._apply(writes)
            return self._revision

    def grant(self, seconds: int) -> int:
        with self._changed:
            self._granted += 1
            lifetime = seconds * SECOND
            self._leases[self._granted] = (lifetime, self._clock.monotonic() + lifetime)
            return self._granted

    def renew(self, lease: int) -> None:
        with self._changed:
            self._end_leases()
            if lease not in self._leases:
                raise LeaseEndedError(f"Lease {lease} has ended.")
            lifetime, _ = self._leases[lease]
            self._leases[lease] = (lifetime, self._clock.monotonic() + lifetime)

    def revoke(self, lease: int) -> None:
        with self._changed:
            self._leases.pop(lease, None)
            self._delete_without_lease()

    def compact(self) -> None:
        with self._changed:
            self._compacted = self._revision
            self._log = [one for one in self._log if one.revision >= self._compacted]

    def changes(self, prefix: str, after: int, seconds: float) -> tuple[KeyChange, ...]:
        """The changes of ``prefix`` after a revision, once there are some; for MemoryChanges."""
        with self._changed:
            self._end_leases()
            if after + 1 < self._compacted:
                raise WatchEndedError(f"The changes after revision {after} are forgotten.")

            def found() -> tuple[KeyChange, ...]:
                return tuple(
                    change
                    for change in self._log
                    if change.revision > after and change.key.startswith(prefix)
                )

            self._changed.wait_for(lambda: bool(found()), seconds)
            return found()

    def _end_leases(self) -> None:
        now = self._clock.monotonic()
        ended = [lease for lease, (_, end) in self._leases.items() if end <= now]
        for lease in ended:
            del self._leases[lease]
        if ended:
            self._delete_without_lease()

    def _delete_without_lease(self) -> None:
        ended = [
            KeyWrite(key, None)
            for key, entry in self._keys.items()
            if entry.lease and entry.lease not in self._leases
        ]
        if ended:
            self._apply(ended)

    def _apply(self, writes: Iterable[KeyWrite]) -> None:
        made = [write for write in writes if write.value is not None or write.key in self._keys]
        if not made:
            return
        self._revision += 1
        for write in made:
            entry = None
            if write.value is None:
                del self._keys[write.key]
                self._sorted.remove(write.key)
            else:
                if write.key not in self._keys:
                    insort(self._sorted, write.key)
                entry = StoredKey(write.key, write.value, self._revision, write.lease)
                self._keys[write.key] = entry
            self._log.append(KeyChange(write.key, entry, self._revision))
        self._changed.notify_all()


class MemoryCoordination:
    """A client of a MemoryCluster, whose connection tests cut.

    While ``connected`` is False, calls fail and watches end; while ``deaf``, commits are made and
    their answers are lost.
    """

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self.connected = True
        self.deaf = False

    def read(self, prefix: str) -> PrefixState:
        return self._service().read(prefix)

    def commit(
        self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
    ) -> int:
        revision = self._service().commit(writes, conditions)
        if self.deaf:
            raise OutcomeUnknownError("The connection broke. The change may have been made.")
        return revision

    def grant(self, seconds: int) -> int:
        return self._service().grant(seconds)

    def renew(self, lease: int) -> None:
        self._service().renew(lease)

    def revoke(self, lease: int) -> None:
        self._service().revoke(lease)

    def watch(self, prefix: str, after: int) -> Changes:
        self._service()
        return MemoryChanges(self, self._cluster, prefix, after)

    def close(self) -> None:
        self.connected = False

    def _service(self) -> MemoryCluster:
        if not self.connected:
            raise UnreachableError("No endpoint answers; the connection is retried.")
        return self._cluster


class MemoryChanges:
    """The changes of a prefix in a MemoryCluster."""

    def __init__(
        self, client: MemoryCoordination, cluster: MemoryCluster, prefix: str, after: int
    ) -> None:
        self._client, self._cluster, self._prefix, self._after = client, cluster, prefix, after

    def wait(self, seconds: float) -> tuple[KeyChange, ...]:
        if not self._client.connected:
            raise WatchEndedError("The connection broke; the watch is repeated.")
        changes = self._cluster.changes(self._prefix, self._after, seconds)
        if changes:
            self._after = changes[-1].revision
        return changes

    def close(self) -> None:
        pass
