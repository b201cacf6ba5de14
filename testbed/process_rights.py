"""The umask and the user of this process for the time of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def new_root(tmp_path: Path) -> Iterator[Path]:
    """An empty root directory for an installation, with the umask of most systems."""
    with umask(0o022):
        (tmp_path / "root").mkdir()
        yield tmp_path / "root"


@contextmanager
def without_root(user: int = NOBODY) -> Iterator[None]:
    """As ``user`` if the tests run as root; else as the user of the tests."""
    before = os.geteuid()
    os.seteuid(before or user)
    try:
        yield
    finally:
        os.seteuid(before)
