"""Spans belong to the process that the kernel says sent them, or that it can have been."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
from testbed.fake_kernel import OURS, FakeKernel, Process

from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ResourceClaim
from wattspan.ingest.identity_verification import (
    CERTAIN_TTL,
    KEEP_AFTER_EXIT,
    LONGEST_SEARCH,
    MAX_CHECKS,
    MAX_CLAIM_LENGTH,
    UNCERTAIN_TTL,
    IdentityResolver,
)
from wattspan.model import SECOND, Consumer, Principal
from wattspan.processes.host import host_ids
from wattspan.processes.inspector import LiveProcess
from wattspan.sharing.pools import PoolName
from wattspan.spans.values import Outcome
from wattspan.testing import ManualClock

UNKNOWN, DISBELIEVED = Outcome.UNKNOWN_PROCESS, Outcome.NOT_BELIEVED
ID = "0123456789abcdef" * 4
OTHER_ID = "f" * 64
DOCKER = f"0::/system.slice/docker-{ID}.scope\n"
POD = "0::/kubepods.slice/kubepods-pod0d137909_8596_495c_92b3_048a901457b2.slice/cri-containerd-"
ELSEWHERE = Peer(address=("10.0.0.7", 4000), local=("10.0.0.1", 4318), accepted=1)


class Host:
    """A kernel, and the identities derived from it. Everybody is of user 1000 unless it is said."""

    def __init__(self, *, unproven: bool = False, hosts: tuple[str, ...] = ()) -> None:
        self.clock = ManualClock()
        self.kernel = FakeKernel(self.clock)
        self.kernel.born(1, user=0, parent=0)
        self.identities = IdentityResolver(self.clock, self.kernel, unproven=unproven, hosts=hosts)
        self.born = self.kernel.born

    def whose(self, peer: Peer, claim: ResourceClaim | None = None) -> Consumer | Outcome:
        return self.identities.resolve(peer, [claim or ResourceClaim()])[0].found

    def created(self, living: LiveProcess, later: float = 0.0) -> str:
        """When it was born, as an SDK writes it."""
        now = self.clock.now()
        boot = now.wall - now.mono - now.asleep
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=(boot + living.born) // 1000)
        return (at + timedelta(seconds=later)).isoformat()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def trusting() -> Host:
    """A host that believes senders whom the kernel cannot identify."""
    return Host(unproven=True)


# ------------------------------------------------------------------------------ Unix sockets


def test_unix_socket_peer_is_the_sender(host: Host) -> None:
    app = host.born(50)
    peer = host.kernel.over_unix(app)
    assert host.whose(peer) == app.consumer
    assert host.whose(peer, ResourceClaim(pid=50)) == app.consumer


def test_container_pid_is_translated_to_the_host_pid(host: Host) -> None:
    host.born(7, user=0)
    app = host.born(50, inside=(7,), user=0)
    assert host.whose(host.kernel.over_unix(app), ResourceClaim(pid=7)) == app.consumer


def test_collector_may_speak_for_processes_of_its_user(host: Host) -> None:
    app, collector = host.born(50), host.born(60)
    assert host.whose(host.kernel.over_unix(collector), ResourceClaim(pid=50)) == app.consumer


def test_no_user_may_speak_for_another(host: Host) -> None:
    host.born(50, user=1001)
    for user in (1000, 0):
        sender = host.kernel.over_unix(host.born(60 + user, user=user))
        assert host.whose(sender, ResourceClaim(pid=50)) == DISBELIEVED


def test_socket_for_forwarders_accepts_processes_of_every_user(host: Host) -> None:
    app = host.born(50, user=1001, cgroup=DOCKER, inside=(1,))
    peer = host.kernel.over_unix(host.born(60))._replace(forwards=True)
    assert host.whose(peer, ResourceClaim(pid=50)) == app.consumer
    assert host.whose(peer, ResourceClaim("web")) == UNKNOWN
    assert host.whose(peer, ResourceClaim(pid=51)) == DISBELIEVED
    assert host.whose(peer, ResourceClaim(pid=1)) == DISBELIEVED


MACHINE, BOARD = "b08dfa6083e7567a1921a715000001fb", "4c4c4544-0042-3510-8052-b4c04f4e4731"


@pytest.mark.parametrize("forwards", [True, False])
@pytest.mark.parametrize(
    ("text", "hosts", "elsewhere"),
    [
        ("f" * 32, (MACHINE, BOARD), True),  # machine-id: Go, Java, JavaScript, Python
        (MACHINE.upper(), (MACHINE,), False),
        ("b08dfa60-83e7-567a-1921-a715000001fb", (MACHINE, BOARD), False),  # so by gopsutil
        ("03000200-0400-0500-0006-000700080009", (MACHINE, BOARD), True),  # DMI's product_uuid
        (BOARD.upper(), (MACHINE, BOARD), False),
        ("03000200-0400-0500-0006-000700080009", (MACHINE,), False),  # unknown here
        ("f" * 32, (), False),
        ("i-0123456789abcdef0", (MACHINE, BOARD), False),  # ids of EC2 and GCE, and a name
        ("4520031799277581759", (MACHINE, BOARD), False),
        ("node7", (MACHINE, BOARD), False),
        ("", (MACHINE, BOARD), False),
    ],
)
def test_pid_alone_of_another_host_is_no_process_here(
    text: str, hosts: tuple[str, ...], elsewhere: bool, forwards: bool
) -> None:
    host = Host(hosts=hosts)
    app, sender = host.born(50), host.born(60)
    peer = host.kernel.over_unix(sender)._replace(forwards=forwards)
    found = host.whose(peer, ResourceClaim(pid=50, host=text))
    assert found == (UNKNOWN if elsewhere else app.consumer)
    own = host.whose(peer, ResourceClaim(pid=60, host=text))
    assert own == (UNKNOWN if elsewhere and forwards else sender.consumer)
    # A container may have a machine id of its own.
    told = ResourceClaim(pid=50, created=host.created(app), host=text)
    assert host.whose(peer, told) == app.consumer


def test_ids_of_a_host_are_not_those_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text(f"{MACHINE}\n")
    assert host_ids(tmp_path, {}) == {MACHINE}
    assert host_ids(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == frozenset()
    board = tmp_path / "sys/class/dmi/id/product_uuid"
    board.parent.mkdir(parents=True)
    board.write_text(f"{BOARD.upper()}\n")
    assert host_ids(tmp_path, {}) == {MACHINE, BOARD, "44454c4c-4200-1035-8052-b4c04f4e4731"}
    board.write_text("Not Settable\n")
    (tmp_path / ".dockerenv").touch()
    assert host_ids(tmp_path, {}) == frozenset()


def test_forwarded_spans_without_pid_have_no_process(host: Host) -> None:
    host.born(50)
    peer = host.kernel.over_unix(collector := host.born(60))
    assert host.whose(peer, ResourceClaim("web")) == collector.consumer
    host.whose(peer, ResourceClaim("shop", pid=50))
    host.clock.advance(1)
    assert host.whose(peer, ResourceClaim("web")) == UNKNOWN
    assert host.whose(peer, ResourceClaim("collector", pid=60)) == collector.consumer
    for name in ("otelcol-contrib", "aws-otel-collec", "alloy", "hotel-col"):
        sender = host.born(70, name=name)
        found = host.whose(host.kernel.over_tcp(sender), ResourceClaim("web"))
        assert found == (sender.consumer if name == "hotel-col" else UNKNOWN)


def test_unused_pid_claim_is_rejected(host: Host) -> None:
    assert host.whose(host.kernel.over_unix(host.born(50)), ResourceClaim(pid=51)) == DISBELIEVED


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**63, 10**40])
def test_impossible_pid_claim_is_rejected(host: Host, pid: int) -> None:
    assert host.whose(host.kernel.over_unix(host.born(50)), ResourceClaim(pid=pid)) == DISBELIEVED


def test_kernel_thread_sends_no_spans(host: Host) -> None:
    host.born(2, user=0, kernel=True)
    root = host.kernel.over_unix(host.born(50, user=0))
    assert host.whose(root, ResourceClaim(pid=2)) == DISBELIEVED


def test_sender_without_pid_proves_nothing(host: Host) -> None:
    host.born(50)
    assert host.whose(Peer(uid=1000), ResourceClaim(pid=50)) == DISBELIEVED
    assert host.whose(Peer(uid=1000)) == UNKNOWN


# ---------------------------------------------------------------------------------- principals


def test_container_root_is_not_root_of_the_host(host: Host) -> None:
    host.born(50, user=0)
    host.born(51, user=0, cgroup=DOCKER.replace(ID, OTHER_ID), inside=(9,))
    neighbour = host.born(52, user=1001, cgroup=DOCKER, inside=(8,))
    peer = host.kernel.over_unix(host.born(60, user=0, cgroup=DOCKER, inside=(1,)))
    for pid in (50, 51):
        assert host.whose(peer, ResourceClaim(pid=pid)) in (DISBELIEVED, UNKNOWN)
        assert host.whose(peer, ResourceClaim(pid=pid, container=OTHER_ID)) == DISBELIEVED
    assert neighbour.principal is not None
    assert host.whose(peer, ResourceClaim(pid=8)) == DISBELIEVED


def test_containers_of_one_user_do_not_speak_for_each_other(host: Host) -> None:
    host.born(50, cgroup=DOCKER.replace(ID, OTHER_ID), inside=(7,))
    host.born(51)
    peer = host.kernel.over_unix(host.born(60, cgroup=DOCKER, inside=(1,)))
    for pid, container in ((50, ""), (51, ""), (7, OTHER_ID)):
        claim = ResourceClaim(pid=pid, container=container)
        assert host.whose(peer, claim) == DISBELIEVED


def test_workers_that_dropped_privileges_send_on_the_connection_of_their_root(host: Host) -> None:
    master = host.born(50, user=0)
    peer = host.kernel.over_unix(master)
    worker = host.born(51, user=33, parent=50)
    host.born(52, user=33)  # not a descendant
    assert host.whose(peer, ResourceClaim(pid=51)) == worker.consumer
    assert host.whose(peer, ResourceClaim(pid=52)) == DISBELIEVED


def test_worker_of_a_user_who_gained_root_is_not_claimed_by_the_user(host: Host) -> None:
    shell = host.born(50)
    peer = host.kernel.over_unix(shell)
    host.born(51, user=0, parent=50)  # started by sudo
    assert host.whose(peer, ResourceClaim(pid=51)) == DISBELIEVED


def test_exec_of_a_setuid_program_ends_the_right_to_send(host: Host) -> None:
    app, other = host.born(50), host.born(51)
    peer = host.kernel.over_unix(app)
    assert host.whose(peer) == app.consumer
    assert host.whose(peer, ResourceClaim(pid=51)) == other.consumer
    host.kernel.changes(app, user=0)
    host.clock.advance(ns=CERTAIN_TTL)
    assert host.whose(peer) == UNKNOWN
    assert host.whose(peer, ResourceClaim(pid=51)) == DISBELIEVED
    assert host.whose(peer, ResourceClaim(pid=50)) == DISBELIEVED


def test_move_to_another_container_ends_the_right_to_send(host: Host) -> None:
    app = host.born(50)
    host.born(51, cgroup=DOCKER, inside=(7,))
    peer = host.kernel.over_unix(app)
    host.kernel.changes(app, cgroup=DOCKER)
    assert host.whose(peer) == UNKNOWN
    assert host.whose(peer, ResourceClaim(pid=51)) == DISBELIEVED


def test_root_that_dropped_its_privileges_sends_for_its_present_user(host: Host) -> None:
    app = host.born(50, user=0)
    host.born(51, user=0)
    sibling = host.born(52)
    peer = host.kernel.over_unix(app)
    host.kernel.changes(app, user=1000)
    assert host.whose(peer) == app.consumer
    assert host.whose(peer, ResourceClaim(pid=52)) == sibling.consumer
    assert host.whose(peer, ResourceClaim(pid=51)) == DISBELIEVED


def test_passed_descriptor_speaks_for_its_opener_only(host: Host) -> None:
    opener, receiver = host.born(50), host.born(60, user=1001)
    peer = host.kernel.over_unix(opener)  # sent to ``receiver`` by SCM_RIGHTS
    assert host.whose(peer, ResourceClaim(pid=60)) == DISBELIEVED
    assert host.whose(peer) == opener.consumer
    host.kernel.dies(opener)
    host.clock.advance(ns=UNCERTAIN_TTL)
    assert receiver.principal is not None
    assert host.whose(peer, ResourceClaim(pid=60)) == DISBELIEVED


def test_socket_of_another_cgroup_than_its_holder_proves_nothing(host: Host) -> None:
    app = host.born(50)
    peer = host.kernel.over_tcp(app)
    (inode,) = host.kernel.held[50]
    host.kernel.of_sockets[inode] = Principal(1000, ID)
    assert host.whose(peer) == UNKNOWN


def test_exec_of_a_setuid_program_ends_the_right_of_a_tcp_connection(host: Host) -> None:
    app = host.born(50)
    host.born(51, user=0)
    peer = host.kernel.over_tcp(app)
    host.kernel.of_sockets.clear()  # without the unified hierarchy
    host.kernel.changes(app, user=0)
    assert host.whose(peer) == UNKNOWN
    assert host.whose(peer, ResourceClaim(pid=51)) == DISBELIEVED


def test_holder_proves_a_tcp_connection_without_the_unified_hierarchy(host: Host) -> None:
    app, sibling = host.born(50), host.born(51)
    peer = host.kernel.over_tcp(app)
    host.kernel.of_sockets.clear()
    assert host.whose(peer) == app.consumer
    assert host.whose(peer, ResourceClaim(pid=51)) == sibling.consumer


def test_user_of_a_container_over_tcp_claims_nothing_outside(host: Host) -> None:
    host.born(50)
    app = host.born(60, cgroup=DOCKER, inside=(1,))
    host.kernel.closed_to_us |= {50, 60}
    peer = host.kernel.over_tcp(app)
    assert host.whose(peer, ResourceClaim(pid=50)) == DISBELIEVED
    assert host.whose(peer, ResourceClaim(pid=60)) == app.consumer


def test_remote_claims_are_refused_by_default(host: Host) -> None:
    app = host.born(50, inside=(7,), cgroup=DOCKER)
    claims = ResourceClaim(pid=50, created=host.created(app)), ResourceClaim(pid=7, container=ID)
    for claim in claims:
        assert host.whose(ELSEWHERE, claim) == DISBELIEVED


# --------------------------------------------------------------------------------------- fork


def test_worker_with_its_parents_stale_pid_is_itself(host: Host) -> None:
    parent = host.born(50)
    worker = host.born(51, parent=50, copied=True)
    grandchild = host.born(52, parent=51, copied=True)
    for sender in (worker, grandchild):
        peer = host.kernel.over_unix(sender)
        assert host.whose(peer, ResourceClaim(pid=50)) == sender.consumer
        stale = ResourceClaim(pid=50, created=host.created(parent))
        assert host.whose(peer, stale) == sender.consumer
        assert host.whose(peer, ResourceClaim()) == sender.consumer


def test_exec_child_may_send_for_its_parent(host: Host) -> None:
    parent, sidecar = host.born(50), host.born(51, parent=50)
    assert host.whose(host.kernel.over_unix(sidecar), ResourceClaim(pid=50)) == parent.consumer


def test_reused_pid_with_another_start_time_is_rejected(host: Host) -> None:
    parent = host.born(50)
    worker = host.born(51, parent=50, copied=True)
    wrong = ResourceClaim(pid=50, created=host.created(parent, later=-30))
    assert host.whose(host.kernel.over_unix(worker), wrong) == DISBELIEVED


def test_daemon_with_its_parent_pid_is_itself(host: Host) -> None:
    starter = host.born(50)
    daemon = host.born(51, parent=1, copied=True)
    told = ResourceClaim(pid=50, created=host.created(starter))
    host.kernel.dies(starter)
    peer = host.kernel.over_unix(daemon)
    assert host.whose(peer, ResourceClaim(pid=50)) == host.whose(peer, told) == daemon.consumer
    later = ResourceClaim(pid=50, created=host.created(daemon, later=100))
    assert host.whose(peer, later) == DISBELIEVED


def test_worker_on_the_master_connection_is_accepted(host: Host) -> None:
    peer = host.kernel.over_unix(master := host.born(50))
    worker = host.born(51, parent=50, copied=True)
    assert host.whose(peer, ResourceClaim(pid=51)) == worker.consumer
    assert host.whose(peer, ResourceClaim("other")) == master.consumer


def test_connection_of_a_dead_master_proves_the_user(host: Host) -> None:
    peer = host.kernel.over_unix(master := host.born(50))
    worker = host.born(51, parent=50, copied=True)
    stranger = host.born(52, user=1001)
    host.kernel.dies(master)
    assert host.whose(peer, ResourceClaim(pid=51)) == worker.consumer
    assert host.whose(peer, ResourceClaim(pid=52)) == DISBELIEVED
    assert stranger.users == {1001}
    assert host.whose(peer) == UNKNOWN


# ------------------------------------------------------------------------------ pids used again


def test_reused_pid_is_another_process(host: Host) -> None:
    first = host.born(50)
    peer = host.kernel.over_unix(first)
    assert host.whose(peer) == first.consumer
    host.kernel.dies(first)
    second = host.born(50)
    assert second.consumer != first.consumer
    assert host.whose(peer) == UNKNOWN
    assert host.whose(host.kernel.over_unix(second)) == second.consumer


def test_pid_first_seen_after_reuse_is_not_the_sender(host: Host) -> None:
    peer = host.kernel.over_unix(first := host.born(50))
    host.kernel.dies(first)
    host.born(50)
    assert host.whose(peer) == UNKNOWN


def test_undated_peer_is_the_current_holder_of_the_pid_of_the_same_user(host: Host) -> None:
    peer = host.kernel.over_unix(first := host.born(50), dated=False)
    assert host.whose(peer) == first.consumer
    host.kernel.dies(first)
    second = host.born(50)
    assert host.whose(peer) == second.consumer
    host.kernel.dies(second)
    host.born(50, user=1001)
    assert host.whose(peer) == UNKNOWN


def test_reused_claimed_pid_resolves_to_its_new_process(host: Host) -> None:
    app, collector = host.born(50), host.kernel.over_unix(host.born(60))
    assert host.whose(collector, ResourceClaim(pid=50)) == app.consumer
    host.kernel.dies(app)
    other = host.born(50, user=1001)
    assert host.whose(collector, ResourceClaim(pid=50)) == DISBELIEVED
    host.kernel.dies(other)
    again = host.born(50)
    host.clock.advance(ns=UNCERTAIN_TTL)
    assert host.whose(collector, ResourceClaim(pid=50)) == again.consumer


def test_last_spans_of_a_process_may_come_after_its_end_for_a_while(host: Host) -> None:
    app, collector = host.born(50), host.kernel.over_unix(host.born(60))
    host.whose(collector, ResourceClaim(pid=50))
    host.kernel.dies(app)
    host.clock.advance(KEEP_AFTER_EXIT / 1e9 / 2)
    assert host.whose(collector, ResourceClaim(pid=50)) == app.consumer
    host.clock.advance(KEEP_AFTER_EXIT / 1e9)
    assert host.whose(collector, ResourceClaim(pid=50)) == DISBELIEVED


# ---------------------------------------------------------------------------------- TCP, here


def test_over_loopback_the_holder_of_the_socket_is_the_process(host: Host) -> None:
    for pid in range(80, 90):
        host.born(pid)
    app = host.born(50)
    host.born(95)
    assert host.whose(host.kernel.over_tcp(app)) == app.consumer


def test_foreign_pid_over_loopback_is_rejected(host: Host) -> None:
    host.born(50, user=1001)
    sender = host.born(60)
    assert host.whose(host.kernel.over_tcp(sender), ResourceClaim(pid=50)) == DISBELIEVED


def test_hidden_descriptors_fall_back_to_the_user(host: Host) -> None:
    app, other = host.born(50), host.born(60, user=1001)
    host.kernel.closed_to_us |= {50, 60}
    peer = host.kernel.over_tcp(app)
    assert host.whose(peer, ResourceClaim(pid=50)) == app.consumer
    assert host.whose(peer, ResourceClaim(pid=60)) == DISBELIEVED
    assert host.whose(peer) == UNKNOWN
    assert other.users == {1001}


def test_invisible_container_root_is_not_the_host_init(host: Host) -> None:
    app = host.born(50, user=0, inside=(1,))
    host.kernel.closed_to_us |= {50, 1}
    assert host.whose(host.kernel.over_tcp(app), ResourceClaim(pid=1)) == DISBELIEVED


def test_claiming_holder_of_a_shared_connection_is_accepted(host: Host) -> None:
    peer = host.kernel.over_tcp(host.born(50))
    worker = host.born(51, parent=50, copied=True)
    host.born(52, parent=50, copied=True)
    assert host.whose(peer, ResourceClaim(pid=51)) == worker.consumer


def test_connecting_holder_of_a_shared_connection_is_the_sender(host: Host) -> None:
    peer = host.kernel.over_tcp(master := host.born(50))
    for pid in (51, 52):
        host.born(pid, parent=50, copied=True)
    assert host.whose(peer) == master.consumer


def test_orphans_sharing_a_connection_stay_unidentified(host: Host) -> None:
    peer = host.kernel.over_tcp(master := host.born(50))
    for pid in (51, 52):
        host.born(pid, parent=50, copied=True)
    host.kernel.dies(master)
    assert host.whose(peer) == UNKNOWN


def test_socket_without_holder_gives_no_identity(trusting: Host) -> None:
    peer = trusting.kernel.over_tcp(app := trusting.born(50))
    trusting.kernel.sockets.clear()
    assert trusting.whose(peer) == UNKNOWN
    assert trusting.whose(peer, ResourceClaim(pid=50)) == DISBELIEVED
    claim = ResourceClaim(pid=50, created=trusting.created(app))
    assert trusting.whose(peer, claim) == app.consumer


def test_port_used_again_is_another_connection(host: Host) -> None:
    first, second = host.born(50), host.born(60)
    peer = host.kernel.over_tcp(first, dated=False)
    assert host.whose(peer) == first.consumer
    (ends,) = host.kernel.sockets
    inode = host.kernel.sockets[ends].inode
    host.kernel.held = {60: {inode}}
    host.clock.advance(6)
    assert host.whose(peer) == second.consumer


def test_connection_is_looked_up_once_for_all_claims(host: Host) -> None:
    peer = host.kernel.over_tcp(host.born(50))
    for pid in range(1000, 1100):
        host.whose(peer, ResourceClaim(pid=pid))
        host.clock.advance(1)
    assert host.kernel.lookups == 1


def test_process_scans_use_a_bounded_share_of_time(host: Host) -> None:
    app = host.born(50)
    host.kernel.closed_to_us.add(50)
    host.kernel.costs = 100_000_000  # ns each time
    start = host.clock.monotonic()
    answers = set()
    for _ in range(200):
        answers.add(host.whose(host.kernel.over_tcp(app), ResourceClaim(pid=50)))
        host.clock.advance(0.01)
    waited = 200 * 10_000_000
    assert host.clock.monotonic() - start - waited < waited // 20 + 500_000_000
    assert answers == {app.consumer}


# ---------------------------------------------------------------------------- TCP, from afar


def test_remote_pid_without_start_time_is_rejected(trusting: Host) -> None:
    trusting.born(50)
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=50)) == DISBELIEVED
    assert trusting.whose(ELSEWHERE) == UNKNOWN
    assert trusting.whose(Peer(), ResourceClaim("web")) == UNKNOWN


def test_pid_with_start_time_is_accepted(trusting: Host) -> None:
    app = trusting.born(50)
    for later in (-1, 0, 1, 3):
        claim = ResourceClaim(pid=50, created=trusting.created(app, later))
        assert trusting.whose(ELSEWHERE, claim) == (DISBELIEVED if later == 3 else app.consumer)


def test_time_of_birth_fits_by_the_clock_of_then(trusting: Host) -> None:
    app = trusting.born(50)
    before = trusting.created(app)
    trusting.clock.step_wall(7200)
    for created in (before, trusting.created(app)):
        assert trusting.whose(ELSEWHERE, ResourceClaim(pid=50, created=created)) == app.consumer


def test_start_times_match_after_suspend(trusting: Host) -> None:
    trusting.clock.suspend(3600)
    app = trusting.born(50)
    trusting.clock.suspend(7200)
    claim = ResourceClaim(pid=50, created=trusting.created(app))
    assert trusting.whose(ELSEWHERE, claim) == app.consumer


@pytest.mark.parametrize("created", ["yesterday", "2026-13-01", "0000", "9" * 400, "\0"])
def test_invalid_start_time_is_ignored(trusting: Host, created: str) -> None:
    app, claim = trusting.born(50), ResourceClaim(pid=50, created=created)
    assert trusting.whose(ELSEWHERE, claim) == DISBELIEVED
    assert trusting.whose(trusting.kernel.over_unix(app), claim) == app.consumer


# --------------------------------------------------------------------------------- containers


@pytest.mark.parametrize("told", [ID, ID[:12], f"docker://{ID}", f"cri-containerd-{ID}.scope"])
def test_pid_inside_a_container_is_translated(trusting: Host, told: str) -> None:
    trusting.born(7, user=0)
    trusting.born(50, inside=(1,), cgroup=DOCKER)
    app = trusting.born(51, inside=(7,), cgroup=DOCKER)
    trusting.born(61, inside=(7,), cgroup=DOCKER.replace(ID, OTHER_ID))
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=7, container=told)) == app.consumer


def test_pid_outside_the_claimed_container_is_rejected(trusting: Host) -> None:
    trusting.born(50, inside=(1,), cgroup=DOCKER)
    trusting.born(60)
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=60, container=ID)) == DISBELIEVED
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=9, container=ID)) == DISBELIEVED


def test_container_that_is_not_here_is_unknown(trusting: Host) -> None:
    trusting.born(7)
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=7, container=ID)) == UNKNOWN
    assert trusting.whose(ELSEWHERE, ResourceClaim(container=ID)) == UNKNOWN


def test_containers_only_process_needs_no_pid(trusting: Host) -> None:
    app = trusting.born(50, inside=(1,), cgroup=DOCKER)
    assert trusting.whose(ELSEWHERE, ResourceClaim("web", container=ID)) == app.consumer
    trusting.born(51, inside=(2,), cgroup=DOCKER)
    assert trusting.whose(Peer(), ResourceClaim("shop", container=ID)) == UNKNOWN


def test_ambiguous_pid_in_a_container_is_unknown(trusting: Host) -> None:
    trusting.born(50, inside=(1, 7), cgroup=DOCKER)
    trusting.born(51, inside=(2, 7), cgroup=DOCKER)
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=7, container=ID)) == DISBELIEVED


def test_observer_of_a_container_may_claim_host_pids(trusting: Host) -> None:
    app = trusting.born(50, inside=(7,), cgroup=DOCKER)
    trusting.born(51, inside=(8,), cgroup=DOCKER)
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=50, container=ID)) == app.consumer


def test_collector_in_one_container_is_not_the_pid_1_of_another(host: Host) -> None:
    app = host.born(50, inside=(1,), cgroup=DOCKER)
    collector = host.born(60, inside=(1,), cgroup=DOCKER.replace(ID, OTHER_ID))
    host.born(61, inside=(9,), cgroup=DOCKER.replace(ID, OTHER_ID))
    peer = host.kernel.over_unix(collector)
    assert host.whose(peer, ResourceClaim(pid=1, container=ID)) == DISBELIEVED
    peer = peer._replace(forwards=True)
    assert host.whose(peer, ResourceClaim(pid=1, container=ID)) == app.consumer
    assert host.whose(peer, ResourceClaim(pid=1, container=OTHER_ID)) == collector.consumer
    assert host.whose(peer, ResourceClaim("web", container=ID)) == app.consumer
    for pid in (1, 9):
        assert host.whose(peer, ResourceClaim(pid=pid)) == UNKNOWN
    claim = ResourceClaim(pid=1, created=host.created(collector))
    assert host.whose(peer, claim) == collector.consumer


@pytest.mark.parametrize("way", ["unix", "forwarder", "unproven"])
def test_id_of_a_sandbox_means_the_other_containers_of_its_pod(way: str) -> None:
    """Detectors find it in mountinfo (open-telemetry/opentelemetry-java-instrumentation#8462)."""
    host = Host(unproven=way == "unproven")
    host.born(50, user=65535, inside=(1,), cgroup=f"{POD}{ID}.scope\n", name="pause")
    app = host.born(51, inside=(1,), cgroup=f"{POD}{OTHER_ID}.scope\n")
    lone = host.born(52, inside=(1,), cgroup=DOCKER.replace(ID, "e" * 64), name="pause")
    collector = host.kernel.over_unix(host.born(60))._replace(forwards=True)
    peer = {"unix": host.kernel.over_unix(app), "forwarder": collector}.get(way, ELSEWHERE)
    for claim in (ResourceClaim(pid=1, container=ID), ResourceClaim("web", container=ID)):
        assert host.whose(peer, claim) == app.consumer
    assert host.whose(peer, ResourceClaim("web")) == (app.consumer if way == "unix" else UNKNOWN)
    found = host.whose(peer, ResourceClaim(pid=1, container="e" * 64))
    assert found == (DISBELIEVED if way == "unix" else lone.consumer)
    host.born(53, inside=(1,), cgroup=f"{POD}{'d' * 64}.scope\n")  # with another pid 1
    found = host.whose(peer, ResourceClaim(pid=1, container=ID[:12]))
    assert found == (app.consumer if way == "unix" else DISBELIEVED)


def test_sender_in_a_container_names_its_neighbours_by_their_pids_there(host: Host) -> None:
    host.born(8)
    app = host.born(50, inside=(8,), cgroup=DOCKER)
    sidecar = host.born(51, inside=(9,), cgroup=DOCKER)
    peer = host.kernel.over_unix(sidecar)
    assert host.whose(peer, ResourceClaim(pid=8)) == app.consumer
    assert host.whose(peer, ResourceClaim(pid=10)) == DISBELIEVED


def test_same_small_pid_with_another_time_of_birth_is_another_process(host: Host) -> None:
    sidecar = host.born(51, inside=(1,), cgroup=DOCKER)
    claim = ResourceClaim(pid=1, created=host.created(sidecar, later=-500))
    assert host.whose(host.kernel.over_unix(sidecar), claim) == DISBELIEVED


@pytest.mark.parametrize("way", ["tcp", "unix", "forwarder", "unproven"])
def test_cgroup_that_another_user_named_like_a_container_hides_no_process_of_it(way: str) -> None:
    host = Host(unproven=way == "unproven")
    app = host.born(50, cgroup=DOCKER, inside=(7,))
    sidecar = host.born(51, cgroup=DOCKER, inside=(8,))
    impostor = host.born(60, user=1001, cgroup=DOCKER, inside=(7,))
    named = impostor._replace(principal=Principal(1001))  # the directory is his own
    host.kernel.processes[60] = Process(named, DOCKER)
    host.kernel.closed_to_us |= {50, 51}
    peer = {
        "tcp": host.kernel.over_tcp(app),
        "unix": host.kernel.over_unix(sidecar),
        "forwarder": host.kernel.over_unix(host.born(61))._replace(forwards=True),
        "unproven": ELSEWHERE,
    }[way]
    assert host.whose(peer, ResourceClaim(pid=7, container=ID)) == app.consumer
    if way in ("forwarder", "unproven"):
        host.kernel.dies(sidecar)
        host.clock.advance(5)
        assert host.whose(peer, ResourceClaim(container=ID)) == app.consumer


def test_reused_container_pid_is_looked_up_again(trusting: Host) -> None:
    old = trusting.born(50, inside=(1,), cgroup=DOCKER)
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=1, container=ID)) == old.consumer
    trusting.kernel.dies(old)
    trusting.born(50)
    new = trusting.born(52, inside=(1,), cgroup=DOCKER)
    assert trusting.whose(ELSEWHERE, ResourceClaim(pid=1, container=ID)) == new.consumer


# -------------------------------------------------------------------------------------- cost


def test_identities_are_cached(host: Host) -> None:
    peer = host.kernel.over_tcp(host.born(50))
    host.whose(peer, ResourceClaim(pid=50))
    looks = host.kernel.looks
    host.clock.advance(ns=CERTAIN_TTL - 1)
    host.whose(peer, ResourceClaim(pid=50))
    host.clock.advance(ns=CERTAIN_TTL)
    host.whose(peer, ResourceClaim(pid=50))
    assert host.kernel.looks == looks


def test_claim_cache_is_bounded(host: Host) -> None:
    peer = host.kernel.over_unix(host.born(50))
    for number in range(PoolName.IDENTITIES.limit + 100):
        text = "x" * (number % (2 * MAX_CLAIM_LENGTH))
        host.whose(peer, ResourceClaim(text, pid=number, container=text))
        host.whose(peer._replace(address=("127.0.0.1", number % 65536), local=("::1", 1)))
    identities = host.identities._identities
    assert len(identities) <= PoolName.IDENTITIES.limit
    assert len(host.identities._senders._senders) <= PoolName.SENDERS.limit
    assert max(len(claim.container) for _, claim in identities) <= MAX_CLAIM_LENGTH


RESOURCES = range(2_000)
OTHERS = [{"user": 1001}, {"cgroup": DOCKER.replace(ID, OTHER_ID)}]
"""Another user than 1000, and a container of the same user."""


def forks(host: Host, pid: int, user: int = 1000, parent: int = 1) -> LiveProcess:
    """The last of 65 processes, each forked from the one before."""
    for number in range(pid, pid + 65):
        last = host.born(number, user=user, parent=parent, copied=number > pid)
        parent = number
    return last


@pytest.mark.parametrize(
    "claim",
    [
        lambda number, _: ResourceClaim(pid=10_000 + number),
        lambda number, start: ResourceClaim(pid=50, created=f"{start[:19]}.{number:06}+00:00"),
        lambda number, _: ResourceClaim(pid=264, container=f"{number}"),
        lambda number, _: ResourceClaim(pid=364, container=f"{number}"),
    ],
    ids=["unused pids", "start times", "forked process", "process of another user"],
)
def test_request_of_many_resources_reads_a_bounded_number_of_processes(
    host: Host, claim: Callable[[int, str], ResourceClaim]
) -> None:
    forks(host, 200), forks(host, 300, user=33)
    leaf = forks(host, 50)
    start = host.created(leaf)
    for sender in (leaf, host.born(500, user=0)):
        peer = host.kernel.over_unix(sender)
        claims = [claim(number, start) for number in RESOURCES]
        looks = host.kernel.looks
        found = [one.found for one in host.identities.resolve(peer, [ResourceClaim(), *claims])]
        assert found[0] == sender.consumer
        assert set(found[MAX_CHECKS:]) == {UNKNOWN}
        assert host.kernel.looks - looks <= MAX_CHECKS + 2 * 65
        repeated = [one.found for one in host.identities.resolve(peer, claims[:1] * 999)]
        assert repeated == found[1:2] * 999


@pytest.mark.parametrize("other", OTHERS)
def test_checks_of_claims_take_a_bounded_time_of_their_owner_only(
    host: Host, other: dict[str, object]
) -> None:
    app = host.kernel.over_unix(modest := host.born(50))
    peer = host.kernel.over_unix(host.born(60, **other))
    host.kernel.look_costs = 1_000_000
    start, rounds = host.clock.monotonic(), 20
    for turn in range(rounds):
        claims = [ResourceClaim(pid=1000 * turn + number) for number in RESOURCES[:1000]]
        host.identities.resolve(peer, claims)
    took = host.clock.monotonic() - start
    assert took < SECOND // 4
    assert host.whose(peer) == UNKNOWN
    assert host.whose(app) == modest.consumer


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("way", ["tcp", "container", "neighbour"])
def test_searches_for_one_owner_leave_time_for_those_of_another(
    host: Host, other: dict[str, object], way: str
) -> None:
    greedy = host.born(60, **other)
    host.kernel.costs = SECOND // 5
    for number in range(20):
        host.whose(host.kernel.over_tcp(greedy), ResourceClaim(pid=number + 70, container=ID))
    app = host.born(50, **({} if way == "tcp" else {"cgroup": DOCKER, "inside": (7,)}))
    sidecar = host.born(51, cgroup=DOCKER, inside=(8,))
    peer, claim = {
        "tcp": (host.kernel.over_tcp(app), ResourceClaim()),
        "container": (host.kernel.over_unix(sidecar), ResourceClaim(pid=7, container=ID)),
        "neighbour": (host.kernel.over_unix(sidecar), ResourceClaim(pid=7)),
    }[way]
    assert host.whose(peer, claim) == app.consumer


def test_search_among_many_descriptors_ends_and_is_repeated_later(host: Host) -> None:
    peer = host.kernel.over_tcp(app := host.born(50))
    for pid in range(100, 200):
        host.born(pid)
    host.kernel.holds_costs = SECOND // 10
    start = host.clock.monotonic()
    assert host.whose(peer) == UNKNOWN
    assert host.clock.monotonic() - start < LONGEST_SEARCH + SECOND // 2
    host.kernel.holds_costs = 0
    host.clock.advance(60)
    assert host.whose(peer) == app.consumer


@pytest.mark.parametrize("other", OTHERS)
def test_flood_of_an_owner_forgets_no_identity_of_another(
    host: Host, other: dict[str, object]
) -> None:
    app, collector, ports = host.born(50), host.born(60), count()
    over_tcp, over_unix = host.kernel.over_tcp(app), host.kernel.over_unix(collector)
    host.whose(over_tcp)
    host.whose(over_unix, ResourceClaim(pid=50))
    for pid in range(1000, 1300):
        peer = host.kernel.over_unix(host.born(pid, **other))
        host.whose(peer, ResourceClaim(pid=max(1000, pid - 1)))
        claims = [ResourceClaim(pid=20 * pid + number) for number in range(15)]
        host.identities.resolve(peer, claims)
        for _ in range(4):
            host.whose(peer._replace(address=("127.0.0.1", next(ports)), local=OURS))
    host.kernel.dies(app)
    lookups = host.kernel.lookups
    assert host.whose(over_unix, ResourceClaim(pid=50)) == app.consumer
    assert host.whose(over_unix) == UNKNOWN
    host.whose(over_tcp, ResourceClaim(pid=51))
    assert host.kernel.lookups == lookups


def test_process_is_identified_by_its_pid(host: Host) -> None:
    user = Principal(1000)
    assert host.identities.announcer(50, user) is None
    app = host.born(50)
    assert host.identities.announcer(50, user) == app.consumer
    host.kernel.changes(app, user=0)
    assert host.identities.announcer(50, user) == DISBELIEVED
