"""Authorisation of queries by the user who asks.

The energy of devices and of the host is available to every user who may open the socket, at a
coarse resolution (``energy.TimeGrid``); root and the agent's user, who may read the counters
themselves, get everything. The energy of a process reveals something about its computations, so
it is available to its own user and to root only.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from wattspan.api.requests import ProblemError
from wattspan.http.messages import Peer
from wattspan.model import Consumer

ROOT = 0
MAX_REMEMBERED = 10_000
"""Owners of ended processes that are remembered; the least recently queried are evicted."""

NOBODY = -1
"""No user's id: the owner of a process with several user ids."""

OwnerOf = Callable[[Consumer], int | None]


def owner_of(consumer: Consumer) -> int | None:
    """The user who owns the process; None if it is gone.

    A process that changes its user may know what none of them should tell the other, so all of
    its user ids must be the same, as for a debugger. One that has ended and that its parent has
    not taken note of yet still has its owner.
    """
    folder = Path(f"/proc/{consumer.pid}")
    try:
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
        stat = (folder / "stat").read_bytes()  # read second: the status is of the same process
    except OSError:
        return None
    if int(stat.rpartition(b")")[2].split()[19]) != consumer.started:
        return None
    ids = re.search(r"^Uid:\s+(\d+)\s+(\d+)\s+(\d+)", status, re.MULTILINE)
    if ids is None or len(set(ids.groups())) > 1:
        return NOBODY
    return int(ids[1])


def may_read_counters(peer: Peer) -> bool:
    """True if ``peer`` may read the energy counters."""
    return peer.uid in (ROOT, os.geteuid())


class Authorization:
    """Decides by the owner of a process; remembers the owners of ended processes."""

    def __init__(self, owner: OwnerOf = owner_of) -> None:
        self._owner = owner
        self._owners: OrderedDict[Consumer, int] = OrderedDict()

    def require(self, peer: Peer, consumer: Consumer) -> None:
        """ProblemError if ``peer`` may not see the energy of ``consumer``."""
        if not self.permits(peer, consumer):
            owner = self._owner_of(consumer)
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                f"process {consumer.pid}",
                "it is not known to be yours"
                if owner in (None, NOBODY)
                else "it belongs to another user, and what it spends says what it does",
                "Ask as its user or as root.",
            )

    def permits(self, peer: Peer, consumer: Consumer) -> bool:
        """True if ``peer`` may see the energy of ``consumer``."""
        if peer.uid == ROOT:
            return True
        return peer.uid is not None and self._owner_of(consumer) == peer.uid

    def _owner_of(self, consumer: Consumer) -> int | None:
        owner = self._owner(consumer)
        if owner is None:
            return self._owners.get(consumer)
        self._owners[consumer] = owner
        self._owners.move_to_end(consumer)
        if len(self._owners) > MAX_REMEMBERED:
            self._owners.popitem(last=False)
        return owner
