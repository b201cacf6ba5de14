"""fleet.coordination: guarantees of every adapter of a coordination service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from testbed.etcd import EtcdCluster
from testbed.fixtures import entered_once_in
from testbed.memory_cluster import MemoryCluster
from testbed.waiting import eventually

from wattspan.fleet.coordination import (
    ABSENT,
    ConflictError,
    Coordination,
    Election,
    KeyWrite,
    LeaseEndedError,
    RevisionCondition,
    WatchEndedError,
)
from wattspan.testing import ManualClock

LEASE_SECONDS = 2


@dataclass(frozen=True)
class Service:
    """A running service: ``connect`` makes clients, ``pass_time`` lets leases end.

    ``pause`` is a part of a lease's seconds in real time, where leases end by it.
    """

    connect: Callable[[], Coordination]
    pass_time: Callable[[float], object]
    compact: Callable[[], object]
    pause: float = 0.0


def memory_service() -> Iterator[Service]:
    clock = ManualClock()
    cluster = MemoryCluster(clock)
    yield Service(cluster.client, clock.advance, cluster.compact)


cluster = entered_once_in(EtcdCluster, "etcd")


def etcd_service(cluster: EtcdCluster) -> Iterator[Service]:
    client = cluster.client()
    client.commit([KeyWrite(entry.key, None) for entry in client.read("").entries])
    yield Service(cluster.client, lambda seconds: None, cluster.compact, 0.5)


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.needs_etcd)])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    if request.param == "memory":
        yield from memory_service()
    else:
        yield from etcd_service(request.getfixturevalue("cluster"))


@pytest.fixture
def one(service: Service) -> Iterator[Coordination]:
    client = service.connect()
    yield client
    client.close()


@pytest.fixture
def other(service: Service) -> Iterator[Coordination]:
    client = service.connect()
    yield client
    client.close()


def values(client: Coordination, prefix: str = "") -> dict[str, bytes]:
    return {entry.key: entry.value for entry in client.read(prefix).entries}


def test_read_returns_the_keys_of_a_prefix_in_order(one: Coordination) -> None:
    one.commit([KeyWrite(key, key.encode()) for key in ("a/2", "a/1", "ab", "b/1", "a0")])
    assert [entry.key for entry in one.read("a/").entries] == ["a/1", "a/2"]
    assert len(one.read("").entries) == 5
    assert one.read("c").entries == ()


@pytest.mark.parametrize("value", [b"", b"\x00\xff", "ä".encode(), b"x" * 100_000])
def test_value_is_read_as_it_was_written(one: Coordination, value: bytes) -> None:
    revision = one.commit([KeyWrite("kä/\x01", value)])
    (entry,) = one.read("kä").entries
    assert (entry.key, entry.value, entry.revision, entry.lease) == (
        "kä/\x01", value, revision, 0,
    )  # fmt: skip


def test_read_by_another_client_sees_each_finished_commit(
    one: Coordination, other: Coordination
) -> None:
    for number in range(20):
        revision = one.commit([KeyWrite("k", b"%d" % number)])
        state = other.read("k")
        assert state.entries[0].value == b"%d" % number
        assert state.revision >= revision


def test_delete_removes_a_key_and_ignores_a_missing_one(one: Coordination) -> None:
    one.commit([KeyWrite("k", b"1")])
    one.commit([KeyWrite("k", None), KeyWrite("missing", None)])
    assert values(one) == {}


def test_commit_with_a_failing_condition_changes_nothing(
    one: Coordination, other: Coordination
) -> None:
    revision = one.commit([KeyWrite("k", b"1")])
    other.commit([KeyWrite("k", b"2")], [RevisionCondition("k", revision)])
    for stale in (revision, ABSENT):
        with pytest.raises(ConflictError, match="k"):
            one.commit(
                [KeyWrite("k", b"3"), KeyWrite("l", b"3")],
                [RevisionCondition("l", ABSENT), RevisionCondition("k", stale)],
            )
    assert values(one) == {"k": b"2"}


def test_concurrent_increments_are_all_counted(service: Service) -> None:
    def increment() -> None:
        client = service.connect()
        for _ in range(10):
            while True:
                entries = client.read("n").entries
                count = int(entries[0].value) if entries else 0
                revision = entries[0].revision if entries else ABSENT
                try:
                    client.commit(
                        [KeyWrite("n", b"%d" % (count + 1))], [RevisionCondition("n", revision)]
                    )
                    break
                except ConflictError:
                    pass
        client.close()

    threads = [threading.Thread(target=increment) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert values(service.connect()) == {"n": b"40"}


def test_too_many_or_repeated_changes_are_refused(one: Coordination) -> None:
    with pytest.raises(ValueError, match="more than 100"):
        one.commit([KeyWrite(f"k{number}", b"") for number in range(101)])
    with pytest.raises(ValueError, match="two writes"):
        one.commit([KeyWrite("k", b""), KeyWrite("k", None)])
    assert values(one) == {}


@pytest.mark.slow
def test_keys_end_with_their_lease(service: Service, one: Coordination) -> None:
    lease = one.grant(LEASE_SECONDS)
    one.commit([KeyWrite("k", b"1", lease), KeyWrite("l", b"1")])
    assert one.read("k").entries[0].lease == lease
    service.pass_time(LEASE_SECONDS + 1)
    eventually(lambda: values(one) == {"l": b"1"}, "the key ends", within=20)
    with pytest.raises(LeaseEndedError):
        one.renew(lease)
    with pytest.raises(LeaseEndedError):
        one.commit([KeyWrite("k", b"2", lease)])


@pytest.mark.slow
def test_renewed_lease_keeps_its_keys(service: Service, one: Coordination) -> None:
    watched = one.watch("k", one.read("k").revision)
    lease = one.grant(LEASE_SECONDS)
    one.commit([KeyWrite("k", b"1", lease)])
    assert watched.wait(20)
    for _ in range(3 * LEASE_SECONDS):
        service.pass_time(0.9)
        one.renew(lease)
        assert watched.wait(service.pause) == ()
    watched.close()
    assert values(one) == {"k": b"1"}


def test_revoked_lease_ends_its_keys_at_once(one: Coordination, other: Coordination) -> None:
    lease = one.grant(60)
    one.commit([KeyWrite("k", b"1", lease)])
    other.revoke(lease)
    assert values(one) == {}
    other.revoke(lease)


def test_key_written_without_the_lease_outlives_it(one: Coordination) -> None:
    lease = one.grant(60)
    one.commit([KeyWrite("k", b"1", lease)])
    one.commit([KeyWrite("k", b"2")])
    one.revoke(lease)
    assert values(one) == {"k": b"2"}


def test_watch_yields_each_change_once_and_in_order(one: Coordination, other: Coordination) -> None:
    one.commit([KeyWrite("a/1", b"before")])
    changes = one.watch("a/", one.read("a/").revision)
    revisions = [
        other.commit([KeyWrite("a/1", b"1"), KeyWrite("b", b"1")]),
        other.commit([KeyWrite("a/2", b"2")]),
        other.commit([KeyWrite("a/1", None)]),
    ]
    found = []
    while len(found) < 3:
        found += eventually(lambda: changes.wait(1), "a change", within=20)
    assert [(one.key, one.entry and one.entry.value, one.revision) for one in found] == [
        ("a/1", b"1", revisions[0]),
        ("a/2", b"2", revisions[1]),
        ("a/1", None, revisions[2]),
    ]
    assert changes.wait(0) == ()
    changes.close()
    changes.close()


def test_watch_begins_after_a_past_revision(one: Coordination) -> None:
    first = one.commit([KeyWrite("k", b"1")])
    second = one.commit([KeyWrite("k", b"2")])
    changes = one.watch("k", first)
    (change,) = eventually(lambda: changes.wait(1), "the change", within=20)
    assert change.revision == second
    changes.close()


def test_watch_of_forgotten_changes_ends(service: Service, one: Coordination) -> None:
    first, *_ = (one.commit([KeyWrite("k", value)]) for value in (b"1", b"2", b"3"))
    service.compact()
    with pytest.raises(WatchEndedError):
        one.watch("k", first).wait(20)


def test_watch_reports_the_end_of_a_lease(one: Coordination, other: Coordination) -> None:
    lease = one.grant(60)
    revision = one.commit([KeyWrite("k", b"1", lease)])
    changes = other.watch("k", revision)
    one.revoke(lease)
    (change,) = eventually(lambda: changes.wait(1), "the change", within=20)
    assert (change.key, change.entry) == ("k", None)
    changes.close()


# ------------------------------------------------------------------------------------- election


def test_election_has_one_leader_until_its_lease_ends(
    one: Coordination, other: Coordination
) -> None:
    first, second = Election(one, "leader", "one"), Election(other, "leader", "two")
    leases = one.grant(60), other.grant(60)
    assert first.campaign(leases[0])
    assert not second.campaign(leases[1])
    assert (first.leader, second.leader) == ("one", "one")
    assert first.campaign(leases[0])
    one.revoke(leases[0])
    assert second.campaign(leases[1])
    assert not first.campaign(one.grant(60))
    assert first.fence is None


def test_fence_of_a_former_leader_fails_its_commits(one: Coordination, other: Coordination) -> None:
    first, second = Election(one, "leader", "one"), Election(other, "leader", "two")
    lease = one.grant(60)
    assert first.campaign(lease)
    fence = first.fence
    assert fence is not None
    one.commit([KeyWrite("plan", b"1")], [fence])
    one.revoke(lease)
    assert second.campaign(other.grant(60))
    with pytest.raises(ConflictError):
        one.commit([KeyWrite("plan", b"2")], [fence])


def test_leader_of_the_same_name_under_another_lease_is_another(one: Coordination) -> None:
    before, after = Election(one, "leader", "one"), Election(one, "leader", "one")
    assert before.campaign(one.grant(60))
    assert not after.campaign(one.grant(60))


def test_resigned_leader_is_followed_at_once(one: Coordination, other: Coordination) -> None:
    first, second = Election(one, "leader", "one"), Election(other, "leader", "two")
    assert first.campaign(one.grant(60))
    first.resign()
    assert second.campaign(other.grant(60))
    first.resign()
    assert not first.campaign(one.grant(60))
    assert first.leader == "two"
