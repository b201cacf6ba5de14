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
        above = self.kernel.look(parent)
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
        living = self.kernel.look(pid)
        if living is None:
            return
        if hidden:
            self.kernel.closed_to_us.add(pid)
        make = self.kernel.over_tcp if tcp else self.kernel.over_unix
        self.connections.append((make(living), living, self.clock.monotonic()))

    @rule(seconds=st.sampled_from([0.01, 0.3, 3.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(data=st.data(), claimed=st.none() | PIDS)
    def send(self, data: st.DataObject, claimed: int | None) -> None:
        if not self.connections:
            return
        peer, sender, _ = data.draw(st.sampled_from(self.connections))
        found = self.identities.resolve(peer, [ResourceClaim(pid=claimed)])[0].found
        if not isinstance(found, Consumer):
            return
        assert found in self.ever
        process = self.ever[found]
        (user,) = sender.users
        assert user == 0 or user in process.users
        if claimed is None and peer.pid is not None:
            assert found == sender.consumer
        if found in self.dead and found != sender.consumer:
            assert found.pid not in self.kernel.processes or claimed is not None

    @invariant()
    def known_pids_are_those_that_live(self) -> None:
        for pid, process in self.kernel.processes.items():
            assert self.kernel.identify(pid) == process.living.consumer


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
