"""Hosts in real time: agents' and cappers' threads, random faults, and the sum of all limits.

The agents' and the leader's code, the capper's ceiling and etcd are real; devices are numbers.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from testbed.etcd import EtcdCluster
from testbed.simulated_fleet import SimulatedHost, W
from testbed.waiting import eventually
from wattspan.capper.protocol import AllotmentRow
from wattspan.clock import SystemClock
from wattspan.config import FleetSettings
from wattspan.fleet.allotment import AllotmentBook, accept_budgets
from wattspan.fleet.coordination import KeyWrite, OutcomeUnknownError, UnreachableError
from wattspan.fleet.etcd import EtcdCoordination
from wattspan.fleet.participant import FleetParticipant
from wattspan.fleet.records import FleetKeys, encode
from wattspan.model import SECOND, Instant
from wattspan.ports import CapsError


class SteppedClock(SystemClock):
    """The host's clock, whose wall time is stepped."""

    step = 0

    def now(self) -> Instant:
        now = super().now()
        return Instant(now.mono, now.wall + self.step, now.asleep)


class PowerSum:
    """The sum of all limits, checked at each change of one."""

    def __init__(self, budget: int) -> None:
        self._budget, self._lock = budget, threading.Lock()
        self._limits: dict[str, int] = {}
        self.is_strict = False
        self.changes = self.highest = 0
        self.violations: list[dict[str, int]] = []

    def set(self, name: str, limit: int) -> None:
        with self._lock:
            self._limits[name] = limit
            total = sum(self._limits.values())
            self.changes += 1
            if self.is_strict:
                self.highest = max(self.highest, total)
                if total > self._budget:
                    self.violations.append(dict(self._limits))

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self._limits.values())


class Link:
    """A connection to etcd that can be cut, also while an answer is under way.

    ``enter`` is called first in each call, by the thread that makes it.
    """

    def __init__(self, client: EtcdCoordination, enter: Callable[[], None]) -> None:
        self._client, self._enter = client, enter
        self.connected = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._client, name)

        def checked(*arguments: Any) -> Any:
            if not self.connected and name != "close":
                raise UnreachableError("The link is cut.")
            self._enter()
            answer = call(*arguments)
            if not self.connected and name == "commit":
                raise OutcomeUnknownError("The link was cut.")
            return answer

        return checked


class Links:
    """Makes connections to a cluster, from the network that a thread is in after ``enter``."""

    def __init__(self, cluster: EtcdCluster, enter: Callable[[], None]) -> None:
        self._cluster, self._enter = cluster, enter

    def client(self) -> Link:
        return Link(self._cluster.client(timeout=SECOND), self._enter)


class Process:
    """One life of an agent: its link and its access to the capper end when it is killed."""

    def __init__(self, host: RealTimeHost, link: Link) -> None:
        self._host, self.link = host, link
        self.is_alive = True

    def allotment(self) -> AllotmentRow:
        with self._capper() as host:
            return host.allotment()

    def allot(self, limit: int, safe: int, until: int, why: str) -> AllotmentRow:
        with self._capper() as host:
            return host.allot(limit, safe, until, why)

    @contextmanager
    def _capper(self) -> Iterator[RealTimeHost]:
        with self._host.lock:  # a dead process has no call under way
            if not self.is_alive:
                raise CapsError("This agent is dead.")
            yield self._host


class RealTimeHost(SimulatedHost):
    """A host whose capper has a thread, and whose agent has one."""

    def __init__(
        self, name: str, sums: PowerSum, urls: Sequence[str], links: Links, path: Path
    ) -> None:
        self.lock = threading.RLock()
        self._sums, self._links, self._enforced = sums, links, 0
        self.process: Process | None = None
        self._killed: list[FleetParticipant] = []
        settings = FleetSettings(
            endpoints=tuple(urls), name=name, place="row-1", contact=3 * SECOND,
            fallback=2 * SECOND, timeout=SECOND,
        )  # fmt: skip
        self.wall = SteppedClock()
        super().__init__(name, settings, links, self.wall, path, floor=300 * W, original=1500 * W)

    @property
    def enforced(self) -> int:
        return self._enforced

    @enforced.setter
    def enforced(self, limit: int) -> None:
        if limit != self._enforced:
            self._enforced = limit
            self._sums.set(self.name, limit)

    def allotment(self) -> AllotmentRow:
        with self.lock:
            return super().allotment()

    def allot(self, limit: int, safe: int, until: int, why: str) -> AllotmentRow:
        with self.lock:
            return super().allot(limit, safe, until, why)

    def turn(self) -> None:
        """One turn of the capper."""
        with self.lock:
            if self.is_on:
                self.settle()

    def start_agent(self) -> None:
        link = self._links.client()
        self.process = Process(self, link)
        self.participant = self.new_participant(link, self.process, former_session=self._noted)
        self.participant.start()

    def kill_agent(self) -> None:
        if self.process is not None and self.participant is not None:
            with self.lock:
                self.process.is_alive = self.process.link.connected = False
            self.participant.stop(0)
            self._killed.append(self.participant)
        self.participant = None

    def end(self) -> None:
        """Kill the agent, and wait for the threads of all killed ones, which use the network."""
        self.kill_agent()
        for one in self._killed:
            one.stop(20)

    def stop_agent(self) -> None:
        if self.participant is not None:
            self.participant.stop(20)
        self.participant = None

    @property
    def leads(self) -> bool:
        return self.participant is not None and self.participant.status.leads

    @property
    def in_contact(self) -> bool:
        return self.participant is not None and self.participant.status.in_contact


class Schedule:
    """Random faults, each mended some time later."""

    def __init__(self, hosts: list[RealTimeHost], seed: int) -> None:
        self.hosts = hosts
        self.random, self.clock = random.Random(seed), SystemClock()
        self.done: Counter[str] = Counter()
        self._mends: list[tuple[int, Callable[[], object]]] = []

    @property
    def kinds(self) -> tuple[Callable[[], bool], ...]:
        """The faults that may happen; each returns False if it cannot happen now."""
        return (self.kill_agent, self.kill_leader, self.stop_agent, self.step_clock)

    def fault(self) -> None:
        for host in self.random.sample(self.hosts, 3):  # so that limits differ from the fallbacks
            host.power = self.random.choice((None, 350 * W, 1500 * W))
        kind = self.random.choice(self.kinds)
        if kind():
            self.done[kind.__name__] += 1

    def mend(self, all_of_them: bool = False) -> None:
        now = self.clock.monotonic()
        due = [one for one in self._mends if all_of_them or one[0] <= now]
        self._mends = [one for one in self._mends if one not in due]
        for _, mend in due:
            mend()

    def later(self, low: float, high: float, mend: Callable[[], object]) -> bool:
        delay = round(self.random.uniform(low, high) * SECOND)
        self._mends.append((self.clock.monotonic() + delay, mend))
        return True

    def _host(self, wanted: Callable[[RealTimeHost], bool]) -> RealTimeHost | None:
        found = [host for host in self.hosts if host.participant is not None and wanted(host)]
        return self.random.choice(found) if found else None

    def kill_agent(self, wanted: Callable[[RealTimeHost], bool] = lambda _: True) -> bool:
        host = self._host(wanted)
        if host is None:
            return False
        host.kill_agent()
        return self.later(1, 8, lambda: host.is_on and host.start_agent())

    def kill_leader(self) -> bool:
        return self.kill_agent(lambda host: host.leads)

    def stop_agent(self) -> bool:
        host = self._host(lambda host: True)
        if host is None:
            return False
        host.stop_agent()
        return self.later(1, 8, lambda: host.is_on and host.start_agent())

    def cut(self) -> bool:
        host = self._host(lambda host: True)
        if host is None or host.process is None:
            return False
        link = host.process.link
        link.connected = False
        return self.later(1, 15, lambda: setattr(link, "connected", host.process.is_alive))

    def switch_off(self) -> bool:
        host = self._host(lambda host: True)
        if host is None:
            return False
        host.kill_agent()
        with host.lock:
            host.is_on, host.enforced = False, 0

        def switch_on() -> None:
            with host.lock:
                host.is_on, host.enforced = True, host.floor
                host.restart_capper()
            host.start_agent()

        return self.later(2, 10, switch_on)

    def restart_capper(self) -> bool:
        host = self.random.choice(self.hosts)
        with host.lock:
            host.restart_capper()
        return True

    def step_clock(self) -> bool:
        host = self.random.choice(self.hosts)
        host.wall.step = self.random.choice((-3600, 3600, 86400)) * SECOND
        return True


class RealTimeFleet:
    """Hosts over a cluster, which share one budget."""

    def __init__(self, hosts: list[RealTimeHost], sums: PowerSum, budget: int) -> None:
        self.hosts, self.sums, self.budget = hosts, sums, budget

    @property
    def uses_budget(self) -> bool:
        """True if the limits add up to the budget, but for changes that the leader leaves out."""
        left_out = FleetSettings().least_change_watts * W
        return self.sums.total > self.budget - len(self.hosts) * left_out

    def run(self, schedule: Schedule, faults: int) -> None:
        """Let so many faults happen, mend all, and await the use of the whole budget."""
        eventually(lambda: self.sums.total == self.budget, "the whole budget is in use")
        for host in self.hosts[: len(self.hosts) // 2]:
            host.power = 350 * W
        self.sums.is_strict = True
        pause = threading.Event()
        while schedule.done.total() < faults:
            schedule.fault()
            for _ in range(schedule.random.randrange(1, 15)):
                pause.wait(0.1)
                schedule.mend()
            assert self.sums.violations == []
        schedule.mend(all_of_them=True)
        for host in self.hosts:
            host.power = None
        eventually(lambda: all(host.in_contact for host in self.hosts), "all hosts return", 120)
        eventually(lambda: self.uses_budget, "the whole budget is in use", 120)


@contextmanager
def real_time_fleet(
    cluster: EtcdCluster, hosts: int, budget: int, enter: Callable[[int], None] = lambda _: None
) -> Iterator[RealTimeFleet]:
    """A fleet of so many hosts; ``enter`` brings a thread into the network of a host's number."""
    keys = FleetKeys(FleetSettings().prefix)
    book = accept_budgets(AllotmentBook(), {"row-1": budget})
    cluster.client().commit([KeyWrite(keys.book, encode(book))])
    sums, over = PowerSum(budget), threading.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
        made = [
            RealTimeHost(
                f"host{number}", sums, cluster.urls, Links(cluster, partial(enter, number)),
                folder / f"{number}.json",
            )
            for number in range(hosts)
        ]  # fmt: skip

        def cappers() -> None:
            while not over.wait(0.05):
                for host in made:
                    host.turn()

        thread = threading.Thread(target=cappers)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        for host in made:
            stack.callback(host.end)
        yield RealTimeFleet(made, sums, budget)
