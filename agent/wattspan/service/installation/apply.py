"""Execution of an installation plan, one action after the other, each reported when done."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from wattspan.ports import WattspanError
from wattspan.service.installation.files import FileContent
from wattspan.service.installation.inspection import content_below, escapes_root, path_below
from wattspan.service.installation.plan import Action, Keep, Note, Remove, RemoveFolder, Run, Write

Runner = Callable[[Sequence[str]], str]
"""Runs a command; returns "" after success, else the cause of the failure."""

LIMIT_NOT_RESTORED = 6


class InstallationError(WattspanError):
    """An action failed. Earlier actions stay in effect."""


class LimitNotRestoredError(InstallationError):
    """A power limit was not restored, so nothing that can restore it was removed."""

    exit_code = LIMIT_NOT_RESTORED


def apply_plan(
    plan: Sequence[Action], root: Path, say: Callable[[str], None], run: Runner
) -> tuple[str, ...]:
    """Perform the actions and return the errors of optional ones.

    Raises InstallationError if a required action fails.
    """
    failed = []
    for action in plan:
        error = _perform(action, root, run)
        if not error:
            if not (isinstance(action, RemoveFolder) and path_below(root, action.path).exists()):
                say(action.sentence(done=True))
            continue
        if isinstance(action, Run) and action.required:
            restoring = action.command[-2:] == ("caps", "restore")
            raise (LimitNotRestoredError if restoring else InstallationError)(
                f"{error} Nothing was removed. Correct the cause and run the command again."
            )
        failed.append(error)
    return tuple(failed)


def _perform(action: Action, root: Path, run: Runner) -> str:
    """Perform one action; return the error as a sentence, "" after success."""
    try:
        match action:
            case Write():
                _write(root, action.path, action.text, action.found)
            case Remove():
                _require_unchanged(root, action.path, action.found)
                path_below(root, action.path).unlink()
            case RemoveFolder() if escapes_root(root, action.path):
                return f"{action.path} leaves this root through a symbolic link."
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


def _write(root: Path, name: str, text: str, found: FileContent) -> None:
    """Write the file atomically with mode 0644, unless it changed since the inspection."""
    _require_unchanged(root, name, found)
    path = path_below(root, name)
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        folder.chmod(0o755)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        _require_unchanged(root, name, found)
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _require_unchanged(root: Path, path: str, found: FileContent) -> None:
    if content_below(root, path) != found:
        raise OSError(0, "it has changed since the inspection; run the command again")


_PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TERM")


def system_runner(environ: Mapping[str, str]) -> Runner:
    """Return a runner of commands with only the basic environment variables of the caller."""
    variables = {name: environ[name] for name in _PASSED_VARIABLES if name in environ}

    def run(command: Sequence[str]) -> str:
        try:
            done = subprocess.run(  # noqa: S603 - our own commands, no shell
                list(command),
                env=variables,
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

    return run
