"""The keys of a terminal, one at a time, without waiting for enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Protocol, Self

_SEQUENCES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down",
    "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[H": "home", "\x1b[1~": "home",
    "\x1b[Z": "backtab", "\x1b": "escape", "\t": "tab", "\r": "enter", "\n": "enter",
    "\x7f": "backspace", "\x08": "backspace", "\x03": "ctrl-c", "\x04": "ctrl-d",
}  # fmt: skip


class Keys(Protocol):
    """Something that is typed on."""

    def wait(self, seconds: float) -> list[str]:
        """The keys pressed, as soon as there are any; none after ``seconds``."""
        ...


def decode(text: str) -> list[str]:
    """The keys in what a terminal sent at once. Unknown escape sequences are no keys."""
    keys: list[str] = []
    while text:
        length = _escape_length(text)
        chunk, text = text[:length], text[length:]
        key = _SEQUENCES.get(chunk, chunk)
        if len(key) == 1 and not key.isprintable():
            continue
        if not key.startswith("\x1b"):
            keys.append(key)
    return keys


def _escape_length(text: str) -> int:
    """How many characters the first key takes: ESC [ parameters letter, ESC O letter, or 1."""
    if text[:2] == "\x1bO":
        return min(3, len(text))
    if text[:2] != "\x1b[":
        return 1
    for index, char in enumerate(text[2:], start=2):
        if "@" <= char <= "~":
            return index + 1
    return len(text)


class Keyboard:
    """Standard input, a terminal, in cbreak mode while this is open."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._before: list[int | list[bytes | int]] | None = None
        self._open = True

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> list[str]:
        watched = [self._descriptor] if self._open else []
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        if not ready:
            return []
        typed = os.read(self._descriptor, 1024)
        self._open = bool(typed)  # at its end the terminal is always ready and says nothing
        return decode(typed.decode("utf-8", "replace"))
