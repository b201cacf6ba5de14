"""Checks that services can run a program and that only root can change it. Pure.

A service sees no home directories and no other program's /tmp, and does not have the rights of the
installing user. One of the services runs as root, so only root may be able to change its program.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

HIDDEN = ("/home", "/root", "/run/user")
"""Directories hidden from units with ProtectHome=."""

WRITABLE = ("/tmp", "/var", "/run", "/dev/shm")  # noqa: S108 - rejected
"""Directories in NoExecPaths= of the units, or private to each unit."""

REMEDY = (
    "Install wattspan in a directory that services can read and only root can write: "
    "`/usr/bin/python3 -m venv /usr/local/lib/wattspan`, then "
    "`/usr/local/lib/wattspan/bin/pip install wattspan`, then "
    "`/usr/local/lib/wattspan/bin/wattspan service install`."
)
_PLAIN = re.compile(r"(?:/[A-Za-z0-9_.+@-]+)+")


@dataclass(frozen=True, slots=True)
class PathComponent:
    """One file, directory or link of a path; ``mode`` is None if it does not exist."""

    path: str
    mode: int | None
    uid: int = 0
    gid: int = 0


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
class ProgramFile:
    """A file or directory of the program; ``tree`` is its installation, "" outside of it."""

    step: PathComponent
    tree: str = ""


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
    parts: Iterable[ProgramFile], trusted: TrustedOwners = TrustedOwners()
) -> tuple[str, ...]:
    """Return a sentence about files that other users can change; empty without such files."""
    found: dict[str, tuple[str, str]] = {}
    for part in parts:
        if part.step.mode is not None and (writer := _writer(part.step, trusted)):
            found.setdefault(part.step.path, (writer, part.tree))
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
        return ""  # a link's own mode says nothing
    if step.mode & stat.S_IWOTH:
        return "every user"
    others = step.mode & stat.S_IWGRP and step.gid not in trusted.groups
    return f"group {step.gid}" if others else ""


def _below(path: str, places: Sequence[str]) -> str:
    return next((place for place in places if f"{path}/".startswith(f"{place}/")), "")
