"""Whether what a resource says of its process is true, given who sends it.

The kernel's word goes before the sender's. A sender may speak for others, as collectors and
sidecars do, as far as it could act for them: for its own user's processes, root for all.

Which process spans belong to.

In order of trust: the credentials of a Unix socket's peer; the kernel's owner of a TCP
connection on this host; a claimed pid whose time of birth fits; a pid in a claimed container.
What cannot be true is not believed, and where nothing tells, nobody is charged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

from wattspan.http.messages import Peer
from wattspan.ingest.export_request import ResourceClaim
from wattspan.ingest.process_lookup import (
    ContainerProcesses,
    LookupBudget,
    ProcessLookup,
    ProcessSnapshot,
    StartTimeMatcher,
    container_id,
    find_by_pid,
    unix_time,
)
from wattspan.ingest.senders import UNKNOWN_AGE, Sender, SenderResolver
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.ports import Clock
from wattspan.spans.values import Outcome

_MAX_ANCESTORS = 64
_MAX_FORWARDERS = 256


class ClaimVerifier:
    """Judges claims; knows who has been seen to speak for others."""

    def __init__(
        self, kernel: ProcessLookup, containers: ContainerProcesses, births: StartTimeMatcher
    ) -> None:
        self._kernel = kernel
        self._containers = containers
        self._births = births
        self._forwarders: dict[Consumer, None] = {}

    def judge(self, sender: Sender, claim: ResourceClaim) -> Consumer | Outcome:
        """Whose the spans are; NOT_BELIEVED, or UNKNOWN_PROCESS where nothing tells."""
        container = container_id(claim.container)
        created = unix_time(claim.created) if claim.created else None
        me = sender.living
        if claim.pid is None:
            return self._without_pid(sender, container)
        if me is not None and (
            self._is_itself(me, claim.pid, container, created)
            or self._is_copy_of(me, claim.pid, created)
        ):
            return me.consumer
        found = self._named(claim.pid, container, me)
        if found is None and me is not None and self._is_orphan(me, container, created):
            return me.consumer
        if isinstance(found, Outcome):
            return found
        if found is None or not self._believable(found, sender, created, container):
            return Outcome.NOT_BELIEVED
        if me is not None:
            self._note_forwarder(me, found)
        return found.consumer

    def forwards(self, consumer: Consumer) -> bool:
        """Whether this process has been seen to speak for others."""
        return consumer in self._forwarders

    # ---------------------------------------------------------------- the sender's own spans

    def _without_pid(self, sender: Sender, container: str) -> Consumer | Outcome:
        """The sender itself, unless it is known to speak for others, or says it does."""
        me = sender.living
        if me is not None and (not container or self._may_be_in(container, me)):
            return Outcome.UNKNOWN_PROCESS if self.forwards(me.consumer) else me.consumer
        members = self._containers.members(container) if container else None
        if not members or len(members) > 1:
            return Outcome.UNKNOWN_PROCESS
        if not self._believable(members[0], sender, None, container):
            return Outcome.NOT_BELIEVED
        return members[0].consumer

    def _is_itself(
        self, me: ProcessSnapshot, pid: int, container: str, created: int | None
    ) -> bool:
        """Whether the sender is called ``pid``, by us or in a pid namespace of its own.

        Small pids are the same in every container, so there all that is told must fit.
        """
        if pid not in me.pids or (container and not self._may_be_in(container, me)):
            return False
        return len(me.pids) == 1 or created is None or self._births.fits(me, created)

    def _is_copy_of(self, me: ProcessSnapshot, pid: int, created: int | None) -> bool:
        """Whether the sender was forked from ``pid`` and still has the resource of then.

        As long as it runs no program of its own its memory is a copy, stale pid and all.
        """
        return any(
            pid in above.pids and (created is None or self._births.fits(above, created))
            for above in self._originals(me)
        )

    def _is_orphan(self, me: ProcessSnapshot, container: str, created: int | None) -> bool:
        """Whether the pid that nobody has can be that of the process the sender is a copy of."""
        return (
            me.copied
            and not self.forwards(me.consumer)
            and (created is None or self._births.before(created, me))
            and (not container or self._may_be_in(container, me))
        )

    def _originals(self, living: ProcessSnapshot) -> Iterator[ProcessSnapshot]:
        """The processes of whose memory this one's is a copy, the nearest first."""
        for _ in range(_MAX_ANCESTORS):
            above = self._kernel.look(living.parent) if living.copied else None
            if above is None:
                return
            yield above
            living = above

    # ------------------------------------------------------------------------- those of others

    def _named(
        self, pid: int, container: str, me: ProcessSnapshot | None
    ) -> ProcessSnapshot | Outcome | None:
        """Who is called ``pid`` where the claim, or else the sender, is at home; None: nobody."""
        if container:
            members = self._containers.members(container)
        elif me is not None and len(me.pids) > 1:
            members = self._containers.neighbours(me)
        else:
            return self._kernel.look(pid)
        return find_by_pid(pid, members) if members else Outcome.UNKNOWN_PROCESS

    def _believable(
        self, found: ProcessSnapshot, sender: Sender, created: int | None, container: str
    ) -> bool:
        """Whether it can be true, and whether this sender may say it."""
        if found.kernel or (created is not None and not self._births.fits(found, created)):
            return False
        vouched = created is not None or bool(container)
        if sender.user is None:
            return vouched
        if sender.user == 0:
            # Containers are full of a pid 1 of root's; the host's own sends no spans.
            return vouched or sender.living is not None or found.pids != (1,)
        return sender.user in found.users

    # --------------------------------------------------------------------------------- small

    def _may_be_in(self, container: str, me: ProcessSnapshot) -> bool:
        """Whether the sender is in the container, or in one that cannot be told."""
        inside = self._containers.has(container, me)
        return not self._containers.members(container) if inside is None else inside

    def _note_forwarder(self, me: ProcessSnapshot, other: ProcessSnapshot) -> None:
        """Remember who speaks for others; not for its own copies, to whom it left a connection."""
        if any(above.consumer == me.consumer for above in self._originals(other)):
            return
        self._forwarders[me.consumer] = None
        if len(self._forwarders) > _MAX_FORWARDERS:
            del self._forwarders[next(iter(self._forwarders))]


CERTAIN_TTL = 250 * MILLISECOND
"""How long an answer stands unchecked: no host gives out all of its pids in so short a time."""

UNCERTAIN_TTL = 2 * SECOND
"""How long it stands that nobody can be named, before all is looked at again."""

KEEP_AFTER_EXIT = 60 * SECOND
"""How long spans may come after the end of their process, over somebody else's connection."""

MAX_IDENTITIES = 4096
MAX_CLAIM_LENGTH = 512
"""Characters of a claim that are read and kept: more than any true one has."""

_IdentityKey = tuple[Peer, int | None, str, str]
"""Who sends, and what is said of the process: its pid, its birth, its container."""


class _CachedIdentity(NamedTuple):
    found: Consumer | Outcome
    judged: int
    until: int
    ended: int | None = None  # when its process was first found to be gone


class IdentityResolver:
    """Resolves senders and claims to processes. Safe from any thread.

    An answer is a pid with its start time, so whoever is given the same pid later is another
    process. A sender is best asked about while it waits for the response: then it lives.
    """

    def __init__(self, clock: Clock, kernel: ProcessLookup) -> None:
        looking = LookupBudget(clock)
        self._clock = clock
        self._kernel = kernel
        self._births = StartTimeMatcher()
        self._senders = SenderResolver(kernel, LookupBudget(clock), looking)
        self._claims = ClaimVerifier(
            kernel, ContainerProcesses(kernel, clock, looking), self._births
        )
        self._answers: dict[_IdentityKey, _CachedIdentity] = {}
        self._lock = threading.Lock()
        self._births.observe(clock.now())

    def identify(self, pid: int) -> Consumer | None:
        """The process that has ``pid`` now."""
        return self._kernel.identify(pid)

    def resolve(self, peer: Peer, claim: ResourceClaim) -> Consumer | Outcome:
        """The process of spans that ``peer`` sends and of which ``claim`` is said.

        Outcome.NOT_BELIEVED for what cannot be true, UNKNOWN_PROCESS where nothing tells.
        """
        _, pid, created, container = claim
        if len(created) + len(container) > MAX_CLAIM_LENGTH:
            created, container = (
                created[: MAX_CLAIM_LENGTH // 2],
                container[: MAX_CLAIM_LENGTH // 2],
            )
        key = (peer, pid, created, container)
        answer = self._answers.get(key)
        if answer is not None and self._clock.monotonic() < answer.until:
            return answer.found
        with self._lock:
            return self._renew(key, answer).found

    # ------------------------------------------------------------------------------- details

    def _renew(self, key: _IdentityKey, old: _CachedIdentity | None) -> _CachedIdentity:
        peer, pid, created, container = key
        claim = ResourceClaim("", pid, created, container)
        now = self._clock.now()
        self._births.observe(now)
        answer = self._still(peer, claim, old, now.mono)
        if answer is None:
            sender = self._senders.of(peer, claim.pid, now)
            found = self._claims.judge(sender, claim) if sender else Outcome.UNKNOWN_PROCESS
            stands = CERTAIN_TTL if isinstance(found, Consumer) else UNCERTAIN_TTL
            answer = _CachedIdentity(found, now.mono, now.mono + stands)
        self._answers.pop(key, None)
        self._answers[key] = answer
        if len(self._answers) > MAX_IDENTITIES:
            self._answers = dict(list(self._answers.items())[MAX_IDENTITIES // 4 :])
        return answer

    def _still(
        self, peer: Peer, claim: ResourceClaim, old: _CachedIdentity | None, now: int
    ) -> _CachedIdentity | None:
        """The old answer, where its process still lives, or has only just died."""
        if old is None or not isinstance(old.found, Consumer):
            return None
        present = self._kernel.identify(old.found.pid)
        if present == old.found:
            # An undated connection may be another one by now.
            undated = peer.accepted is None and now - old.judged >= UNKNOWN_AGE
            disowned = claim.pid is None and self._claims.forwards(old.found)
            return None if undated or disowned else old._replace(until=now + CERTAIN_TTL)
        ended = now if old.ended is None else old.ended
        if present is None and now - ended < KEEP_AFTER_EXIT:
            return old._replace(until=now + CERTAIN_TTL, ended=ended)
        return None
