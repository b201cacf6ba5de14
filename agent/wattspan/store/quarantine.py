"""Where a ruined file goes: aside, whole, and not for ever."""

from __future__ import annotations

import re
from pathlib import Path

KEPT = 3

_COMPANIONS = ("-wal", "-shm")


def move_aside(path: Path) -> Path:
    """Rename the database at ``path`` to ``NAME.corrupt-<n>`` and return that.

    Its write-ahead log goes with it, so that a person may still recover it. Only the newest few
    are kept.
    """
    numbers = sorted(_numbers(path))
    aside = _numbered(path, numbers[-1] + 1 if numbers else 1)
    path.rename(aside)
    wal = _beside(path, "-wal")
    if wal.exists():
        wal.rename(_beside(aside, "-wal"))
    _beside(path, "-shm").unlink(missing_ok=True)
    for number in numbers[: len(numbers) + 1 - KEPT]:
        for old in (_numbered(path, number), _beside(_numbered(path, number), "-wal")):
            old.unlink(missing_ok=True)
    return aside


def remove_companions(path: Path) -> None:
    """Remove what is left of a database whose main file somebody deleted.

    A log without its database would be replayed into the new one.
    """
    for suffix in _COMPANIONS:
        _beside(path, suffix).unlink(missing_ok=True)


def _numbers(path: Path) -> list[int]:
    pattern = re.compile(re.escape(path.name) + r"\.corrupt-(\d+)")
    found = (pattern.fullmatch(entry.name) for entry in path.parent.iterdir())
    return [int(match[1]) for match in found if match is not None]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.corrupt-{number}")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
