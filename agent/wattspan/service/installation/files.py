"""The files of the systemd services: their text, places and digests.

Each installed file contains a digest of its text, which shows later whether wattspan wrote it and
whether it was edited since.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from wattspan.ports import WattspanError

_DIGEST_HEADER = """\
# Written by `wattspan service install`, which replaces it only while it is as it was written.
# To change a unit, use a drop-in: systemctl edit UNIT.
# wattspan-digest: sha256:{digest}
"""
_DIGEST = re.compile(r"# wattspan-digest: sha256:([0-9a-f]{64})\n")
_DIGEST_WITHIN = 1000  # characters from the beginning


class NonRegularFile(str):
    """Description of a link, directory or other object in place of a regular file."""

    __slots__ = ()


FileContent = bytes | NonRegularFile | None
"""Content at a path; None if nothing exists there."""


class FileState(enum.Enum):
    """State of a file compared with the one that wattspan installs."""

    ABSENT = "absent"
    CURRENT = "current"
    OUTDATED = "outdated"
    EDITED = "edited"
    FOREIGN = "foreign"


def with_digest(text: str) -> str:
    """Return ``text`` after a comment with its digest."""
    return _DIGEST_HEADER.format(digest=_digest(text)) + text


def file_state(content: FileContent, wanted: str | None = None) -> FileState:
    """Return the state; a valid file is OUTDATED if it differs from ``wanted``."""
    if content is None:
        return FileState.ABSENT
    if isinstance(content, NonRegularFile):
        return FileState.FOREIGN
    text = content.decode("utf-8", "replace")
    found = _DIGEST.search(text, 0, _DIGEST_WITHIN)
    if found is None:
        return FileState.FOREIGN
    if found[1] != _digest(text[found.end() :]) or text != with_digest(text[found.end() :]):
        return FileState.EDITED
    return FileState.CURRENT if wanted is None or text == wanted else FileState.OUTDATED


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


AGENT = "wattspan.service"
CAPPER = "wattspan-capper.service"
CAPPER_SOCKET = "wattspan-capper.socket"

LOCAL_LIB = "/usr/local/lib"
"""systemd and udev read it before the distribution's files and after /etc."""
PLACES = {
    "system": f"{LOCAL_LIB}/systemd/system",
    "sysusers.d": f"{LOCAL_LIB}/sysusers.d",
    "tmpfiles.d": f"{LOCAL_LIB}/tmpfiles.d",  # noqa: S108 - systemd's own place
    "udev/rules.d": f"{LOCAL_LIB}/udev/rules.d",
}
PACKAGED_PROGRAM = "/usr/bin/wattspan"
"""Program path in the shipped units."""
_PACKAGED_PROGRAM = re.compile(rf"{re.escape(PACKAGED_PROGRAM)}(?![\w.-])")


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """One file: its installed path and text."""

    path: str
    text: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def folder(self) -> str:
        return str(PurePosixPath(self.path).parent)

    @property
    def unit(self) -> bool:
        return self.folder == PLACES["system"]


def service_files(folder: Path, program: str) -> tuple[ServiceFile, ...]:
    """Return the files below ``folder`` with the path of ``program`` and their digests.

    Raises WattspanError if the folder contains no unit of the agent.
    """
    found = [
        ServiceFile(
            f"{PLACES[place]}/{path.name}",
            with_digest(with_program_path(path.read_text("utf-8"), program)),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (place := install_place(path.relative_to(folder).as_posix()))
    ]
    if AGENT not in {file.name for file in found}:
        raise WattspanError(
            f"{folder} contains no {AGENT}: this installation of wattspan is incomplete. "
            "Install it again from a wheel or a complete source tree."
        )
    return tuple(found)


def service_files_directory() -> Path:
    """Return the directory of the shipped files, in the package or in the source tree."""
    here = Path(__file__).resolve().parent
    packaged = here / "systemd"
    return packaged if packaged.is_dir() else here.parents[3] / "systemd"


def install_place(path: str) -> str:
    """Return the key of PLACES for a shipped file; "" if the file is not installed."""
    if re.search(r"\.(service|socket|timer|target|slice|path|mount)$", path):
        return "system"
    if path.endswith(".rules"):
        return "udev/rules.d"
    kinds = ("sysusers.d", "tmpfiles.d")
    return next((kind for kind in kinds if kind in path and path.endswith(".conf")), "")


def with_program_path(text: str, program: str) -> str:
    """Replace the program path in the text of a unit."""
    return _PACKAGED_PROGRAM.sub(lambda _: program, text)


def unit_names(files: Sequence[ServiceFile]) -> tuple[str, ...]:
    return tuple(file.name for file in files if file.unit)
