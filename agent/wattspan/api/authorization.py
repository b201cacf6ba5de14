"""Who may ask about whom.

What devices and the host spend, everybody may know who may open the socket, but not finely: see
``grid``. Root and the agent's own user, who may read the counters themselves, are told all that is
known. What a process spends is told to its own user and to root, since it says something of what
the process computes.
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
"""Owners of processes that are kept past their end; the longest unasked for are forgotten."""

NOBODY = -1
"""No user's id: the owner of a process that is several users'."""

OwnerOf = Callable[[Consumer], int | None]


def owner_of(consumer: Consumer) -> int | None:
    """The user whose the process is; None if it is gone.

    A process that changes its user may know what none of them should tell the other, so all of
    its user ids must be the same, as for a debugger. One that has ended and that its parent has
    not taken note of yet still has its owner.
    """
    folder = Path(f"/proc/{consumer.pid}")
    try:
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
        stat = (folder / "stat").read_bytes()  # afterwards: then the status was the same process's
    except OSError:
        return None
    if int(stat.rpartition(b")")[2].split()[19]) != consumer.started:
        return None
    ids = re.search(r"^Uid:\s+(\d+)\s+(\d+)\s+(\d+)", status, re.MULTILINE)
    if ids is None or len(set(ids.groups())) > 1:
        return NOBODY
    return int(ids[1])


def may_read_counters(peer: Peer) -> bool:
    """Whether ``peer`` may read the counters themselves."""
    return peer.uid in (ROOT, os.geteuid())


class Authorization:
    """Decides, and remembers whose the dead were."""

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
        """Whether ``peer`` may see the energy of ``consumer``."""
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
