"""Read-only inspection of a host: service files, unit states, and the files of the program."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import wattspan
from wattspan.ports import WattspanError
from wattspan.service.installation.files import (
    PLACES,
    FileContent,
    FileState,
    NonRegularFile,
    ServiceFile,
    file_state,
)
from wattspan.service.installation.plan import CONFIG, STATE, InstallationState
from wattspan.service.installation.program import (
    PathComponent,
    ProgramFile,
    RequiredFile,
    TrustedOwners,
)

_VENDOR = ("/usr/lib/systemd/system", "/lib/systemd/system")
_ADMINISTRATOR = {
    PLACES["system"]: "/etc/systemd/system",
    PLACES["sysusers.d"]: "/etc/sysusers.d",
    PLACES["tmpfiles.d"]: "/etc/tmpfiles.d",
    PLACES["udev/rules.d"]: "/etc/udev/rules.d",
}
_MASK = NonRegularFile("a link to /dev/null")
_MAX_LINKS = 40  # symbolic links in one path, as in the kernel
_MAX_BYTES = 1 << 20


def systemctl_version() -> str:
    """Return the output of `systemctl --version`; "" without systemd."""
    return _systemctl("--version")


def inspect_host(
    root: Path, files: Sequence[ServiceFile], version: Callable[[], str] = systemctl_version
) -> InstallationState:
    """Return the state of the service files below ``root``."""
    live = root == Path("/")
    version_match = re.match(r"systemd (\d+)", version()) if live else None
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


# ---------------------------------------------------------------------------------- the program


def own_program() -> str:
    """Return the absolute path of the running program."""
    called = Path(sys.argv[0])
    if called.name == "wattspan" and called.is_file():
        return str(called.absolute())
    return str(Path(sys.executable).parent / "wattspan")


def required_files(root: Path, program: str) -> tuple[RequiredFile, ...]:
    """Return the program, its interpreter and its modules."""
    found = [_required_file(root, "the program", program, run=True)]
    interpreter = interpreter_of(resolve_below(root, program))
    if interpreter:
        found.append(_required_file(root, "its interpreter", interpreter, run=True))
        found += _modules(root, interpreter)
    return tuple(found)


def trusted_owners(root: Path) -> TrustedOwners:
    """Return root, the owner of the directory ``root``, and Debian's group `staff`."""
    groups = {0}
    try:
        lines = path_below(root, "/etc/group").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    if any(line.startswith("staff:x:50:") for line in lines):
        groups.add(50)
    owner = root.stat()
    return TrustedOwners(frozenset({0, owner.st_uid}), frozenset(groups | {owner.st_gid}))


def resolve_below(root: Path, path: str) -> Path:
    """Return ``path`` below ``root`` with its links resolved within ``root``."""
    steps = tuple(path_components(root, path))
    return path_below(root, steps[-1].path) if steps else root


def _required_file(root: Path, what: str, path: str, *, run: bool = False) -> RequiredFile:
    return RequiredFile(what, path, tuple(path_components(root, path)), run)


def path_components(root: Path, path: str) -> Iterator[PathComponent]:
    """Yield each directory and link of ``path``, and its target.

    The last component has no mode if it does not exist.
    """
    waiting = list(reversed(PurePosixPath(path).parts[1:]))
    at, links = PurePosixPath("/"), 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            at = at.parent
            continue
        here = at / part
        try:
            found = path_below(root, str(here)).lstat()
        except OSError:
            yield PathComponent(str(here), None)
            return
        yield PathComponent(str(here), found.st_mode, found.st_uid, found.st_gid)
        if not stat.S_ISLNK(found.st_mode):
            at = here
            continue
        links += 1
        if links > _MAX_LINKS:
            yield PathComponent(str(here), None)
            return
        target = PurePosixPath(path_below(root, str(here)).readlink())
        if target.is_absolute():
            at = PurePosixPath("/")
        waiting += reversed([p for p in target.parts if p != "/"])


def interpreter_of(program: Path) -> str:
    """Return the interpreter of a script; "" for other or unreadable files."""
    try:
        with program.open("rb") as file:
            first = file.readline(500)
    except OSError:
        return ""
    words = first.removeprefix(b"#!").decode("utf-8", "replace").split()
    return words[0] if first.startswith(b"#!") and words else ""


def _modules(root: Path, interpreter: str) -> Iterator[RequiredFile]:
    """Yield the modules of the interpreter; those of wattspan if it runs this process."""
    settings = path_below(root, str(PurePosixPath(interpreter).parents[1])) / "pyvenv.cfg"
    try:
        lines = settings.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    pairs = {
        key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)
    }
    if home := pairs.get("home"):
        yield _required_file(root, "the directory of its base interpreter", home)
    if root == Path("/") and interpreter == sys.executable:
        yield _required_file(root, "Python's own modules", str(Path(os.__file__).parent))
        yield _required_file(root, "its package", str(Path(wattspan.__file__).parent))


_STATE_TEXT = {
    FileState.ABSENT: "not installed",
    FileState.CURRENT: "current",
    FileState.OUTDATED: ("outdated; `wattspan service install` updates it"),
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

    ``units`` maps each unit to systemd's active and enabled states; empty if systemd does not run.
    ``shadowing`` are installed files that replace those of a package. ``administrators`` are files
    in /etc, which replace both.
    """

    program: str
    files: dict[str, FileState]
    units: dict[str, tuple[str, str]]
    packaged: tuple[str, ...]
    shadowing: tuple[str, ...] = ()
    administrators: tuple[str, ...] = ()

    @property
    def is_current(self) -> bool:
        """True if the services of this installation or of a package are in use and current."""
        if self.packaged:
            return not self.shadowing
        return all(state is FileState.CURRENT for state in self.files.values())

    def facts(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "package": list(self.packaged),
            "shadowing": list(self.shadowing),
            "administrators": list(self.administrators),
            "files": {path: state.value for path, state in self.files.items()},
            "units": {
                name: {"active": active, "enabled": enabled}
                for name, (active, enabled) in self.units.items()
            },
        }

    def lines(self) -> Iterator[str]:
        if self.packaged:
            yield f"Installed as a package: {', '.join(self.packaged)}"
        for path, state in self.files.items():
            if not self.packaged:
                yield f"{path}: {_STATE_TEXT[state]}"
        for path in self.administrators:
            yield f"{path}: a file of the administrator, which takes precedence"
        for path in self.shadowing:
            yield f"{path}: takes precedence over the package's file of this name"
        if self.shadowing:
            yield _UNSHADOW
        for name, (active, enabled) in self.units.items():
            yield f"{name}: {active}, {enabled}"


def service_status(root: Path, files: Sequence[ServiceFile], program: str) -> ServiceStatus:
    found = inspect_host(root, files)
    names = [file.name for file in files if file.unit]
    installed = tuple(p for p, content in found.files.items() if content is not None)
    return ServiceStatus(
        program,
        {file.path: file_state(found.files[file.path], file.text) for file in files},
        {
            name: (
                _systemctl("is-active", name) or "unknown",
                _systemctl("is-enabled", name) or "unknown",
            )
            for name in names
        }
        if found.booted
        else {},
        found.packaged,
        installed if found.packaged else (),
        tuple(p for p in found.overriding if p not in found.masked),
    )


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


MAX_ENTRIES = 200_000
"""Largest number of inspected entries; an environment with only wattspan has a few thousand."""

_SEPARATE_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Directories below Python's own modules that are imported only if they are in sys.path."""


def program_files(root: Path, program: str) -> Iterator[ProgramFile]:
    """Yield every file and directory of the program, and the components of each link target.

    Only the virtual environment is known of a program other than the running one.
    """
    interpreter = PurePosixPath(interpreter_of(resolve_below(root, program)))
    environments, imported = [str(interpreter.parent.parent)], []
    if root == Path("/") and (str(interpreter) == sys.executable or program == own_program()):
        environments.append(sys.prefix)
        # The directory of the script belongs to the program; services do not get PYTHONPATH.
        given = os.environ.get("PYTHONPATH", "").split(":")
        path = sys.path[0 if sys.flags.safe_path else 1 :]
        imported = [p for p in path if p.startswith("/") and p not in given]
    virtual = [e for e in environments if resolve_below(root, f"{e}/pyvenv.cfg").is_file()]
    yield from _walk(root, virtual, [p for p in imported if Path(p).is_dir()])


def _walk(root: Path, whole: Sequence[str], imported: Sequence[str]) -> Iterator[ProgramFile]:
    """Yield all files below ``whole``, and those below ``imported`` of no other environment."""
    waiting = [(p, p, False) for p in reversed(imported)] + [(p, p, True) for p in reversed(whole)]
    seen: set[str] = set()
    entries = 0
    while waiting:
        folder, tree, complete = waiting.pop()
        if folder == tree and (components := list(path_components(root, folder))):
            yield from map(ProgramFile, components)
            folder = tree = components[-1].path  # without links
        if folder in seen:
            continue
        seen.add(folder)
        for step in _entries(root, folder):
            entries += 1
            if entries > MAX_ENTRIES:
                raise WattspanError(
                    f"{tree} contains more than {MAX_ENTRIES} files, too many to check. Install "
                    "wattspan in an environment of its own."
                )
            if stat.S_ISLNK(step.mode or 0):
                components = list(path_components(root, step.path))
                yield from map(ProgramFile, components)
                target = components[-1].path
                reached = complete and f"{target}/".startswith(f"{tree}/")
                if stat.S_ISDIR(components[-1].mode or 0) and not reached:
                    waiting.append((target, target, complete))
                continue
            yield ProgramFile(step, tree)
            inside = complete or PurePosixPath(step.path).name not in _SEPARATE_PACKAGES
            if stat.S_ISDIR(step.mode or 0) and inside:
                waiting.append((step.path, tree, complete))


def _entries(root: Path, folder: str) -> Iterator[PathComponent]:
    """Yield the entries of a directory without following links."""
    try:
        with os.scandir(path_below(root, folder)) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                yield PathComponent(
                    f"{folder}/{entry.name}", found.st_mode, found.st_uid, found.st_gid
                )
    except OSError as error:
        raise WattspanError(
            f"Cannot read {folder} ({error.strerror}) to check the owners of the program. Use sudo."
        ) from None
