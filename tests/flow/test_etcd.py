"""The etcd adapter on real clusters: credentials, TLS, and members that end, hang and return."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from testbed.certificates import Authority
from testbed.etcd import EtcdCluster
from testbed.fixtures import entered_in
from testbed.reserved_port import reserved_port
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.config import FleetSettings
from wattspan.fleet.coordination import (
    ConflictError,
    CoordinationError,
    Election,
    KeyWrite,
    LeaseEndedError,
    OutcomeUnknownError,
    PermissionDeniedError,
    RevisionCondition,
    UnreachableError,
    WatchEndedError,
)
from wattspan.fleet.etcd import EtcdCoordination
from wattspan.model import SECOND

pytestmark = pytest.mark.needs_etcd


three = entered_in(lambda folder: EtcdCluster(folder, 3))


def password_file(folder: Path, password: str, mode: int = 0o600) -> str:
    path = folder / f"password-{password}"
    path.write_text(f"{password}\n")
    path.chmod(mode)
    return str(path)


def value(client: EtcdCoordination, key: str = "k") -> bytes:
    return client.read(key).entries[0].value


# ------------------------------------------------------------------------------------- access


def test_no_member_is_reported_with_every_endpoint() -> None:
    with reserved_port() as port:
        endpoints = tuple(f"http://{host}:{port}" for host in ("127.0.0.1", "[::1]"))
        client = EtcdCoordination(FleetSettings(endpoints=endpoints), SystemClock())
        with pytest.raises(UnreachableError) as error:
            client.read("")
        assert f"127.0.0.1:{port}: connection refused" in str(error.value)
        assert "[fleet] endpoints" in str(error.value)


@pytest.mark.exhaustive
def test_credentials_are_required_renewed_and_limited_to_the_prefix(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        early = cluster.client()
        named = cluster.client(user="fleet", password_file=password_file(tmp_path, "secret"))
        named.commit([KeyWrite("/w/k", b"1")])  # before authentication is enabled
        cluster.enable_authentication({"root": "r00t", "fleet": "secret"}, "/w/")
        assert value(named, "/w/") == b"1"
        with pytest.raises(PermissionDeniedError, match="user and password_file"):
            early.read("/w/")
        with pytest.raises(PermissionDeniedError, match="readwrite permission"):
            named.commit([KeyWrite("/v/k", b"1")])
        with pytest.raises(PermissionDeniedError, match="readwrite permission"):
            named.read("/v/")
        wrong = cluster.client(user="fleet", password_file=password_file(tmp_path, "wrong"))
        with pytest.raises(PermissionDeniedError, match="rejects the credentials"):
            wrong.read("/w/")
        missing = cluster.client(user="fleet", password_file=str(tmp_path / "missing"))
        with pytest.raises(PermissionDeniedError, match="Correct password_file"):
            missing.read("/w/")
        public = cluster.client(
            user="fleet", password_file=password_file(tmp_path, "public", 0o644)
        )
        with pytest.raises(PermissionDeniedError, match="chmod 0640"):
            public.read("/w/")
        changes = named.watch("/w/", named.read("/w/").revision)
        lease = named.grant(60)
        cluster.kill(0)
        cluster.start(0)  # the member forgets all tokens
        eventually(lambda: works(named), "the member answers")
        with suppress(WatchEndedError):
            changes.wait(20)
        changes.close()
        named.renew(lease)
        named.commit([KeyWrite("/w/k", b"2", lease)])
        assert value(named, "/w/") == b"2"


def works(client: EtcdCoordination) -> bool:
    try:
        client.read("/w/")
    except UnreachableError:
        return False
    return True


@pytest.mark.exhaustive
def test_members_and_clients_are_checked_by_certificates(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server, client, foreign = (
        authority.issue("server"),
        authority.issue("client"),
        stranger.issue("foreign"),
    )
    tls = [
        f"--cert-file={server.certificate}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={authority.certificate}",
        "--client-cert-auth",
    ]
    with EtcdCluster(tmp_path, tls=tls) as cluster:
        files = {"tls_certificate": str(client.certificate), "tls_key": str(client.key)}
        good = cluster.client(tls_ca=str(authority.certificate), **files)

        def answers() -> bool:
            with suppress(UnreachableError):
                good.commit([KeyWrite("/w/k", b"1")])
                return True
            return False

        eventually(answers, "the member answers")
        changes = good.watch("/w/", good.read("/w/").revision)
        good.commit([KeyWrite("/w/k", b"2")])
        assert changes.wait(20)[0].entry.value == b"2"
        assert changes.wait(0) == ()
        changes.close()
        for options, cause in (
            ({"tls_ca": str(stranger.certificate), **files}, "certificate is not trusted"),
            ({}, "certificate is not trusted"),
            ({"tls_ca": str(authority.certificate)}, "TLS failed"),
            (
                {
                    "tls_ca": str(authority.certificate),
                    "tls_certificate": str(foreign.certificate),
                    "tls_key": str(foreign.key),
                },
                "TLS failed",
            ),
        ):
            with pytest.raises(UnreachableError, match=cause):
                cluster.client(timeout=5 * SECOND, **options).read("/w/")
        plain = tuple(url.replace("https", "http") for url in cluster.urls)
        with pytest.raises(UnreachableError):
            cluster.client(endpoints=plain).read("/w/")
        absent = cluster.client(tls_ca=str(tmp_path / "absent"))
        with pytest.raises(PermissionDeniedError, match="tls_ca"):
            absent.read("/w/")


# ------------------------------------------------------------------------------------- members


@pytest.mark.exhaustive
def test_commits_continue_while_each_member_is_lost_in_turn(three: EtcdCluster) -> None:
    client = three.client()
    for member in range(3):
        three.kill(member)
        eventually(lambda n=member: written(client, n), f"a commit without member {member}")
        three.start(member)
        eventually(lambda: len(answering(three)) == 3, "all members answer")
    assert value(client) == b"2"


def written(client: EtcdCoordination, number: int) -> bool:
    try:
        client.commit([KeyWrite("k", b"%d" % number)])
    except UnreachableError:
        return False
    return True


def answering(cluster: EtcdCluster) -> list[str]:
    found = []
    for url in cluster.urls:
        with suppress(CoordinationError):
            cluster.client(endpoints=(url,), timeout=2 * SECOND).read("k")
            found.append(url)
    return found


@pytest.mark.exhaustive
def test_hanging_member_delays_a_call_by_its_share_of_the_time(three: EtcdCluster) -> None:
    clock = SystemClock()
    client = three.client(timeout=6 * SECOND)
    client.commit([KeyWrite("k", b"1")])
    member = (three.leader() + 1) % 3
    order = [three.urls[member], *three.urls]
    client = three.client(timeout=6 * SECOND, endpoints=tuple(order))
    three.hang(member)
    began = clock.monotonic()
    assert value(client) == b"1"
    first = clock.monotonic() - began
    assert first < 6 * SECOND
    for _ in range(20):  # the member that answered stays the first
        client.read("k")
    three.resume(member)


@pytest.mark.exhaustive
def test_minority_refuses_reads_and_writes_and_returns(three: EtcdCluster) -> None:
    client = three.client()
    client.commit([KeyWrite("k", b"1")])
    lease = client.grant(2)
    client.commit([KeyWrite("l", b"1", lease)])
    changes = client.watch("k", client.read("k").revision)
    three.kill(0)
    three.kill(1)
    hasty = three.client(timeout=3 * SECOND)
    with pytest.raises(UnreachableError, match="No etcd member decides"):
        hasty.read("k")
    with pytest.raises(UnreachableError):
        hasty.commit([KeyWrite("k", b"2")], [RevisionCondition("k", 0)])
    with pytest.raises(UnreachableError):
        hasty.renew(lease)
    with pytest.raises(WatchEndedError):
        changes.wait(60)
    three.start(0)
    three.start(1)
    eventually(lambda: len(answering(three)) == 3, "all members answer")
    assert value(client) == b"1"


@pytest.mark.exhaustive
def test_killed_etcd_leader_changes_no_fleet_leader(three: EtcdCluster) -> None:
    client, other = three.client(), three.client()
    lease = client.grant(30)
    election = Election(client, "leader", "one")
    assert election.campaign(lease)
    three.kill(three.leader())

    def renewed() -> bool:
        with suppress(UnreachableError):
            client.renew(lease)
            return True
        return False

    eventually(renewed, "a renewal by the next etcd leader")
    assert election.campaign(lease)
    assert not Election(other, "leader", "two").campaign(other.grant(30))
    client.commit([KeyWrite("plan", b"1")], [election.fence])


@pytest.mark.exhaustive
def test_commit_of_a_hanging_cluster_has_an_unknown_outcome(three: EtcdCluster) -> None:
    client = three.client(timeout=2 * SECOND)
    revision = client.commit([KeyWrite("k", b"1")])
    for member in range(3):
        three.hang(member)
    with pytest.raises(OutcomeUnknownError, match="may have been made"):
        client.commit([KeyWrite("k", b"2")], [RevisionCondition("k", revision)])
    for member in range(3):
        three.resume(member)
    client = three.client()
    eventually(lambda: works(client), "the members answer")
    try:  # made at most once
        client.commit([KeyWrite("k", b"3")], [RevisionCondition("k", revision)])
    except ConflictError:
        assert value(client) == b"2"
    with pytest.raises(LeaseEndedError):
        client.renew(77)
