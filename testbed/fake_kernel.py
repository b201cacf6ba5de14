"""A kernel that shows the processes, users, containers and connections a test puts into it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple

from wattspan.http.sockets import Peer
from wattspan.model import Consumer, Principal
from wattspan.processes.inspector import LiveProcess, SocketOwner
from wattspan.processes.principals import PrincipalResolver
from wattspan.processes.procfs import TICK
from wattspan.testing import ManualClock

OURS = ("127.0.0.1", 4318)


class Process(NamedTuple):
    living: LiveProcess
    cgroup: str


class FakeKernel:
    """Processes are born at the clock's present time.

    A list of all processes costs ``costs`` nanoseconds, a look at one ``look_costs``,
    a search of its descriptors ``holds_costs``. A read fails for want of descriptors if ``fails``.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.processes: dict[int, Process] = {}
        self.sockets: dict[tuple[tuple[str, int], tuple[str, int]], SocketOwner] = {}
        self.held: dict[int, set[int]] = {}  # inodes by pid
        self.of_sockets: dict[int, Principal | None] = {}  # by inode
        self.closed_to_us: set[int] = set()  # pids whose descriptors we may not see
        self.costs = self.look_costs = self.holds_costs = 0
        self.looks = 0
        self.lookups = 0
        self._port = 50_000
        self.principals = PrincipalResolver()
        self.shortage: OSError | None = None
        self.fails: Callable[[], bool] = lambda: False

    # ---------------------------------------------------------------------------- setup

    def born(
        self,
        pid: int,
        *,
        user: int = 1000,
        parent: int = 1,
        copied: bool = False,
        inside: tuple[int, ...] = (),
        cgroup: str = "0::/user.slice\n",
        kernel: bool = False,
        name: str = "",
    ) -> LiveProcess:
        """A new process; ``inside`` are its pids in the namespaces below ours."""
        self.clock.advance(1)
        at = self.clock.now()
        ticks = (at.mono + at.asleep) // TICK
        living = LiveProcess(
            Consumer(pid, ticks),
            parent,
            ticks * TICK,
            frozenset({user}),
            self.principals.principal(cgroup, user),
            (pid, *inside),
            copied,
            kernel,
            name,
        )
        self.processes[pid] = Process(living, cgroup)
        if copied and parent in self.held:
            self.held[pid] = set(self.held[parent])
        return living

    def dies(self, living: LiveProcess) -> None:
        del self.processes[living.consumer.pid]
        self.held.pop(living.consumer.pid, None)

    def over_unix(self, living: LiveProcess, *, dated: bool = True) -> Peer:
        """A connection that ``living`` makes now."""
        accepted = self.clock.monotonic() if dated else None
        (user,) = living.users
        return Peer(
            pid=living.consumer.pid, uid=user, accepted=accepted, principal=living.principal
        )

    def over_tcp(self, living: LiveProcess, *, dated: bool = True) -> Peer:
        self._port += 1
        end, inode = ("127.0.0.1", self._port), self._port * 10
        (user,) = living.users
        self.sockets[end, OURS] = SocketOwner(user, inode)
        self.of_sockets[inode] = living.principal
        self.held.setdefault(living.consumer.pid, set()).add(inode)
        accepted = self.clock.monotonic() if dated else None
        return Peer(address=end, local=OURS, accepted=accepted, principal=living.principal)

    # ----------------------------------------------------------------------------- kernel
    # interface

    def living(self, pid: int) -> LiveProcess | None:
        """The process of ``pid``, without a read."""
        process = self.processes.get(pid)
        return process.living if process else None

    def _read(self, pid: int) -> Process | None:
        return None if self._lacks_descriptors() else self.processes.get(pid)

    def _lacks_descriptors(self) -> bool:
        fails = self.fails()
        if fails:
            self.shortage = OSError(errno.EMFILE, "Too many open files")
        return fails

    def identify(self, pid: int) -> Consumer | None:
        process = self._read(pid)
        return process.living.consumer if process else None

    def look(self, pid: int) -> LiveProcess | None:
        self.looks += 1
        self.clock.advance(ns=self.look_costs)
        process = self._read(pid)
        return process.living if process else None

    def pids(self) -> list[int]:
        self.clock.advance(ns=self.costs)
        return [] if self._lacks_descriptors() else list(self.processes)

    def user_id(self, pid: int) -> int | None:
        process = self._read(pid)
        return min(process.living.users) if process else None

    def principal(self, pid: int) -> Principal | None:
        process = self._read(pid)
        return process.living.principal if process else None

    def socket_principal(self, owner: SocketOwner) -> Principal | None:
        return None if self._lacks_descriptors() else self.of_sockets.get(owner.inode)

    def changes(self, living: LiveProcess, *, user: int | None = None, cgroup: str = "") -> None:
        """``living`` executes a setuid program, or moves to another cgroup."""
        uid = min(living.users) if user is None else user
        text = cgroup or self.processes[living.consumer.pid].cgroup
        principal = self.principals.principal(text, uid)
        changed = living._replace(users=frozenset({uid}), principal=principal)
        self.processes[living.consumer.pid] = Process(changed, text)

    def cgroup(self, pid: int) -> str | None:
        process = self._read(pid)
        return process.cgroup if process else None

    def owner_of(self, end: tuple[str, int], other: tuple[str, int]) -> SocketOwner | None:
        self.lookups += 1
        return None if self._lacks_descriptors() else self.sockets.get((end, other))

    def holds(self, pid: int, inode: int) -> bool | None:
        self.clock.advance(ns=self.holds_costs)
        if self._lacks_descriptors() or pid in self.closed_to_us:
            return None
        return inode in self.held.get(pid, ())
