"""Doing what was planned, one action after the other, each said as it is done."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from wattspan.installation.actions import Action, Keep, Note, Remove, RemoveFolder, Run, Write
from wattspan.installation.looking import below, content_in, leads_out
from wattspan.installation.marking import Content
from wattspan.ports import WattspanError

Runner = Callable[[Sequence[str]], str]
"""Runs a command; "" if it succeeded, else why not."""
CAP_NOT_GIVEN_BACK = 6


class InstallationError(WattspanError):
    """It could not be done, and what was done before stands."""


class CapStaysError(InstallationError):
    """A limit could not be given back, so what could give it back stays."""

    exit_code = CAP_NOT_GIVEN_BACK


def apply(
    plan: Sequence[Action], root: Path, say: Callable[[str], None], run: Runner
) -> tuple[str, ...]:
    """Do it; what failed and cost only itself. InstallationError for what ends it."""
    failed = []
    for action in plan:
        trouble = _do(action, root, run)
        if not trouble:
            if not (isinstance(action, RemoveFolder) and below(root, action.path).exists()):
                say(action.sentence(done=True))
            continue
        if isinstance(action, Run) and action.must:
            given_back = action.command[-2:] != ("caps", "restore")
            raise (InstallationError if given_back else CapStaysError)(
                f"{trouble} Nothing was removed: put it right, and call again."
            )
        failed.append(trouble)
    return tuple(failed)


def _do(action: Action, root: Path, run: Runner) -> str:
    """Do one thing; why it failed, in a sentence, "" if it did not."""
    try:
        match action:
            case Write():
                _write(root, action.path, action.text, action.found)
            case Remove():
                _unchanged(root, action.path, action.found)
                below(root, action.path).unlink()
            case RemoveFolder() if leads_out(root, action.path):
                return f"{action.path} is out of this root, by a link on the way to it."
            case RemoveFolder(whole=True):
                shutil.rmtree(below(root, action.path))
            case RemoveFolder():
                with suppress(OSError):
                    below(root, action.path).rmdir()
            case Run():
                why = run(action.command)
                return why and f"`{' '.join(action.command)}` failed: {why}."
            case Keep() | Note():
                pass
    except OSError as error:
        why = error.strerror or str(error)
        return f"{action.sentence(done=False).partition(':')[0].rstrip('.')}: {why}."
    return ""


def _write(root: Path, name: str, text: str, found: Content) -> None:
    """Put it there whole or not at all, readable by all, if what is there is what was found."""
    _unchanged(root, name, found)
    path = below(root, name)
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
        _unchanged(root, name, found)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _unchanged(root: Path, path: str, found: Content) -> None:
    if content_in(root, path) != found:
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
