"""For any births, exits, reused pids and claims: no process inherits an identity."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from testbed.fake_kernel import FakeKernel

from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ResourceClaim
from wattspan.ingest.identity_verification import IdentityResolver
from wattspan.ingest.process_lookups import LookupBudget
from wattspan.model import SECOND, Consumer, Principal
from wattspan.processes.inspector import LiveProcess
from wattspan.spans.values import Outcome
from wattspan.testing import ManualClock

PIDS = st.integers(2, 9)
USERS = st.sampled_from([0, 1000, 1001])


class Senders(RuleBasedStateMachine):
    """Few pids and users, so that they are used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.kernel = FakeKernel(self.clock)
        self.kernel.born(1, user=0, parent=0)
        self.identities = IdentityResolver(self.clock, self.kernel)
        self.connections: list[tuple[Peer, LiveProcess, int]] = []
        self.dead: set[Consumer] = set()
        self.ever: dict[Consumer, LiveProcess] = {}

    @rule(pid=PIDS, user=USERS, parent=PIDS, copied=st.booleans(), inner=st.booleans())
    def be_born(self, pid: int, user: int, parent: int, copied: bool, inner: bool) -> None:
        if pid in self.kernel.processes:
            return
        above = self.kernel.living(parent)
        if above is not None and copied:
            (user,) = above.users
        inside = (pid % 3 + 1,) if inner else ()
        living = self.kernel.born(
            pid, user=user, parent=parent if above else 1, copied=copied, inside=inside
        )
        self.ever[living.consumer] = living

    @rule(pid=PIDS)
    def die(self, pid: int) -> None:
        process = self.kernel.processes.get(pid)
        if process is not None:
            self.kernel.dies(process.living)
            self.dead.add(process.living.consumer)

    @rule(pid=PIDS, tcp=st.booleans(), hidden=st.booleans())
    def connect(self, pid: int, tcp: bool, hidden: bool) -> None:
        living = self.kernel.living(pid)
        if living is None:
            return
        if hidden:
            self.kernel.closed_to_us.add(pid)
        make = self.kernel.over_tcp if tcp else self.kernel.over_unix
        self.connections.append((make(living), living, self.clock.monotonic()))

    @rule(seconds=st.sampled_from([0.01, 0.3, 3.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(reads=st.lists(st.booleans(), max_size=30))
    def lack_descriptors(self, reads: list[bool]) -> None:
        left = iter(reads)
        self.kernel.fails = lambda: next(left, False)

    @rule(data=st.data(), claimed=st.none() | PIDS)
    def send(self, data: st.DataObject, claimed: int | None) -> None:
        if not self.connections:
            return
        peer, sender, _ = data.draw(st.sampled_from(self.connections))
        before = self.kernel.shortage
        found = self.identities.resolve(peer, [ResourceClaim(pid=claimed)])[0].found
        sure = self.kernel.shortage is before
        if not isinstance(found, Consumer):
            return
        assert found in self.ever
        process = self.ever[found]
        (user,) = sender.users
        assert user == 0 or user in process.users
        if claimed is None and peer.pid is not None:
            assert found == sender.consumer
        if sure and found in self.dead and found != sender.consumer:
            assert found.pid not in self.kernel.processes or claimed is not None

    @invariant()
    def known_pids_are_those_that_live(self) -> None:
        for pid, process in self.kernel.processes.items():
            assert process.living.consumer.pid == pid


ALONE, TWICE = "a" * 64, "b" * 64


class Evidence:
    """Senders, each with claims, and the truth about them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kernel = kernel = FakeKernel(self.clock)
        kernel.born(1, user=0, parent=0)
        app, parent = kernel.born(50), kernel.born(52)
        kernel.born(53)
        collector = kernel.born(80, user=0, name="otelcol")
        for pid, container in ((70, ALONE), (71, TWICE), (72, TWICE)):
            kernel.born(pid, user=0, cgroup=f"0::/system.slice/docker-{container}.scope\n")
        inherited = kernel.over_tcp(parent)
        kernel.born(54, parent=52, copied=True)
        kernel.dies(parent)
        kernel.born(55, parent=54, copied=True)  # two hold the connection of an ended process
        forwarder = kernel.over_unix(collector)._replace(forwards=True)
        own, unused, other = ResourceClaim(), ResourceClaim(pid=99), ResourceClaim(pid=53)
        self.requests = [
            (kernel.over_unix(app), own),
            (kernel.over_tcp(app), own),
            (kernel.over_tcp(app), unused),
            (inherited, own),
            (kernel.over_unix(kernel.born(56)), other),
            (kernel.over_unix(kernel.born(57, parent=53, copied=True)), other),
            (forwarder, ResourceClaim(container=ALONE)),
            (forwarder, ResourceClaim(container=TWICE)),
            (forwarder, other),
        ]
        self.truth = [self.asked(self.resolver(), number) for number in range(len(self.requests))]

    def resolver(self) -> IdentityResolver:
        return IdentityResolver(self.clock, self.kernel)

    def asked(self, resolver: IdentityResolver, number: int) -> Consumer | Outcome:
        peer, claim = self.requests[number]
        return resolver.resolve(peer, [claim])[0].found


@given(
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.lists(st.booleans(), max_size=20),
            st.sampled_from([0.0, 0.3, 3.0, 100.0]),
        ),
        max_size=12,
    )
)
def test_shortage_of_descriptors_neither_changes_nor_forgets_an_identity(
    requests: list[tuple[int, list[bool], float]],
) -> None:
    evidence = Evidence()
    resolver, verified = evidence.resolver(), set[int]()
    for number, reads, pause in requests:
        evidence.clock.advance(pause)
        left = iter(reads)
        evidence.kernel.fails = lambda left=left: next(left, False)  # type: ignore[misc]
        found, truth = evidence.asked(resolver, number), evidence.truth[number]
        assert found == truth or (found is Outcome.UNKNOWN_PROCESS and number not in verified)
        if isinstance(found, Consumer):
            verified.add(number)
    evidence.kernel.fails = lambda: False
    for number, truth in enumerate(evidence.truth):
        assert evidence.asked(resolver, number) == truth


SPENDERS = [Principal(1000), Principal(1001), Principal(1001, "a" * 64), Principal(1001, "b" * 64)]
TURNS = st.tuples(st.sampled_from(SPENDERS), st.integers(0, SECOND), st.integers(0, 5 * SECOND))


@given(st.lists(TURNS))
def test_lookups_have_their_share_of_time_and_refuse_no_owner_in_credit(
    turns: list[tuple[Principal, int, int]],
) -> None:
    clock = ManualClock()
    start = clock.monotonic()
    limit, taken = SECOND // 4, Counter[Principal]()
    budget = LookupBudget(clock, 20, limit)
    for owner, cost, pause in turns:
        clock.advance(ns=pause)
        budget.charge(owner)
        with budget as allowed:
            assert allowed or taken[owner] >= limit
            if allowed:
                clock.advance(ns=cost)
                taken[owner] += cost
    bursts = len(SPENDERS) * (limit + SECOND)
    assert budget.total == taken.total() <= (clock.monotonic() - start) // 20 + bursts


def test_containers_of_an_owner_delay_no_lookups_of_another() -> None:
    clock = ManualClock()
    budget = LookupBudget(clock, 20, SECOND)
    greedy = [Principal(1001, f"{number:064x}") for number in range(300)]
    for owner in (*greedy, Principal(1000)):
        budget.charge(owner)
        with budget:
            clock.advance(2)
    clock.advance(2 * 20)
    for owner, expected in ((Principal(1000), True), (greedy[-1], False)):
        budget.charge(owner)
        with budget as allowed:
            assert allowed is expected


Senders.TestCase.settings = settings(stateful_step_count=40)
test_nobody_inherits_what_another_process_sent = Senders.TestCase
