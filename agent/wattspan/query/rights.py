"""Who may ask about whom.

What devices and the host spend, everybody may know who may open the socket: their energy is told
by intervals no finer than the agent's, which is bounded at 10 ms. What a process spends is told
to its own user and to root, since it says something of what the process computes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from wattspan.model import Consumer
from wattspan.ports import ProcessDirectory
from wattspan.query.problem import ProblemError
from wattspan.web.message import Peer

ROOT = 0
REMEMBERED = 10_000
"""Owners of processes that are kept past their end; the longest unasked for are forgotten."""

OwnerOf = Callable[[int], int | None]


def owner_of(pid: int) -> int | None:
    """The user whose the process is; None if there is none, or if it is several users'.

    A process that changes its user may know what none of them should tell the other, so all of
    its user ids must be the same, as for a debugger.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("Uid:"):
            real, effective, saved = line.split()[1:4]
            return int(real) if real == effective == saved else None
    return None


class Rights:
    """Decides, and remembers whose the dead were."""

    def __init__(self, directory: ProcessDirectory, owner: OwnerOf = owner_of) -> None:
        self._directory, self._owner = directory, owner
        self._owners: OrderedDict[Consumer, int] = OrderedDict()

    def require(self, peer: Peer, consumer: Consumer) -> None:
        """ProblemError if ``peer`` may not know what ``consumer`` spends."""
        if peer.uid == ROOT:
            return
        owner = self._owner_of(consumer)
        if peer.uid is None or owner != peer.uid:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                f"process {consumer.pid}",
                "it is not known to be yours"
                if owner is None
                else "it belongs to another user, and what it spends says what it does",
                "Ask as its user or as root.",
            )

    def _owner_of(self, consumer: Consumer) -> int | None:
        owner = self._owner(consumer.pid)
        if self._directory.identify(consumer.pid) != consumer:  # the pid is another's, or nobody's
            return self._owners.get(consumer)
        if owner is None:
            self._owners.pop(consumer, None)
        else:
            self._owners[consumer] = owner
            self._owners.move_to_end(consumer)
            if len(self._owners) > REMEMBERED:
                self._owners.popitem(last=False)
        return owner
