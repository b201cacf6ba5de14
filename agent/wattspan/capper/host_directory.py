"""The directory by which the cappers of one host exclude and find each other.

It is the same for every agent of the host, whatever its run directory: ``[caps] host_dir``. The
capper of the host holds ``host.lock`` there. ``current`` is a link to its socket, ``journal`` a
link to the directory of its journal; both stay after a SIGKILL, and the next capper replaces them.
Emulated hosts have no such directory.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.protocol import CapperAddress
from wattspan.ports import WattspanError
from wattspan.util.files import FileLock, LockHeldError, LockHolder, lock_holder

LOCK_FILE, SOCKET_LINK, JOURNAL_LINK = "host.lock", "current", "journal"
MODE = 0o755
"""Every user may look for the capper, only its own user may change the directory."""


class HostDirectoryError(WattspanError):
    """The directory cannot be used or trusted."""

    exit_code = 6


class HostHeldError(HostDirectoryError):
    """Another process is the capper of this host."""


@dataclass(frozen=True, slots=True)
class HostDirectory:
    """The directory as every process of the host sees it. Nothing is written."""

    path: Path

    def address(self) -> CapperAddress | None:
        """The socket to which ``current`` points; None if there is none, or it is not trusted.

        The process that listens there may have ended. Its user must be the owner of the link.
        """
        with suppress(OSError, HostDirectoryError), _OpenDirectory.open(self.path) as directory:
            target = directory.link(SOCKET_LINK)
            return CapperAddress(Path(target[0]), target[1]) if target is not None else None
        return None

    def fault(self) -> str:
        """The reason why the directory cannot be trusted, with the remedy; "" for none."""
        try:
            _OpenDirectory.open(self.path).close()
        except HostDirectoryError as error:
            return str(error)
        except OSError:
            pass
        return ""

    @property
    def holder_text(self) -> str:
        """One sentence about the holder of the lock, with the remedy; "" if it is free."""
        holder = lock_holder(self.path / LOCK_FILE)
        return "" if holder is None else _held_text(self.path, holder)


class HostClaim:
    """The right to be the one capper of this host, until its release or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Take the lock. HostHeldError if another process has it, HostDirectoryError."""
        self.path = path
        self._socket = self._journal = ""
        self._directory, self._lock = _take(path)

    @property
    def former_journal(self) -> Path | None:
        """The directory of the journal of the capper before this one, if it is known."""
        with suppress(OSError):
            if (found := self._directory.link(JOURNAL_LINK)) is not None:
                return Path(found[0])
        return None

    def publish(self, socket: Path, journal: Path) -> None:
        """Let ``current`` and ``journal`` point to this capper. HostDirectoryError."""
        self._socket, self._journal = str(socket.absolute()), str(journal.absolute())
        try:
            self._directory.replace_link(JOURNAL_LINK, self._journal)
            self._directory.replace_link(SOCKET_LINK, self._socket)
        except OSError as error:
            raise HostDirectoryError(
                f"Cannot write the link to this capper in {self.path}: {error.strerror}. Make it"
                " writable for the capper."
            ) from None

    def keep(self) -> None:
        """Renew the lock and the links if they were removed or replaced since.

        HostHeldError if another process has become the capper meanwhile; HostDirectoryError.
        """
        if not self._is_in_place():
            # The lock of a removed file excludes no other process. It is kept until the next one.
            directory, lock = _take(self.path)
            self._close()
            self._directory, self._lock = directory, lock
        if self._socket and self._link_text(SOCKET_LINK) != self._socket:
            self.publish(Path(self._socket), Path(self._journal))

    def release(self) -> None:
        """Remove ``current`` and release the lock. ``journal`` stays. Idempotent."""
        if self._lock.released:
            return
        with suppress(OSError, HostDirectoryError):
            if self._socket and self._is_in_place() and self._link_text(SOCKET_LINK):
                self._directory.remove(SOCKET_LINK)
        self._close()

    def _close(self) -> None:
        self._lock.release()
        self._directory.close()

    def _is_in_place(self) -> bool:
        return self._directory.is_at(self.path) and self._lock.is_at(self._directory.at(LOCK_FILE))

    def _link_text(self, name: str) -> str:
        try:
            found = self._directory.link(name)
        except OSError:
            return ""
        return found[0] if found is not None else ""


def _take(path: Path) -> tuple[_OpenDirectory, FileLock]:
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(_OpenDirectory.create(path))
            while True:
                lock = FileLock(directory.at(LOCK_FILE))
                if lock.is_at(directory.at(LOCK_FILE)):
                    break
                lock.release()  # removed between its opening and its locking
        except LockHeldError as held:
            raise HostHeldError(_held_text(path, held.holder)) from None
        except OSError as error:
            raise HostDirectoryError(
                f"Cannot take the lock of this host's capper in {path}: {error.strerror}."
                f" {_remedy(path)}"
            ) from None
        stack.pop_all()
    return directory, lock


def _remedy(path: Path) -> str:
    if os.geteuid() == 0:
        return "Make it writable, or set another [caps] host_dir for every agent of the host."
    return f"Run the capper as root, or run `install -d -o {os.geteuid()} -m 755 {path}` as root."


def _held_text(directory: Path, holder: LockHolder) -> str:
    path = directory / LOCK_FILE
    if holder.pid is None:
        return (
            f"An unknown process has the lock {path} of this host's capper: {holder.description}."
            f" Find it with `fuser -v {path}`, and end it."
        )
    address = HostDirectory(directory).address()
    serves = f", answers on {address.path}" if address is not None else ""
    return (
        f"Process {holder.pid} is the capper of this host{serves} and has the lock {path}. Use it,"
        " or end it and the agent that started it."
    )


class _OpenDirectory:
    """An open directory that only its owner can write; names in it are used relative to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> _OpenDirectory:
        """HostDirectoryError if others may write it or own it; OSError."""
        return cls._checked(path, {0, os.geteuid()})

    @classmethod
    def create(cls, path: Path) -> _OpenDirectory:
        """As ``open``, for the capper: it creates a missing directory, and must own it."""
        try:
            path.mkdir(mode=MODE)
        except FileExistsError:
            return cls._checked(path, {os.geteuid()})
        directory = cls._checked(path, {os.geteuid()})
        directory.show()
        return directory

    @classmethod
    def _checked(cls, path: Path, owners: set[int]) -> _OpenDirectory:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except NotADirectoryError:  # a link as well
            raise HostDirectoryError(
                f"{path} is not a directory, so the capper of this host is neither looked for nor"
                " announced there. Remove it."
            ) from None
        directory = cls(descriptor)
        found = os.fstat(descriptor)
        cause = ""
        if found.st_uid not in owners:
            cause = f"belongs to user {found.st_uid}"
        elif found.st_mode & 0o022:
            cause = "can be written by other users"
        if cause:
            directory.close()
            owner = min(owners)
            raise HostDirectoryError(
                f"{path} {cause}, so the lock and the link of this host's capper in it are not"
                f" trusted. Run `chown {owner} {path} && chmod {MODE:o} {path}` as root, or set"
                " another [caps] host_dir for every agent of the host."
            )
        return directory

    def show(self) -> None:
        """Let every user look into it: the umask may have removed that permission. OSError."""
        os.fchmod(self._descriptor, MODE)

    def at(self, name: str) -> Path:
        """The path of a file in this very directory, also if another one has its name now."""
        return Path(f"/proc/self/fd/{self._descriptor}") / name

    def link(self, name: str) -> tuple[str, int] | None:
        """The target of a link, and its owner; None without an absolute one. OSError."""
        try:
            target = os.readlink(name, dir_fd=self._descriptor)
            owner = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_uid
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:  # it is no link
                return None
            raise
        owned = owner == os.fstat(self._descriptor).st_uid
        return (target, owner) if owned and Path(target).is_absolute() else None

    def replace_link(self, name: str, target: str) -> None:
        """Replace a link as a whole, so that readers see the former or the new one. OSError."""
        draft = f"{name}.new"
        self.remove(draft)
        os.symlink(target, draft, dir_fd=self._descriptor)
        os.rename(draft, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists. OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def is_at(self, path: Path) -> bool:
        """True if ``path`` still names this directory."""
        with suppress(OSError):
            return os.path.samestat(path.lstat(), os.fstat(self._descriptor))
        return False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> _OpenDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
