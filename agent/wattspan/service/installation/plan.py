"""What can be done, each in one sentence: before it is done, and after.

What is to be done, from what is there: pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wattspan.service.installation.files import (
    AGENT,
    CAPPER,
    CAPPER_SOCKET,
    LOCAL_LIB,
    PLACES,
    FileContent,
    FileState,
    ServiceFile,
    file_state,
)


@dataclass(frozen=True, slots=True)
class Write:
    """Put a file there. ``found`` is what it replaces, and nothing else is replaced."""

    path: str
    text: str
    found: FileContent
    why: str

    def sentence(self, *, done: bool) -> str:
        return f"{'Wrote' if done else 'Write'} {self.path}: {self.why}."


@dataclass(frozen=True, slots=True)
class Keep:
    """Let a file be. ``ours`` is whether it is as we would have it."""

    path: str
    why: str
    ours: bool = True

    def sentence(self, *, done: bool) -> str:
        return f"{'Left' if done else 'Leave'} {self.path} alone: {self.why}."


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file, if it is still what was found."""

    path: str
    found: FileContent
    why: str

    def sentence(self, *, done: bool) -> str:
        return f"{'Removed' if done else 'Remove'} {self.path}: {self.why}."


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """Remove a directory with all that is in it, or, if not ``whole``, only once it is empty."""

    path: str
    whole: bool = False

    def sentence(self, *, done: bool) -> str:
        if self.whole:
            return f"{'Removed' if done else 'Remove'} {self.path}, with all that is in it."
        return (
            f"Removed {self.path}, which was empty."
            if done
            else f"Remove {self.path}, if it is empty then."
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Run a command. Where it ``must`` succeed, nothing after it is done unless it does."""

    command: tuple[str, ...]
    why: str
    must: bool = False

    def sentence(self, *, done: bool) -> str:
        return f"{'Ran' if done else 'Run'} `{shlex.join(self.command)}`: {self.why}."


@dataclass(frozen=True, slots=True)
class Note:
    """Nothing to do, and something to know."""

    text: str

    def sentence(self, *, done: bool) -> str:
        return self.text


Action = Write | Keep | Remove | RemoveFolder | Run | Note
Plan = tuple[Action, ...]


def action_facts(action: Action) -> dict[str, Any]:
    """An action for a program."""
    named: dict[str, Any] = {"do": type(action).__name__.lower()}
    match action:
        case Run():
            named |= {"command": list(action.command)}
        case Note():
            pass
        case _:
            named |= {"path": action.path}
    return named | {"sentence": action.sentence(done=False)}


STATE = ("/var/lib/wattspan", "/var/lib/wattspan-capper")
CONFIG = "/etc/wattspan/config.toml"
OLDEST_SYSTEMD = 248
"""The first that knows every directive of the units: NoExecPaths= is the newest."""
_CAPPER_UNITS = (CAPPER_SOCKET, CAPPER)


@dataclass(frozen=True, slots=True)
class InstallationState:
    """What is there before anything is done.

    ``live`` is whether it is the running host, not a tree for another; ``booted`` whether systemd
    runs it. ``packaged`` are units that a package has brought, ``overriding`` files in /etc that
    take precedence, and ``masked`` those of them that switch a file off. ``journal`` is whether
    caps may have been left to give back. ``systemd`` is the running host's version, if known.
    """

    files: Mapping[str, FileContent] = field(default_factory=dict)
    live: bool = True
    booted: bool = True
    devices: bool = True
    packaged: tuple[str, ...] = ()
    overriding: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    configured: bool = False
    state: tuple[str, ...] = ()
    journal: bool = False
    systemd: int | None = None


def refusals(found: InstallationState, faults: Sequence[str]) -> tuple[str, ...]:
    """Why nothing may be installed; none where it may."""
    if found.packaged:
        return (
            f"wattspan is installed here as a package, whose unit is {found.packaged[0]}: its "
            "package manager sees to its files. Use that, or remove the package first.",
        )
    return tuple(faults)


def install(files: Sequence[ServiceFile], found: InstallationState) -> Plan:
    """The way from what is there to the files being in place; never over another's."""
    return (
        *map(_install_file, files, (found.files.get(f.path) for f in files)),
        *_activate(files, found),
    )


def uninstall(
    files: Sequence[ServiceFile], found: InstallationState, program: str, *, purge: bool = False
) -> Plan:
    """The way back: limits first, then what we wrote, and what was measured only if ``purge``."""
    ours = [f for f in files if file_state(found.files.get(f.path)) in _WRITTEN]
    there = [f for f in files if file_state(found.files.get(f.path)) is not FileState.NOBODY]
    return (
        *_stop_services([f.name for f in ours if f.unit], found, program),
        *(_remove_file(f, found.files.get(f.path)) for f in there),
        *_remove_empty_directories(
            [f for f in ours if file_state(found.files.get(f.path)) in _REPLACED]
        ),
        *(_reload_system(found, "the units are gone") if ours else ()),
        *_package_notice([f.name for f in ours if f.unit], found),
        *_remove_state(found, purge=purge),
    )


_WRITTEN = (FileState.OURS, FileState.OUTDATED, FileState.EDITED)
_REPLACED = (FileState.OURS, FileState.OUTDATED)


# ------------------------------------------------------------------------------------ installing


def _install_file(file: ServiceFile, content: FileContent) -> Action:
    match file_state(content, file.text):
        case FileState.NOBODY:
            return Write(file.path, file.text, content, f"{_purpose(file)}, new here")
        case FileState.OUTDATED:
            why = f"{_purpose(file)}, in place of what an earlier installation wrote"
            return Write(file.path, file.text, content, why)
        case FileState.OURS:
            return Keep(file.path, "it is as it should be")
    return _keep_file(file.path, content)


def _keep_file(path: str, content: FileContent) -> Keep:
    if file_state(content) is FileState.EDITED:
        why = "somebody has changed it since it was written; move it away to have ours"
    elif content is not None and not isinstance(content, bytes):
        why = f"it is {content}, which somebody else has put there"
    else:
        why = "somebody else has put it there; move it away to have ours"
    return Keep(path, why, ours=False)


def _purpose(file: ServiceFile) -> str:
    if file.unit:
        return {AGENT: "the agent's service", CAPPER: "the service that alone sets limits"}.get(
            file.name, "where limits are asked for" if file.name == CAPPER_SOCKET else "a unit"
        )
    return {
        PLACES["sysusers.d"]: "the user that the agent runs as",
        PLACES["tmpfiles.d"]: "who may read the counters of the CPU",
    }.get(file.folder, "who may read counters that appear later")


def _activate(files: Sequence[ServiceFile], found: InstallationState) -> Iterator[Action]:
    """What makes the files take effect, and what is left to the administrator."""
    for path in found.overriding:
        yield Note(f"{path} takes precedence over the file of this name written here.")
    if not found.live:
        yield Note("No command is run for another root; it takes effect when that is booted.")
        return
    if found.systemd is not None and found.systemd < OLDEST_SYSTEMD:
        yield Note(
            f"systemd {found.systemd} is older than {OLDEST_SYSTEMD} and ignores what it does not "
            "know of the units, such as NoExecPaths=: the services run, and are less closed off "
            "than they are meant to be."
        )
    for kind, command, why in (
        ("sysusers.d", ("systemd-sysusers",), "makes the user wattspan, where there is none"),
        ("tmpfiles.d", ("systemd-tmpfiles", "--create"), "applies the rights at once"),
    ):
        paths = [f.path for f in files if f.folder == PLACES[kind]]
        if paths:
            yield Run((*command, *paths), why)
    yield from _reload_system(found, "so that it knows the units")
    if not found.configured:
        yield Note(
            f"There is no {CONFIG}, and none is needed: the defaults apply; `wattspan config show` "
            "prints them for a start of your own."
        )
    yield Note(f"Start it now and at every boot: systemctl enable --now {AGENT}")
    if any(f.name == CAPPER_SOCKET for f in files):
        yield Note(f"Let it set limits too: systemctl enable --now {CAPPER_SOCKET}")


def _reload_system(found: InstallationState, why: str) -> Iterator[Action]:
    """systemd and udev look again."""
    if not found.live:
        return
    if found.devices:
        yield Run(("udevadm", "control", "--reload"), "udev reads its rules again")
        yield Run(
            ("udevadm", "trigger", "--subsystem-match=powercap", "--action=add"),
            "the rules are applied to the counters that are there",
        )
    if found.booted:
        yield Run(("systemctl", "daemon-reload"), f"systemd looks again, {why}")
    else:
        yield Note("systemd does not run this host now; it sees the change when it does.")


# ------------------------------------------------------------------------------------- removing


def _stop_services(
    units: Sequence[str], found: InstallationState, program: str
) -> Iterator[Action]:
    """The agent first, which lets go of its limits; then the capper, which gives back the rest."""
    if not found.live:
        return
    if found.booted:
        if AGENT in units:
            why = "stops the agent, which lets go of the limits it holds"
            yield Run(("systemctl", "disable", "--now", AGENT), why, must=True)
        if capper := tuple(name for name in _CAPPER_UNITS if name in units):
            why = "stops the capper, which gives every limit back"
            yield Run(("systemctl", "disable", "--now", *capper), why, must=True)
    if found.journal:
        # It does so with a configuration that cannot be read as well.
        yield Run((program, "caps", "restore"), "gives back what no capper could", must=True)


def _remove_file(file: ServiceFile, content: FileContent) -> Action:
    if file_state(content) in _REPLACED:
        return Remove(file.path, content, "it is as it was written")
    left = _keep_file(file.path, content)
    return Keep(left.path, left.why.partition(";")[0], ours=False)


def _remove_empty_directories(gone: Sequence[ServiceFile]) -> Iterator[Action]:
    """The directories that may be empty now, the deepest first, up to the one for all."""
    folders = dict.fromkeys(f.folder for f in gone)
    parents = dict.fromkeys(
        folder.rpartition("/")[0]
        for folder in folders
        if folder.count("/") > LOCAL_LIB.count("/") + 1
    )
    yield from (RemoveFolder(folder) for folder in (*folders, *parents))


def _package_notice(units: Sequence[str], found: InstallationState) -> Iterator[Action]:
    """Units of the same names are the package's now, and were stopped and disabled as ours."""
    if found.packaged and found.live and (stopped := [u for u in units if u != CAPPER]):
        yield Note(
            "The package's services are stopped and disabled now: "
            f"`systemctl enable --now {' '.join(stopped)}` has them run again."
        )


def _remove_state(found: InstallationState, *, purge: bool) -> Iterator[Action]:
    if found.packaged:
        yield Note(
            f"wattspan is here as a package as well, by {found.packaged[0]}: what was measured is "
            "left to its package manager."
        )
        return
    for folder in found.state:
        if purge:
            yield RemoveFolder(folder, whole=True)
        else:
            yield Note(f"{folder} stays, with what was measured; --purge removes it.")
    if found.configured:
        yield Note(f"{CONFIG} stays: it is yours.")
    if purge:
        yield Note("The user wattspan stays; `userdel wattspan` removes it.")
