"""Announcements count for spans of one principal, and never move spans between principals."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from testbed.fake_kernel import FakeKernel

from wattspan.ingest.export_request import ResourceClaim
from wattspan.ingest.identity_verification import IdentityResolver, SpanIdentity
from wattspan.ingest.side_channel import ProcessRecords
from wattspan.model import Consumer, Principal
from wattspan.processes.inspector import LiveProcess
from wattspan.service.span_announcers import CHECK_EVERY, MAX_PRINCIPALS, SpanAnnouncers
from wattspan.spans.values import Outcome
from wattspan.testing import ManualClock

VICTIM, ATTACKER = 1000, 2000
CONTAINER = "0::/docker/" + "c" * 64
SPANS = [bytes([n]) * 8 for n in range(1, 6)]


class Host:
    def __init__(self, limit: int = 1000) -> None:
        self.clock = ManualClock()
        self.kernel = FakeKernel(self.clock)
        self.kernel.born(1, user=0, parent=0)
        self.resolver = IdentityResolver(self.clock, self.kernel)
        self.announcers = SpanAnnouncers(limit, self.resolver, lambda span, consumer: False)

    def announce(
        self, process: LiveProcess, *spans: bytes, principal: Principal | None = None
    ) -> bool:
        """Announce on a connection of ``principal``; False if the announcement is not taken."""
        proven = process.principal if principal is None else principal
        report = ProcessRecords(process.consumer.pid, proven, [], 0, gone=False)
        consumer = self.announcers.process(report, self.clock.monotonic())
        if consumer is None or proven is None:
            return False
        for span in spans:
            self.announcers.add(span, proven, consumer)
        return True

    def sent(
        self, process: LiveProcess, *, forwards: bool = False, pid: int | None = None
    ) -> SpanIdentity:
        """The identity of a request on a Unix socket of ``process``."""
        peer = self.kernel.over_unix(process)._replace(forwards=forwards)
        return self.resolver.resolve(peer, [ResourceClaim("shop", pid)])[0]

    def senders(self, identity: SpanIdentity, *spans: bytes) -> list[Consumer | Outcome]:
        found = self.announcers.senders(spans, identity)
        return [found] * len(spans) if isinstance(found, Consumer | Outcome) else list(found)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize("where", [{"user": ATTACKER}, {"user": VICTIM, "cgroup": CONTAINER}])
@pytest.mark.parametrize("announced", [SPANS[:1], SPANS[-1:], SPANS])
def test_announcement_of_another_principal_moves_no_span(
    host: Host, where: dict[str, object], announced: list[bytes]
) -> None:
    victim = host.kernel.born(50, user=VICTIM)
    attacker = host.kernel.born(60, **where)  # type: ignore[arg-type]
    assert host.announce(attacker, *announced)
    assert host.senders(host.sent(victim), *SPANS) == [victim.consumer] * 5
    assert host.announcers.conflicts == 1
    assert host.announce(victim, *SPANS)
    assert host.senders(host.sent(victim), *SPANS) == [victim.consumer] * 5
    assert host.announcers.conflicts == 1
    assert host.senders(host.sent(attacker), *SPANS) == [attacker.consumer] * 5


def test_each_span_is_resolved_by_its_own_id(host: Host) -> None:
    collector, first, second = (host.kernel.born(pid, user=VICTIM) for pid in (50, 51, 52))
    host.announce(first, *SPANS[:2])
    host.announce(second, *SPANS[2:4])
    found = host.senders(host.sent(collector), *SPANS)
    assert found == [first.consumer] * 2 + [second.consumer] * 2 + [collector.consumer]


def test_rank_that_announced_the_span_too_is_its_sender(host: Host) -> None:
    first, second = host.kernel.born(51, user=VICTIM), host.kernel.born(52, user=VICTIM)
    host.announce(first, *SPANS)
    host.announce(second, *SPANS)
    assert host.senders(host.sent(first), *SPANS) == [first.consumer] * 5
    assert host.senders(host.sent(second), *SPANS) == [second.consumer] * 5


def test_worker_that_dropped_privileges_announces_on_the_connection_of_its_root(host: Host) -> None:
    master = host.kernel.born(50, user=0)
    worker = host.kernel.born(51, user=33, parent=50)
    stranger = host.kernel.born(52, user=33)
    identity = host.sent(master)
    host.announce(worker, SPANS[0])
    host.announce(stranger, SPANS[1])
    assert host.senders(identity, *SPANS[:2]) == [worker.consumer, master.consumer]


def test_worker_is_unknown_and_not_forgotten_without_descriptors(host: Host) -> None:
    master = host.kernel.born(50, user=0)
    worker = host.kernel.born(51, user=33, parent=50)
    identity = host.sent(master)
    host.announce(worker, SPANS[0])
    host.clock.advance(ns=CHECK_EVERY)
    host.kernel.fails = lambda: True
    assert host.senders(identity, SPANS[0]) == [Outcome.UNKNOWN_PROCESS]
    assert host.announce(worker, SPANS[1])
    host.kernel.fails = lambda: False
    assert host.senders(identity, *SPANS[:2]) == [worker.consumer] * 2
    assert host.announcers.conflicts == 0


def test_process_that_changed_its_principal_announces_nothing(host: Host) -> None:
    app = host.kernel.born(50, user=ATTACKER)
    assert host.announce(app, SPANS[0])
    host.kernel.changes(app, user=0)
    host.clock.advance(ns=CHECK_EVERY)
    assert not host.announce(app, SPANS[1])
    assert host.senders(host.sent(host.kernel.born(70, user=0)), *SPANS[:2]) != [app.consumer] * 2


def test_ended_process_has_its_last_announcements(host: Host) -> None:
    app = host.kernel.born(50, user=VICTIM)
    assert host.announce(app, SPANS[0])
    host.kernel.dies(app)
    host.clock.advance(ns=CHECK_EVERY)
    assert host.announce(app, SPANS[1])


def test_unidentified_connection_announces_nothing(host: Host) -> None:
    host.kernel.born(50)
    report = ProcessRecords(50, None, [], 0, gone=False)
    assert host.announcers.process(report, 0) is None


class Forwarded(NamedTuple):
    announced: tuple[int, ...]  # users
    claimed: int | None  # the user whose pid is claimed
    expected: int | Outcome


@pytest.mark.parametrize(
    "case",
    [
        Forwarded((VICTIM,), None, VICTIM),
        Forwarded((VICTIM,), VICTIM, VICTIM),
        Forwarded((ATTACKER, VICTIM), VICTIM, VICTIM),
        Forwarded((ATTACKER,), VICTIM, Outcome.NOT_BELIEVED),
        Forwarded((ATTACKER, VICTIM), None, Outcome.NOT_BELIEVED),
        Forwarded((), VICTIM, VICTIM),
        Forwarded((), None, Outcome.UNKNOWN_PROCESS),
    ],
)
def test_announcement_decides_for_forwarders_unless_it_is_contradicted(
    host: Host, case: Forwarded
) -> None:
    apps = {user: host.kernel.born(user, user=user) for user in (VICTIM, ATTACKER)}
    collector = host.kernel.born(50, user=10001)
    for user in case.announced:
        host.announce(apps[user], SPANS[0])
    identity = host.sent(collector, forwards=True, pid=case.claimed)
    expected = case.expected if isinstance(case.expected, Outcome) else apps[case.expected].consumer
    assert host.senders(identity, SPANS[0]) == [expected]


def test_flood_of_a_principal_forgets_no_announcement_of_another() -> None:
    host = Host(limit=100)
    modest, greedy = host.kernel.born(50, user=VICTIM), host.kernel.born(60, user=ATTACKER)
    collector = host.kernel.born(51, user=VICTIM)
    host.announce(modest, *SPANS)
    host.announce(greedy, *(number.to_bytes(8, "big") for number in range(10_000)))
    assert host.senders(host.sent(collector), *SPANS) == [modest.consumer] * 5
    assert len(host.announcers) <= 200


def test_number_of_principals_is_bounded_and_containers_share_a_users_part() -> None:
    host = Host(limit=MAX_PRINCIPALS * 20)
    modest = host.kernel.born(50, user=VICTIM)
    collector = host.kernel.born(51, user=VICTIM)
    host.announce(modest, *SPANS)
    for number in range(100):
        principal = Principal(ATTACKER, str(number))
        for span in range(200):
            host.announcers.add(
                bytes([number]) * 4 + span.to_bytes(4, "big"), principal, Consumer(9, 9)
            )
    assert host.senders(host.sent(collector), *SPANS) == [modest.consumer] * 5
    assert len(host.announcers) <= 2 * MAX_PRINCIPALS * 20


def test_old_announcements_are_forgotten(host: Host) -> None:
    app = host.kernel.born(50, user=VICTIM)
    host.announce(app, *SPANS)
    assert len(host.announcers) == 5
    for second in range(10):
        host.announcers.age(second * 10**9, 10**9)
    assert len(host.announcers) == 0
