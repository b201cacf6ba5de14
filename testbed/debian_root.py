"""Roots with a fresh Debian in them, and packages of the tree to install there.

Each release comes by debootstrap, once, and is kept in .tools; every root is unpacked from there
into memory. scripts/build-deb builds the package once for all concurrent tests.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from testbed.requirements import ROOT
from testbed.systemd_host import SystemdHost
from testbed.systemd_host import missing as missing_systemd
from wattspan.emulation.control import Closeable

PACKAGES = ("python3", "systemd")
"""Dependencies of the package; the root has no other packages beyond Debian's minimum."""

_SEEN = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")
"""Directories that no test needs; the stored Debian lacks them."""
_SOURCES = ("agent", "exporters", "docs", "packaging/deb", "requirements", "scripts", "systemd", "")
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


@functools.cache
def missing() -> str | None:
    """Cause that prevents a Debian root from being built and booted here; None if possible."""
    absent = [name for name in ("debootstrap", "dpkg-deb") if shutil.which(name) is None]
    if absent:
        return f"no {' and no '.join(absent)}; install Debian's debootstrap and dpkg"
    if not Path("/usr/bin/python3").exists():
        return "no /usr/bin/python3, of which the package is made; install Debian's python3"
    if _suite() is None:
        return "the package is built for the Debian that it is built on, and this is none"
    return missing_systemd()


def _suite() -> str | None:
    told = platform.freedesktop_os_release()
    return told.get("VERSION_CODENAME") if told.get("ID") == "debian" else None


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Exclude other processes and threads from ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder for a root; on disk where memory is short."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30
    return tempfile.TemporaryDirectory(prefix="wattspan-debian-", dir=memory if roomy else None)


def archive(suite: str, packages: Sequence[str]) -> Path:
    """The place of the archive of a release."""
    key = hashlib.sha256(" ".join((*packages, *_SEEN)).encode()).hexdigest()[:12]
    return ROOT / ".tools" / f"debian-root-{suite}-{key}.tar"


def debian(suite: str | None = None, packages: Sequence[str] = PACKAGES) -> Path:
    """An archive of a fresh Debian, by default of this machine's release; made if there is none."""
    suite = suite or _suite()
    kept = archive(str(suite), packages)
    # Not in memory: where /dev/shm is mounted "nodev", debootstrap cannot make its devices.
    with _one_at_a_time(kept), tempfile.TemporaryDirectory(prefix="debian-") as scratch:
        if not kept.exists():
            fresh = Path(scratch, "root")
            included = f"--include={','.join(packages)}"
            told = subprocess.run(
                ["debootstrap", "--variant=minbase", included, str(suite), str(fresh)],
                capture_output=True,
                text=True,
                env={**os.environ, **_ENVIRONMENT},
            )
            assert told.returncode == 0, f"debootstrap failed:\n{told.stdout[-2000:]}{told.stderr}"
            left_out = [f"--exclude=./{name}/*" for name in _SEEN]
            draft = kept.with_suffix(".new")
            tar = ("tar", "--create", "--numeric-owner", "--one-file-system")
            subprocess.run(
                [*tar, *left_out, f"--file={draft}", f"--directory={fresh}", "."], check=True
            )
            draft.replace(kept)
    return kept


def package(folder: Path, *words: str, **environ: str) -> Path:
    """A package built of the tree into ``folder``, unless it is there already."""
    with _one_at_a_time(folder):
        found = list(folder.glob("*.deb"))
        if not found:
            told = subprocess.run(
                [ROOT / "scripts" / "build-deb", "--output", folder, *words],
                capture_output=True,
                text=True,
                env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **environ},
            )
            assert told.returncode == 0, told.stdout + told.stderr
            found = list(folder.glob("*.deb"))
    (one,) = found
    return one


@functools.cache
def the_package() -> Path:
    """The package of the current tree, built once for all concurrent callers."""
    time = ("git", "-C", ROOT, "log", "-1", "--format=%ct")  # it is in the package
    tree = hashlib.sha256(subprocess.run(time, capture_output=True, check=False).stdout)
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*") if folder else [ROOT / "pyproject.toml"]):
            if path.is_file() and path.suffix != ".pyc":
                tree.update(f"{path} {path.stat().st_mode} ".encode() + path.read_bytes())
    kept = ROOT / ".tools" / "deb" / tree.hexdigest()[:16]
    for old in kept.parent.glob("*"):
        if not old.name.startswith(kept.name):
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
    return package(kept)


def another_version(package: Path, version: str, folder: Path) -> Path:
    """The same package under another version, in ``folder``."""
    opened = folder / "opened"
    subprocess.run(["dpkg-deb", "--raw-extract", package, opened], check=True)
    control = opened / "DEBIAN" / "control"
    control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", control.read_text()))
    target = folder / f"wattspan_{version}.deb"
    pack = ("dpkg-deb", "--root-owner-group", "-Znone", "--build")
    subprocess.run([*pack, opened, target], check=True, capture_output=True)
    shutil.rmtree(opened)
    return target


class DebianRoot(Closeable):
    """A folder with a fresh Debian in it, from ``with`` to the end of it. A root in memory."""

    def __init__(self, suite: str | None = None, packages: Sequence[str] = PACKAGES) -> None:
        self._debian = suite, packages

    def __enter__(self) -> Self:
        self._temporary = _in_memory()
        self.folder = Path(self._temporary.name)
        self.path = self.folder / "root"
        self.path.mkdir(mode=0o755)
        subprocess.run(
            ["tar", "--extract", f"--file={debian(*self._debian)}", f"--directory={self.path}"],
            check=True,
        )
        (self.path / "etc" / "machine-id").write_text("")
        return self

    def close(self) -> None:
        self._temporary.cleanup()

    def boot(self, name: str = "host", binds: Mapping[Path, Path] | None = None) -> SystemdHost:
        """A systemd for the root as a context manager; ``name`` is unique."""
        return SystemdHost(self.folder / name, root=self.path, binds=binds)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program in it where no systemd runs, as in a container."""
        script = 'mount -t proc proc "$1/proc" && exec chroot "$@"'
        apart = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        return subprocess.run(
            [*apart, "sh", "-c", script, "sh", self.path, *command],
            capture_output=True,
            text=True,
            env=_ENVIRONMENT,
            timeout=120,
        )

    def put(self, *packages: Path) -> list[str]:
        """Copy packages into it; how they are called there."""
        for one in packages:
            shutil.copy(one, self.path / "root")
        return [f"/root/{one.name}" for one in packages]

    def files(self) -> dict[str, str]:
        """Content of the root: of every file and link its kind, rights, owner and contents."""
        return dict(_described(self.path))


def _described(root: Path) -> Iterator[tuple[str, str]]:
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            found = path.lstat()
            told = f"{found.st_mode:o} {found.st_uid}:{found.st_gid}"
            if path.is_symlink():
                told += f" -> {path.readlink()}"
            elif path.is_file():
                told += f" {hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}"
            yield str(path.relative_to(root)), told


if __name__ == "__main__":  # beside the linters, rather than while every test of packages waits
    if missing() is None:
        debian()
