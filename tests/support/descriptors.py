"""File descriptors of a process: none is free while a block runs, or until others are permitted."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENOUGH = 1024
_LISTINGS = 50


def forbid_descriptors(pid: int) -> None:
    """Let a process have no descriptor but those that it has."""
    used = _used(pid)
    for _ in range(_LISTINGS):  # a file that is just being read has one for a moment
        used &= _used(pid)
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    _limit(pid, lowest)


def _used(pid: int) -> set[int]:
    listed = list(Path(f"/proc/{pid}/fd").iterdir())
    return {int(one.name) for one in listed if one.is_symlink()}  # without that of the listing


def permit_descriptors(pid: int) -> None:
    _limit(pid, _ENOUGH)


@contextmanager
def no_free_descriptor(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    forbid_descriptors(pid)
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _limit(pid: int, number: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(number, hard), hard))
