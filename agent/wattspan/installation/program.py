"""Checks that services can run a program and that only root can change it.

A service sees no home directories and no other program's /tmp, and does not have the rights of the
installing user. One of the services runs as root, so only root may be able to change its program.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import wattspan
from wattspan.installation.files import path_below
from wattspan.ports import WattspanError

HIDDEN = ("/home", "/root", "/run/user")
"""Directories hidden from units with ProtectHome=."""

WRITABLE = ("/tmp", "/var", "/run", "/dev/shm")  # noqa: S108 - rejected
"""Directories in NoExecPaths= of the units, or private to each unit."""

REMEDY = (
    "Install wattspan in a directory that services can read and only root can write: "
    "`/usr/bin/python3 -m venv /usr/local/lib/wattspan`, then "
    "`/usr/local/lib/wattspan/bin/pip install PATH`, the path of a wheel or checkout of wattspan, "
    "then `/usr/local/lib/wattspan/bin/wattspan service install`."
)
_PLAIN = re.compile(r"(?:/[A-Za-z0-9_.+@-]+)+")


@dataclass(frozen=True, slots=True)
class PathComponent:
    """One file, directory or link; ``mode`` is None if it does not exist.

    ``tree`` is the installation that a file of the program belongs to, "" outside of it.
    """

    path: str
    mode: int | None
    uid: int = 0
    gid: int = 0
    tree: str = ""


@dataclass(frozen=True, slots=True)
class RequiredFile:
    """A file that the program needs, with the components of its path.

    ``run`` is True if it is executed, not only read.
    """

    what: str
    path: str
    steps: tuple[PathComponent, ...]
    run: bool = False


@dataclass(frozen=True, slots=True)
class TrustedOwners:
    """Users and groups whose write permission is accepted."""

    users: frozenset[int] = frozenset({0})
    groups: frozenset[int] = frozenset({0})


def requirement_faults(
    needs: Sequence[RequiredFile], trusted: TrustedOwners = TrustedOwners()
) -> tuple[str, ...]:
    """Return a sentence for each file that the services cannot run, and the remedy."""
    found = tuple(dict.fromkeys(fault for need in needs if (fault := _fault(need, trusted))))
    return (*found, REMEDY) if found else ()


def writable_by_others(
    parts: Iterable[PathComponent], trusted: TrustedOwners = TrustedOwners()
) -> tuple[str, ...]:
    """Return a sentence about files that other users can change; empty without such files."""
    found: dict[str, tuple[str, str]] = {}
    for part in parts:
        if part.mode is not None and (writer := _writer(part, trusted)):
            found.setdefault(part.path, (writer, part.tree))
    if not found:
        return ()
    path, (writer, tree) = next(iter(found.items()))
    more = len(found) - 1
    recursive, place = ("-R ", tree) if tree else ("", path)
    return (
        f"The services must not run wattspan, because one of them runs as root and {writer} can "
        f"change {path}{f' and {more} more files of the program' if more else ''}. Run "
        f"`chown {recursive}root: {shlex.quote(place)}` and `chmod {recursive}go-w "
        f"{shlex.quote(place)}`, then run the command again.",
    )


def _fault(need: RequiredFile, trusted: TrustedOwners) -> str:
    subject = f"The services cannot run wattspan: {need.what}, {need.path}, "
    if not _PLAIN.fullmatch(need.path):
        return f"{subject}has a path with characters that unit files do not allow."
    for why in _reasons(need, trusted):
        return subject + why
    return ""


def _reasons(need: RequiredFile, trusted: TrustedOwners) -> Iterator[str]:
    last = need.steps[-1] if need.steps else PathComponent(need.path, None)
    for step in need.steps:
        if hidden := _below(step.path, HIDDEN):
            yield f"is below {hidden}, which is hidden from services."
        if writable := _below(step.path, WRITABLE):
            yield f"is below {writable}, where services may not execute files."
    for step in need.steps:
        if step.mode is None:
            yield f"does not exist: there is no {step.path}."
            return
        if writer := _writer(step, trusted):
            yield (
                f"can be changed by {writer} through {step.path}, who could then run commands with "
                "the rights of the services."
            )
        if stat.S_ISDIR(step.mode) and not step.mode & stat.S_IXOTH:
            yield f"is not accessible for the user wattspan: {step.path} denies access."
    if last.mode is None:
        yield f"does not exist: there is no {last.path}."
    elif stat.S_ISREG(last.mode) and not last.mode & stat.S_IROTH:
        yield f"is not readable for the user wattspan: {last.path} denies access."
    elif need.run and not last.mode & stat.S_IXOTH:
        yield f"is not executable for the user wattspan. Run `chmod a+x {last.path}`."


def _writer(step: PathComponent, trusted: TrustedOwners) -> str:
    """Return the untrusted user or group with write permission; "" if there is none."""
    assert step.mode is not None  # noqa: S101 - checked by the callers
    if step.uid not in trusted.users:
        return f"user {step.uid}"
    if stat.S_ISLNK(step.mode):
        return ""  # the mode of a link has no effect
    if step.mode & stat.S_IWOTH:
        return "every user"
    others = step.mode & stat.S_IWGRP and step.gid not in trusted.groups
    return f"group {step.gid}" if others else ""


def _below(path: str, places: Sequence[str]) -> str:
    return next((place for place in places if f"{path}/".startswith(f"{place}/")), "")


# --------------------------------------------------------------------- the files of the program

_MAX_LINKS = 40  # symbolic links in one path, as in the kernel
_SEPARATE_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Directories below Python's own modules that are imported only if they are in sys.path."""


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
    if re.search(r"^staff:x:50:", _text(path_below(root, "/etc/group")), re.MULTILINE):
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
        here = str(at / part)
        step = _component(root, here) if links <= _MAX_LINKS else PathComponent(here, None)
        yield step
        if step.mode is None:
            return
        if not stat.S_ISLNK(step.mode):
            at /= part
            continue
        links += 1
        target = PurePosixPath(path_below(root, here).readlink())
        if target.is_absolute():
            at = PurePosixPath("/")
        waiting += reversed([p for p in target.parts if p != "/"])


def _component(root: Path, path: str) -> PathComponent:
    try:
        found = path_below(root, path).lstat()
    except OSError:
        return PathComponent(path, None)
    return PathComponent(path, found.st_mode, found.st_uid, found.st_gid)


def _text(path: Path) -> str:
    """Return the content of a file; "" if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


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
    if home := re.search(r"^home\s*=\s*(.*\S)", _text(settings), re.MULTILINE):
        yield _required_file(root, "the directory of its base interpreter", home[1])
    if root == Path("/") and interpreter == sys.executable:
        yield _required_file(root, "Python's own modules", str(Path(os.__file__).parent))
        yield _required_file(root, "its package", str(Path(wattspan.__file__).parent))


def program_files(root: Path, program: str) -> Iterator[PathComponent]:
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


def _walk(root: Path, whole: Sequence[str], imported: Sequence[str]) -> Iterator[PathComponent]:
    """Yield all files below ``whole``, and those below ``imported`` of no other environment."""
    waiting = [(tree, False) for tree in reversed(imported)]
    waiting += [(tree, True) for tree in reversed(whole)]
    seen: set[str] = set()
    while waiting:
        tree, complete = waiting.pop()
        components = list(path_components(root, tree))
        yield from components
        tree = components[-1].path  # without links
        for place, folders, files in os.walk(path_below(root, tree), onerror=_refuse_unreadable):
            folder = f"/{os.path.relpath(place, root)}"
            if folder in seen:
                folders.clear()
                continue
            seen.add(folder)
            for name in sorted((*folders, *files)):  # of lib and its link lib64, lib first
                step = _component(root, f"{folder}/{name}")
                if not stat.S_ISLNK(step.mode or 0):
                    yield replace(step, tree=tree)
                    continue
                components = list(path_components(root, step.path))
                yield from components
                target = components[-1]
                reached = complete and _below(target.path, (tree,))
                if stat.S_ISDIR(target.mode or 0) and not reached:
                    waiting.append((target.path, complete))
            if not complete:
                folders[:] = [name for name in folders if name not in _SEPARATE_PACKAGES]


def _refuse_unreadable(error: OSError) -> None:
    raise WattspanError(
        f"Cannot read {error.filename} ({error.strerror}) to check the owners of the program. Use "
        "sudo."
    )
