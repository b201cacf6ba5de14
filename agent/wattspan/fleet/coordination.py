"""The port of a coordination service: keys with revisions, leases, changes, and an election.

A service is linearizable: a read that is sent after the end of a commit sees the commit, on every
member and in every partition. :class:`Coordination` needs no more of it than compare-and-swap on
keys, keys that end with a lease, and changes of a prefix. The election is made of these.

Leases serve liveness only: they show which participants are present. A participant with an old
answer may take an ended lease for a live one, so no safety may rest on a lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from wattspan.ports import WattspanError

ABSENT = 0
"""The revision of a key that does not exist."""

MAX_CHANGES = 100
"""Conditions, and changes, of one commit."""


class CoordinationError(WattspanError):
    """A call to the coordination service failed; the message names endpoint, cause and remedy."""

    exit_code = 8


class UnreachableError(CoordinationError):
    """No endpoint answers, or none with a quorum: try later. The call had no effect.

    ``causes`` has a clause for each endpoint that was tried.
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class OutcomeUnknownError(UnreachableError):
    """The connection broke after a change was sent: it may have been made. Read before retrying."""


class PermissionDeniedError(CoordinationError):
    """The service rejects the credentials, or they permit too little."""


class ConflictError(CoordinationError):
    """A condition of a commit does not hold; nothing was changed."""


class LeaseEndedError(CoordinationError):
    """The lease has ended, and its keys with it."""


class WatchEndedError(CoordinationError):
    """Changes were missed, or the stream of changes broke: read, and watch anew."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as it is stored.

    ``revision`` is that of its last write, and larger than any earlier one of the service.
    ``lease`` is the lease that it ends with, 0 if none.
    """

    key: str
    value: bytes
    revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class PrefixState:
    """All keys of a prefix at ``revision``, sorted."""

    entries: tuple[StoredKey, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A write, or with ``entry`` None the end of a key, at ``revision``."""

    key: str
    entry: StoredKey | None
    revision: int


@dataclass(frozen=True, slots=True)
class KeyWrite:
    """Set ``key`` to ``value``, to end with ``lease`` (0: with none); None deletes the key."""

    key: str
    value: bytes | None
    lease: int = 0


@dataclass(frozen=True, slots=True)
class RevisionCondition:
    """The last write of ``key`` has ``revision``; ABSENT: there is no such key."""

    key: str
    revision: int


class Changes(Protocol):
    """The changes of a prefix since a revision, each once and in order. For one thread."""

    def wait(self, seconds: float) -> tuple[KeyChange, ...]:
        """The next changes; empty if there are none within ``seconds``. WatchEndedError."""

    def close(self) -> None:
        """End the stream. Idempotent."""


class Coordination(Protocol):
    """A linearizable store of small values. Every call may raise CoordinationError.

    Safe from any thread. A call ends within the adapter's time limit, with UnreachableError if the
    service cannot decide by then. Prefixes are plain: "a/" has "a/b" and not "ab".
    """

    def read(self, prefix: str) -> PrefixState:
        """All keys that begin with ``prefix``, as of a moment between call and return."""

    def commit(
        self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
    ) -> int:
        """Make all of ``writes`` if all of ``conditions`` hold, and return their revision.

        ConflictError if a condition does not hold, LeaseEndedError if a lease has ended,
        OutcomeUnknownError if the connection broke. At most one write per key, MAX_CHANGES in all.
        """

    def grant(self, seconds: int) -> int:
        """A new lease that ends ``seconds`` after its last renewal, or a little later."""

    def renew(self, lease: int) -> None:
        """Renew a lease; LeaseEndedError."""

    def revoke(self, lease: int) -> None:
        """End a lease and its keys now. Idempotent."""

    def watch(self, prefix: str, after: int) -> Changes:
        """The changes of ``prefix`` with a revision above ``after``."""

    def close(self) -> None:
        """End all connections. Idempotent."""


def check_commit(writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition]) -> None:
    """ValueError for a commit that every adapter refuses."""
    if max(len(writes), len(conditions)) > MAX_CHANGES:
        raise ValueError(f"more than {MAX_CHANGES} changes")
    if len({write.key for write in writes}) < len(writes):
        raise ValueError("two writes of one key")


def read_key(coordination: Coordination, key: str) -> StoredKey | None:
    """One key as it is stored, None if it does not exist; CoordinationError."""
    entries = coordination.read(key).entries
    return next((entry for entry in entries if entry.key == key), None)


class Election:
    """The candidacy of one participant for the leadership at ``key``, step by step.

    The leader's key ends with its lease. Each commit of a leader names ``fence`` as a condition:
    then it fails if another participant has become leader since.
    """

    def __init__(self, coordination: Coordination, key: str, name: str) -> None:
        self._coordination, self._key, self._name = coordination, key, name
        self._revision = ABSENT
        self.leader = ""
        """Name of the newest known leader."""

    @property
    def fence(self) -> RevisionCondition | None:
        """The condition "this participant leads"; None if it does not, as far as it knows."""
        return RevisionCondition(self._key, self._revision) if self._revision else None

    def campaign(self, lease: int) -> bool:
        """Become leader under ``lease`` if nobody is; True if this participant leads."""
        entry = read_key(self._coordination, self._key)
        if entry is not None:
            return self._observe(entry, lease)
        try:
            write = KeyWrite(self._key, self._name.encode(), lease)
            self._revision = self._coordination.commit(
                (write,), (RevisionCondition(self._key, ABSENT),)
            )
        except (ConflictError, OutcomeUnknownError):
            self._revision = ABSENT  # the next campaign reads the outcome
            return False
        self.leader = self._name
        return True

    def resign(self) -> None:
        """Give the leadership up, so that another participant need not await the lease's end."""
        fence, self._revision = self.fence, ABSENT
        if fence is not None:
            with suppress(CoordinationError):  # it ends with the lease
                self._coordination.commit((KeyWrite(self._key, None),), (fence,))

    def _observe(self, entry: StoredKey, lease: int) -> bool:
        self.leader = entry.value.decode(errors="replace")
        is_own = entry.lease == lease and self.leader == self._name
        self._revision = entry.revision if is_own else ABSENT
        return is_own
