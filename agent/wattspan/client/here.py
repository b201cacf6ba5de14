"""The process that measures itself: it asks the agent, once and in the background, to keep it.

The agent remembers a process that is watched for longer than others, so that long windows can
still be told. No agent, no harm: it is tried again with a later window.
"""

from __future__ import annotations

import os
from time import monotonic_ns  # noqa: TID251 - an application has no clock of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RENEW = 300 * 10**9
"""Nanoseconds until the agent is asked again: it may have been started anew."""

RETRY = 10 * 10**9
"""Nanoseconds until it is tried again after nobody answered."""

_NEVER = 2**63


class Here:
    """This process. ``due`` is the monotonic time from which on a window asks to be kept."""

    __slots__ = ("due", "identity", "pid")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.due = 0
        self.identity: tuple[int, int] | None = None  # pid and start time, as the agent sees them

    def watch(self) -> None:
        """Ask in the background; returns at once and never raises."""
        self.due = _NEVER
        try:
            from threading import Thread

            Thread(target=self._watch, name="wattspan-watch", daemon=True).start()
        except RuntimeError:  # no room for a thread, or the interpreter is ending
            self.due = monotonic_ns() + RETRY

    def _watch(self) -> None:
        due = RETRY
        try:
            from wattspan.client.agent import ask

            told: dict[str, Any] = ask("/v1/watch", {"pid": "self", "family": "1"}, method="POST")
            self.identity = told["pid"], told["started"]
            due = RENEW
        except Exception:  # noqa: BLE001, S110 - reading a figure says what is wrong
            pass
        finally:
            self.due = monotonic_ns() + due


here = Here()


def _reborn() -> None:
    """After a fork the child measures itself."""
    global here
    here = Here()


os.register_at_fork(after_in_child=_reborn)
