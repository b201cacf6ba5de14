"""No budget of a fleet is exceeded at any instant, whatever is delayed, lost or restarted."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from wattspan.fleet.allotment import (
    ENDED_AFTER,
    RETREATED_AFTER,
    Allotment,
    AllotmentBook,
    BudgetBelowFloorsError,
    HostInUseError,
    HostReport,
    accept_budgets,
    drain_host,
    nodes_of,
    note_absence,
    power_bounds,
    remove_host,
)
from wattspan.fleet.allotment_planner import plan_allotments

PLACES = ("row-1/rack-1", "row-1/rack-2", "row-2")
NODES = ("", "row-1", "row-1/rack-1", "row-1/rack-2", "row-2", "row-2/host-2")
NAMES = tuple(f"host-{number}" for number in range(5))
HOSTS = st.sampled_from(NAMES)
FLOORS = st.integers(50, 200).map(lambda n: n * 997)
DEMANDS = st.none() | st.integers(0, 900_000) | st.just(0)
"""A host that asks for nothing leaves the others more than their safe allotments."""
POWERS = st.integers(200, 2_500).map(lambda n: n * 991)
BUDGETS = st.dictionaries(st.sampled_from(NODES), POWERS)
TIGHT_BUDGETS = st.builds(
    lambda whole, others: {"": whole} | others,
    st.integers(700, 1_800).map(lambda n: n * 991),
    st.dictionaries(st.sampled_from(NODES), POWERS, max_size=2),
)
LEADERS = st.integers(0, 1)
LEAST_CHANGES = st.sampled_from([0, 20_000])


@dataclass
class ModelHost:
    """A host as it is: ``limit`` is enforced; ``recorded`` is on its disk."""

    place: str
    floor: int
    ceiling: int
    demand: int | None = None
    priority: int = 100
    recorded: Allotment | None = None
    on: bool = False
    received: list[Allotment] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """The limit that is in force."""
        if not self.on or self.recorded is None:
            return 0
        return max(self.floor, self.recorded.limit)

    @property
    def without_contact(self) -> int:
        """The limit that is in force once contact is lost."""
        if not self.on or self.recorded is None:
            return 0
        return max(self.floor, self.recorded.lost().limit)


class Fleet(RuleBasedStateMachine):
    """Five hosts in two rows, two leaders that overtake each other, and a slow network."""

    @initialize(budgets=BUDGETS, ranges=st.lists(st.tuples(FLOORS, FLOORS), min_size=5, max_size=5))
    def begin(self, budgets: dict[str, int], ranges: list[tuple[int, int]]) -> None:
        self.hosts = {
            name: ModelHost(PLACES[number % 3], low, low + 4 * more)
            for number, (name, (low, more)) in enumerate(zip(NAMES, ranges, strict=True))
        }
        self.book = accept_budgets(AllotmentBook(), budgets)
        self.reports: dict[str, HostReport] = {}
        self.seen_books: dict[int, AllotmentBook] = {}
        self.seen_reports: dict[int, dict[str, HostReport]] = {}
        self.sessions = 0
        self.allowed: dict[str, int] = {}
        """The highest sums of limits by node while a lowered budget is not in force yet."""
        for name in NAMES:
            self.switch_on(name, self.hosts[name].place)
            self.connect(name)
        self.whole_round(0)

    # ---------------------------------------------------------------------------------- hosts

    @rule(name=HOSTS, place=st.sampled_from(PLACES))
    def switch_on(self, name: str, place: str) -> None:
        """A host starts at its floor, without a record of its former limits."""
        host = self.hosts[name]
        if not host.on:
            if name not in self.book.hosts:
                host.place = place
            host.on = True
            host.recorded = Allotment.initial(host.floor, host.floor)

    @rule(name=HOSTS)
    def connect(self, name: str) -> None:
        """A host without a session begins one, once its former session has ended."""
        host = self.hosts[name]
        self.end_session(name)
        if host.on and host.recorded and name not in self.reports:
            self.sessions += 1
            host.recorded = host.recorded.begin(f"session-{self.sessions}")
            self.publish(name)

    @rule(name=HOSTS)
    def publish(self, name: str) -> None:
        """A host in a session acknowledges what it has adopted, and reports its demand."""
        host = self.hosts[name]
        if not self.in_session(name) or host.recorded is None:
            return
        self.reports[name] = HostReport(
            session=host.recorded.session,
            place=host.place,
            floor=host.floor,
            ceiling=host.ceiling,
            limit=host.limit,
            demand=host.demand,
            priority=host.priority,
            acknowledged=host.recorded.sequence,
        )

    @rule(name=HOSTS, demand=DEMANDS, priority=st.integers(90, 110))
    def load_changes(self, name: str, demand: int | None, priority: int) -> None:
        self.hosts[name].demand, self.hosts[name].priority = demand, priority
        self.publish(name)

    @rule(name=HOSTS, which=st.integers(0, 5))
    def receive(self, name: str, which: int) -> None:
        """Any allotment that was ever sent arrives, late, again and out of order."""
        host = self.hosts[name]
        if host.on and host.recorded and which < len(host.received):
            host.recorded = host.recorded.adopt(host.received[-1 - which])

    @rule(names=st.sets(HOSTS))
    def receive_again(self, names: set[str]) -> None:
        """The network repeats everything, the oldest last."""
        for name in names:
            for which in range(len(self.hosts[name].received)):
                self.receive(name, which)

    @rule(name=HOSTS)
    def lose_contact(self, name: str) -> None:
        """The host's own time is up: before its session ends at the service."""
        host = self.hosts[name]
        if host.on and host.recorded:
            host.recorded = host.recorded.lost()

    @rule(name=HOSTS, which=st.integers(0, 2))
    def restart(self, name: str, which: int) -> None:
        """The agent loses contact and begins a new session; an old allotment arrives first."""
        self.lose_contact(name)
        self.connect(name)
        self.receive(name, which)

    @rule(name=HOSTS)
    def switch_off(self, name: str) -> None:
        self.hosts[name].on = False
        self.hosts[name].recorded = None

    @rule(name=HOSTS)
    def end_session(self, name: str) -> None:
        """The service ends the session of a host that has given it up."""
        if not self.in_session(name):
            self.reports.pop(name, None)

    @rule(name=HOSTS, seconds=st.sampled_from([RETREATED_AFTER - 1, RETREATED_AFTER, ENDED_AFTER]))
    def stay_absent(self, name: str, seconds: int) -> None:
        """A host has no session for long; its capper retreats before any leader notes that time."""
        host = self.hosts[name]
        if self.in_session(name) or name in self.reports or name not in self.book.hosts:
            return
        if self.book.hosts[name].absent + seconds >= RETREATED_AFTER and host.on:
            host.recorded = Allotment.initial(0, 0)
        self.book = note_absence(self.book, {name: seconds})

    def in_session(self, name: str) -> bool:
        """True if the host acts in a session; a report of an older one cannot exist then."""
        host = self.hosts[name]
        return bool(host.on and host.recorded and host.recorded.session)

    # --------------------------------------------------------------------------- the operator

    @rule(budgets=TIGHT_BUDGETS, seldom=st.integers(0, 3))
    def set_budgets(self, budgets: dict[str, int], seldom: int) -> None:
        if seldom:
            return
        try:
            self.book = accept_budgets(self.book, budgets)
        except BudgetBelowFloorsError:
            return
        self.allowed = self.recorded()

    @rule(name=HOSTS, drained=st.sampled_from([False, False, True]))
    def drain(self, name: str, drained: bool) -> None:
        self.book = drain_host(self.book, name, drained=drained)

    @rule(name=HOSTS)
    def remove(self, name: str) -> None:
        """A host that is off is removed; its limits count no longer."""
        report = self.reports.get(name)
        if name not in self.book.hosts or self.hosts[name].on:
            return
        try:
            self.book = remove_host(self.book, name, report)
        except HostInUseError:
            assert report is not None

    # ----------------------------------------------------------------------------- the leaders

    @rule(leader=LEADERS)
    def read_book(self, leader: int) -> None:
        self.seen_books[leader] = self.book
        self.seen_reports.pop(leader, None)

    @rule(leader=LEADERS)
    @precondition(lambda self: bool(self.seen_books))
    def read_reports(self, leader: int) -> None:
        if leader in self.seen_books:
            self.seen_reports[leader] = dict(self.reports)

    @rule(leader=LEADERS, least_change=LEAST_CHANGES)
    @precondition(lambda self: bool(self.seen_reports))
    def replace_book(self, leader: int, least_change: int) -> None:
        """A leader acts on what it read, however old that is; compare-and-swap decides."""
        if leader not in self.seen_reports:
            return
        seen = self.seen_books[leader]
        plan = plan_allotments(seen, self.seen_reports[leader], least_change=least_change)
        if plan.book is None or seen is not self.book:
            return
        self.book = plan.book
        for name, allotment in plan.changed.items():
            self.hosts[name].received.append(allotment)

    @rule(leader=LEADERS, least_change=LEAST_CHANGES)
    def lead(self, leader: int, least_change: int) -> None:
        """A leader is not overtaken; its allotments are on their way."""
        self.read_book(leader)
        self.read_reports(leader)
        self.replace_book(leader, least_change)

    @rule(names=st.sets(HOSTS))
    def reach(self, names: set[str]) -> None:
        """Some hosts get their newest allotments and acknowledge them."""
        for name in names:
            self.receive(name, 0)
            self.publish(name)

    @rule(least_change=LEAST_CHANGES)
    def whole_round(self, least_change: int) -> None:
        """Everything works for a moment."""
        for leader in (0, 1):
            self.lead(leader, least_change)
            self.reach(set(NAMES))

    # ------------------------------------------------------------------------------ invariants

    def possible(self) -> dict[str, int]:
        """The sum at each node of the limits that may be in force."""
        entries = self.book.hosts.items()
        return self.sums({n: power_bounds(e, self.reports.get(n)).limit for n, e in entries})

    def recorded(self) -> dict[str, int]:
        """The sum at each node of the limits that the book counts without any report."""
        return self.sums({name: entry.limit_bound for name, entry in self.book.hosts.items()})

    def sums(self, limits: dict[str, int]) -> dict[str, int]:
        sums = dict.fromkeys(NODES, 0)
        for name, limit in limits.items():
            for node in nodes_of(self.book.hosts[name].place, name):
                if node in sums:
                    sums[node] += limit
        return sums

    @invariant()
    def budgets_hold(self) -> None:
        if not hasattr(self, "book"):
            return
        possible, recorded = self.possible(), self.recorded()
        self.allowed = {n: min(one, recorded[n]) for n, one in self.allowed.items()}
        for node, budget in self.book.budgets.items():
            inside = [n for n, e in self.book.hosts.items() if node in nodes_of(e.place, n)]
            enforced = sum(self.hosts[name].limit for name in inside)
            safe = sum(self.hosts[name].without_contact for name in inside)
            allowed = max(budget, self.allowed.get(node, 0))
            assert safe <= enforced <= possible[node] <= allowed
            if not self.allowed:
                entries = ((self.book.hosts[n], self.reports.get(n)) for n in inside)
                assert sum(power_bounds(*one).safe for one in entries) <= budget

    @invariant()
    def limits_are_within_the_bounds_of_the_book(self) -> None:
        for name, entry in getattr(self, "book", AllotmentBook()).hosts.items():
            bounds = power_bounds(entry, self.reports.get(name))
            assert self.hosts[name].limit <= bounds.limit
            assert entry.allotment.limit >= min(entry.floor, bounds.limit)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(stateful_step_count=60)


# ------------------------------------------------------------------------- the end of transitions

REPORTS = st.dictionaries(
    HOSTS,
    st.builds(
        lambda place, low, more, demand, priority: HostReport(
            session="s",
            place=place,
            floor=low,
            ceiling=low + 4 * more,
            limit=low,
            demand=demand,
            priority=priority,
        ),
        st.sampled_from(PLACES),
        FLOORS,
        FLOORS,
        DEMANDS,
        st.integers(99, 101),
    ),
    min_size=1,
)


def settled(book: AllotmentBook, reports: dict[str, HostReport]) -> AllotmentBook:
    """The book once every host has acknowledged everything, in at most four rounds."""
    for _ in range(4):
        plan = plan_allotments(book, reports)
        if plan.book is None:
            return book
        book = plan.book
        for name, one in plan.changed.items():
            reports[name] = replace(
                reports[name], acknowledged=one.sequence, limit=one.limit, session=one.session
            )
    raise AssertionError("the transition does not end")


def limits(book: AllotmentBook) -> dict[str, int]:
    return {name: entry.allotment.limit for name, entry in book.hosts.items()}


@given(REPORTS, BUDGETS)
def test_transition_ends_with_every_limit_in_its_range(
    reports: dict[str, HostReport], budgets: dict[str, int]
) -> None:
    book = settled(accept_budgets(AllotmentBook(), budgets), reports)
    plan = plan_allotments(book, reports)
    assert plan.book is None
    assert plan.waiting.keys() == reports.keys() - book.hosts.keys()
    for entry in book.hosts.values():
        assert entry.floor <= entry.allotment.limit <= entry.ceiling
        assert entry.limit_bound == entry.allotment.limit
        assert entry.safe_bound == entry.allotment.safe
    assert all((node.headroom or 0) >= 0 for node in plan.nodes.values())


@given(REPORTS, BUDGETS)
def test_power_is_left_only_where_a_budget_is_used_up(
    reports: dict[str, HostReport], budgets: dict[str, int]
) -> None:
    """A host below its ceiling is below a node with less than a watt per host to give."""
    book = settled(accept_budgets(AllotmentBook(), budgets), reports)
    nodes = plan_allotments(book, reports).nodes
    for name, entry in book.hosts.items():
        above = nodes_of(entry.place, name)
        full = any(
            budget - nodes[node].allotted < 1_000 * max(1, nodes[node].hosts)
            for node, budget in budgets.items()
            if node in above
        )
        assert full or entry.allotment.limit == entry.ceiling


@given(REPORTS, BUDGETS, HOSTS, st.integers(1, 5))
def test_higher_priority_reduces_no_allotment_of_its_host(
    reports: dict[str, HostReport], budgets: dict[str, int], name: str, more: int
) -> None:
    before = settled(accept_budgets(AllotmentBook(), budgets), reports)
    if name not in before.hosts:
        return
    reports[name] = replace(reports[name], priority=reports[name].priority + more)
    after = settled(before, reports)
    assert limits(after)[name] >= limits(before)[name]


@given(REPORTS, BUDGETS, HOSTS, st.integers(0, 10**15))
def test_claimed_demand_is_bounded_by_hardware_and_takes_no_floor(
    reports: dict[str, HostReport], budgets: dict[str, int], liar: str, demand: int
) -> None:
    book = settled(accept_budgets(AllotmentBook(), budgets), reports)
    if liar not in book.hosts:
        return
    reports[liar] = replace(reports[liar], demand=demand)
    after = settled(book, reports)
    assert limits(after)[liar] <= reports[liar].ceiling
    assert all(limit >= reports[name].floor for name, limit in limits(after).items())


@given(REPORTS, BUDGETS, st.integers(0, 200_000))
def test_higher_budget_of_the_fleet_reduces_no_allotment(
    reports: dict[str, HostReport], budgets: dict[str, int], more: int
) -> None:
    total = sum(report.floor for report in reports.values()) + 100_000
    book = settled(accept_budgets(AllotmentBook(), budgets | {"": total}), reports)
    low = limits(book)
    high = limits(settled(accept_budgets(book, budgets | {"": total + more}), reports))
    assert all(high[name] >= limit for name, limit in low.items())


@given(REPORTS, BUDGETS, HOSTS)
def test_lost_host_frees_what_it_had_above_its_safe_allotment(
    reports: dict[str, HostReport], budgets: dict[str, int], lost: str
) -> None:
    book = settled(accept_budgets(AllotmentBook(), budgets), reports)
    if lost not in book.hosts:
        return
    before = limits(book)
    safe = book.hosts[lost].allotment.safe
    reports = {name: one for name, one in reports.items() if name != lost}
    after = settled(book, reports)
    assert after.hosts[lost] == book.hosts[lost]
    assert power_bounds(after.hosts[lost], None).limit == min(before[lost], safe)
    fallen = before[lost] - min(before[lost], safe)
    registered = before.keys() - {lost}
    gained = sum(limits(after)[name] for name in registered) - sum(before[n] for n in registered)
    assert -1_000 * len(before) <= gained <= fallen + 1_000 * len(before) or len(after.hosts) > len(
        before
    )
