"""Doing what was planned, one action after the other, each said as it is done."""

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
"""Runs a command; "" if it succeeded, else why not."""
LIMIT_NOT_RESTORED = 6


class InstallationError(WattspanError):
    """It could not be done, and what was done before stands."""


class LimitNotRestoredError(InstallationError):
    """A limit could not be given back, so what could give it back stays."""

    exit_code = LIMIT_NOT_RESTORED


def apply_plan(
    plan: Sequence[Action], root: Path, say: Callable[[str], None], run: Runner
) -> tuple[str, ...]:
    """Do it; what failed and cost only itself. InstallationError for what ends it."""
    failed = []
    for action in plan:
        trouble = _perform(action, root, run)
        if not trouble:
            if not (isinstance(action, RemoveFolder) and path_below(root, action.path).exists()):
                say(action.sentence(done=True))
            continue
        if isinstance(action, Run) and action.must:
            given_back = action.command[-2:] != ("caps", "restore")
            raise (InstallationError if given_back else LimitNotRestoredError)(
                f"{trouble} Nothing was removed: put it right, and call again."
            )
        failed.append(trouble)
    return tuple(failed)


def _perform(action: Action, root: Path, run: Runner) -> str:
    """Do one thing; why it failed, in a sentence, "" if it did not."""
    try:
        match action:
            case Write():
                _write(root, action.path, action.text, action.found)
            case Remove():
                _require_unchanged(root, action.path, action.found)
                path_below(root, action.path).unlink()
            case RemoveFolder() if escapes_root(root, action.path):
                return f"{action.path} is out of this root, by a link on the way to it."
            case RemoveFolder(whole=True):
                shutil.rmtree(path_below(root, action.path))
            case RemoveFolder():
                with suppress(OSError):
                    path_below(root, action.path).rmdir()
            case Run():
                why = run(action.command)
                return why and f"`{' '.join(action.command)}` failed: {why}."
            case Keep() | Note():
                pass
    except OSError as error:
        why = error.strerror or str(error)
        return f"{action.sentence(done=False).partition(':')[0].rstrip('.')}: {why}."
    return ""


def _write(root: Path, name: str, text: str, found: FileContent) -> None:
    """Put it there whole or not at all, readable by all, if what is there is what was found."""
    _require_unchanged(root, name, found)
    path = path_below(root, name)
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        folder.chmod(0o755)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        _require_unchanged(root, name, found)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _require_unchanged(root: Path, path: str, found: FileContent) -> None:
    if content_below(root, path) != found:
        raise OSError(0, "somebody has changed it meanwhile; call again")


ESSENTIAL = ("PATH", "HOME", "LANG", "LC_ALL", "TERM")


def system_runner(environ: Mapping[str, str]) -> Runner:
    """Runs commands of this host, with nothing of the caller's environment but the usual."""
    kept = {name: environ[name] for name in ESSENTIAL if name in environ}

    def run(command: Sequence[str]) -> str:
        try:
            done = subprocess.run(  # noqa: S603 - our own commands, no shell
                list(command),
                env=kept,
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
        except FileNotFoundError:
            return f"there is no {command[0]} here"
        except OSError as error:
            return str(error.strerror)
        except subprocess.TimeoutExpired:
            return "it did not end within two minutes"
        lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
        said = lines[-1].strip().rstrip(".") if lines else "it said nothing"
        return f"exit code {done.returncode}, {said}" if done.returncode else ""

    return run
