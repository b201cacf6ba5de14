"""The directories of a capper, and the locks by which the cappers of one host exclude each other.

A capper keeps its journal in a directory of its own, under a lock. The directory of the host is
the same for every agent of the host, whatever its run directory: ``[caps] host_dir``. The capper of
the host holds ``host.lock`` there. ``current`` is a link to its socket, ``journal`` a link to the
directory of its journal; both stay after a SIGKILL, and the next capper replaces them. Emulated
hosts have no such directory.
"""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.journal import PREFIX, JournalError
from wattspan.capper.protocol import CapperAddress
from wattspan.ports import WattspanError
from wattspan.util.files import FileLock, LockHeldError, LockHolder, lock_holder

# ------------------------------------------------------------------------------ own directory

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SYSTEM_STATE = Path("/var/lib/wattspan")
SYSTEM_CAPPER_STATE = Path("/var/lib/wattspan-capper")
SOCKET_FILE = "capper.sock"
SYSTEM_RUN = Path("/run/wattspan")
SYSTEM_CAPPER_RUN = Path("/run/wattspan-capper")
AUDIT_FILE = "audit.jsonl"


@dataclass(frozen=True, slots=True)
class CapperHost:
    """The host by its boot, and the capper's own directory. An emulated host has one boot."""

    directory: Path
    boot_id: str

    @property
    def audit(self) -> Path:
        return self.directory / AUDIT_FILE

    @property
    def ceilings(self) -> Path:
        return self.directory / "ceilings.json"


def capper_socket_path(run_dir: Path, *, emulated: bool = False) -> Path:
    """The socket of the capper beside an agent with sockets in ``run_dir``.

    The system's capper has a directory of its own, in which the agent can create nothing.
    """
    own = run_dir == SYSTEM_RUN and not emulated
    return (SYSTEM_CAPPER_RUN if own else run_dir) / SOCKET_FILE


def audit_path(state_dir: Path, *, emulated: bool) -> Path:
    """The audit log of the capper of this host, or of an emulated one."""
    return capper_directory(state_dir, emulated=emulated) / AUDIT_FILE


def open_capper_host(state_dir: Path, emulated: Path | None = None) -> CapperHost:
    """This host, or the ``emulated`` one of that directory. JournalError if it is unusable."""
    directory = open_capper_directory(state_dir, emulated=emulated is not None)
    try:
        boot_id = BOOT_ID.read_text().strip()
    except OSError as error:
        raise JournalError(
            f"Cannot read the id of this boot from {BOOT_ID}: {error.strerror}. Mount /proc."
        ) from None
    return CapperHost(directory, boot_id if emulated is None else f"{boot_id} {emulated.name}")


def capper_directory(state_dir: Path, *, emulated: bool) -> Path:
    """The capper's own directory, whether it exists or not.

    The system's is beside the agent's state directory: the owner of a directory may rename its
    content, and the capper does not trust the agent.
    """
    if emulated:
        return state_dir / "capper-emulated"
    return SYSTEM_CAPPER_STATE if state_dir == SYSTEM_STATE else state_dir / "capper"


def open_capper_directory(state_dir: Path, *, emulated: bool = False) -> Path:
    """The capper's own directory; JournalError if it is unusable or cannot be trusted.

    A process with all rights trusts its content, so no other user may write it. An emulated host
    has another one.
    """
    directory = capper_directory(state_dir, emulated=emulated)
    remedy = "Make it writable, or set another [agent] state_dir."
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise JournalError(
            f"Cannot keep a journal in {directory}: {error.strerror}. {remedy}"
        ) from None
    if remedy := _distrust_reason(directory, found):
        raise JournalError(f"Cannot keep a journal in {directory}: {remedy}")
    return directory


def has_journal(directory: Path) -> bool:
    """True if a capper that kept its journal in ``directory`` may have left limits."""
    return any(directory.glob(f"{PREFIX}*"))


def distrust_reason(directory: Path) -> str:
    """The reason if the directory of an existing journal cannot be trusted; else ""."""
    try:
        return _distrust_reason(directory, directory.lstat())
    except OSError as error:
        return f"{error.strerror}."


def _distrust_reason(directory: Path, found: os.stat_result) -> str:
    """The reason if the directory cannot be trusted, with the remedy; else "".

    The remedy is never the removal of a journal of limits that are to be restored.
    """
    user = os.geteuid()
    if found.st_uid != user and user != 0:
        owner = _user_name(found.st_uid)
        how = "Use sudo." if found.st_uid == 0 else f"Run this as {owner}."
        return f"it belongs to {owner}, and only {owner} may. {how}"
    whole = stat.S_ISDIR(found.st_mode)
    if whole and found.st_uid == user and not found.st_mode & 0o022:
        return ""
    others = "other users may write it."
    if not has_journal(directory):
        return f"{others} Remove it, and let the capper make its own."
    if not whole:
        return f"{others} It is a link to what holds a journal: put that in its place."
    place = shlex.quote(str(directory))
    return (
        f"{others} It holds a journal of limits that are to be restored: if that journal is right,"
        f" run `chown -R {user} {place} && chmod -R go-w {place}`."
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def lock_capper(place: CapperHost) -> FileLock:
    """Take the right to be the capper of a host; JournalError names its holder, if it is known.

    It can be taken on a read-only disk as well: a restore must not depend on writing.
    """
    path = place.directory / "lock"
    try:
        return FileLock(path, unwritable=True)
    except LockHeldError as error:
        raise JournalError(_lock_held_message(path, error.holder)) from None
    except OSError as error:
        raise JournalError(
            f"Cannot lock {path}: {error.strerror}. Make it writable for the capper."
        ) from None


def _unknown_holder_message(path: Path, holder: LockHolder) -> str:
    return (
        f"An unknown process has the lock {path} of this host's capper: {holder.description}."
        f" Find it with `fuser -v {path}`, and end it."
    )


def _lock_held_message(path: Path, holder: LockHolder) -> str:
    if holder.pid is None:
        return _unknown_holder_message(path, holder)
    if holder.pid == holder.recorded_pid:
        return (
            f"Process {holder.pid} is the one capper of this host and has the lock {path}. Leave it"
            " running, or end it."
        )
    return (
        f"Process {holder.pid} has the lock {path} of this host's capper, and has not written its"
        " pid there, as a capper does. End it, unless it has just started."
    )


# ------------------------------------------------------------------------- directory of the host

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
        return _unknown_holder_message(path, holder)
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
