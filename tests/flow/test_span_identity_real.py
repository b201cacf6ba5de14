"""Real senders on the real kernel: credentials, sockets, forks, users and pid namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ResourceClaim
from wattspan.ingest.identity_verification import IdentityResolver
from wattspan.model import Consumer
from wattspan.processes.cgroups import find_hierarchy
from wattspan.processes.inspector import ProcessInspector, TcpConnections
from wattspan.processes.principals import CgroupDirectories, PrincipalResolver
from wattspan.processes.procfs import ProcFs
from wattspan.spans.values import Outcome

NOBODY = 54321  # 65534 stands for every unmapped user, and is no principal
Pids = tuple[int, int]

# Connects, reports it, and stays until its input ends. A second argument makes it fork before or
# after
SENDER = """
import os, socket, sys
where, how = sys.argv[1], sys.argv[2]
def connect():
    if where.startswith("/"):
        s = socket.socket(socket.AF_UNIX)
        s.connect(where)
    else:
        host, _, port = where.rpartition(" ")
        s = socket.create_connection((host, int(port)))
    return s
if how == "fork first":
    if os.fork():
        os.wait()
        os._exit(0)
s = connect()
if how == "fork after":
    if os.fork():
        os._exit(0)
print(os.getpid(), os.getppid(), flush=True)
sys.stdin.read()
"""


class Agent:
    """Listens, and reports the sender."""

    def __init__(self, folder: Path) -> None:
        self.clock = SystemClock()
        self.principals = PrincipalResolver.of_host()
        self.witness = ProcessInspector(principals=self.principals)
        self.identities = IdentityResolver(self.clock, self.witness)
        self.path = str(folder / "otlp.sock")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        Path(self.path).chmod(0o777)
        self.listener.listen()
        self.accepted: list[socket.socket] = []

    def close(self) -> None:
        for each in [self.listener, *self.accepted]:
            each.close()
        self.witness.close()

    def listen_tcp(self, host: str) -> str:
        self.listener.close()
        family = socket.AF_INET6 if ":" in host or not host else socket.AF_INET
        dual = not host
        self.listener = socket.create_server((host, 0), family=family, dualstack_ipv6=dual)
        return str(self.listener.getsockname()[1])

    def peer(self) -> Peer:
        connection, _ = self.listener.accept()
        self.accepted.append(connection)
        accepted = self.clock.monotonic()
        if connection.family == socket.AF_UNIX:
            told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, _ = struct.unpack("3i", told)
            principal = self.principals.of_connection(self.witness, pid or None, uid)
            return Peer(pid or None, uid, accepted=accepted, principal=principal)
        sender, ours = connection.getpeername(), connection.getsockname()
        return Peer(address=sender[:2], local=ours[:2], accepted=accepted)

    def whose(self, peer: Peer, claim: ResourceClaim | None = None) -> Consumer | Outcome:
        return self.identities.resolve(peer, [claim or ResourceClaim()])[0].found

    def consumer(self, pid: int) -> Consumer:
        found = self.witness.identify(pid)
        assert found is not None
        return found


@pytest.fixture
def agent() -> Iterator[Agent]:
    """An agent in a directory that every user may enter, which no directory of pytest is."""
    with tempfile.TemporaryDirectory(prefix="wattspan-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        agent = Agent(folder)
        yield agent
        agent.close()


@contextlib.contextmanager
def sending(where: str, how: str = "", *, prefix: tuple[str, ...] = ()) -> Iterator[Pids]:
    """A process that has connected: its pid and its parent's, as it sees them."""
    child = subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", "-c", SENDER, where, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        pid, parent = child.stdout.readline().split()
        if how == "fork after":
            child.wait()
        yield int(pid), int(parent)
    finally:
        child.stdin.close()
        child.stdout.read()  # until every holder has ended
        child.stdout.close()
        child.wait()


@contextlib.contextmanager
def as_nobody(work: Callable[[], str]) -> Iterator[tuple[int, str]]:
    """A forked child of another user: its pid and the result of its work; it remains for a
    while."""
    tell, told = os.pipe()[::-1]
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(tell, work().encode())
            signal.pause()
        os._exit(1)
    os.close(tell)
    try:
        yield pid, os.read(told, 4096).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)


def test_peer_of_a_unix_socket_is_named_with_its_start(agent: Agent) -> None:
    with sending(agent.path) as (pid, _):
        peer = agent.peer()
        ticks = round(psutil.Process(pid).create_time())  # of the same process
        assert agent.whose(peer) == agent.whose(peer, ResourceClaim(pid=pid)) == agent.consumer(pid)
        assert ticks > 0


def test_exited_known_sender_keeps_its_identity(agent: Agent) -> None:
    with sending(agent.path) as (pid, _):
        peer = agent.peer()
        consumer = agent.consumer(pid)
        assert agent.whose(peer) == consumer
    assert agent.witness.identify(pid) is None
    assert agent.whose(peer) == consumer


def test_exited_unknown_sender_is_unidentified(agent: Agent) -> None:
    with sending(agent.path) as (pid, _):
        peer = agent.peer()
    assert agent.whose(peer) == Outcome.UNKNOWN_PROCESS
    assert agent.whose(peer, ResourceClaim(pid=pid)) == Outcome.NOT_BELIEVED


def test_forked_worker_with_its_parents_resource_is_itself(agent: Agent) -> None:
    with sending(agent.path, "fork first") as (worker, parent):
        peer = agent.peer()
        born = datetime.fromtimestamp(psutil.Process(parent).create_time(), UTC).isoformat()
        for claim in (
            ResourceClaim(pid=parent),
            ResourceClaim(pid=parent, created=born),
            ResourceClaim(pid=worker),
        ):
            assert agent.whose(peer, claim) == agent.consumer(worker)


def test_child_program_may_send_for_its_parent(agent: Agent) -> None:
    with sending(agent.path):
        assert agent.whose(agent.peer(), ResourceClaim(pid=os.getpid())) == agent.consumer(
            os.getpid()
        )


def test_connection_of_a_process_that_ended_before_acceptance_proves_nothing(agent: Agent) -> None:
    with sending(agent.path, "fork after") as (worker, _):
        peer = agent.peer()
        assert peer.pid is not None
        eventually(lambda: not Path(f"/proc/{peer.pid}/fd").exists(), "the parent's end")
        assert peer.principal is None
        assert agent.whose(peer, ResourceClaim(pid=worker)) == Outcome.NOT_BELIEVED
        assert agent.whose(peer) == Outcome.UNKNOWN_PROCESS


@pytest.mark.parametrize(
    ("listen", "connect"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("", "127.0.0.1"),
        ("", "::1"),
        ("", "::ffff:127.0.0.1"),
    ],
)
def test_over_tcp_the_holder_of_the_other_end_is_found(
    agent: Agent, listen: str, connect: str
) -> None:
    try:
        port = agent.listen_tcp(listen)
    except OSError:
        pytest.skip("no IPv6 here")
    with sending(f"{connect} {port}") as (pid, _):
        peer = agent.peer()
        assert agent.whose(peer) == agent.whose(peer, ResourceClaim(pid=pid)) == agent.consumer(pid)


def test_kernel_names_the_socket_of_a_connection_until_it_ends(agent: Agent) -> None:
    connections = TcpConnections()
    agent.listen_tcp("")
    port = agent.listener.getsockname()[1]
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        with socket.create_connection((host, port)) as mine:
            peer = agent.peer()
            assert peer.address is not None
            assert peer.local is not None
            found = connections.owner_of(peer.address, peer.local)
            assert found.inode == os.fstat(mine.fileno()).st_ino
        assert connections.owner_of(peer.address, peer.local) is None
    connections.close()


def test_worker_inheriting_a_tcp_connection_is_found_after_parent_exit(
    agent: Agent,
) -> None:
    port = agent.listen_tcp("127.0.0.1")
    with sending(f"127.0.0.1 {port}", "fork after") as (worker, _):
        peer = agent.peer()
        eventually(
            lambda: psutil.Process(worker).ppid() != 0 and _holders(peer) == [worker],
            "the parent's end",
        )
        assert agent.whose(peer) == agent.consumer(worker)


def _holders(peer: Peer) -> list[int]:
    witness = ProcessInspector()
    assert peer.address is not None
    assert peer.local is not None
    owner = witness.owner_of(peer.address, peer.local)
    holders = [pid for pid in witness.pids() if owner and witness.holds(pid, owner.inode)]
    witness.close()
    return holders


def test_thread_id_is_not_a_process() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    witness = ProcessInspector()
    try:
        assert thread.native_id is not None
        assert witness.look(thread.native_id) is None
        assert witness.look(os.getpid()) is not None
    finally:
        stop.set()
        thread.join()
        witness.close()


def test_kernel_data_of_this_process_is_read_correctly() -> None:
    witness = ProcessInspector()
    me = witness.look(os.getpid())
    witness.close()
    process = psutil.Process()
    assert me.parent == process.ppid()
    assert me.users == set(process.uids())
    assert me.pids[0] == os.getpid()
    now = SystemClock().now()
    assert abs((now.wall - now.since_boot + me.born) / 1e9 - process.create_time()) < 1.5


@pytest.mark.needs_root
def test_pid_of_another_user_is_rejected(agent: Agent) -> None:
    port = int(agent.listen_tcp("127.0.0.1"))
    kept = []

    def connect() -> str:
        kept.append(socket.create_connection(("127.0.0.1", port)))
        return "connected"

    with as_nobody(connect) as (pid, told):
        assert told == "connected"
        peer = agent.peer()
        assert agent.whose(peer, ResourceClaim(pid=1)) == Outcome.NOT_BELIEVED
        assert agent.whose(peer, ResourceClaim(pid=pid)) == agent.consumer(pid)
        assert agent.whose(peer) == agent.consumer(pid)


@pytest.mark.needs_root
def test_unprivileged_agent_reads_users_without_descriptors(agent: Agent) -> None:
    port = agent.listen_tcp("127.0.0.1")
    with sending(f"127.0.0.1 {port}") as (pid, _):
        peer = agent.peer()

        def whose() -> str:
            inspector = ProcessInspector(principals=PrincipalResolver.of_host())
            identities = IdentityResolver(SystemClock(), inspector)
            claims = (ResourceClaim(pid=pid), ResourceClaim(pid=os.getpid()), ResourceClaim())
            return repr([one.found for one in identities.resolve(peer, claims)])

        with as_nobody(whose) as (_, told):
            # Root may be of any container unless the kernel shows the cgroup of the socket.
            proven = CgroupDirectories().is_unified
            of_root = agent.consumer(pid) if proven else Outcome.NOT_BELIEVED
            assert told == repr([of_root, Outcome.NOT_BELIEVED, Outcome.UNKNOWN_PROCESS])


needs_unshare = pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")


@needs_unshare
@pytest.mark.needs_root
def test_pid_namespace_is_translated(agent: Agent) -> None:
    unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with sending(agent.path, prefix=unshare) as (inside, _):
        peer = agent.peer()
        assert inside == 1
        sender = agent.whose(peer, ResourceClaim(pid=inside))
        assert isinstance(sender, Consumer)
        assert sender == agent.consumer(peer.pid or 0)
        assert sender.pid != 1
        assert agent.whose(peer) == sender
        assert agent.whose(peer, ResourceClaim(pid=31000)) == Outcome.NOT_BELIEVED


@needs_unshare
@pytest.mark.needs_root
def test_namespaces_sidecar_names_its_neighbour_by_the_pid_there(agent: Agent) -> None:
    script = f'{sys.executable} -c "$0" "$1" \'\'; true'  # a shell is pid 1, python its child
    unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script)
    child = subprocess.Popen(
        [*unshare, SENDER, agent.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        inside, _ = child.stdout.readline().split()
        peer = agent.peer()
        shell = agent.consumer(ProcFs().stat(peer.pid or 0).parent)  # type: ignore[union-attr]
        assert int(inside) > 1
        assert agent.whose(peer, ResourceClaim(pid=int(inside))) == agent.consumer(peer.pid or 0)
        assert agent.whose(peer, ResourceClaim(pid=1)) == shell
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait()


@needs_unshare
@pytest.mark.needs_root
def test_claimed_container_is_found_by_its_cgroup(agent: Agent) -> None:
    hierarchy = find_hierarchy(Path("/sys/fs/cgroup"))
    if hierarchy is None:
        pytest.skip("no cgroups here")
    container = "c0ffee" + os.urandom(29).hex()
    folder = hierarchy.root / f"docker-{container}.scope"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    afar = Peer(address=("10.9.8.7", 4000), local=("10.9.8.1", 4318), accepted=1)
    agent.identities = IdentityResolver(agent.clock, agent.witness, unproven=True)
    try:
        with sending(agent.path, prefix=unshare) as (inside, _):
            pid = agent.peer().pid
            (folder / "cgroup.procs").write_text(str(pid))
            for told in (container, container[:12], f"containerd://{container}"):
                claim = ResourceClaim(pid=inside, container=told)
                assert agent.whose(afar, claim) == agent.consumer(pid or 0)
            assert (
                agent.whose(afar, ResourceClaim(pid=2, container=container)) == Outcome.NOT_BELIEVED
            )
            assert agent.whose(afar, ResourceClaim(container=container)) == agent.consumer(pid or 0)
        later = afar._replace(accepted=2)
        assert agent.whose(later, ResourceClaim(container=container)) == Outcome.UNKNOWN_PROCESS
    finally:

        def removed() -> (
            bool
        ):  # the kernel removes the cgroup's last process shortly after its exit
            with contextlib.suppress(OSError):
                folder.rmdir()
            return not folder.exists()

        eventually(removed, f"{folder} is empty")
