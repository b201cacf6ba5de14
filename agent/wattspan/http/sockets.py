"""Listening sockets, with one sentence for each failure, and the identity of peers."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Collection, Hashable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.model import Principal
from wattspan.model.settings import Listen
from wattspan.ports import ListenError, PeerPrincipals
from wattspan.util.unix_sockets import peer_credentials

BACKLOG = 128
_RUN_DIR_REMEDY = "set another [agent] run_dir"


class ListeningSocket(NamedTuple):
    """A listening socket. ``address`` is in the notation of the configuration."""

    socket: socket.socket
    address: str
    remove: Callable[[], None]  # removes the file of a closed socket


def listen_tcp(
    host: str, port: int, *, what: str, setting: str, verb: str = "receive"
) -> ListeningSocket:
    """Listen on TCP; port 0 takes any, the hosts "" and "::" every address. ListenError."""
    where = Listen.written(host, port)
    try:
        if host in ("", "::") and socket.has_dualstack_ipv6():
            listener = socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
        else:
            family, _, _, _, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ListenError(_tcp_sentence(error, where, port, f"{verb} {what}", setting)) from None
    actual = Listen.written(host, listener.getsockname()[1])
    return ListeningSocket(listener, actual, lambda: None)


def other_loopback(listen: Listen) -> Listen | None:
    """The address of IPv6 of "localhost", which its clients try first; None for others.

    A program that listens there in place of the agent receives what is meant for it.
    """
    if listen.host != "127.0.0.1" or not listen.port:
        return None
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:  # the host has no IPv6
        return None
    return Listen(Listen.written("::1", listen.port))


def listen_unix(path: Path, mode: int = 0o666, *, what: str) -> ListeningSocket:
    """Listen on a Unix socket. Users with write permission may connect. ListenError.

    A file without a listener is replaced; one with a listener is not. A missing directory is
    created; one that another user can change is refused.
    """
    refused = f"Cannot receive {what} on {path}"
    with ExitStack() as undo:
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
            undo.callback(os.close, directory)
            if fault := directory_fault(path.parent, os.fstat(directory), {0, os.geteuid()}):
                raise ListenError(f"{refused}: {fault.cause}; {fault.remedy}.")
            with ExitStack() as failed:
                listener = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                _remove_stale_socket(path, refused)
                os.fchmod(listener.fileno(), mode)  # the file never has more permissions
                listener.bind(str(path))
                bound = os.open(path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory)
                undo.callback(os.close, bound)
                ours = _own_socket(bound)
                failed.callback(_remove, path, ours)
                # Permissions removed by the umask. No link is followed: this is the file itself.
                Path(f"/proc/self/fd/{bound}").chmod(mode)
                listener.listen(BACKLOG)
                failed.pop_all()
        except OSError as error:
            raise ListenError(f"{refused}: {_unix_sentence(error, path)}") from None
    return ListeningSocket(listener, str(path), lambda: _remove(path, ours))


class DirectoryFault(NamedTuple):
    """Cause and remedy of a directory that is unsafe for sockets."""

    cause: str
    remedy: str


def directory_fault(
    path: Path, found: os.stat_result, owners: Collection[int]
) -> DirectoryFault | None:
    """The permission by which another user could replace sockets in the directory, or None.

    ``owners`` are the users who may own it.
    A sticky directory such as /tmp is refused as well: another user could make a socket of the
    same name first, and receive what is meant for the agent.
    """
    if found.st_uid not in owners:
        owner = f"{path} belongs to user {found.st_uid}, who can replace the sockets in it"
        return DirectoryFault(owner, f"run `chown {os.geteuid()} {path}`, or {_RUN_DIR_REMEDY}")
    names = {stat.S_IWGRP: "its group", stat.S_IWOTH: "every user"}
    writers = " and ".join(name for bit, name in names.items() if found.st_mode & bit)
    if not writers:
        return None
    cause = f"{path} can be written by {writers}, who could replace the sockets in it"
    if found.st_mode & stat.S_ISVTX:
        return DirectoryFault(
            cause, f"set [agent] run_dir to a directory inside it, such as {path}/wattspan"
        )
    return DirectoryFault(cause, f"run `chmod go-w {path}`, or {_RUN_DIR_REMEDY}")


def _own_socket(bound: int) -> os.stat_result:
    """The identity of the new socket file. OSError if something replaced it."""
    found = os.fstat(bound)
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EEXIST, "another user replaced the socket")
    return found


def _remove_stale_socket(path: Path, refused: str) -> None:
    """Remove a socket file without a listener. ListenError if something else is there."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ListenError(
                f"{refused}: something else has that name; move it away, or set another "
                "[agent] run_dir."
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # no process listens
            else:
                raise ListenError(
                    f"{refused}: another agent listens there; stop it, or set another "
                    "[agent] run_dir."
                )


def _remove(path: Path, ours: os.stat_result) -> None:
    """Remove the socket's file, unless another agent has replaced it."""
    with suppress(OSError):
        if os.path.samestat(path.lstat(), ours):
            path.unlink()


def _tcp_sentence(
    error: OSError | UnicodeError, where: str, port: int, what: str, setting: str
) -> str:
    another = f"choose another address in {setting}"
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        cause = "the port is in use"
        remedy = f"stop its user (`ss -ltnp sport = :{port}` names it) or {another}"
    elif code == errno.EACCES:
        cause = "ports below 1024 are privileged"
        remedy = f"{another}, or give the service CAP_NET_BIND_SERVICE"
    elif isinstance(error, socket.gaierror | UnicodeError) or code == errno.EADDRNOTAVAIL:
        cause, remedy = "this host has no such address", another
    else:
        cause, remedy = str((code and os.strerror(code)) or error), another
    return f"Cannot {what} on {where}: {cause}; {remedy}."


def _unix_sentence(error: OSError, path: Path) -> str:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{path.parent} cannot be written; run the agent as a user who may, or set another "
            "[agent] run_dir."
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and not path.parent.is_dir():
        return f"{path.parent} is no directory; set another [agent] run_dir."
    if error.errno is None:  # raised by Python: the path exceeds the length of a socket address
        return "a Unix socket's path has at most 107 bytes; set a shorter [agent] run_dir."
    return f"{error.strerror}; set another [agent] run_dir."


# ------------------------------------------------------------------------------------ peers

QuotaOwner = Hashable
"""A principal of this host, or a host of the network."""


def network_peer(address: str) -> QuotaOwner:
    """The quota owner of an address: a host has a whole /64 of IPv6."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0].removeprefix("::ffff:"))
    except ValueError:
        return address
    if ip.is_loopback:
        return "loopback"
    return int(ip) >> 64 if ip.version == 6 else str(ip)


Endpoint = tuple[str, int]
"""Address and port of one end of a TCP connection."""


class UserPrincipals:
    """Principals by user id alone, for a host without containers."""

    def connected(self, pid: int | None, uid: int | None) -> Principal | None:
        return None if uid is None else Principal(uid)

    def socket_owner(self, end: Endpoint, other: Endpoint) -> Principal | None:
        return None


def endpoint(address: tuple[Any, ...]) -> Endpoint:
    """One end of a TCP connection; an IPv4-mapped IPv6 address becomes an IPv4 address."""
    return address[0].removeprefix("::ffff:"), address[1]


def local_principal(
    remote: Endpoint, local: Endpoint, principals: PeerPrincipals
) -> Principal | None:
    """The principal who opened a TCP connection from this host; None for others, or if unknown."""
    own = remote[0] == local[0] or network_peer(remote[0]) == "loopback"
    return principals.socket_owner(remote, local) if own else None


def connection_owner(remote: Endpoint, principal: Principal | None) -> QuotaOwner:
    """The quota owner of a TCP connection: a principal of this host, or else a network peer.

    Connections of unknown users over loopback have one owner together.
    """
    return network_peer(remote[0]) if principal is None else principal


class Peer(NamedTuple):
    """Identity of a sender as proven by the kernel; None is unknown.

    On a Unix socket pid and uid are the peer's credentials. On TCP ``address`` and ``local`` are
    the two ends. ``accepted`` is the time of acceptance in monotonic nanoseconds; it distinguishes
    successive connections with the same ends or pid. ``principal`` is that of the time of
    acceptance; on TCP it is used for quotas only. ``forwards``: the socket is for those that
    forward the spans of others.
    """

    pid: int | None = None
    uid: int | None = None
    address: tuple[str, int] | None = None  # the sender's end of the connection
    local: tuple[str, int] | None = None  # ours
    accepted: int | None = None
    principal: Principal | None = None
    forwards: bool = False

    @property
    def quota_owner(self) -> QuotaOwner:
        """The principal or host whose quotas apply; unidentified peers share theirs."""
        if self.address is not None:
            return connection_owner(self.address, self.principal)
        return "unidentified" if self.principal is None else self.principal


def transport_peer(transport: Any, accepted: int, principals: PeerPrincipals) -> Peer:
    """The peer of an asyncio transport, as proven by the kernel.

    ``accepted`` is the time of acceptance in monotonic nanoseconds.
    """
    connection = transport.get_extra_info("socket")
    if connection is None:
        return Peer(accepted=accepted)
    if connection.family == socket.AF_UNIX:
        try:
            pid, uid = peer_credentials(connection)
        except OSError:
            return Peer(accepted=accepted)
        return Peer(pid, uid, accepted=accepted, principal=principals.connected(pid, uid))
    remote, local = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    if not remote or not local:
        return Peer(accepted=accepted)
    remote, local = endpoint(remote), endpoint(local)
    owner = local_principal(remote, local, principals)
    return Peer(address=remote, local=local, accepted=accepted, principal=owner)
