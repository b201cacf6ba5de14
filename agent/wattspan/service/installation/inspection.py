"""What is there now: files, links, rights. Reads, and changes nothing.

How the service stands: its files against those of this wattspan, its units as systemd says.

Every file that the program is made of: its environment, and whatever else it imports from.
"""

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
_LINKS = 40  # followed before a path is given up, as the kernel does
_LARGEST = 1 << 20


def systemctl_version() -> str:
    """What `systemctl --version` prints; "" where there is none that answers."""
    try:
        return subprocess.run(
            ["systemctl", "--version"],  # noqa: S607 - the host's own
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def inspect_host(
    root: Path, files: Sequence[ServiceFile], version: Callable[[], str] = systemctl_version
) -> InstallationState:
    """What there is below ``root`` of the service; of the running host also which systemd."""
    live = root == Path("/")
    told = re.match(r"systemd (\d+)", version()) if live else None
    units = [f for f in files if f.unit]
    vendor = dict.fromkeys(f"{place}/{f.name}" for f in units for place in _VENDOR)
    above = [f"{_ADMINISTRATOR[f.folder]}/{f.name}" for f in files]
    return InstallationState(
        files={f.path: content_below(root, f.path) for f in files},
        live=live,
        booted=live and Path("/run/systemd/system").is_dir(),
        devices=live and Path("/run/udev/control").exists(),
        packaged=tuple(p for p in vendor if os.path.lexists(path_below(root, p))),
        overriding=tuple(p for p in above if os.path.lexists(path_below(root, p))),
        masked=tuple(p for p in above if content_below(root, p) == _MASK),
        configured=path_below(root, CONFIG).exists(),
        state=tuple(p for p in STATE if path_below(root, p).is_dir() and not escapes_root(root, p)),
        journal=any(path_below(root, STATE[1]).glob("journal-*")),
        systemd=int(told[1]) if told else None,
    )


def path_below(root: Path, path: str) -> Path:
    """A path of the host whose root is at ``root``."""
    return root / path.lstrip("/")


def escapes_root(root: Path, path: str) -> bool:
    """Whether a link on the way to ``path`` leads out of ``root``, into this very host."""
    parent = Path(os.path.realpath(path_below(root, path).parent))
    return not parent.is_relative_to(os.path.realpath(root))


def content_below(root: Path, path: str) -> FileContent:
    """What is at ``path`` of the host whose root is at ``root``."""
    if escapes_root(root, path):
        return NonRegularFile("out of this root, by a link on the way to it")
    return file_content(path_below(root, path))


def file_content(path: Path) -> FileContent:
    """What is at ``path``, links not followed."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return NonRegularFile(f"a link to {path.readlink()}")
        if not stat.S_ISREG(mode):
            return NonRegularFile("a directory" if stat.S_ISDIR(mode) else "no regular file")
        with path.open("rb") as file:
            return file.read(_LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return NonRegularFile(f"what cannot be read ({error.strerror})")


# ---------------------------------------------------------------------------------- the program


def own_program() -> str:
    """The path of the program that is running, as a unit would name it."""
    called = Path(sys.argv[0])
    if called.name == "wattspan" and called.is_file():
        return str(called.absolute())
    return str(Path(sys.executable).parent / "wattspan")


def required_files(root: Path, program: str) -> tuple[RequiredFile, ...]:
    """What the program needs so that it runs: itself, its interpreter, its modules."""
    found = [_required_file(root, "the program", program, run=True)]
    interpreter = interpreter_of(resolve_below(root, program))
    if interpreter:
        found.append(_required_file(root, "its interpreter", interpreter, run=True))
        found += _modules(root, interpreter)
    return tuple(found)


def trusted_owners(root: Path) -> TrustedOwners:
    """Root, and for another root whoever it belongs to; and Debian's group of administrators."""
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
    """Where a path leads in ``root``, its links followed as they are seen in there."""
    steps = tuple(path_components(root, path))
    return path_below(root, steps[-1].path) if steps else root


def _required_file(root: Path, what: str, path: str, *, run: bool = False) -> RequiredFile:
    return RequiredFile(what, path, tuple(path_components(root, path)), run)


def path_components(root: Path, path: str) -> Iterator[PathComponent]:
    """Every directory and link on the way to ``path``, and what it comes to."""
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
        if links > _LINKS:
            yield PathComponent(str(here), None)
            return
        target = PurePosixPath(path_below(root, str(here)).readlink())
        if target.is_absolute():
            at = PurePosixPath("/")
        waiting += reversed([p for p in target.parts if p != "/"])


def interpreter_of(program: Path) -> str:
    """What the first line of a script names; "" for what is no script, or cannot be read."""
    try:
        with program.open("rb") as file:
            first = file.readline(500)
    except OSError:
        return ""
    words = first.removeprefix(b"#!").decode("utf-8", "replace").split()
    return words[0] if first.startswith(b"#!") and words else ""


def _modules(root: Path, interpreter: str) -> Iterator[RequiredFile]:
    """The interpreter's own modules, and wattspan's where it is the one that runs this."""
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
    FileState.NOBODY: "not installed",
    FileState.OURS: "as it should be",
    FileState.OUTDATED: (
        "of an earlier installation; `wattspan service install` brings it up to date"
    ),
    FileState.EDITED: "changed by somebody since it was written",
    FileState.FOREIGN: "somebody else's",
}
_UNSHADOW = (
    "To have the package's files in force: `wattspan service uninstall`, remove what that leaves "
    "of these, `systemctl daemon-reload`, then `systemctl enable --now wattspan.service "
    "wattspan-capper.socket`."
)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """``units`` are systemd's words for each: active state, enabled state; empty where unasked.

    ``shadowing`` are files of an earlier installation that are read in place of a package's;
    ``administrators`` are the administrator's own in /etc, which are read in place of either.
    """

    program: str
    files: dict[str, FileState]
    units: dict[str, tuple[str, str]]
    packaged: tuple[str, ...]
    shadowing: tuple[str, ...] = ()
    administrators: tuple[str, ...] = ()

    @property
    def well(self) -> bool:
        """Whether the services are there as they should be, of this installation or a package."""
        if self.packaged:
            return not self.shadowing
        return all(state is FileState.OURS for state in self.files.values())

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
            yield f"{path}: the administrator's own, which takes precedence"
        for path in self.shadowing:
            yield f"{path}: shadows the package, as it comes before the package's file of this name"
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
        {name: (_systemctl("is-active", name), _systemctl("is-enabled", name)) for name in names}
        if found.booted
        else {},
        found.packaged,
        installed if found.packaged else (),
        tuple(p for p in found.overriding if p not in found.masked),
    )


def _systemctl(verb: str, unit: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own words, no shell
            ["systemctl", verb, unit],  # noqa: S607 - the host's own
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


MAX_ENTRIES = 200_000
"""Entries looked at; an environment with wattspan alone has a few thousand."""
_OF_OTHERS = frozenset({"site-packages", "dist-packages"})
"""What is below Python's own modules so, and is imported only if it is on the path itself."""


def program_files(root: Path, program: str) -> Iterator[ProgramFile]:
    """Every file and directory of the program, and every step of the way to what it links to.

    Of a program that is not the one that runs this, only its virtual environment is known.
    """
    interpreter = PurePosixPath(interpreter_of(resolve_below(root, program)))
    environments, imported = [str(interpreter.parent.parent)], []
    if root == Path("/") and (str(interpreter) == sys.executable or program == own_program()):
        environments.append(sys.prefix)
        # The script's own place is looked at with the program; no service has the caller's path.
        given = os.environ.get("PYTHONPATH", "").split(":")
        path = sys.path[0 if sys.flags.safe_path else 1 :]
        imported = [p for p in path if p.startswith("/") and p not in given]
    virtual = [e for e in environments if resolve_below(root, f"{e}/pyvenv.cfg").is_file()]
    yield from _walk(root, virtual, [p for p in imported if Path(p).is_dir()])


def _walk(root: Path, whole: Sequence[str], imported: Sequence[str]) -> Iterator[ProgramFile]:
    """All below ``whole``; all below ``imported`` but what belongs to other environments."""
    waiting = [(p, p, False) for p in reversed(imported)] + [(p, p, True) for p in reversed(whole)]
    seen: set[str] = set()
    entries = 0
    while waiting:
        folder, tree, all_of_it = waiting.pop()
        if folder == tree and (way := list(path_components(root, folder))):
            yield from map(ProgramFile, way)
            folder = tree = way[-1].path  # as it is called without links
        if folder in seen:
            continue
        seen.add(folder)
        for step in _entries(root, folder):
            entries += 1
            if entries > MAX_ENTRIES:
                raise WattspanError(
                    f"{tree} holds too many files to look at each ({MAX_ENTRIES}): install "
                    "wattspan in an environment of its own."
                )
            if stat.S_ISLNK(step.mode or 0):
                way = list(path_components(root, step.path))
                yield from map(ProgramFile, way)
                target = way[-1].path
                reached = all_of_it and f"{target}/".startswith(f"{tree}/")
                if stat.S_ISDIR(way[-1].mode or 0) and not reached:
                    waiting.append((target, target, all_of_it))
                continue
            yield ProgramFile(step, tree)
            inside = all_of_it or PurePosixPath(step.path).name not in _OF_OTHERS
            if stat.S_ISDIR(step.mode or 0) and inside:
                waiting.append((step.path, tree, all_of_it))


def _entries(root: Path, folder: str) -> Iterator[PathComponent]:
    """What is in a directory, links not followed."""
    try:
        with os.scandir(path_below(root, folder)) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                yield PathComponent(
                    f"{folder}/{entry.name}", found.st_mode, found.st_uid, found.st_gid
                )
    except OSError as error:
        raise WattspanError(
            f"{folder} cannot be looked into ({error.strerror}), so it is not known who may change "
            "the program: call it by sudo."
        ) from None
