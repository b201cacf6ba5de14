"""Disks of a few megabytes that only one agent sees, so that one of them can be filled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_MOUNT = """\
while [ "$#" -gt 0 ]; do
    mkdir -p "$2" && mount -t tmpfs -o "size=$1,mode=0700" small "$2" || exit 1
    shift 2
done
"""


class Mounted:
    """A mount below ``folder``, in a mount namespace with the lifetime of this object.

    Needs root. An agent started by the command ``within`` sees it, in each of its runs.
    """

    def __init__(self, mount: str, words: Callable[[Path], Sequence[str]], refusal: str) -> None:
        """``mount`` is a script of the shell, given ``words`` of the folder; or it fails."""
        self._temporary = tempfile.TemporaryDirectory(
            prefix="wattspan-disks-", ignore_cleanup_errors=True
        )
        self.folder = Path(self._temporary.name)
        script = f"mount --make-rprivate /\n{mount}\necho mounted\nexec cat\n"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", *words(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"mounted\n":
            self.close()
            raise RuntimeError(refusal)

    @property
    def within(self) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt"]

    def outside(self, path: str) -> Path:
        """Path of a file on the disks for processes outside the namespace."""
        return Path(f"/proc/{self._holder.pid}/root{self.folder / path}")

    def close(self) -> None:
        self._holder.stdin.close()
        self._holder.wait(60)  # unmount it, after a final sync
        self._holder.stdout.close()
        self._temporary.cleanup()


class Disks(Mounted):
    """Disks by name."""

    def __init__(self, sizes: Mapping[str, str]) -> None:
        """``sizes``: of each disk, by its path in ``folder``; those around others first."""
        super().__init__(
            _MOUNT,
            lambda folder: [
                word for path, size in sizes.items() for word in (size, str(folder / path))
            ],
            "no disks can be mounted; only root can",
        )

    def fill(self, path: str) -> None:
        """Fill the disk completely, including space freed meanwhile."""
        with (self.outside(path) / "ballast").open("ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12, 512):
                with contextlib.suppress(OSError):
                    while ballast.write(bytes(size)) == size:
                        pass

    def free(self, path: str) -> None:
        (self.outside(path) / "ballast").unlink(missing_ok=True)

    def forbid_writing(self, path: str) -> None:
        """Let every file that is opened from now on be on a read-only file system.

        The kernel refuses to remount a file system with files open for writing, so another mount
        of it hides it. Disks in it stay writable.
        """
        folder = str(self.folder / path)
        self._mount("--rbind", folder, folder)
        self._mount("-o", "remount,bind,ro", folder)

    def permit_writing(self, path: str) -> None:
        """Undo ``forbid_writing``."""
        folder = self.folder / path
        subprocess.run([*self.within, "umount", "--lazy", folder], check=True)

    def _mount(self, *words: str) -> None:
        subprocess.run([*self.within, "mount", *words], check=True)

    def left(self, path: str) -> int:
        """Bytes that are free."""
        found = os.statvfs(self.outside(path))
        return found.f_bavail * found.f_frsize
