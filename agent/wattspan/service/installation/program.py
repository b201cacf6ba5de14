"""Whether a service can run a program, and whether it should: told from facts about its files.

A service has no home directories, no /tmp of others and no rights of whoever installs it; and as
one of the services is root, nobody but root may be able to change what it runs.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

HIDDEN = ("/home", "/root", "/run/user")
"""What units with ProtectHome= do not see."""
WRITABLE = ("/tmp", "/var", "/run", "/dev/shm")  # noqa: S108 - to be refused
"""What the units name in NoExecPaths=, or do not share with others."""
REMEDY = (
    "Install wattspan where services reach it and root alone writes: `/usr/bin/python3 -m venv "
    "/usr/local/lib/wattspan`, then `/usr/local/lib/wattspan/bin/pip install wattspan`, then "
    "`/usr/local/lib/wattspan/bin/wattspan service install`."
)
_PLAIN = re.compile(r"(?:/[A-Za-z0-9_.+@-]+)+")


@dataclass(frozen=True, slots=True)
class PathComponent:
    """One file or directory on the way to something; ``mode`` is None where nothing is."""

    path: str
    mode: int | None
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class RequiredFile:
    """Something without which the program does not run, and every step of the way to it.

    ``run`` is whether it is executed, not only read.
    """

    what: str
    path: str
    steps: tuple[PathComponent, ...]
    run: bool = False


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A file or directory of the program, and the ``tree`` that is its own; "" on the way to it."""

    step: PathComponent
    tree: str = ""


@dataclass(frozen=True, slots=True)
class TrustedOwners:
    """The users and groups that may change anything anyway."""

    users: frozenset[int] = frozenset({0})
    groups: frozenset[int] = frozenset({0})


def requirement_faults(
    needs: Sequence[RequiredFile], trusted: TrustedOwners = TrustedOwners()
) -> tuple[str, ...]:
    """Why the services cannot run it, or must not: one sentence for each need, and the remedy."""
    found = tuple(dict.fromkeys(fault for need in needs if (fault := _fault(need, trusted))))
    return (*found, REMEDY) if found else ()


def writable_by_others(
    parts: Iterable[ProgramFile], trusted: TrustedOwners = TrustedOwners()
) -> tuple[str, ...]:
    """What of the program others may change, in one sentence with the remedy; none for nothing."""
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
        f"The services must not run wattspan, as one of them is root: {path} may be changed by "
        f"{writer}{f', and so may {more} more files of the program' if more else ''}; "
        f"`chown {recursive}root: {shlex.quote(place)}` and `chmod {recursive}go-w "
        f"{shlex.quote(place)}`, then call it again.",
    )


def _fault(need: RequiredFile, trusted: TrustedOwners) -> str:
    said = f"The services cannot run wattspan: {need.what}, {need.path}, "
    if not _PLAIN.fullmatch(need.path):
        return f"{said}has a path with characters that a unit does not take as they are."
    for why in _reasons(need, trusted):
        return said + why
    return ""


def _reasons(need: RequiredFile, trusted: TrustedOwners) -> Iterator[str]:
    last = need.steps[-1] if need.steps else PathComponent(need.path, None)
    for step in need.steps:
        if hidden := _below(step.path, HIDDEN):
            yield f"is below {hidden}, which they do not see."
        if writable := _below(step.path, WRITABLE):
            yield f"is below {writable}: what lies where services write is not run by them."
    for step in need.steps:
        if step.mode is None:
            yield f"is not there: there is no {step.path}."
            return
        if writer := _writer(step, trusted):
            yield (
                f"may be changed by {writer}, who may write to {step.path}, and so could run "
                "anything with the rights of the services."
            )
        if stat.S_ISDIR(step.mode) and not step.mode & stat.S_IXOTH:
            yield f"cannot be reached by the user wattspan: {step.path} is closed to others."
    if last.mode is None:
        yield f"is not there: there is no {last.path}."
    elif stat.S_ISREG(last.mode) and not last.mode & stat.S_IROTH:
        yield f"cannot be read by the user wattspan: {last.path} is closed to others."
    elif need.run and not last.mode & stat.S_IXOTH:
        yield f"cannot be executed by the user wattspan: `chmod a+x {last.path}`."


def _writer(step: PathComponent, trusted: TrustedOwners) -> str:
    """Who else may write there, in words; "" for nobody."""
    assert step.mode is not None  # noqa: S101 - told before
    if step.uid not in trusted.users:
        return f"user {step.uid}"
    if stat.S_ISLNK(step.mode):
        return ""  # a link's own mode says nothing
    if step.mode & stat.S_IWOTH:
        return "everybody"
    others = step.mode & stat.S_IWGRP and step.gid not in trusted.groups
    return f"group {step.gid}" if others else ""


def _below(path: str, places: Sequence[str]) -> str:
    return next((place for place in places if f"{path}/".startswith(f"{place}/")), "")
