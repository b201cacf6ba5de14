"""Choices made by bytes: structured input of a target, such as a tree or a conversation."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_Item = TypeVar("_Item")
_MEMORY = Path("/dev/shm")


class Supply:
    """Takes from the front of ``data``; exhausted data yields 0 or empty values."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[self.byte() % len(items)]

    def whole(self, size: int = 8, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def number(self) -> int:
        """Usually small, or near a power of two: where parsers have their edges."""
        kind = self.byte()
        if kind < 128:
            return kind
        power = 1 << (kind % 72)
        return (power, power - 1, -power, self.whole())[kind % 4]

    def take(self, most: int) -> bytes:
        taken = self._data[self._at : self._at + most]
        self._at += len(taken)
        return taken

    def chunk(self) -> bytes:
        """A length, and so many bytes."""
        return self.take(self.byte())

    def text(self) -> str:
        return self.chunk().decode("utf-8", "replace")

    def rest(self) -> bytes:
        return self.take(len(self._data))


@contextmanager
def folder() -> Iterator[Path]:
    """An empty directory, in memory where that can be: a target is run thousands of times."""
    where = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=where) as path:
        yield Path(path)


def one_line(text: str, most: int) -> None:
    """Messages for a person must be fit for a log: bounded, and free of control characters."""
    assert len(text) <= most, f"{len(text)} characters are said: {text[:80]!r}"
    assert text.isprintable(), f"unprintable: {text!r:.200}"
    text.encode()  # a lone surrogate would fail on encoding


def told(error: Exception, most: int = 2000) -> None:
    """A refusal must say why, and not without end."""
    assert 0 < len(str(error)) < most, f"{type(error).__name__} says {str(error)!r:.200}"
