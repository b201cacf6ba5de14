"""Ten agents in real time over three members of etcd, under a schedule of 100 faults.

The agents' and the leader's code, the capper's ceiling and etcd are real; devices are numbers.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.etcd import EtcdCluster
from support.simulated_fleet import SimulatedHost, W
from support.waiting import eventually
from wattspan.capper.protocol import AllotmentRow
from wattspan.clock import SystemClock
from wattspan.config import FleetSettings
from wattspan.fleet.allotment import AllotmentBook, accept_budgets
from wattspan.fleet.coordination import KeyWrite, OutcomeUnknownError, UnreachableError
from wattspan.fleet.etcd import EtcdCoordination
from wattspan.fleet.records import FleetKeys, encode
from wattspan.model import SECOND, Instant
from wattspan.ports import CapsError

pytestmark = [pytest.mark.needs_etcd, pytest.mark.exhaustive]

HOSTS, BUDGET, FAULTS, SEED = 10, 8000 * W, 100, 20261127


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
    """A connection to etcd that can be cut, also while an answer is under way."""

    def __init__(self, client: EtcdCoordination) -> None:
        self._client = client
        self.connected = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._client, name)

        def checked(*arguments: Any) -> Any:
            if not self.connected and name != "close":
                raise UnreachableError("The link is cut.")
            answer = call(*arguments)
            if not self.connected and name == "commit":
                raise OutcomeUnknownError("The link was cut.")
            return answer

        return checked


class Links:
    """Makes connections to a cluster."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self._cluster = cluster

    def client(self) -> Link:
        return Link(self._cluster.client(timeout=SECOND))


class Process:
    """One life of an agent: its link and its access to the capper end when it is killed."""

    def __init__(self, host: RealTimeHost, link: Link) -> None:
        self._host, self.link = host, link
        self.is_alive = True

    def allotment(self) -> AllotmentRow:
        self._check()
        return self._host.allotment()

    def allot(self, limit: int, safe: int, until: int, why: str) -> AllotmentRow:
        self._check()
        return self._host.allot(limit, safe, until, why)

    def _check(self) -> None:
        if not self.is_alive:
            raise CapsError("This agent is dead.")


class RealTimeHost(SimulatedHost):
    """A host whose capper has a thread, and whose agent has one."""

    def __init__(self, name: str, sums: PowerSum, cluster: EtcdCluster, path: Path) -> None:
        self.lock = threading.RLock()
        self._sums, self._etcd, self._enforced = sums, cluster, 0
        self.process: Process | None = None
        settings = FleetSettings(
            endpoints=tuple(cluster.urls), name=name, place="row-1", contact=3 * SECOND,
            fallback=2 * SECOND, timeout=SECOND,
        )  # fmt: skip
        self.wall, links = SteppedClock(), Links(cluster)
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
        link = Links(self._etcd).client()
        self.process = Process(self, link)
        self.participant = self.new_participant(link, self.process)
        self.participant.start()

    def kill_agent(self) -> None:
        if self.process is not None and self.participant is not None:
            self.process.is_alive = self.process.link.connected = False
            self.participant.stop(0)
        self.participant = None

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

    def __init__(self, hosts: list[RealTimeHost], cluster: EtcdCluster, seed: int) -> None:
        self.hosts, self.cluster = hosts, cluster
        self.random, self.clock = random.Random(seed), SystemClock()
        self.done: Counter[str] = Counter()
        self._mends: list[tuple[int, Callable[[], object]]] = []
        self._down: set[int] = set()

    def fault(self) -> None:
        kinds = (
            self.kill_agent, self.kill_leader, self.kill_leader, self.cut, self.cut,
            self.switch_off, self.restart_capper, self.step_clock, self.stop_agent,
            self.kill_member, self.kill_etcd_leader, self.hang_member, self.lose_quorum,
        )  # fmt: skip
        for host in self.random.sample(self.hosts, 3):  # so that limits differ from the fallbacks
            host.power = self.random.choice((None, 350 * W, 1500 * W))
        kind = self.random.choice(kinds)
        if kind():
            self.done[kind.__name__] += 1

    def mend(self, all_of_them: bool = False) -> None:
        now = self.clock.monotonic()
        due = [one for one in self._mends if all_of_them or one[0] <= now]
        self._mends = [one for one in self._mends if one not in due]
        for _, mend in due:
            mend()

    def _later(self, low: float, high: float, mend: Callable[[], object]) -> bool:
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
        return self._later(1, 8, lambda: host.is_on and host.start_agent())

    def kill_leader(self) -> bool:
        return self.kill_agent(lambda host: host.leads)

    def stop_agent(self) -> bool:
        host = self._host(lambda host: True)
        if host is None:
            return False
        host.stop_agent()
        return self._later(1, 8, lambda: host.is_on and host.start_agent())

    def cut(self) -> bool:
        host = self._host(lambda host: True)
        if host is None or host.process is None:
            return False
        link = host.process.link
        link.connected = False
        return self._later(1, 15, lambda: setattr(link, "connected", host.process.is_alive))

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

        return self._later(2, 10, switch_on)

    def restart_capper(self) -> bool:
        host = self.random.choice(self.hosts)
        with host.lock:
            host.restart_capper()
        return True

    def step_clock(self) -> bool:
        host = self.random.choice(self.hosts)
        host.wall.step = self.random.choice((-3600, 3600, 86400)) * SECOND
        return True

    def _lose(self, members: list[int], seconds: tuple[float, float]) -> bool:
        if self._down:
            return False
        self._down = set(members)
        for member in members:
            self.cluster.kill(member)

        def restart() -> None:
            for member in members:
                self.cluster.start(member)
            self._down = set()

        return self._later(*seconds, restart)

    def kill_member(self) -> bool:
        return self._lose([self.random.randrange(3)], (1, 4))

    def kill_etcd_leader(self) -> bool:
        if self._down:
            return False
        try:
            return self._lose([self.cluster.leader()], (1, 4))
        except AssertionError:
            return False

    def lose_quorum(self) -> bool:
        return self._lose(self.random.sample(range(3), 2), (4, 10))

    def hang_member(self) -> bool:
        if self._down:
            return False
        member = self.random.randrange(3)
        self._down = {member}
        self.cluster.hang(member)

        def resume() -> None:
            self.cluster.resume(member)
            self._down = set()

        return self._later(1, 6, resume)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path, 3) as cluster:
        yield cluster


def test_budget_holds_at_every_change_under_100_faults(
    cluster: EtcdCluster, record_property: Callable[[str, object], None]
) -> None:
    keys, clock = FleetKeys(FleetSettings().prefix), SystemClock()
    book = accept_budgets(AllotmentBook(), {"row-1": BUDGET})
    cluster.client().commit([KeyWrite(keys.book, encode(book))])
    sums, over = PowerSum(BUDGET), threading.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        hosts = [
            RealTimeHost(f"host{number}", sums, cluster, folder / f"{number}.json")
            for number in range(HOSTS)
        ]

        def cappers() -> None:
            while not over.wait(0.05):
                for host in hosts:
                    host.turn()

        thread = threading.Thread(target=cappers)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        for host in hosts:
            stack.callback(host.kill_agent)
        eventually(lambda: sums.total == BUDGET, "the whole budget is in use")
        for host in hosts[: HOSTS // 2]:
            host.power = 350 * W
        sums.is_strict = True
        schedule = Schedule(hosts, cluster, SEED)
        pause = threading.Event()
        while schedule.done.total() < FAULTS:
            schedule.fault()
            for _ in range(schedule.random.randrange(1, 15)):
                pause.wait(0.1)
                schedule.mend()
            assert sums.violations == []
        schedule.mend(all_of_them=True)
        for host in hosts:
            host.power = None
        eventually(lambda: all(host.in_contact for host in hosts), "all hosts return", 120)
        eventually(lambda: sums.total >= BUDGET - 20 * W, "the whole budget is in use", 120)
        began, leaving = clock.monotonic(), hosts[0]
        leaving.stop_agent()
        leaving.start_agent()
        eventually(lambda: leaving.in_contact and sums.total >= BUDGET - 20 * W, "it joins again")
        joined = (clock.monotonic() - began) / SECOND
    assert sums.violations == []
    figures = {
        "faults": dict(schedule.done),
        "changes": sums.changes,
        "highest": sums.highest,
        "join_seconds": round(joined, 2),
    }
    record_property("figures", figures)
    print(figures)
