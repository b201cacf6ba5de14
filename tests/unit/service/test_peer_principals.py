"""A user who causes slow searches for cgroups loses only the own share of time for them."""

from __future__ import annotations

from pathlib import Path

from wattspan.model import SECOND, Principal
from wattspan.processes.inspector import SocketOwner, TcpConnections
from wattspan.processes.principals import CgroupDirectories, PrincipalResolver
from wattspan.service.span_assembly import PeerPrincipalLookup
from wattspan.testing import ManualClock

GREEDY, MODEST = 1001, 1000


class Sockets(TcpConnections):
    """The socket at each port is of the user of that number."""

    def owner_of(self, end: tuple[str, int], other: tuple[str, int]) -> SocketOwner | None:
        return SocketOwner(end[1], 1, end[1])


class SlowDirectories(CgroupDirectories):
    """Each cgroup is searched among all; ``searches`` are the users whose sockets were searched."""

    def __init__(self, root: Path, clock: ManualClock) -> None:
        super().__init__(root)
        self.clock, self.searches = clock, list[int]()

    def path_of(self, cgroup: int) -> str | None:
        self.searches.append(cgroup)
        self.clock.advance(ns=SECOND // 2)
        return None


def test_searches_for_the_sockets_of_a_user_leave_time_for_those_of_another(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    clock = ManualClock()
    directories = SlowDirectories(tmp_path, clock)
    lookup = PeerPrincipalLookup(clock, PrincipalResolver(directories), Sockets())

    def owner(user: int) -> Principal | None:
        return lookup.socket_owner(("127.0.0.1", user), ("127.0.0.1", 9949))

    assert [owner(GREEDY) for _ in range(10)] == [Principal(GREEDY)] * 10
    assert directories.searches == [GREEDY]
    assert owner(MODEST) == Principal(MODEST)
    assert directories.searches == [GREEDY, MODEST]
