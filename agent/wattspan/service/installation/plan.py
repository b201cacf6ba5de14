"""Actions of an installation, and the plans that consist of them. Pure."""

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
    """Write a file, if the content at ``path`` is still ``found``."""

    path: str
    text: str
    found: FileContent
    why: str

    def sentence(self, *, done: bool) -> str:
        return f"{'Wrote' if done else 'Write'} {self.path}: {self.why}."


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave a file unchanged. ``current`` is True if it has the wanted text."""

    path: str
    why: str
    current: bool = True

    def sentence(self, *, done: bool) -> str:
        return f"{'Left' if done else 'Leave'} {self.path} unchanged: {self.why}."


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file, if its content is still ``found``."""

    path: str
    found: FileContent
    why: str

    def sentence(self, *, done: bool) -> str:
        return f"{'Removed' if done else 'Remove'} {self.path}: {self.why}."


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """Remove a directory: with its content if ``recursive``, else only if it is empty."""

    path: str
    recursive: bool = False

    def sentence(self, *, done: bool) -> str:
        if self.recursive:
            return f"{'Removed' if done else 'Remove'} {self.path} with its content."
        return (
            f"Removed {self.path}, which was empty."
            if done
            else f"Remove {self.path}, if it is empty."
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Run a command. If a ``required`` command fails, the plan ends there."""

    command: tuple[str, ...]
    why: str
    required: bool = False

    def sentence(self, *, done: bool) -> str:
        return f"{'Ran' if done else 'Run'} `{shlex.join(self.command)}`: {self.why}."


@dataclass(frozen=True, slots=True)
class Note:
    """Information without an action."""

    text: str

    def sentence(self, *, done: bool) -> str:
        return self.text


Action = Write | Keep | Remove | RemoveFolder | Run | Note
Plan = tuple[Action, ...]


def action_facts(action: Action) -> dict[str, Any]:
    """Return an action as JSON values."""
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
"""First version with every directive of the units; NoExecPaths= is the newest one."""
_CAPPER_UNITS = (CAPPER_SOCKET, CAPPER)


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


def refusals(found: InstallationState, faults: Sequence[str]) -> tuple[str, ...]:
    """Return the reasons against an installation; empty if it is possible."""
    if found.packaged:
        return (
            f"wattspan is installed as a system package with the unit {found.packaged[0]}. Use its "
            "services, or remove the package first.",
        )
    return tuple(faults)


def install(files: Sequence[ServiceFile], found: InstallationState) -> Plan:
    """Return the actions that install ``files``; foreign and edited files stay unchanged."""
    return (
        *map(_install_file, files, (found.files.get(f.path) for f in files)),
        *_activate(files, found),
    )


def uninstall(
    files: Sequence[ServiceFile], found: InstallationState, program: str, *, purge: bool = False
) -> Plan:
    """Return the actions that restore limits, then remove files; with ``purge`` also data."""
    written = [f for f in files if file_state(found.files.get(f.path)) in _WRITTEN]
    present = [f for f in files if file_state(found.files.get(f.path)) is not FileState.ABSENT]
    return (
        *_stop_services([f.name for f in written if f.unit], found, program),
        *(_remove_file(f, found.files.get(f.path)) for f in present),
        *_remove_empty_directories(
            [f for f in written if file_state(found.files.get(f.path)) in _REPLACED]
        ),
        *(_reload_system(found, "without the units") if written else ()),
        *_package_notice([f.name for f in written if f.unit], found),
        *_remove_state(found, purge=purge),
    )


_WRITTEN = (FileState.CURRENT, FileState.OUTDATED, FileState.EDITED)
_REPLACED = (FileState.CURRENT, FileState.OUTDATED)


# ------------------------------------------------------------------------------------ installing


def _install_file(file: ServiceFile, content: FileContent) -> Action:
    match file_state(content, file.text):
        case FileState.ABSENT:
            return Write(file.path, file.text, content, f"{_purpose(file)}, a new file")
        case FileState.OUTDATED:
            why = f"{_purpose(file)}, in place of the file of an earlier installation"
            return Write(file.path, file.text, content, why)
        case FileState.CURRENT:
            return Keep(file.path, "it is current")
    return _keep_file(file.path, content)


def _keep_file(path: str, content: FileContent) -> Keep:
    if file_state(content) is FileState.EDITED:
        why = "it was edited since its installation; move it away to replace it"
    elif content is not None and not isinstance(content, bytes):
        why = f"it is {content}, which wattspan did not create"
    else:
        why = "wattspan did not write it; move it away to replace it"
    return Keep(path, why, current=False)


def _purpose(file: ServiceFile) -> str:
    if file.unit:
        return {AGENT: "the agent's service", CAPPER: "the service that sets power limits"}.get(
            file.name, "the socket of that service" if file.name == CAPPER_SOCKET else "a unit"
        )
    return {
        PLACES["sysusers.d"]: "the user that the agent runs as",
        PLACES["tmpfiles.d"]: "read permission for the CPU counters",
    }.get(file.folder, "read permission for counters that appear later")


def _activate(files: Sequence[ServiceFile], found: InstallationState) -> Iterator[Action]:
    """Yield the actions that put the files into effect, and notes for the administrator."""
    for path in found.overriding:
        yield Note(f"{path} takes precedence over the installed file of this name.")
    if not found.live:
        yield Note(
            "No command runs for another root; the files take effect when that system boots."
        )
        return
    if found.systemd is not None and found.systemd < OLDEST_SYSTEMD:
        yield Note(
            f"systemd {found.systemd} is older than {OLDEST_SYSTEMD} and ignores directives such "
            "as NoExecPaths=: the services run with fewer restrictions."
        )
    for kind, command, why in (
        ("sysusers.d", ("systemd-sysusers",), "creates the user wattspan if it is missing"),
        ("tmpfiles.d", ("systemd-tmpfiles", "--create"), "applies the permissions now"),
    ):
        paths = [f.path for f in files if f.folder == PLACES[kind]]
        if paths:
            yield Run((*command, *paths), why)
    yield from _reload_system(found, "to load the units")
    if not found.configured:
        yield Note(
            f"There is no {CONFIG}: the defaults apply. `wattspan config show` prints them as a "
            "template."
        )
    yield Note(f"To start the agent now and at every boot: systemctl enable --now {AGENT}")
    if any(f.name == CAPPER_SOCKET for f in files):
        yield Note(f"To let it set power limits: systemctl enable --now {CAPPER_SOCKET}")


def _reload_system(found: InstallationState, why: str) -> Iterator[Action]:
    """Yield the commands that reload udev and systemd."""
    if not found.live:
        return
    if found.udev:
        yield Run(("udevadm", "control", "--reload"), "reloads the rules of udev")
        yield Run(
            ("udevadm", "trigger", "--subsystem-match=powercap", "--action=add"),
            "applies the rules to existing counters",
        )
    if found.booted:
        yield Run(("systemctl", "daemon-reload"), f"reloads systemd {why}")
    else:
        yield Note("systemd does not run this host; the change takes effect when it does.")


# ------------------------------------------------------------------------------------- removing


def _stop_services(
    units: Sequence[str], found: InstallationState, program: str
) -> Iterator[Action]:
    """Yield the commands that stop the agent and then the capper, which restore all limits."""
    if not found.live:
        return
    if found.booted:
        if AGENT in units:
            why = "stops the agent, which releases its limits"
            yield Run(("systemctl", "disable", "--now", AGENT), why, required=True)
        if capper := tuple(name for name in _CAPPER_UNITS if name in units):
            why = "stops the capper, which restores every limit"
            yield Run(("systemctl", "disable", "--now", *capper), why, required=True)
    if found.journal:
        # The command works with an unreadable configuration as well.
        yield Run(
            (program, "caps", "restore"), "restores limits that no capper restored", required=True
        )


def _remove_file(file: ServiceFile, content: FileContent) -> Action:
    if file_state(content) in _REPLACED:
        return Remove(file.path, content, "it is unchanged since its installation")
    left = _keep_file(file.path, content)
    return Keep(left.path, left.why.partition(";")[0], current=False)


def _remove_empty_directories(gone: Sequence[ServiceFile]) -> Iterator[Action]:
    """Yield the directories that may be empty now, deepest first, below LOCAL_LIB."""
    folders = dict.fromkeys(f.folder for f in gone)
    parents = dict.fromkeys(
        folder.rpartition("/")[0]
        for folder in folders
        if folder.count("/") > LOCAL_LIB.count("/") + 1
    )
    yield from (RemoveFolder(folder) for folder in (*folders, *parents))


def _package_notice(units: Sequence[str], found: InstallationState) -> Iterator[Action]:
    """Yield a note if the stopped units have the names of those of a package."""
    if found.packaged and found.live and (stopped := [u for u in units if u != CAPPER]):
        yield Note(
            "The services of the package are stopped and disabled now. To start them, run "
            f"`systemctl enable --now {' '.join(stopped)}`."
        )


def _remove_state(found: InstallationState, *, purge: bool) -> Iterator[Action]:
    if found.packaged:
        yield Note(
            f"wattspan is also installed as a package ({found.packaged[0]}): the measured data is "
            "left to its package manager."
        )
        return
    for folder in found.state:
        if purge:
            yield RemoveFolder(folder, recursive=True)
        else:
            yield Note(f"{folder} with the measured data is kept; --purge removes it.")
    if found.configured:
        yield Note(f"{CONFIG} is kept.")
    if purge:
        yield Note("The user wattspan is kept; `userdel wattspan` removes it.")
