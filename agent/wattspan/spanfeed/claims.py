"""Whether what a resource says of its process is true, given who sends it.

The kernel's word goes before the sender's. A sender may speak for others, as collectors and
sidecars do, as far as it could act for them: for its own user's processes, root for all.
"""

from __future__ import annotations

from collections.abc import Iterator

from wattspan.model import Consumer
from wattspan.spanfeed.births import Births, unix_time
from wattspan.spanfeed.containers import Containers, container_id, with_pid
from wattspan.spanfeed.delivery import Claim
from wattspan.spanfeed.evidence import Kernel, Living
from wattspan.spanfeed.peers import Sender
from wattspan.spans.values import Outcome

_GENERATIONS = 64
_FORWARDERS = 256


class Claims:
    """Judges claims; knows who has been seen to speak for others."""

    def __init__(self, kernel: Kernel, containers: Containers, births: Births) -> None:
        self._kernel = kernel
        self._containers = containers
        self._births = births
        self._forwarders: dict[Consumer, None] = {}

    def judge(self, sender: Sender, claim: Claim) -> Consumer | Outcome:
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

    def _is_itself(self, me: Living, pid: int, container: str, created: int | None) -> bool:
        """Whether the sender is called ``pid``, by us or in a pid namespace of its own.

        Small pids are the same in every container, so there all that is told must fit.
        """
        if pid not in me.pids or (container and not self._may_be_in(container, me)):
            return False
        return len(me.pids) == 1 or created is None or self._births.fits(me, created)

    def _is_copy_of(self, me: Living, pid: int, created: int | None) -> bool:
        """Whether the sender was forked from ``pid`` and still has the resource of then.

        As long as it runs no program of its own its memory is a copy, stale pid and all.
        """
        return any(
            pid in above.pids and (created is None or self._births.fits(above, created))
            for above in self._originals(me)
        )

    def _is_orphan(self, me: Living, container: str, created: int | None) -> bool:
        """Whether the pid that nobody has can be that of the process the sender is a copy of."""
        return (
            me.copied
            and not self.forwards(me.consumer)
            and (created is None or self._births.before(created, me))
            and (not container or self._may_be_in(container, me))
        )

    def _originals(self, living: Living) -> Iterator[Living]:
        """The processes of whose memory this one's is a copy, the nearest first."""
        for _ in range(_GENERATIONS):
            above = self._kernel.look(living.parent) if living.copied else None
            if above is None:
                return
            yield above
            living = above

    # ------------------------------------------------------------------------- those of others

    def _named(self, pid: int, container: str, me: Living | None) -> Living | Outcome | None:
        """Who is called ``pid`` where the claim, or else the sender, is at home; None: nobody."""
        if container:
            members = self._containers.members(container)
        elif me is not None and len(me.pids) > 1:
            members = self._containers.neighbours(me)
        else:
            return self._kernel.look(pid)
        return with_pid(pid, members) if members else Outcome.UNKNOWN_PROCESS

    def _believable(
        self, found: Living, sender: Sender, created: int | None, container: str
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

    def _may_be_in(self, container: str, me: Living) -> bool:
        """Whether the sender is in the container, or in one that cannot be told."""
        inside = self._containers.has(container, me)
        return not self._containers.members(container) if inside is None else inside

    def _note_forwarder(self, me: Living, other: Living) -> None:
        """Remember who speaks for others; not for its own copies, to whom it left a connection."""
        if any(above.consumer == me.consumer for above in self._originals(other)):
            return
        self._forwarders[me.consumer] = None
        if len(self._forwarders) > _FORWARDERS:
            del self._forwarders[next(iter(self._forwarders))]
