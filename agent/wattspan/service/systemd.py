"""Tells the service manager how the service is doing; nothing where there is none.

How the agent is doing, in the one sentence that ``systemctl status`` shows.

What stands between this process and its service manager: systemd, or whoever speaks as it does.

Where there is no service manager nothing is told, nothing is inherited, and nothing fails.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress

from wattspan.model import SECOND, Snapshot
from wattspan.ports import Clock
from wattspan.util.text import printable

WATCHDOG_DIVISOR = 4
"""How many signs of life there are in one watchdog period, so that a late one is no death."""

LONGEST_STATUS = 400  # characters; `systemctl status` shows one line

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_WATCHDOG_MESSAGE = "WATCHDOG=1"
_SEND_TIMEOUT = 1.0  # seconds that a service manager may take to make room for a message


class SystemdNotifier:
    """One datagram a message to ``$NOTIFY_SOCKET``. Safe from any thread; never raises."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        where = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + where[1:] if where.startswith("@") else where
        self.period = _period(environ) if self._address else None
        """Nanoseconds within which a sign of life is awaited; None where nobody waits for one."""
        self._status = ""

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> SystemdNotifier:
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
            out.settimeout(0.0 if lines == (_WATCHDOG_MESSAGE,) else _SEND_TIMEOUT)
            out.sendto("\n".join(lines).encode(), self._address)

    def alive(self) -> None:
        """Say that the loop that matters runs."""
        self(_WATCHDOG_MESSAGE)

    def status(self, sentence: str) -> None:
        """Say in one sentence how it is; again only when it has changed."""
        if sentence != self._status:
            self._status = sentence
            self(status_assignment(sentence))

    def ready(self, sentence: str) -> None:
        """Say that everything answers, after a start or a reload."""
        self._status = sentence
        self("READY=1", status_assignment(sentence))

    def reloading(self, now: int) -> None:
        """Say that the configuration is read anew; ``now`` is monotonic."""
        self("RELOADING=1", f"MONOTONIC_USEC={now // 1000}", status_assignment("Reloading."))

    def stopping(self) -> None:
        """Say that the end has begun."""
        self("STOPPING=1", status_assignment("Stopping."))

    def patience(self, span: int) -> None:
        """Ask that a start or an end that is under way may take ``span`` nanoseconds from now."""
        self(f"EXTEND_TIMEOUT_USEC={span // 1000}")


class Watchdog:
    """Called by a loop whenever it turns; tells the service manager often enough, and no oftener.

    It belongs to one loop: where that hangs, nothing is told, whatever else of the process runs.
    """

    def __init__(self, notify: SystemdNotifier, clock: Clock) -> None:
        self._notify, self._clock = notify, clock
        self._due = clock.monotonic()

    def __call__(self) -> None:
        period = self._notify.period
        if period is None:
            return
        now = self._clock.monotonic()
        if now >= self._due:
            self._due = now + period // WATCHDOG_DIVISOR
            self._notify.alive()


def status_assignment(sentence: str) -> str:
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


_NAMED = 3  # addresses, and things that are missing, that are named; of the others, how many
_LONGEST_NOTE = 160


def agent_status(snapshot: Snapshot, addresses: Sequence[str], note: str = "") -> str:
    """What is served, how many counters answer, and what is missing; no figure that moves.

    ``note`` is what the operator should know first.
    """
    parts = (_served(addresses), _counters(snapshot), _missing(snapshot))
    told = f"{'; '.join(part for part in parts if part)}."
    label = "EMULATED: " if snapshot.emulated else ""
    if len(note) > _LONGEST_NOTE:
        note = note[: _LONGEST_NOTE - 1] + "…"
    return " ".join(part for part in (note, f"{label}{told}") if part)


def _served(addresses: Sequence[str]) -> str:
    return f"serving {_abbreviated_list(addresses)}" if addresses else "serving nobody"


def _counters(snapshot: Snapshot) -> str:
    there = [account.domain for account in snapshot.domains if account.present]
    if not there:
        return "no energy counter answers"
    sources = sorted({domain.source for domain in there})
    return f"{len(there)} energy counter{'s' * (len(there) > 1)} of {_abbreviated_list(sources)}"


def _missing(snapshot: Snapshot) -> str:
    down = [health.source for health in snapshot.health if not health.up]
    return f"missing: {_abbreviated_list(down)}" if down else ""


def _abbreviated_list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
