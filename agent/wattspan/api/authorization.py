"""Rights to see energy, by the principals that the kernel proves.

The energy of devices and of the host is available to every user who may open the socket, at a
coarse resolution (``energy.TimeGrid``); root of the host and the agent's own principal, who may
read the counters themselves, get everything. The energy of a process reveals something about its
computations, so it is available to its own principal and to these two only.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus

from wattspan.api.requests import ProblemError
from wattspan.http.sockets import Peer
from wattspan.model import HOST_ROOT, Consumer, Principal
from wattspan.processes.principals import OVERFLOW_UID, PrincipalResolver
from wattspan.processes.procfs import ProcFs

PrincipalOf = Callable[[Consumer], Principal | None]
"""Returns the principal of a process; None if it is gone.

It is one with a negative user for a process with several user ids.
"""

MAX_REMEMBERED = 10_000
"""Owners of ended processes that are remembered; the least recently queried are evicted."""

NOBODY = -1
"""No user's id: the owner of a process with several user ids."""

NO_PRINCIPAL = Principal(NOBODY)
"""No peer's principal."""


def owner_of(consumer: Consumer) -> int | None:
    """The user who owns the process; None if it is gone.

    A process with several user ids has no owner, as for a debugger: it may know secrets of each
    user. A process that has ended keeps its owner until its parent has reaped it.
    """
    procfs = ProcFs()
    status, stat = procfs.status(consumer.pid), procfs.stat(consumer.pid)
    if status is None or stat is None or stat.started != consumer.started:
        return None
    ids = re.search(rb"^Uid:\s+(\d+)\s+(\d+)\s+(\d+)", status, re.MULTILINE)
    if ids is None or len(set(ids.groups())) > 1:
        return NOBODY
    return int(ids[1])


class ProcessPrincipals:
    """The principals of processes at present; None for one that is gone.

    ``NO_PRINCIPAL`` for a process with several user ids, and where the kernel proves none.
    """

    def __init__(self, resolver: PrincipalResolver) -> None:
        self._resolver = resolver

    def __call__(self, consumer: Consumer) -> Principal | None:
        procfs = ProcFs()
        cgroup, owner = procfs.cgroup(consumer.pid), owner_of(consumer)
        if cgroup is None or owner is None:
            return None
        if owner == NOBODY:
            return NO_PRINCIPAL
        return self._resolver.principal(cgroup, owner) or NO_PRINCIPAL


class Authorization:
    """Decides by the principal of a process; remembers those of ended processes.

    ``own`` is the agent's principal. It and root of the host may see everything; root of a
    container may not.
    """

    def __init__(self, principal_of: PrincipalOf, own: Principal | None = None) -> None:
        self.principal_of, self._own = principal_of, own
        self._owners: OrderedDict[Consumer, Principal] = OrderedDict()

    @classmethod
    def of_host(cls, resolver: PrincipalResolver) -> Authorization:
        """By the processes of this host."""
        return cls(ProcessPrincipals(resolver), resolver.of_process(ProcFs(), os.getpid()))

    def may_read_counters(self, peer: Peer) -> bool:
        """True if ``peer`` may read the energy counters."""
        return peer.principal is not None and peer.principal in (HOST_ROOT, self._own)

    def require(self, peer: Peer, consumer: Consumer) -> None:
        """ProblemError if ``peer`` may not see the energy of ``consumer``."""
        if not self.permits(peer, consumer):
            owner = self._owner_of(consumer, peer)
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                f"process {consumer.pid}",
                "it is not known to be yours"
                if owner in (None, NO_PRINCIPAL)
                else "it belongs to another user, and energy reveals computations",
                "Ask as root." if owner == NO_PRINCIPAL else "Ask as its user or as root.",
            )

    def permits(self, peer: Peer, consumer: Consumer) -> bool:
        """True if ``peer`` may see the energy of ``consumer``."""
        if self.may_read_counters(peer):
            return True
        return peer.principal is not None and self._owner_of(consumer, peer) == peer.principal

    def _owner_of(self, consumer: Consumer, peer: Peer) -> Principal | None:
        """The owner, remembered if ``peer`` is it: who reads a list of all evicts nobody's."""
        owner = self.principal_of(consumer)
        if owner is None:
            return self._owners.get(consumer)
        if owner == peer.principal or consumer in self._owners:
            self._owners[consumer] = owner
            self._owners.move_to_end(consumer)
            if len(self._owners) > MAX_REMEMBERED:
                self._owners.popitem(last=False)
        return owner


_SHARED = "it stands for every user without a number here, so no process is known to be yours"


def problem_for(peer: Peer, problem: ProblemError) -> ProblemError:
    """``problem``; of user 65534, to whom nothing is known to belong, the cause of a refusal."""
    if problem.status != HTTPStatus.FORBIDDEN or (peer.uid, peer.principal) != (OVERFLOW_UID, None):
        return problem
    return ProblemError(problem.status, f"user {OVERFLOW_UID}", _SHARED, "Ask as another user.")


def shown_user(peer: Peer, *, privileged: bool) -> int | None:
    """The user whose row ``peer`` may see; None for every row, NOBODY for none.

    A user id inside a container is not the host's user of that id, and neither is its root.
    """
    principal = peer.principal
    if principal is None or principal.container or principal.pod or principal.user is None:
        return NOBODY
    return None if privileged else principal.user
