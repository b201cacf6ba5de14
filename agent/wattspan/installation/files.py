"""The files of the systemd services: their text, places and digests, and their state on a host.

Each installed file contains a digest of its text, which shows later whether wattspan wrote it and
whether it was edited since.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


class FileState(enum.StrEnum):
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
COUNTERS = "wattspan-counters@.service"
COUNTERS_SOCKET = "wattspan-counters.socket"

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
    return packaged if packaged.is_dir() else here.parents[2] / "systemd"


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
    """The units with a state: not the template, whose instances end with their connections."""
    return tuple(file.name for file in files if file.unit and file.name != COUNTERS)


# --------------------------------------------------------------------- the state of the host

STATE = ("/var/lib/wattspan", "/var/lib/wattspan-capper")
CONFIG = "/etc/wattspan/config.toml"
_VENDOR = ("/usr/lib/systemd/system", "/lib/systemd/system")
_ADMINISTRATOR = {
    PLACES["system"]: "/etc/systemd/system",
    PLACES["sysusers.d"]: "/etc/sysusers.d",
    PLACES["tmpfiles.d"]: "/etc/tmpfiles.d",
    PLACES["udev/rules.d"]: "/etc/udev/rules.d",
}
_MASK = NonRegularFile("a link to /dev/null")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class InstallationState:
    """The state of the host before the first action.

    ``live`` is True for the running host and False for the root directory of another one;
    ``booted`` is True if systemd runs the host, ``udev`` if udev does. ``packaged`` are units of a
    system package, ``overriding`` files in /etc that take precedence, and ``masked`` those that
    disable a file. ``journal`` is True if the capper may have limits to restore. ``systemd`` is
    the version of the running host, if known.
    """

    files: Mapping[str, FileContent] = field(default_factory=dict)
    live: bool = True
    booted: bool = True
    udev: bool = True
    packaged: tuple[str, ...] = ()
    overriding: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    configured: bool = False
    state: tuple[str, ...] = ()
    journal: bool = False
    systemd: int | None = None


def _systemctl(*arguments: str) -> str:
    """Return the output of systemctl; "" without systemd or an answer."""
    try:
        return subprocess.run(  # noqa: S603 - constant commands, no shell
            ["systemctl", *arguments],  # noqa: S607 - the host's own
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def inspect_host(
    root: Path, files: Sequence[ServiceFile], systemctl: Callable[[str], str] = _systemctl
) -> InstallationState:
    """Return the state of the service files below ``root``."""
    live = root == Path("/")
    version_match = re.match(r"systemd (\d+)", systemctl("--version")) if live else None
    units = [f for f in files if f.unit]
    vendor = dict.fromkeys(f"{place}/{f.name}" for f in units for place in _VENDOR)
    above = [f"{_ADMINISTRATOR[f.folder]}/{f.name}" for f in files]
    return InstallationState(
        files={f.path: content_below(root, f.path) for f in files},
        live=live,
        booted=live and Path("/run/systemd/system").is_dir(),
        udev=live and Path("/run/udev/control").exists(),
        packaged=tuple(p for p in vendor if os.path.lexists(path_below(root, p))),
        overriding=tuple(p for p in above if os.path.lexists(path_below(root, p))),
        masked=tuple(p for p in above if content_below(root, p) == _MASK),
        configured=path_below(root, CONFIG).exists(),
        state=tuple(p for p in STATE if path_below(root, p).is_dir() and not escapes_root(root, p)),
        journal=any(path_below(root, STATE[1]).glob("journal-*")),
        systemd=int(version_match[1]) if version_match else None,
    )


def path_below(root: Path, path: str) -> Path:
    """Return ``path`` of the host whose root directory is ``root``."""
    return root / path.lstrip("/")


def escapes_root(root: Path, path: str) -> bool:
    """Return True if a symbolic link in ``path`` leads out of ``root``."""
    parent = Path(os.path.realpath(path_below(root, path).parent))
    return not parent.is_relative_to(os.path.realpath(root))


def content_below(root: Path, path: str) -> FileContent:
    """Return the content at ``path`` of the host whose root directory is ``root``."""
    if escapes_root(root, path):
        return NonRegularFile("outside of this root, through a symbolic link")
    return file_content(path_below(root, path))


def file_content(path: Path) -> FileContent:
    """Return the content at ``path`` without following links."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return NonRegularFile(f"a link to {path.readlink()}")
        if not stat.S_ISREG(mode):
            return NonRegularFile("a directory" if stat.S_ISDIR(mode) else "no regular file")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return NonRegularFile(f"an unreadable file ({error.strerror})")


_STATE_TEXT = {
    FileState.ABSENT: "not installed",
    FileState.CURRENT: "current",
    FileState.OUTDATED: "outdated; `wattspan service install` updates it",
    FileState.EDITED: "edited since its installation",
    FileState.FOREIGN: "not written by wattspan",
}
_UNSHADOW = (
    "To use the package's files: run `wattspan service uninstall`, remove the remaining files of "
    "this list, run `systemctl daemon-reload`, then `systemctl enable --now wattspan.service "
    "wattspan-capper.socket`."
)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """State of the files and units.

    ``package`` are units of a package, ``shadowing`` installed files that replace those of a
    package, ``administrators`` files in /etc, which replace both. ``units`` maps each unit to
    systemd's "active" and "enabled" states; empty if systemd does not run.
    """

    program: str
    package: tuple[str, ...]
    shadowing: tuple[str, ...]
    administrators: tuple[str, ...]
    files: dict[str, FileState]
    units: dict[str, dict[str, str]]

    @property
    def is_current(self) -> bool:
        """True if the services of this installation or of a package are in use and current."""
        if self.package:
            return not self.shadowing
        return all(state is FileState.CURRENT for state in self.files.values())

    def lines(self) -> Iterator[str]:
        if self.package:
            yield f"Installed as a package: {', '.join(self.package)}"
        for path, state in self.files.items():
            if not self.package:
                yield f"{path}: {_STATE_TEXT[state]}"
        for path in self.administrators:
            yield f"{path}: a file of the administrator, which takes precedence"
        for path in self.shadowing:
            yield f"{path}: takes precedence over the package's file of this name"
        if self.shadowing:
            yield _UNSHADOW
        for name, states in self.units.items():
            yield f"{name}: {', '.join(states.values())}"


def service_status(root: Path, files: Sequence[ServiceFile], program: str) -> ServiceStatus:
    found = inspect_host(root, files)
    installed = tuple(p for p, content in found.files.items() if content is not None)
    return ServiceStatus(
        program,
        found.packaged,
        installed if found.packaged else (),
        tuple(p for p in found.overriding if p not in found.masked),
        {file.path: file_state(found.files[file.path], file.text) for file in files},
        {
            name: {
                word: _systemctl(f"is-{word}", name) or "unknown" for word in ("active", "enabled")
            }
            for name in (unit_names(files) if found.booted else ())
        },
    )
