"""What the live view shows, and how a key changes it. Pure: a key in, the next choice out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

E = TypeVar("E", bound=StrEnum)

PAGE = 10


class By(StrEnum):
    """What is listed: everything, or one kind of row alone."""

    ALL = "all"
    PROCESS = "process"
    GROUP = "group"
    DEVICE = "device"
    SPAN = "span"


class Sort(StrEnum):
    WATTS = "watts"
    JOULES = "joules"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class Options:
    """What to show and how much room there is; ``height`` None is as many lines as it takes."""

    by: By = By.ALL
    sort: Sort = Sort.WATTS
    filter: str = ""
    offset: int = 0
    width: int = 100
    height: int | None = None
    ascii: bool = False
    keys: bool = False  # the keys are live, so the last line tells them
    editing: bool = False  # what is typed goes into the filter
    help: bool = False
    brief: bool = False  # without a height: the rows that matter, and how many do not
    notice: str = ""  # one sentence above the figures: no answer, stale, ...
    note: str = ""  # the same, but nothing is wrong

    @property
    def sorts(self) -> list[Sort]:
        """What the rows can be sorted by; spans have no watts, as `view_spans` explains."""
        return [sort for sort in Sort if self.by is not By.SPAN or sort is not Sort.WATTS]

    @property
    def order(self) -> Sort:
        """What the rows are sorted by."""
        return self.sort if self.sort in self.sorts else Sort.JOULES


def press(options: Options, key: str) -> Options | None:
    """The choice after ``key``; None to quit."""
    if key in ("ctrl-c", "ctrl-d"):
        return None
    if options.editing:
        return _edit(options, key)
    if options.help:
        return replace(options, help=False)
    match key:
        case "q" | "Q":
            return None
        case "s":
            return replace(options, sort=_next(options.sorts, options.order), offset=0)
        case "S":
            return replace(options, sort=_next(options.sorts[::-1], options.order), offset=0)
        case "tab":
            return replace(options, by=_next(list(By), options.by), offset=0)
        case "backtab":
            return replace(options, by=_next(list(By)[::-1], options.by), offset=0)
        case "/":
            return replace(options, editing=True)
        case "escape":
            return replace(options, filter="", offset=0)
        case "?" | "h":
            return replace(options, help=True)
        case _:
            return replace(options, offset=max(0, options.offset + _STEPS.get(key, 0)))


_STEPS = {
    "down": 1, "j": 1, "up": -1, "k": -1,
    "pagedown": PAGE, " ": PAGE, "pageup": -PAGE, "home": -(10**9), "g": -(10**9),
}  # fmt: skip


def _edit(options: Options, key: str) -> Options:
    match key:
        case "enter":
            return replace(options, editing=False)
        case "escape":
            return replace(options, editing=False, filter="", offset=0)
        case "backspace":
            return replace(options, filter=options.filter[:-1], offset=0)
        case _ if len(key) == 1 and key.isprintable() and len(options.filter) < 60:
            return replace(options, filter=options.filter + key, offset=0)
        case _:
            return options


def _next(choices: list[E], present: E) -> E:
    return choices[(choices.index(present) + 1) % len(choices)]
