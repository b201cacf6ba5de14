"""Hosts of numbers in a fleet: agents are killed and started, and clocks pass equally."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from testbed.memory_cluster import MemoryCluster, MemoryCoordination
from testbed.tuned_host import LEASE, TICK, Host
from wattspan.fleet.job_exchange import JobExchange
from wattspan.ports import Clock
from wattspan.testing import ManualClock


class ExchangingHost:
    """One of the hosts: its agent runs, or was killed; ``killed`` is the time of that."""

    host: Host
    client: MemoryCoordination
    exchange: JobExchange

    def __init__(self, name: str, cluster: MemoryCluster) -> None:
        self.name, self._cluster = name, cluster
        self.killed: int | None = None
        self.runs = True

    def new_exchange(self, clock: Clock) -> JobExchange:
        """The exchange of an agent that begins."""
        self.client = self._cluster.client()
        self.exchange = JobExchange("/fleet/", self.name, self.client, clock, lambda line: None)
        return self.exchange

    def turn(self, tick: int) -> None:
        host = self.host
        if self.runs:
            host.turn(tick)
            self.exchange.round()
            return
        host._pass()
        host.tap.drain()
        if self.killed is not None and host.clock.monotonic() - self.killed > LEASE:
            host.capper.lapse()
            self.killed = None

    def kill(self) -> None:
        """The agent ends without a word: its leases expire."""
        self.runs, self.killed = False, self.host.clock.monotonic()

    def start(self) -> None:
        """Another agent begins, with an exchange of its own."""
        self.host.capper.lapse()
        self.host._job_records = self.new_exchange(self.host.clock)
        self.host.restart()
        self.runs, self.killed = True, None


HostT = TypeVar("HostT", bound=ExchangingHost)


class HostsInStep(Generic[HostT]):
    """All hosts of a job, and the service of their records."""

    members: Sequence[HostT]

    def __init__(self, cluster: MemoryCluster | None = None) -> None:
        self.clock = ManualClock()
        self.cluster = cluster or MemoryCluster(self.clock)
        self.ticks = 0

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass on all hosts."""
        for _ in range(round(seconds * 1e9 / TICK)):
            for one in self.members:
                one.turn(self.ticks)
            self.clock.advance(ns=TICK)
            self.ticks += 1
            if self.ticks % 2 and until():
                return


class Disturbances(Generic[HostT]):
    """Agents are killed and started, lose and find the service, and GPUs throttle.

    ``lost_at`` has the time of its clock since which a host is without contact.
    """

    def __init__(self, hosts: HostsInStep[HostT], chance: random.Random) -> None:
        self._hosts, self.chance = hosts, chance
        self.kinds: list[Callable[[HostT], None]] = [self.kill, self.cut, self.throttle]
        self.lost_at: dict[str, int] = {}

    def disturb(self, rate: float) -> None:
        """At most one event, which happens in a second with a probability of ``rate``."""
        one = self.chance.choice(self._hosts.members)
        if not one.runs:
            if self.chance.random() < max(20 * rate, 1 / 30):
                one.start()
        elif self.chance.random() < rate:
            self.chance.choice(self.kinds)(one)
        elif not one.client.connected and self.chance.random() < 10 * rate:
            one.client.connected = True
            self.lost_at.pop(one.name, None)

    def lost(self, one: HostT) -> int:
        """Nanoseconds for which a host is without contact."""
        now = one.host.clock.monotonic()
        return now - self.lost_at.get(one.name, now)

    def kill(self, one: HostT) -> None:
        one.kill()
        self.lost_at.pop(one.name, None)

    def cut(self, one: HostT) -> None:
        one.client.connected = False
        self.lost_at.setdefault(one.name, one.host.clock.monotonic())

    def throttle(self, one: HostT) -> None:
        gpu = one.host.gpus[0]
        gpu.throttling = () if gpu.throttling else ("hw_slowdown",)
