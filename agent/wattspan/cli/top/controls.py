"""Options of the view, their changes by keys, and the keyboard of a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, Self, TypeVar

E = TypeVar("E", bound=StrEnum)

PAGE = 10


class ViewSection(StrEnum):
    """The sections that are shown: all, or one."""

    ALL = "all"
    PROCESS = "process"
    GROUP = "group"
    DEVICE = "device"
    SPAN = "span"


class SortKey(StrEnum):
    WATTS = "watts"
    JOULES = "joules"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """The selection and the size of the view; ``height`` None is unlimited."""

    by: ViewSection = ViewSection.ALL
    sort: SortKey = SortKey.WATTS
    filter: str = ""
    offset: int = 0
    width: int = 100
    height: int | None = None
    keys: bool = False  # the last line lists the keys
    editing: bool = False  # typed characters go into the filter
    help: bool = False
    brief: bool = False  # without a height: only the largest rows
    notice: str = ""  # a line above the figures

    @property
    def wide(self) -> bool:
        """True if there is room for bars, attribution methods and the state of GPUs."""
        return self.width >= 120


def handle_key(options: ViewOptions, key: str) -> ViewOptions | None:
    """The options after ``key``; None to quit."""
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
            return replace(options, sort=_next(list(SortKey), options.sort), offset=0)
        case "tab":
            return replace(options, by=_next(list(ViewSection), options.by), offset=0)
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


def _edit(options: ViewOptions, key: str) -> ViewOptions:
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


_SEQUENCES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down",
    "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[H": "home", "\x1b[1~": "home",
    "\x1b": "escape", "\t": "tab", "\r": "enter", "\n": "enter",
    "\x7f": "backspace", "\x08": "backspace", "\x03": "ctrl-c", "\x04": "ctrl-d",
}  # fmt: skip


class KeySource(Protocol):
    """A source of keys."""

    def wait(self, seconds: float) -> list[str]:
        """The next keys; an empty list after ``seconds``."""
        ...


_KEY = re.compile(r"\x1bO.?|\x1b\[[ -?]*[@-~]?|.", re.DOTALL)


def decode(text: str) -> list[str]:
    """The keys in the input of a terminal, without unknown escape sequences."""
    keys = (_SEQUENCES.get(chunk, chunk) for chunk in _KEY.findall(text))
    return [key for key in keys if key.isprintable()]


class Keyboard:
    """Standard input, a terminal, in cbreak mode while it is entered."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._before: list[int | list[bytes | int]] | None = None
        self._open = True

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> list[str]:
        watched = [self._descriptor] if self._open else []
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        if not ready:
            return []
        typed = os.read(self._descriptor, 1024)
        self._open = bool(typed)  # at its end, a terminal is always ready
        return decode(typed.decode("utf-8", "replace"))
