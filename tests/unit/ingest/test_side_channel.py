"""The agent's end of the side channel, and its clients."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from testbed.announcing import ends, listening, processor_of, starts, telling
from testbed.fixtures import entered_in

import wattspan
from wattspan import sdk
from wattspan.http.sockets import UserPrincipals
from wattspan.ingest.side_channel import (
    MAX_OWNER_RECORDS,
    MAX_RING_RECORDS,
    SideChannelServer,
)
from wattspan.model import Principal
from wattspan.ports import ListenError
from wattspan.sdk.ring import (
    EDGE,
    HELLO,
    MAGIC,
    RECORD_SIZE,
    RECORDS,
    STARTED,
    VERSION,
    WRITE_FORMAT,
    RingChannel,
)
from wattspan.spans.values import SpanStart

GOOD = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 64)
SHRINK = fcntl.F_SEAL_SHRINK


feed = entered_in(listening)


@contextmanager
def memory(size: int = 64 * RECORD_SIZE, seals: int = SHRINK) -> Iterator[int]:
    descriptor = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def guest(run_dir: Path, hello: bytes, descriptors: Sequence[int] = ()) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(run_dir / "feed.sock"))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        if hello:
            connection.sendmsg([hello], [rights] if descriptors else [])
        yield connection


@contextmanager
def in_another_process(run_dir: Path) -> Iterator[None]:
    """A child of this process is connected."""
    ready, end = os.pipe()
    child = os.fork()
    if not child:
        try:
            with memory() as ring, guest(run_dir, GOOD, [ring]):
                os.write(end, b"1")
                signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(end)
        assert os.read(ready, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)


def hung_up(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionError:  # we had said more than was read
        return True


def record(number: int, span: int = 7, kind: int = STARTED) -> bytes:
    return WRITE_FORMAT.pack(span, 0, 1000 + number, 0, 42, kind, number)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_client_gives_no_records(feed: SideChannelServer) -> None:
    assert feed.drain() == []


def test_records_have_the_kernels_pid_and_uid(feed: SideChannelServer, tmp_path: Path) -> None:
    with memory() as ring, guest(tmp_path, GOOD, [ring]):
        os.pwrite(ring, record(1), 1 * RECORD_SIZE)
        (report,) = feed.drain()
        assert (report.pid, report.principal) == (os.getpid(), Principal(os.getuid()))
        assert report.records == [SpanStart((7).to_bytes(8), b"", 1001, 42, 0)]
        assert (report.lost, report.gone) == (0, False)
        assert feed.drain() == []


def test_last_records_of_a_process_precede_its_end(feed: SideChannelServer, tmp_path: Path) -> None:
    with memory() as ring:
        with guest(tmp_path, GOOD, [ring]):
            assert feed.drain() == []
            for number in range(1, 4):
                os.pwrite(ring, record(number), number * RECORD_SIZE)
        (report,) = feed.drain()
        assert (len(report.records), report.gone) == (3, True)
        assert feed.drain() == []


def test_records_of_a_short_process_are_read(feed: SideChannelServer, tmp_path: Path) -> None:
    with telling(tmp_path) as provider:
        provider.get_tracer("application").start_span("work").end()
    reports = feed.drain()
    assert (len(starts(reports)), len(ends(reports)), reports[-1].gone) == (1, 1, True)


def test_process_ends_with_its_last_connection(feed: SideChannelServer, tmp_path: Path) -> None:
    with telling(tmp_path) as one, telling(tmp_path) as other:
        one.get_tracer("application").start_span("work").end()
        other.get_tracer("application").start_span("work").end()
        assert [len(report.records) for report in feed.drain()] == [2, 2]
        one.shutdown()
        assert [report.gone for report in feed.drain()] == [False]
        other.get_tracer("application").start_span("work").end()
        other.shutdown()
        assert [(len(report.records), report.gone) for report in feed.drain()] == [(2, True)]


def test_overwritten_records_are_counted(feed: SideChannelServer, tmp_path: Path) -> None:
    with telling(tmp_path) as provider:
        tracer = provider.get_tracer("application")
        for _ in range(RECORDS):  # two records each: twice the capacity of the ring
            tracer.start_span("work").end()
        turns = iter(lambda: sum(((len(r.records), r.lost) for r in feed.drain()), ()), ())
        records, lost = map(sum, zip(*turns, strict=True))
        assert records + lost == 2 * RECORDS
        assert records >= RECORDS * 3 // 4
        tracer.start_span("work").end()
        assert [(len(r.records), r.lost) for r in feed.drain()] == [(2, 0)]


# ---------------------------------------------------------------------------- disconnections


@contextmanager
def plain_file(tmp_path: Path, size: int = 64 * RECORD_SIZE) -> Iterator[int]:
    path = tmp_path / "plain"
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        yield file.fileno()


@contextmanager
def pipe(_: Path) -> Iterator[int]:
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"w",
        GOOD[:-1],
        b"GET / HTTP/1.1\r\n\r\n",
        HELLO.pack(b"WATTSPAN", VERSION, RECORD_SIZE, 64),
        HELLO.pack(MAGIC, VERSION + 1, RECORD_SIZE, 64),
        HELLO.pack(MAGIC, VERSION, RECORD_SIZE + 1, 64),
        HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 0),
        HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 65),
        HELLO.pack(MAGIC, VERSION, RECORD_SIZE, MAX_RING_RECORDS + 1),
        HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 2**32 - 1),
        GOOD + b"and more",
    ],
)
def test_invalid_hello_is_disconnected(
    hello: bytes, feed: SideChannelServer, tmp_path: Path
) -> None:
    before = open_descriptors()
    with memory() as ring, guest(tmp_path, hello, [ring]) as connection:
        for _ in range(30):  # silence is borne for a while
            assert not any(report.records for report in feed.drain())
        assert hung_up(connection)
    assert feed.counts.put_out == 1
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", ["none", "two", "unsealed", "too small", "file", "pipe"])
def test_client_without_ring_is_disconnected(
    kind: str, feed: SideChannelServer, tmp_path: Path
) -> None:
    before = open_descriptors()
    with ExitStack() as stack:
        brought = {
            "none": lambda: [],
            "two": lambda: [stack.enter_context(memory()), stack.enter_context(memory())],
            "unsealed": lambda: [stack.enter_context(memory(seals=0))],
            "too small": lambda: [stack.enter_context(memory(64 * RECORD_SIZE - 1))],
            "file": lambda: [stack.enter_context(plain_file(tmp_path))],
            "pipe": lambda: [stack.enter_context(pipe(tmp_path))],
        }[kind]()
        connection = stack.enter_context(guest(tmp_path, GOOD, brought))
        assert feed.drain() == []
        assert hung_up(connection)
    assert feed.counts.put_out == 1
    assert open_descriptors() == before


def test_data_after_the_hello_is_disconnected(feed: SideChannelServer, tmp_path: Path) -> None:
    with memory() as ring, guest(tmp_path, GOOD, [ring]) as connection:
        feed.drain()
        connection.send(b"and another thing")
        assert [(report.records, report.gone) for report in feed.drain()] == [([], True)]
        assert hung_up(connection)


def test_invalid_ring_is_disconnected_and_others_are_read(
    feed: SideChannelServer, tmp_path: Path
) -> None:
    with telling(tmp_path) as provider, memory() as ring, guest(tmp_path, GOOD, [ring]) as liar:
        os.pwrite(ring, b"\xff" * 64 * RECORD_SIZE, 0)
        provider.get_tracer("application").start_span("work").end()
        reports = feed.drain()
        assert (len(starts(reports)), len(ends(reports))) == (1, 1)
        assert hung_up(liar)
        assert feed.counts.connected == 1


def test_rings_of_one_process_are_bounded(feed: SideChannelServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(guest(tmp_path, b"")) for _ in range(6)]
        feed.drain()
        assert feed.counts.connected == 4
        assert feed.counts.crowded_out == 2
        assert hung_up(crowd[-1])


def test_many_connections_are_accepted_over_several_turns(
    feed: SideChannelServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(guest(tmp_path, b""))
        feed.drain()
        feed.drain()
        assert feed.counts.crowded_out + feed.counts.admitted == 100


class CountedPrincipals(UserPrincipals):
    """The first ``first`` connections are of one user, those after it of another one."""

    def __init__(self, first: int = 0) -> None:
        self.first, self.lookups = first, 0

    def connected(self, pid: int | None, uid: int | None) -> Principal | None:
        self.lookups += 1
        return Principal(1 if self.lookups <= self.first else 2)


@pytest.mark.parametrize("closed", [True, False])
def test_flood_of_connections_keeps_no_process_from_connecting(
    tmp_path: Path, *, closed: bool
) -> None:
    principals = CountedPrincipals()
    with listening(tmp_path, principals) as feed, ExitStack() as stack:
        for _ in range(400):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.setblocking(False)
                connection.connect(str(tmp_path / "feed.sock"))
                if not closed:
                    stack.callback(connection.dup().close)
        with in_another_process(tmp_path):
            feed.drain()
            assert feed.counts.tried == 401
            assert principals.lookups == (1 if closed else 17)
            assert feed.counts.connected == (1 if closed else 5)
        assert feed.drain()[-1].gone


def test_rings_of_an_earlier_process_with_the_pid_do_not_count(tmp_path: Path) -> None:
    with listening(tmp_path, CountedPrincipals(first=4)) as feed, ExitStack() as stack:
        for _ in range(5):
            ring = stack.enter_context(memory())
            stack.enter_context(guest(tmp_path, GOOD, [ring]))
        feed.drain()
        assert (feed.counts.connected, feed.counts.crowded_out) == (5, 0)


def test_disconnected_client_frees_its_place(tmp_path: Path) -> None:
    with listening(tmp_path, max_processes=1, max_windows=0) as feed:
        with telling(tmp_path) as first:
            first.get_tracer("application").start_span("work").end()
            assert len(starts(feed.drain())) == 1
            with telling(tmp_path) as second:
                second.get_tracer("application").start_span("work").end()
                assert feed.drain() == []
                assert feed.counts.crowded_out == 1
        feed.drain()
        with telling(tmp_path) as third:
            third.get_tracer("application").start_span("work").end()
            assert len(starts(feed.drain())) == 1


@pytest.mark.parametrize("step", [1, 513])
def test_invalid_records_and_jumps_count_among_those_of_their_owner(
    tmp_path: Path, step: int
) -> None:
    """Of a ring that leads from one jump to the next, or has records of no kind."""
    slots = 4096
    first, kind = (1, 9) if step == 1 else (1 + slots, STARTED)
    hello = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, slots)
    with listening(tmp_path, max_owner_records=MAX_OWNER_RECORDS) as feed, ExitStack() as stack:
        for _ in range(3):
            ring = stack.enter_context(memory(slots * RECORD_SIZE))
            for number in range(first, first + slots * step, step):
                os.pwrite(ring, record(number, kind=kind), number % slots * RECORD_SIZE)
            stack.enter_context(guest(tmp_path, hello, [ring]))
        reports = feed.drain()
        assert 0 < sum(len(one.records) + one.lost for one in reports) < 2 * MAX_OWNER_RECORDS
        assert feed.counts.connected == 3


# ------------------------------------------------------------------------------- the socket


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "feed.sock"))
    with listening(tmp_path) as feed, telling(tmp_path) as provider:
        provider.get_tracer("application").start_span("work").end()
        assert len(starts(feed.drain())) == 1


def test_socket_of_another_agent_is_not_replaced(feed: SideChannelServer, tmp_path: Path) -> None:
    second = SideChannelServer(tmp_path / "feed.sock")
    with pytest.raises(ListenError, match="another agent listens there"):
        second.start()
    assert second.drain() == []
    with telling(tmp_path) as provider:
        provider.get_tracer("application").start_span("work").end()
        assert len(starts(feed.drain())) == 1


def test_every_user_may_connect(feed: SideChannelServer, tmp_path: Path) -> None:
    assert (tmp_path / "feed.sock").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("bound", ["max_records", "max_owner_records"])
def test_records_of_one_turn_are_bounded_and_fair(tmp_path: Path, bound: str) -> None:
    with listening(tmp_path, **{bound: 600}) as feed, ExitStack() as stack:
        for first in (0, 1 << 20):
            ring = stack.enter_context(memory(4096 * RECORD_SIZE))
            hello = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 4096)
            stack.enter_context(guest(tmp_path, hello, [ring]))
            body = b"".join(record(number, first + number) for number in range(1, 3001))
            os.pwrite(ring, body, RECORD_SIZE)
        turns = [starts(feed.drain()) for _ in range(20)]
        assert max(map(len, turns)) < 600 + 512 + 16
        told = [one.id for turn in turns for one in turn]
        assert len(told) == len(set(told)) == 6000
        first_two = {one.id[5] >= 16 for turn in turns[:2] for one in turn}
        assert first_two == {True, False}


class PrincipalsByTurn(UserPrincipals):
    """The first who connects is a user of its own, and those after it are another."""

    def __init__(self) -> None:
        self.connections = 0

    def connected(self, pid: int | None, uid: int | None) -> Principal | None:
        self.connections += 1
        return Principal(min(2, self.connections))


def test_flood_of_one_owner_leaves_the_records_of_another_to_their_turn(tmp_path: Path) -> None:
    with (
        listening(tmp_path, PrincipalsByTurn(), max_owner_records=MAX_OWNER_RECORDS) as feed,
        ExitStack() as stack,
    ):
        for count in (20_000, 500, 500):
            ring = stack.enter_context(memory(20_001 * RECORD_SIZE))
            hello = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 20_001)
            stack.enter_context(guest(tmp_path, hello, [ring]))
            os.pwrite(ring, b"".join(map(record, range(1, count + 1))), RECORD_SIZE)
        read: Counter[Principal | None] = Counter()
        for report in feed.drain():
            read[report.principal] += len(report.records)
        assert read[Principal(2)] == 1000
        assert read[Principal(1)] < MAX_OWNER_RECORDS + 512 + 16


def test_all_records_of_an_ended_process_are_read(tmp_path: Path) -> None:
    with listening(tmp_path, max_records=600) as feed:
        with memory(4096 * RECORD_SIZE) as ring:
            hello = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, 4096)
            with guest(tmp_path, hello, [ring]):
                body = b"".join(record(number, number) for number in range(1, 3001))
                os.pwrite(ring, body, RECORD_SIZE)
        turns = [feed.drain() for _ in range(8)]
        assert sum(len(starts(turn)) for turn in turns) == 3000
        (last,) = [turn for turn in turns if any(report.gone for report in turn)]
        assert not any(turns[turns.index(last) + 1 :])


def test_stop_closes_everything(tmp_path: Path) -> None:
    before = open_descriptors()
    with telling(tmp_path) as provider:
        with listening(tmp_path) as feed:
            provider.get_tracer("application").start_span("work").end()
            feed.drain()
        assert not (tmp_path / "feed.sock").exists()
        channel = processor_of(provider)._channel
        assert not channel.is_open
    assert open_descriptors() <= before + 1  # the memory of the ring goes with its last user


@contextmanager
def windows_of(run_dir: Path) -> Iterator[sdk.WatchRegistration]:
    """This process with a ring of the edges of windows."""
    channel = RingChannel()
    assert channel.connect([f"{run_dir}/feed.sock"])
    registration = sdk.WatchRegistration()
    registration.note_edge = channel.pen.write_edge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdk, "registration", registration)
        registration.due = 2**63
        yield registration
    channel.close()


def test_windows_tell_their_edges_and_announce_no_spans(
    feed: SideChannelServer, tmp_path: Path
) -> None:
    with windows_of(tmp_path):
        one = wattspan.window().begin()
        (begun,) = feed.drain()
        assert feed.counts.active
        one.end()
        with pytest.raises(ZeroDivisionError), wattspan.window() as failed:
            _ = 1 / 0
        (ended,) = feed.drain()
        assert [*begun.edges, *ended.edges] == [*one.period, *failed.period]
        assert (begun.records, begun.lost, begun.gone) == ([], 0, False)
        assert feed.drain() == []
        assert feed.counts.connected
        assert not feed.counts.active  # the agent rests until the next window
        wattspan.window().begin()
        assert len(feed.drain()) == 1
        assert feed.counts.active
    (gone,) = feed.drain()
    assert gone.gone


class PrincipalOfProcess(UserPrincipals):
    """Each connection is of the next of some users."""

    def __init__(self, *uids: int) -> None:
        self._uids = iter(uids)

    def connected(self, pid: int | None, uid: int | None) -> Principal | None:
        return Principal(next(self._uids))


@contextmanager
def opening_windows(run_dir: Path, kind: int = EDGE) -> Iterator[socket.socket]:
    """A client with one record, of the edge of a window unless ``kind`` is another one."""
    with memory() as ring, guest(run_dir, GOOD, [ring]) as connection:
        os.pwrite(ring, record(1, kind=kind), RECORD_SIZE)
        yield connection


def is_connected(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_windows_of_a_hostile_user_take_no_place_of_processes_with_spans(tmp_path: Path) -> None:
    hostile, user = 7, 8
    principals = PrincipalOfProcess(*[hostile] * 4, *[user] * 4)
    with (
        listening(tmp_path, principals, max_processes=8, max_windows=4) as feed,
        ExitStack() as stack,
    ):
        theirs = [stack.enter_context(opening_windows(tmp_path)) for _ in range(4)]
        assert sum(len(report.edges) for report in feed.drain()) == 4
        own = [stack.enter_context(opening_windows(tmp_path, STARTED)) for _ in range(4)]
        assert len(starts(feed.drain())) == 4  # half of all, as without the others
        assert all(map(is_connected, [*theirs, *own]))
        assert (feed.counts.connected, feed.counts.crowded_out) == (8, 0)


@pytest.mark.parametrize("first", [True, False])
def test_places_of_windows_are_divided_among_users(tmp_path: Path, *, first: bool) -> None:
    hostile, users = 7, [8, 9]
    order = [*users, *[hostile] * 4] if first else [*[hostile] * 4, *users]
    with (
        listening(tmp_path, PrincipalOfProcess(*order), max_windows=4) as feed,
        ExitStack() as stack,
    ):
        crowd = {}
        reports = []
        for number, uid in enumerate(order):
            crowd[number, uid] = stack.enter_context(opening_windows(tmp_path))
            reports += feed.drain()
        reports += feed.drain()
        left = Counter(uid for (_, uid), one in crowd.items() if is_connected(one))
        assert left == {hostile: 2, 8: 1, 9: 1}
        assert feed.counts.crowded_out == 2
        gone = [report.principal for report in reports if report.gone]
        assert set(gone) <= {Principal(hostile)}  # so that their edges are forgotten


def test_process_with_windows_has_a_place_while_those_of_spans_are_taken(tmp_path: Path) -> None:
    with (
        listening(tmp_path, max_processes=1, max_windows=1) as feed,
        opening_windows(tmp_path, STARTED) as tracer,
    ):
        assert len(starts(feed.drain())) == 1
        with opening_windows(tmp_path) as windows, opening_windows(tmp_path) as third:
            assert [len(report.edges) for report in feed.drain()] == [1]
            assert all(map(is_connected, [tracer, windows]))
            assert hung_up(third)
        feed.drain()
        with opening_windows(tmp_path, STARTED) as second:
            feed.drain()
            feed.drain()
            assert hung_up(second)  # it announces spans
            assert is_connected(tracer)


def test_process_that_announces_a_span_after_windows_moves_among_those(tmp_path: Path) -> None:
    with (
        listening(tmp_path, max_processes=2, max_windows=1) as feed,
        memory() as ring,
        guest(tmp_path, GOOD, [ring]) as connection,
    ):
        os.pwrite(ring, record(1, kind=EDGE), RECORD_SIZE)
        feed.drain()
        os.pwrite(ring, record(2), 2 * RECORD_SIZE)
        assert len(starts(feed.drain())) == 1
        with opening_windows(tmp_path) as other:
            feed.drain()
            assert is_connected(other)
            assert is_connected(connection)
    feed.drain()


def test_overwritten_edges_of_windows_are_no_lost_announcements(
    feed: SideChannelServer, tmp_path: Path
) -> None:
    with windows_of(tmp_path) as registration:
        for count in (1, 3 * RECORDS):
            for at in range(count):
                registration.note_edge(at)
            (report,) = feed.drain()
        assert report.lost > RECORDS
        assert feed.counts.lost == 0


def test_forked_child_writes_no_edges_of_its_parent(
    feed: SideChannelServer, tmp_path: Path
) -> None:
    with windows_of(tmp_path):
        one = wattspan.window().begin()
        child = os.fork()
        if not child:
            one.end()
            wattspan.window().begin().end()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        one.end()
        (report,) = feed.drain()
        assert (list(report.edges), report.lost) == (list(one.period), 0)
