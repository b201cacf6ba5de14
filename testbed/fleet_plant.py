"""A fleet in virtual time: the agent's members and leaders, emulated devices, random faults."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random

from msgspec.structs import replace

from testbed.fleet_services import MeteredClient, MeteredService
from wattspan.capper.protocol import AllotmentRow
from wattspan.config import FleetSettings
from wattspan.fleet.allotment import AllotmentBook, HostTerms, accept_budgets, groups_of
from wattspan.fleet.coordination import (
    CoordinationError,
    Election,
    KeyWrite,
    LeaseEndedError,
)
from wattspan.fleet.member import FleetMember
from wattspan.fleet.participant import (
    BEATS_PER_CONTACT,
    FIRST_DELAY,
    LEADER_LEASE_SECONDS,
    LEAST_PAUSE,
    LEAVE_TIME,
    FleetLeader,
)
from wattspan.fleet.records import FleetKeys, FleetState, encode, read_state
from wattspan.model import SECOND
from wattspan.testing import ManualClock
from wattspan.util.throttle import RetryBackoff

W = 1_000
ROWS, HOSTS_PER_RACK = 4, 40
CANDIDATES = 5
LEADER_STEP = SECOND // 2
ORIGINALS = (2_000 * W, 5_600 * W, 10_200 * W)
"""Original limits of hosts, whose floors are 30 % of them."""
PRIORITIES = (50, 100, 100, 200)
BUDGET_FRACTION = 0.6
"""Budget of the fleet relative to the original limits; rows and racks have a bit more."""


def place_of(number: int, hosts: int) -> str:
    """The place of one of ``hosts``, which fill the racks and rows evenly."""
    rack = number % max(1, hosts // HOSTS_PER_RACK)
    return f"row-{rack % ROWS}/rack-{rack}"


class Host:
    """An emulated host: one device, its capper, and an agent that may have crashed."""

    def __init__(
        self, name: str, place: str, fleet: Fleet, *, floor: int, original: int, priority: int
    ) -> None:
        self.name, self.fleet = name, fleet
        self.floor, self.original = floor, original
        self.want = fleet.random.randrange(floor, original)
        self.settings = replace(fleet.settings, name=name, place=place, priority=priority)
        self.nodes = tuple(groups_of(place))
        self.is_on = self.has_agent = self.is_counted = True
        self.enforced = floor
        self.limit = self.safe = floor
        self.until: int | None = None
        self._lowers_at = self.beat_due = 0
        self._noted = ""
        self.joined: int | None = None
        """Time at which its agent was started, None once it has an allotment."""
        self.start_agent()

    def start_agent(self) -> None:
        self.has_agent = True
        self.beat_due, self.joined = 0, self.fleet.clock.monotonic()
        interval = int(self.settings.contact) // BEATS_PER_CONTACT
        self.backoff = RetryBackoff(FIRST_DELAY, interval, self.fleet.random.random)
        self.connection = self.fleet.connect(self)
        self.member = FleetMember(
            self.name,
            self.settings,
            self.connection,
            self,
            self.fleet.clock,
            power=lambda: None if self.fleet.ask_for_all else min(self.want, self.enforced),
            new_session=lambda: f"{self.name}-{self.fleet.clock.monotonic()}",
            former_session=self._noted,
            note_session=self._note,
        )
        self.fleet.run_agent(self)

    def _note(self, session: str) -> None:
        self._noted = session

    def allotment(self) -> AllotmentRow:
        self.settle()
        return AllotmentRow(
            limit=self.limit,
            safe=self.safe,
            until=self.until,
            floor=self.floor,
            original=self.original,
            enforced=self.enforced,
        )

    def allot(self, limit: int, safe: int, until: int, why: str) -> AllotmentRow:
        self.settle()
        if until <= self.fleet.clock.now().since_boot:
            self._fall(self.fleet.clock.monotonic())
        else:
            if limit < self.limit:
                self._lowers_at = self.fleet.clock.monotonic() + self.fleet.random.randrange(SECOND)
            self.limit, self.safe, self.until = limit, safe, until
        return self.allotment()

    def settle(self) -> None:
        """Bring the device to its limit, as far as it has followed by now."""
        if not self.is_on:
            return
        now = self.fleet.clock.now()
        if self.until is not None and now.since_boot >= self.until:
            self._fall(self.until - now.asleep)  # it is looked at later than its capper would
        target = min(max(self.limit, self.floor), self.original)
        if target > self.enforced or now.mono >= self._lowers_at:
            change, self.enforced = target - self.enforced, target
            self.fleet.changed(self, change)

    def switch_off(self) -> None:
        self.is_on = self.has_agent = False
        change, self.enforced = -self.enforced, 0
        self.limit, self.safe, self.until, self._noted = 0, 0, None, ""
        self.fleet.changed(self, change)

    def switch_on(self) -> None:
        self.is_on = True
        self.enforced = self.limit = self.safe = self.floor
        self.fleet.changed(self, self.floor)
        self.start_agent()

    def _fall(self, at: int) -> None:
        """Fall back at a monotonic time; the capper and the device take up to two seconds."""
        fallen = min(self.limit, self.safe)
        if fallen < self.limit:
            self._lowers_at = at + self.fleet.random.randrange(2 * SECOND)
        self.limit = self.safe = fallen
        self.until = None


class Candidate:
    """A host's leadership, which may be killed or paused."""

    def __init__(self, host: Host, fleet: Fleet) -> None:
        self.host, self._fleet = host, fleet
        self.paused_until = 0
        self.restart()

    def restart(self) -> None:
        connection = self.host.connection
        self._connection = connection
        self._election = Election(connection, self._fleet.keys.leader, self.host.name)
        self._leader = FleetLeader(
            self._fleet.keys,
            connection,
            self._fleet.clock,
            int(self.host.settings.least_change_watts),
        )
        self._lease = 0

    @property
    def leads(self) -> bool:
        return self._election.fence is not None

    def step(self) -> None:
        if not self.host.has_agent or self._fleet.clock.monotonic() < self.paused_until:
            return
        if self._connection is not self.host.connection:
            self.restart()
        # A leader that was paused acts first on its old fence, and looks afterwards.
        if (fence := self._election.fence) is not None:
            with suppress(CoordinationError):
                began = time.process_time()
                self._leader.step(fence)
                self._fleet.step_times.append(time.process_time() - began)
        try:
            if not self._lease:
                self._lease = self._connection.grant(self._fleet.leader_lease)
            self._connection.renew(self._lease)
            before = self.leads
            if self._election.campaign(self._lease) and not before:
                self._fleet.count["leader changes"] += 1
        except LeaseEndedError:
            self._lease = 0
        except CoordinationError:
            pass


class Fleet:
    """All hosts, the service, and the events of virtual time."""

    def __init__(
        self,
        hosts: int,
        seed: int,
        service: MeteredService,
        clock: ManualClock,
        *,
        spread: int = LEAST_PAUSE,
        leader_lease: int = LEADER_LEASE_SECONDS,
        **settings: object,
    ) -> None:
        self.random = Random(seed)
        self.clock, self.service, self.leader_lease = clock, service, leader_lease
        self.settings = FleetSettings(endpoints=("http://emulated",), **settings)
        self.keys = FleetKeys(FleetSettings().prefix)
        self.count: Counter[str] = Counter()
        self.step_times: list[float] = []
        self.join_times: list[float] = []
        self.spread, self.ask_for_all = spread, False
        self.ratios: dict[str, float] = {}
        self.sums: Counter[str] = Counter()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.hosts = [self._host(number, hosts) for number in range(hosts)]
        self.budgets = self._budgets()
        self.candidates = [
            Candidate(host, self) for host in self.hosts[:: max(1, hosts // CANDIDATES)]
        ][:CANDIDATES]
        self._operator = self.service.client()
        self.change(lambda book: accept_budgets(book, self.budgets))
        for host in self.hosts:
            terms = HostTerms(
                floor=host.floor, ceiling=host.original, priority=host.settings.priority
            )
            self._operator.commit((KeyWrite(self.keys.terms(host.name), encode(terms)),))
        for host in self.hosts:
            self.sums.update(dict.fromkeys(host.nodes, host.enforced))
            self.repeat(self.random.randrange(60 * SECOND), lambda host=host: self._new_want(host))
        for candidate in self.candidates:
            self.repeat(self.random.randrange(SECOND), lambda one=candidate: self._lead(one))

    def state(self) -> FleetState:
        return read_state(self.keys, self._operator.read(self.keys.prefix))

    def change(self, change: Callable[[AllotmentBook], AllotmentBook]) -> None:
        """Change the book, as an operator does."""
        self._operator.commit((KeyWrite(self.keys.book, encode(change(self.state().book))),))

    def connect(self, host: Host) -> MeteredClient:
        self.service.watchers[self.keys.allotment(host.name)] = lambda: self.at(
            self.random.randrange(SECOND // 5), lambda: host.has_agent and self.beat(host)
        )
        return self.service.client()

    # --------------------------------------------------------------------------------- events

    def at(self, delay: int, act: Callable[[], None]) -> None:
        due = self.clock.monotonic() + delay
        heapq.heappush(self._events, (due, next(self._numbers), act))

    def repeat(self, delay: int, act: Callable[[], int]) -> None:
        """Call ``act`` after a delay, and again after each delay that it returns."""

        def again() -> None:
            self.at(act(), again)

        self.at(delay, again)

    def run(self, seconds: float) -> None:
        end = self.clock.monotonic() + round(seconds * SECOND)
        while self._events and self._events[0][0] <= end:
            due, _, act = heapq.heappop(self._events)
            self.clock.sleep_until(due)
            act()
        self.clock.sleep_until(end)

    def run_agent(self, host: Host) -> None:
        """Let a host's agent beat from now on, until it ends."""
        member = host.member

        def look() -> None:
            if host.has_agent and host.member is member:
                if self.clock.monotonic() >= host.beat_due:
                    self.beat(host)
                self.at(max(LEAST_PAUSE, host.beat_due - self.clock.monotonic()), look)

        self.at(self.random.randrange(self.spread), look)

    def beat(self, host: Host) -> None:
        """Beat, and at once again as long as there is news for the next."""
        host.beat_due = self.clock.monotonic() + int(host.settings.contact) // BEATS_PER_CONTACT
        try:
            while host.member.beat():
                pass
        except CoordinationError:
            host.beat_due = host.backoff.failed(self.clock.monotonic())
            return
        host.backoff.reset()
        if host.joined is not None and host.member.sequence:
            self.join_times.append((self.clock.monotonic() - host.joined) / SECOND)
            host.joined = None
            if not host.is_counted:
                host.is_counted = True
                self.changed(host, host.enforced)
        if host.member.awaits_devices:
            self._await_devices(host, host.member)

    def _await_devices(self, host: Host, member: FleetMember) -> None:
        def look() -> None:
            if host.has_agent and host.member is member and member.awaits_devices:
                if member.has_lowered():
                    self.beat(host)
                else:
                    self.at(LEAST_PAUSE, look)

        self.at(LEAST_PAUSE, look)

    def stop_agent(self, host: Host) -> None:
        """End a host's agent in order."""
        host.has_agent = False
        until = self.clock.monotonic() + LEAVE_TIME

        def leave() -> None:
            if not host.member.leave() and self.clock.monotonic() < until:
                self.at(LEAST_PAUSE, leave)

        leave()

    def _lead(self, candidate: Candidate) -> int:
        candidate.step()
        return LEADER_STEP

    def _new_want(self, host: Host) -> int:
        host.want = self.random.randrange(host.floor // 2, host.original + 1)
        return self.random.randrange(10 * SECOND, 120 * SECOND)

    # ---------------------------------------------------------------------------------- faults

    def begin_faults(self) -> None:
        """One fault a second from now on; every one ends by itself."""
        kinds = (
            [self._crash] * 4
            + [self._cut] * 4
            + [self._deafen] * 4
            + [self._power_cycle] * 4
            + [self._kill_leader, self._pause_leader]
        )
        self.repeat(0, lambda: self.random.choice(kinds)() or SECOND)
        self.repeat(60 * SECOND, lambda: self._outage() or 120 * SECOND)

    def _crash(self) -> None:
        host = self.random.choice(self.hosts)
        if host.has_agent:
            self.count["crashes of agents"] += 1
            host.has_agent = False
            self.at(self._between(1, 60), lambda: host.is_on and host.start_agent())

    def _cut(self) -> None:
        connection = self.random.choice(self.hosts).connection
        self.count["broken connections"] += 1
        connection.connected = False
        self.at(self._between(1, 60), lambda: setattr(connection, "connected", True))

    def _deafen(self) -> None:
        connection = self.random.choice(self.hosts).connection
        self.count["lost answers"] += 1
        connection.deaf = True
        self.at(self._between(1, 10), lambda: setattr(connection, "deaf", False))

    def _power_cycle(self) -> None:
        host = self.random.choice(self.hosts)
        if host.is_on:
            self.count["hosts off and on"] += 1
            host.switch_off()
            self.at(self._between(5, 60), lambda: host.is_on or host.switch_on())

    def _kill_leader(self) -> None:
        leaders = (one.host for one in self.candidates if one.leads and one.host.has_agent)
        host = next(leaders, None)
        if host is not None:
            self.count["killed leaders"] += 1
            host.has_agent = False
            self.at(self._between(1, 30), lambda: host.is_on and host.start_agent())

    def _pause_leader(self) -> None:
        for candidate in self.candidates:
            if candidate.leads:
                self.count["paused leaders"] += 1
                candidate.paused_until = self.clock.monotonic() + self._between(5, 40)
                return

    def _outage(self) -> None:
        self.count["outages of the service"] += 1
        self.service.is_gone = True
        self.at(30 * SECOND, lambda: setattr(self.service, "is_gone", False))

    def _between(self, least: int, most: int) -> int:
        return self.random.randrange(least * SECOND, most * SECOND)

    # ------------------------------------------------------------------------------- the budgets

    def changed(self, host: Host, change: int) -> None:
        """The enforced limit of a host changes now; one that is not registered does not count."""
        if not change or not host.is_counted:
            return
        for node in host.nodes:
            self.sums[node] += change
        if change > 0:
            self._check(host.nodes)

    def _check(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node not in self.budgets:
                continue
            if self.sums[node] > self.budgets[node]:  # some have lowered theirs meanwhile
                for other in self.hosts:
                    if node in other.nodes and other.enforced > other.floor:
                        other.settle()
            ratio = self.sums[node] / self.budgets[node]
            self.ratios[node] = max(ratio, self.ratios.get(node, 0.0))

    def _host(self, number: int, hosts: int) -> Host:
        original = self.random.choice(ORIGINALS)
        return Host(
            f"host-{number:05}",
            place_of(number, hosts),
            self,
            floor=original * 3 // 10,
            original=original,
            priority=self.random.choice(PRIORITIES),
        )

    def _budgets(self) -> dict[str, int]:
        originals: Counter[str] = Counter()
        for host in self.hosts:
            originals.update(dict.fromkeys(host.nodes, host.original))
        more = {0: 1.0, 1: 1.05, 2: 1.1}
        return {
            node: round(power * BUDGET_FRACTION * more[len(node.split("/")) if node else 0])
            for node, power in originals.items()
        }
