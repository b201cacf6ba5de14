"""From a part to the file that it becomes: whole, on the disk, under its name at once."""

from __future__ import annotations

import gzip
import os
import subprocess
from contextlib import suppress

from wattspan.isolated import module_command
from wattspan.ports import WattspanError
from wattspan.tabular import NO_PYARROW, has_pyarrow
from wattspan_exporters.files.folder import Folder, unused
from wattspan_exporters.files.names import FileName

_CHUNK = 1 << 20
_LEVEL = 6
_PATIENCE = 300.0
"""Seconds that a conversion to Parquet may take; a part of 64 MiB takes a few."""


class UnfinishedError(WattspanError):
    """A part cannot become a file; it stays what it is."""


def finish(folder: Folder, name: FileName, fd: int) -> bool:
    """Make the file of the part ``fd``; False for a part of no rows, which leaves none.

    OSError or UnfinishedError, and the part is as before.
    """
    if os.fstat(fd).st_size == 0:
        folder.remove(name.part)
        return False
    if name.suffix in ("jsonl", "csv"):
        os.fsync(fd)
        free = unused(folder, name) if folder.exists(str(name)) else name
        folder.rename(name.part, str(free))
    elif folder.exists(str(name)):  # finished before, and cut short on the very last step
        folder.remove(name.part)
    else:
        with folder.replacing(name) as draft:
            if name.suffix == "parquet":
                _to_parquet(fd, draft)
            else:
                _to_gzip(fd, draft)
        folder.remove(name.part)
    folder.sync()
    return True


def _to_gzip(part: int, draft: int) -> None:
    os.lseek(part, 0, os.SEEK_SET)
    with (
        os.fdopen(os.dup(draft), "wb") as out,
        gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as packed,
    ):
        while chunk := os.read(part, _CHUNK):
            packed.write(chunk)


def _to_parquet(part: int, draft: int) -> None:
    """In a process of its own: what pyarrow takes of memory is given back with it.

    It inherits the part, and with it the lock: nobody takes the part up while it is at work, even
    if the agent is killed meanwhile.
    """
    if not has_pyarrow():
        raise UnfinishedError(NO_PYARROW)
    os.lseek(part, 0, os.SEEK_SET)
    command = module_command("wattspan_exporters.files.convert", str(draft))
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command,
            stdin=part,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(draft,),
            timeout=_PATIENCE,
            check=False,
            start_new_session=True,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise UnfinishedError(f"The conversion to Parquet took over {_PATIENCE:g} s.") from None
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        with suppress(OSError):
            os.ftruncate(draft, 0)
        why = told[-1][:300] if told else f"exit status {done.returncode}"
        raise UnfinishedError(f"The conversion to Parquet failed: {why}.")
