"""Reading the files that an operator names: the configuration, tokens, certificates, tariffs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple

LARGEST = 1 << 20
"""Bytes of a file, unless its kind needs more."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NULL = os.makedev(1, 3)


class UnfitFileError(OSError):
    """The path leads to something else than a file of the kind that is needed."""


class RegularFile(NamedTuple):
    """The whole content of a file, and what the kernel says of the file that was read."""

    content: bytes
    status: os.stat_result


def read_regular(path: Path | str, most: int = LARGEST) -> RegularFile:
    """The file at ``path``; reading it never blocks and never takes more than ``most`` bytes.

    OSError if the file cannot be read; UnfitFileError if it is no regular file or is larger.
    ``/dev/null`` is an empty file: it stands for none.
    """
    # Before it is opened as well: opening a device may act on it.
    _require_regular(Path(path).stat())
    # O_NONBLOCK: the file may have been replaced by a named pipe since.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _require_regular(status)
        content = file.read(most + 1)
    if len(content) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
        raise UnfitFileError(errno.EFBIG, f"it is larger than {size}")
    return RegularFile(content, status)


def _require_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    is_null = stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL
    if not stat.S_ISREG(status.st_mode) and not is_null:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnfitFileError(errno.EINVAL, f"it is {kind}, and a regular file is needed")
