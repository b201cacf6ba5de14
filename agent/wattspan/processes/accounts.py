"""From what each process did to the usages of the host and of its sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wattspan.model import Instant, Payer, Usage
from wattspan.processes.busy import BusyClock, Unclaimed
from wattspan.processes.placement import Placement
from wattspan.processes.sockets import apportion
from wattspan.processes.table import Tracked
from wattspan.processes.topology import CpuTopology

HOST = "cpu"


class SocketAccounts:
    """Keeps, for each socket, what it did in all, who was charged, and what nobody claims."""

    def __init__(self, topology: CpuTopology, placement: Placement, busy: BusyClock | None) -> None:
        self._topology = topology
        self._placement = placement
        self._clock = busy
        self._busy: dict[int, int] | None = None
        self._spent: dict[int, int] = {}
        self._unclaimed: dict[int, Unclaimed] = {}

    def read_busy(self, mono: int) -> None:
        """To be called before the processes' clocks are read."""
        by_cpu = self._clock.read(mono) if self._clock is not None else None
        self._busy = None
        if by_cpu is not None:
            self._busy = dict.fromkeys(self._topology.sockets, 0)
            for cpu, busy in by_cpu.items():
                self._busy[self._topology.socket_of(cpu)] += busy

    def usages(
        self,
        start: Instant,
        end: Instant,
        active: Sequence[tuple[Payer, int, Tracked | None]],
        complete: bool,
    ) -> tuple[Usage, ...]:
        """One usage for the host and one for each socket.

        Where the picture is not ``complete`` (somebody may yet turn up whose work this is),
        nothing is called unclaimed; it will be, if so, with the next complete one.
        """
        divided = self._divide(active, end.mono)
        cpus = self._topology.capacity()
        duration = end.mono - start.mono
        usages = []
        for socket, spent in divided.items():
            self._spent[socket] = self._spent.get(socket, 0) + sum(spent.values())
            usages.append(
                Usage(
                    f"{HOST}:{socket}",
                    start,
                    end,
                    spent,
                    self._nobodys(socket) if complete else 0,
                    cpus.get(socket, 0) * duration,
                )
            )
        unclaimed = sum(usage.unclaimed for usage in usages)
        host = usages[0].spent if len(usages) == 1 else _summed(active)
        whole = Usage(HOST, start, end, host, unclaimed, sum(cpus.values()) * duration)
        return (whole, *usages)

    def _divide(
        self, active: Sequence[tuple[Payer, int, Tracked | None]], now: int
    ) -> dict[int, dict[Payer, int]]:
        sockets = self._topology.sockets
        if len(sockets) == 1:
            return {sockets[0]: _summed(active)}
        weights = self._placement.weights([(row, amount) for _, amount, row in active], now)
        parts = apportion([amount for _, amount, _ in active], weights, self._room(sockets))
        divided: dict[int, dict[Payer, int]] = {socket: {} for socket in sockets}
        for (payer, _, _), by_socket in zip(active, parts, strict=True):
            for socket, part in by_socket.items():
                mine = divided[socket]
                mine[payer] = mine.get(payer, 0) + part
        return divided

    def _room(self, sockets: Sequence[int]) -> Mapping[int, int]:
        """Each socket's busy time that nobody was charged with yet."""
        if self._busy is None:
            return dict.fromkeys(sockets, 0)
        return {
            socket: self._busy[socket]
            - self._spent.get(socket, 0)
            - (self._unclaimed[socket].total if socket in self._unclaimed else 0)
            for socket in sockets
        }

    def _nobodys(self, socket: int) -> int:
        if self._busy is None:
            return 0
        account = self._unclaimed.setdefault(socket, Unclaimed())
        return account.settle(self._busy[socket], self._spent[socket])


def _summed(active: Sequence[tuple[Payer, int, Tracked | None]]) -> dict[Payer, int]:
    spent: dict[Payer, int] = {}
    for payer, amount, _ in active:
        spent[payer] = spent.get(payer, 0) + amount
    return spent
