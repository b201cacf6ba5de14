"""Tells the service manager how the service is doing; nothing where there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from wattspan.model import SECOND
from wattspan.ports import Clock
from wattspan.util.text import printable

PARTS = 4
"""How many signs of life there are in one watchdog period, so that a late one is no death."""

LONGEST_STATUS = 400  # characters; `systemctl status` shows one line

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_ALIVE = "WATCHDOG=1"
_PATIENCE = 1.0  # seconds that a service manager may take to make room for a message


class Notify:
    """One datagram a message to ``$NOTIFY_SOCKET``. Safe from any thread; never raises."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        where = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + where[1:] if where.startswith("@") else where
        self.period = _period(environ) if self._address else None
        """Nanoseconds within which a sign of life is awaited; None where nobody waits for one."""
        self._status = ""

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> Notify:
        """As ``environ`` says, from which it goes: what this process starts has nothing to tell."""
        notify = cls(dict(environ))
        for name in _VARIABLES:
            environ.pop(name, None)
        return notify

    @property
    def heard(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    def __call__(self, *lines: str) -> None:
        """Send ``READY=1``, ``STOPPING=1`` or the like; several lines are one message."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            # A sign of life that finds no room is followed by another one; the rest is said once.
            out.settimeout(0.0 if lines == (_ALIVE,) else _PATIENCE)
            out.sendto("\n".join(lines).encode(), self._address)

    def alive(self) -> None:
        """Say that the loop that matters runs."""
        self(_ALIVE)

    def status(self, sentence: str) -> None:
        """Say in one sentence how it is; again only when it has changed."""
        if sentence != self._status:
            self._status = sentence
            self(said(sentence))

    def ready(self, sentence: str) -> None:
        """Say that everything answers, after a start or a reload."""
        self._status = sentence
        self("READY=1", said(sentence))

    def reloading(self, now: int) -> None:
        """Say that the configuration is read anew; ``now`` is monotonic."""
        self("RELOADING=1", f"MONOTONIC_USEC={now // 1000}", said("Reloading."))

    def stopping(self) -> None:
        """Say that the end has begun."""
        self("STOPPING=1", said("Stopping."))

    def patience(self, span: int) -> None:
        """Ask that a start or an end that is under way may take ``span`` nanoseconds from now."""
        self(f"EXTEND_TIMEOUT_USEC={span // 1000}")


class Watchdog:
    """Called by a loop whenever it turns; tells the service manager often enough, and no oftener.

    It belongs to one loop: where that hangs, nothing is told, whatever else of the process runs.
    """

    def __init__(self, notify: Notify, clock: Clock) -> None:
        self._notify, self._clock = notify, clock
        self._due = clock.monotonic()

    def __call__(self) -> None:
        period = self._notify.period
        if period is None:
            return
        now = self._clock.monotonic()
        if now >= self._due:
            self._due = now + period // PARTS
            self._notify.alive()


def said(sentence: str) -> str:
    """``sentence`` as a status of one line, whoever had a hand in its words."""
    plain = printable(sentence, " ")
    if len(plain) > LONGEST_STATUS:
        plain = plain[: LONGEST_STATUS - 1] + "…"
    return f"STATUS={plain}"


def _period(environ: Mapping[str, str]) -> int | None:
    """What ``WATCHDOG_USEC`` says, if it is meant for this process and makes sense."""
    told, whom = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if whom and whom != str(os.getpid()):
        return None
    if not (told.isascii() and told.isdecimal()) or not int(told):
        return None
    return int(told) * (SECOND // 10**6)
