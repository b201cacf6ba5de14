"""How a file says that we wrote it, and that nobody has changed it since.

The files of the service, as they come with wattspan, and where each belongs.
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
_WITHIN = 1000  # bytes from the beginning in which a mark is looked for


class NonRegularFile(str):
    """What is there in place of a file: a link, a directory. The string says which."""

    __slots__ = ()


FileContent = bytes | NonRegularFile | None
"""What is found at a path; None is nothing."""


class FileState(enum.Enum):
    """Who has the say over what is at a path."""

    NOBODY = "absent"
    OURS = "current"
    OUTDATED = "outdated"
    EDITED = "edited"
    FOREIGN = "foreign"


def with_digest(text: str) -> str:
    """The text with a mark before it."""
    return _DIGEST_HEADER.format(digest=_digest(text)) + text


def file_state(content: FileContent, wanted: str | None = None) -> FileState:
    """Whose it is; with ``wanted``, whether it is that text."""
    if content is None:
        return FileState.NOBODY
    if isinstance(content, NonRegularFile):
        return FileState.FOREIGN
    text = content.decode("utf-8", "replace")
    found = _DIGEST.search(text, 0, _WITHIN)
    if found is None:
        return FileState.FOREIGN
    if found[1] != _digest(text[found.end() :]) or text != with_digest(text[found.end() :]):
        return FileState.EDITED
    return FileState.OURS if wanted is None or text == wanted else FileState.OUTDATED


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


AGENT = "wattspan.service"
CAPPER = "wattspan-capper.service"
CAPPER_SOCKET = "wattspan-capper.socket"

LOCAL_LIB = "/usr/local/lib"
"""Searched by all of them: before the distribution's files, after the administrator's."""
PLACES = {
    "system": f"{LOCAL_LIB}/systemd/system",
    "sysusers.d": f"{LOCAL_LIB}/sysusers.d",
    "tmpfiles.d": f"{LOCAL_LIB}/tmpfiles.d",  # noqa: S108 - systemd's own place
    "udev/rules.d": f"{LOCAL_LIB}/udev/rules.d",
}
PACKAGED_PROGRAM = "/usr/bin/wattspan"
"""The program in the units, as they are shipped."""
_PACKAGED_PROGRAM = re.compile(rf"{re.escape(PACKAGED_PROGRAM)}(?![\w.-])")


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """One file: where it comes to be, and what stands in it there."""

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
    """The files below ``folder``, for a program at that path, each with its mark."""
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
            f"{folder} holds no {AGENT}: this installation of wattspan lacks its own files; "
            "install it anew from a wheel or a whole source tree."
        )
    return tuple(found)


def service_files_directory() -> Path:
    """Where they are: in the package, or in the source tree it is run from."""
    here = Path(__file__).resolve().parent
    packaged = here / "systemd"
    return packaged if packaged.is_dir() else here.parents[3] / "systemd"


def install_place(path: str) -> str:
    """Which of the PLACES a file belongs in; "" for one that is not installed, such as a text."""
    if re.search(r"\.(service|socket|timer|target|slice|path|mount)$", path):
        return "system"
    if path.endswith(".rules"):
        return "udev/rules.d"
    kinds = ("sysusers.d", "tmpfiles.d")
    return next((kind for kind in kinds if kind in path and path.endswith(".conf")), "")


def with_program_path(text: str, program: str) -> str:
    """A unit that runs ``program``; nothing else of it changes."""
    return _PACKAGED_PROGRAM.sub(lambda _: program, text)


def unit_names(files: Sequence[ServiceFile]) -> tuple[str, ...]:
    return tuple(file.name for file in files if file.unit)
