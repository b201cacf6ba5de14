"""A checkout on each supported Debian release, with the release's Python and systemd.

``python -m testbed.debian_releases`` keeps the releases and the wheels for their Pythons in .tools.
An installation then needs neither a mirror nor a package index, and the machine has no network.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from testbed import debian_root
from testbed.debian_machine import Machine
from testbed.debian_root import DebianRoot, archive, debian
from testbed.requirements import ROOT
from testbed.sources import tracked
from wattspan.emulation.control import Closeable

PYTHONS: Mapping[str, str] = {"bookworm": "3.11", "trixie": "3.13"}
"""The Python of each release."""

PACKAGES = (*debian_root.PACKAGES, "man-db", "pipx", "python3-venv")

_LOCKS = ("build.txt", "package.txt")
_TEST_PACKAGES = (
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments", "hypothesis", "sortedcontainers"),
    *("cryptography", "cffi", "pycparser", "grpclib", "multidict", "h2", "hpack", "hyperframe"),
)
"""Those of requirements/dev.txt that most unit and property tests need."""
_UNLOCKED = ("pip", "setuptools", "wheel")
"""Packages of which pipx installs the newest versions for itself."""

WHEELS = Path("/srv/wheels")
TREE = Path("/srv/wattspan")
TEST_LOCK = WHEELS / "tests.txt"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS)}
"""Variables with which pip installs the kept wheels."""


def _test_lock() -> str:
    """The part of requirements/dev.txt that the tests need, with its hashes."""
    text = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    blocks = re.findall(r"^([a-z0-9._-]+)(==(?:.*\\\n)*.*\n)", text, re.MULTILINE)
    return "".join(name + rest for name, rest in blocks if name in _TEST_PACKAGES)


def _wheels(python: str) -> Path:
    """The place of the wheels for a Python."""
    locks = [(ROOT / "requirements" / name).read_bytes() for name in _LOCKS]
    content = b"".join(locks) + _test_lock().encode() + " ".join(_UNLOCKED).encode()
    key = hashlib.sha256(content).hexdigest()[:12]
    return ROOT / ".tools" / f"wheels-{python}-{key}"


def _download(python: str) -> None:
    """Keep the wheels for a Python; CalledProcessError if the package index has not all of them."""
    kept = _wheels(python)
    if kept.exists():
        return
    kept.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="wheels-") as folder:
        draft = Path(folder, "wheels")
        draft.mkdir()
        (draft / TEST_LOCK.name).write_text(_test_lock(), encoding="utf-8")
        locks = [*(ROOT / "requirements" / name for name in _LOCKS), draft / TEST_LOCK.name]
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--no-deps"]
        pip += ["--only-binary", ":all:", "--python-version", python, "--dest", str(draft)]
        for lock in locks:
            wanted = ["--require-hashes", "--requirement", str(lock)]
            subprocess.run([*pip, *wanted], check=True)
        subprocess.run([*pip, *_UNLOCKED], check=True)
        draft.rename(kept)


def missing() -> str | None:
    """Cause that prevents the installation on one of the releases; None if possible."""
    if (cause := debian_root.missing()) is not None:
        return cause
    for suite, python in PYTHONS.items():
        if not (archive(suite, PACKAGES).exists() and _wheels(python).exists()):
            return (
                f"no Debian {suite} with wheels for Python {python}; `make test-all` gets both "
                "where a mirror and a package index answer"
            )
    return None


class Checkout(Closeable):
    """A booted release with the tree in ``TREE``, and no network, from ``with`` to the end of it.

    wattspan is not installed.
    """

    def __init__(self, suite: str) -> None:
        self.python = PYTHONS[suite]
        self.machine = Machine(DebianRoot(suite, PACKAGES))

    def __enter__(self) -> Self:
        self.machine.__enter__()
        try:
            root = self.machine.root.path
            shutil.copytree(_wheels(self.python), root / WHEELS.relative_to("/"))
            for path in tracked():
                copy = root / TREE.relative_to("/") / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self.machine.close()

    def run(
        self,
        *command: str | Path,
        folder: Path = TREE,
        user: str = "",
        code: int = 0,
        variables: Mapping[str, str] = OFFLINE,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in ``folder`` as root or ``user``; it must end with ``code``."""
        as_user = ("runuser", "-u", user, "--") if user else ()
        apart = ("env", "-C", folder, *(f"{name}={value}" for name, value in variables.items()))
        done = self.machine.host.run(*as_user, *apart, *command, check=False, timeout=600)
        assert done.returncode == code, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done


if __name__ == "__main__":
    if (cause := debian_root.missing()) is not None:
        sys.exit(cause)
    for suite, python in PYTHONS.items():
        debian(suite, PACKAGES)
        _download(python)
