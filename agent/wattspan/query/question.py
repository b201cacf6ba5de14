"""Questions, from the parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from wattspan.model import SECOND, Consumer, Instant
from wattspan.model.settings import Duration
from wattspan.query.problem import bad, nearest
from wattspan.query.times import FORMS, moment
from wattspan.util.text import printable

LONGEST_WAIT = 60 * SECOND
_YES = {"1": True, "true": True, "0": False, "false": False}
_MOST_PID = 2**22  # PID_MAX_LIMIT of the kernel


class Subject(NamedTuple):
    """A process as it was named. ``pid`` is None for whoever asks."""

    pid: int | None
    started: int | None = None

    @property
    def consumer(self) -> Consumer | None:
        """The process, if the name alone tells which."""
        if self.pid is None or self.started is None:
            return None
        return Consumer(self.pid, self.started)


class Question(NamedTuple):
    """What was spent from ``start`` to ``end``, monotonic, by the host and by ``subject``."""

    start: int
    end: int
    subject: Subject | None
    family: bool
    wait: int


def energy_question(query: Mapping[str, str], now: Instant) -> Question:
    """The question that ``query`` asks, or a ProblemError for the first thing wrong with it."""
    known_only(query, ("pid", "started", "start", "end", "family", "wait"))
    if "start" not in query:
        raise bad("start", "it is missing", FORMS)
    start = moment_of("start", query["start"], now)
    end = moment_of("end", query["end"], now) if "end" in query else now.mono
    if end < start:
        raise bad("end", "it lies before start", "Swap them, or write both by the same clock.")
    return Question(start, end, subject(query), _flag("family", query), _wait(query))


def watch_question(query: Mapping[str, str]) -> tuple[Subject, bool]:
    """Whom to watch, and whether with its descendants."""
    known_only(query, ("pid", "started", "family"))
    whom = subject(query)
    if whom is None:
        raise bad("pid", "it is missing", 'Write a process id, or "self" for whoever asks.')
    return whom, _flag("family", query)


def no_parameters(query: Mapping[str, str]) -> None:
    known_only(query, ())


def subject(query: Mapping[str, str]) -> Subject | None:
    """The process that is asked about, None if none is."""
    pid, started = query.get("pid"), query.get("started")
    if pid is None:
        if started is not None:
            raise bad("started", "it says nothing without pid", "Give both.")
        return None
    ticks = None if started is None else _number("started", started, 2**63 - 1)
    if pid == "self":
        return Subject(None, ticks)
    return Subject(_number("pid", pid, _MOST_PID), ticks)


def known_only(query: Mapping[str, str], known: tuple[str, ...]) -> None:
    """A ProblemError for a parameter that is none of the ``known``."""
    for name in query:
        if name not in known:
            raise bad(f"{shown(name)}", "there is no such parameter", nearest(name, known))


def moment_of(name: str, text: str, now: Instant) -> int:
    """The monotonic nanoseconds that the parameter ``name`` means, or a ProblemError."""
    try:
        return moment(text, now)
    except ValueError as error:
        raise bad(f"{name}={shown(text)}", str(error), FORMS) from None


def _number(name: str, text: str, most: int) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 19 and 0 < int(text) <= most:
        return int(text)
    raise bad(
        f"{name}={shown(text)}",
        f"that is no whole number from 1 to {most}",
        'Write a process id, or "self" for whoever asks.'
        if name == "pid"
        else "It is field 22 of /proc/PID/stat, in clock ticks since boot.",
    )


def _flag(name: str, query: Mapping[str, str]) -> bool:
    text = query.get(name, "0")
    if text not in _YES:
        raise bad(f"{name}={shown(text)}", "that is neither yes nor no", "Write 1 or 0.")
    return _YES[text]


def _wait(query: Mapping[str, str]) -> int:
    text = query.get("wait", "0s")
    try:
        wait = Duration.parse(text)
    except ValueError as error:
        raise bad("wait", str(error), 'Write it as "2s".') from None
    if wait > LONGEST_WAIT:
        raise bad(f"wait={shown(text)}", "that is too long", "Wait at most 60s, and ask again.")
    return wait


def shown(text: str) -> str:
    """What somebody sent, fit to be told back."""
    return printable(text[:60])
