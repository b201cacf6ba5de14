"""Actions of an installation, the plans that consist of them, and their execution."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from wattspan.installation.files import (
    AGENT,
    CAPPER,
    CAPPER_SOCKET,
    CONFIG,
    COUNTERS,
    COUNTERS_SOCKET,
    LOCAL_LIB,
    PLACES,
    FileContent,
    FileState,
    InstallationState,
    NonRegularFile,
    ServiceFile,
    content_below,
    escapes_root,
    file_state,
    path_below,
)
from wattspan.ports import WattspanError
from wattspan.util.files import replace_file


@dataclass(frozen=True, slots=True)
class _FileAction:
    """An action on one file, and its reason."""

    path: str
    why: str

    verbs: ClassVar[tuple[str, str]]
    """The verb before and after the action."""
    result: ClassVar[str] = ""

    def sentence(self, *, done: bool) -> str:
        return f"{self.verbs[done]} {self.path}{self.result}: {self.why}."


@dataclass(frozen=True, slots=True)
class Write(_FileAction):
    """Write a file, if the content at ``path`` is still ``found``."""

    text: str
    found: FileContent

    verbs = ("Write", "Wrote")


@dataclass(frozen=True, slots=True)
class Keep(_FileAction):
    """Leave a file unchanged."""

    verbs, result = ("Leave", "Left"), " unchanged"


@dataclass(frozen=True, slots=True)
class Remove(_FileAction):
    """Remove a file, if its content is still ``found``."""

    found: FileContent

    verbs = ("Remove", "Removed")


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


OLDEST_SYSTEMD = 248
"""First version with every directive of the units; NoExecPaths= is the newest one."""
_CAPPER_UNITS = (CAPPER_SOCKET, CAPPER)


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


_PURPOSES = {
    AGENT: "the agent's service",
    CAPPER: "the service that sets power limits",
    CAPPER_SOCKET: "the socket of that service",
    COUNTERS: "the helper that reads performance counters",
    COUNTERS_SOCKET: "the socket of that helper",
    PLACES["system"]: "a unit",
    PLACES["sysusers.d"]: "the user that the agent runs as",
    PLACES["tmpfiles.d"]: "read permission for the CPU counters",
    PLACES["udev/rules.d"]: "read permission for counters that appear later",
}
"""The purpose of a file by its name, else by its folder."""


def _install_file(file: ServiceFile, content: FileContent) -> Action:
    purpose = _PURPOSES.get(file.name) or _PURPOSES[file.folder]
    match file_state(content, file.text):
        case FileState.ABSENT:
            return Write(file.path, f"{purpose}, a new file", file.text, content)
        case FileState.OUTDATED:
            why = f"{purpose}, in place of the file of an earlier installation"
            return Write(file.path, why, file.text, content)
        case FileState.CURRENT:
            return Keep(file.path, "it is current")
        case _:
            reason, remedy = _keep_reason(content)
            return Keep(file.path, reason + remedy)


def _keep_reason(content: FileContent) -> tuple[str, str]:
    """Return the reason against a replacement or removal, and the remedy."""
    if file_state(content) is FileState.EDITED:
        return "it was edited since its installation", "; move it away to replace it"
    if isinstance(content, NonRegularFile):
        return f"it is {content}, which wattspan did not create", ""
    return "wattspan did not write it", "; move it away to replace it"


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
    if any(f.name == COUNTERS_SOCKET for f in files):
        yield Note(f"To use performance counters: systemctl enable --now {COUNTERS_SOCKET}")


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
        if COUNTERS_SOCKET in units:
            why = "ends the access to performance counters"
            yield Run(("systemctl", "disable", "--now", COUNTERS_SOCKET), why, required=True)
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
        return Remove(file.path, "it is unchanged since its installation", content)
    return Keep(file.path, _keep_reason(content)[0])


def _remove_empty_directories(removed: Sequence[ServiceFile]) -> Iterator[Action]:
    """Yield the directories that may be empty now, deepest first, below LOCAL_LIB."""
    folders = dict.fromkeys(f.folder for f in removed)
    parents = dict.fromkeys(
        folder.rpartition("/")[0]
        for folder in folders
        if folder.count("/") > LOCAL_LIB.count("/") + 1
    )
    yield from (RemoveFolder(folder) for folder in (*folders, *parents))


def _package_notice(units: Sequence[str], found: InstallationState) -> Iterator[Action]:
    """Yield a note if the stopped units have the names of those of a package."""
    stopped = [one for one in (AGENT, CAPPER_SOCKET) if one in units]
    if found.packaged and found.live and stopped:
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


# ------------------------------------------------------------------------------------ execution

LIMIT_NOT_RESTORED = 6


class InstallationError(WattspanError):
    """An action failed. Earlier actions stay in effect."""


class LimitNotRestoredError(InstallationError):
    """A power limit was not restored, so nothing that can restore it was removed."""

    exit_code = LIMIT_NOT_RESTORED


def apply_plan(
    plan: Sequence[Action],
    root: Path,
    report: Callable[[str], None],
    run: Callable[[Sequence[str]], str],
) -> tuple[str, ...]:
    """Perform the actions and return the errors of optional ones.

    ``run`` runs a command; it returns "" after success, else the cause of the failure. Raises
    InstallationError if a required action fails.
    """
    failed = []
    for action in plan:
        error = _perform(action, root, run)
        if not error:
            if not (isinstance(action, RemoveFolder) and path_below(root, action.path).exists()):
                report(action.sentence(done=True))
            continue
        if isinstance(action, Run) and action.required:
            restoring = action.command[-2:] == ("caps", "restore")
            raise (LimitNotRestoredError if restoring else InstallationError)(
                f"{error} Nothing was removed. Correct the cause and run the command again."
            )
        failed.append(error)
    return tuple(failed)


def _perform(action: Action, root: Path, run: Callable[[Sequence[str]], str]) -> str:
    """Perform one action; return the error as a sentence, "" after success."""
    try:
        match action:
            case Write() | Remove() if content_below(root, action.path) != action.found:
                raise OSError(0, "it has changed since the inspection; run the command again")  # noqa: TRY301
            case Write():
                _write(path_below(root, action.path), action.text)
            case Remove():
                path_below(root, action.path).unlink()
            case RemoveFolder() if escapes_root(root, action.path):
                return f"{action.path} leaves this root through a symbolic link."
            case RemoveFolder(recursive=True) if path_below(root, action.path).is_symlink():
                return f"{action.path} is a symbolic link, which is not followed: remove it."
            case RemoveFolder(recursive=True):
                shutil.rmtree(path_below(root, action.path))
            case RemoveFolder():
                with suppress(OSError):
                    path_below(root, action.path).rmdir()
            case Run():
                cause = run(action.command)
                return cause and f"`{' '.join(action.command)}` failed: {cause}."
            case Keep() | Note():
                pass
    except OSError as error:
        cause = error.strerror or str(error)
        return f"{action.sentence(done=False).partition(':')[0].rstrip('.')}: {cause}."
    return ""


def _write(path: Path, text: str) -> None:
    """Write the file atomically with mode 0644, and missing directories with mode 0755."""
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        folder.chmod(0o755)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    replace_file(path, text.encode(), draft)
    path.chmod(0o644)


_PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TERM")


def run_command(command: Sequence[str]) -> str:
    """Run a command with only the basic environment variables of the caller."""
    try:
        done = subprocess.run(  # noqa: S603 - our own commands, no shell
            list(command),
            env={name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except OSError as error:
        return str(error.strerror)
    except subprocess.TimeoutExpired:
        return "it did not end within two minutes"
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
    message = lines[-1].strip().rstrip(".") if lines else "no message"
    return f"exit code {done.returncode}, {message}" if done.returncode else ""
