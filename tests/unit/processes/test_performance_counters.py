"""The helper for performance counters passes sums, and its client survives whatever it sends."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from testbed.recorded_counters import RecordedCounters
from testbed.synthetic_kernel import Life, SyntheticKernel
from testbed.waiting import eventually

from wattspan.cli import cli
from wattspan.clock import SystemClock
from wattspan.config.settings import AgentSettings
from wattspan.model import SECOND, Consumer, Counts, Instant, Usage
from wattspan.model.settings import Duration
from wattspan.ports import UsageBatch
from wattspan.processes.counters_server import MOST_CONNECTIONS, CountersServer
from wattspan.processes.performance_counters import (
    FIRST_DELAY,
    HUNG_AFTER,
    IDLE_TIMEOUT,
    MAX_BODY,
    CountersClient,
    CounterSums,
    add_counts,
    serve_sums,
)
from wattspan.processes.source import CpuUsageSource
from wattspan.testing import ManualClock
from wattspan.util.cpu_topology import CpuTopology

MS = 1_000_000
HEADER = struct.Struct("=II")
UNKNOWN_USER = 2**32 - 2


def body(*rows: tuple[int, int, tuple[int, ...]]) -> bytes:
    """The body of an answer with rows of a pid, a socket and the words."""
    pairs = [pid << 32 | place for pid, place, _ in rows]
    words = [word for *_, some in rows for word in some]
    return struct.pack(f"={6 * len(rows)}Q", *pairs, *words)


def answer(content: bytes, kind: int = 0) -> bytes:
    return HEADER.pack(kind, len(content)) + content


ONE_ROW = body((7, 1, (5, 6, 7, 8, 9)))

# ---------------------------------------------------------------------------------- the helper


class Program:
    def __init__(self, *bodies: bytes) -> None:
        self.bodies, self.closed = iter(bodies), False

    def sums(self) -> bytes:
        return next(self.bodies)

    def close(self) -> None:
        self.closed = True


class Serving:
    """A helper in a thread, and the agent's end of its connection."""

    def __init__(
        self, opener: Any, permitted: Any = None, timeout: float = 60.0, requests: bytes = b""
    ) -> None:
        mine, its = socket.socketpair()
        mine.send(requests)
        self.agent, self.told = mine, "still serving"
        mine.settimeout(60)
        allowed = range(UNKNOWN_USER) if permitted is None else permitted

        def serve() -> None:
            with its:
                self.told = serve_sums(its, allowed, opener, timeout)

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    def ask(self) -> tuple[int, bytes]:
        self.agent.send(b"?")
        return self.read()

    def read(self) -> tuple[int, bytes]:
        kind, length = HEADER.unpack(self.agent.recv(HEADER.size, socket.MSG_WAITALL))
        return kind, self.agent.recv(length, socket.MSG_WAITALL)

    def end(self) -> str:
        self.agent.close()
        self.thread.join()
        return self.told


def test_helper_answers_each_request_with_the_next_sums_until_the_agent_ends() -> None:
    program = Program(ONE_ROW, b"")
    serving = Serving(lambda: program)
    assert [serving.ask(), serving.ask()] == [(0, ONE_ROW), (0, b"")]
    assert not program.closed
    assert serving.end() == ""
    assert program.closed


def test_helper_refuses_another_user_before_it_opens_anything() -> None:
    opened: list[object] = []
    serving = Serving(lambda: opened.append(0), permitted=())
    kind, told = serving.read()
    assert (kind, opened) == (1, [])
    assert told.startswith(b"user ")
    assert told.endswith(b" may not read performance counters")
    assert serving.end() == told.decode()


def test_helper_tells_why_there_are_no_counters() -> None:
    def open_nothing() -> Program:
        raise OSError(2, "the CPUs offer none")

    serving = Serving(open_nothing)
    assert serving.read() == (1, b"the CPUs offer none")
    assert serving.end() == "the CPUs offer none"


@pytest.mark.parametrize("requests", [b"", b"?"], ids=["no request", "an answer that is not read"])
def test_helper_of_a_stalled_agent_ends(requests: bytes) -> None:
    program = Program(bytes(MAX_BODY))
    serving = Serving(lambda: program, timeout=0.01, requests=requests)
    with serving.agent:
        serving.thread.join()
    assert (serving.told, program.closed) == ("", True)


@contextmanager
def listening(path: Path, opener: Any, tell: Any) -> Iterator[CountersClient]:
    """A client of a helper that listens."""
    client = CountersClient(SystemClock(), path, 60 * SECOND, of_kernel=False)
    with CountersServer(path, range(UNKNOWN_USER), opener, tell) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            client.request()
            yield client
        finally:
            client.close()
            server.shutdown()
            thread.join()


def test_listening_helper_serves_a_few_connections_only(tmp_path: Path) -> None:
    path = tmp_path / "counters.sock"
    opener = partial(Program, ONE_ROW, ONE_ROW)
    with listening(path, opener, list[str]().append) as client, contextlib.ExitStack() as stack:
        assert client.sample() is not None
        more = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for one in more:
            one.connect(str(path))
            one.settimeout(60)
        refused = more[MOST_CONNECTIONS - 1 :]
        assert [one.recv(1) for one in refused] == [b""] * len(refused)
        client.request()
        assert client.sample() is not None


def test_listening_helper_removes_nothing_but_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "settings.conf"
    path.write_text("kept")
    with pytest.raises(FileExistsError, match="no socket"):
        CountersServer(path, (), partial(Program, b""))
    assert path.read_text() == "kept"


def test_helper_does_not_listen_where_others_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = CliRunner().invoke(cli, ["counters", "--user=root", f"--listen={tmp_path / 'a.sock'}"])
    assert done.exit_code
    assert "can be written by its group and every user" in done.output
    assert not list(tmp_path.iterdir())


def test_listening_helper_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    path, told = tmp_path / "counters.sock", list[str]()

    def open_nothing() -> Program:
        raise OSError(2, "the CPUs offer none")

    for content in (ONE_ROW, b""):
        with listening(path, partial(Program, content), told.append) as client:
            assert client.sample() == CounterSums.decoded(content)
    assert path.stat().st_mode & 0o777 == 0o660
    assert told == []
    with listening(path, open_nothing, told.append) as client:
        assert "the CPUs offer none" in failed(client)
    assert eventually(lambda: told, "the helper tells it, too") == ["the CPUs offer none"]


# ---------------------------------------------------------------------------------- the client


class Helper:
    """The socket of a helper that answers what a test tells it to."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.connection: socket.socket | None = None

    def send(self, content: bytes) -> None:
        """Answer the next request, of a new connection if there is one."""
        try:
            accepted = self.listener.accept()[0]
        except BlockingIOError:
            pass
        else:
            self.hang_up()
            self.connection = accepted
        assert self.connection is not None
        assert self.connection.recv(2) == b"?"
        self.connection.sendall(content)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Helper]:
    helper = Helper(tmp_path / "counters.sock")
    yield helper
    helper.hang_up()
    helper.listener.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def client(tmp_path: Path, clock: ManualClock) -> Iterator[CountersClient]:
    client = CountersClient(clock, tmp_path / "counters.sock", patience=0)
    yield client
    client.close()


def test_client_reads_the_sums_since_its_last_request(
    helper: Helper, client: CountersClient
) -> None:
    for content in (ONE_ROW, b"", body((1, 0, (1, 2, 3, 4, 5)), (2, 1, (0, 0, 0, 0, 0)))):
        client.request()
        helper.send(answer(content))
        assert client.sample() == CounterSums.decoded(content)
    assert client.failures == ()


def test_decoded_sums_have_the_fields_of_counts() -> None:
    sums = CounterSums.decoded(ONE_ROW)
    assert sums.times.by_process() == {7: {1: 5}}
    assert sums == ([7 << 32 | 1], [5, 6, 7, 8, 9])
    assert CounterSums.decoded(b"") == ([], [])


def test_late_answer_is_not_used_and_not_taken_for_the_next_one(
    helper: Helper, client: CountersClient
) -> None:
    client.request()
    assert client.sample() is None
    helper.send(answer(ONE_ROW)[:11])
    client.request()
    assert client.sample() is None
    assert helper.connection is not None
    helper.connection.sendall(answer(ONE_ROW)[11:])
    client.request()
    assert client.sample() is None
    client.request()
    helper.send(answer(ONE_ROW))
    assert client.sample() is None, "these sums began when the late answer did"
    client.request()
    helper.send(answer(b""))
    assert client.sample() == ([], [])
    assert client.failures == ()


def test_without_a_socket_there_are_no_sums_and_no_failure(client: CountersClient) -> None:
    client.request()
    assert (client.sample(), client.failures) == (None, ())


def failed(client: CountersClient) -> str:
    assert client.sample() is None
    (failure,) = client.failures
    return str(failure)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (answer(b"the CPUs offer none", 1), ": the CPUs offer none. "),
        (answer(b"\xff\n\x1b[31m", 1), ": �"),
        (answer(ONE_ROW[:-1]), ": its answer has half a row. "),
        (answer(b"", 2), ": its answer is no answer of a helper. "),
        (HEADER.pack(0, MAX_BODY + 1), ": its answer is no answer of a helper. "),
        (answer(b"") + b"\0", ": its answer is no answer of a helper. "),
        (b"HTTP/1.1 400 Bad Request\r\n", ": its answer is no answer of a helper. "),
    ],
)
def test_invalid_answer_is_a_failure_and_ends_the_connection(
    helper: Helper, client: CountersClient, content: bytes, cause: str
) -> None:
    client.request()
    helper.send(content)
    told = failed(client)
    assert cause in told
    assert told.isprintable()
    assert helper.connection is not None
    assert helper.connection.recv(1) == b""


def test_client_connects_again_after_growing_delays(
    helper: Helper, client: CountersClient, clock: ManualClock
) -> None:
    for delay in (1, 2, 4, 8):
        client.request()
        helper.send(b"")
        helper.hang_up()
        assert "it has ended" in failed(client)
        clock.advance(ns=delay * FIRST_DELAY - 1)
        client.request()
        assert "it has ended" in failed(client)
        clock.advance(ns=1)
    client.request()
    helper.send(answer(ONE_ROW))
    assert client.sample() == CounterSums.decoded(ONE_ROW)
    assert client.failures == ()


def test_helper_that_does_not_answer_is_given_up(
    helper: Helper, client: CountersClient, clock: ManualClock
) -> None:
    client.request()
    clock.advance(ns=HUNG_AFTER)
    client.request()
    assert (client.sample(), client.failures) == (None, ())
    clock.advance(ns=1)
    client.request()
    assert "it does not answer" in failed(client)


def test_helper_waits_longer_than_the_longest_interval_of_an_agent() -> None:
    (limits,) = get_type_hints(AgentSettings, include_extras=True)["interval"].__metadata__
    assert 2 * Duration.parse(limits.extra["most"]) <= IDLE_TIMEOUT * SECOND


def test_refused_connection_is_a_failure(helper: Helper, client: CountersClient) -> None:
    helper.listener.close()
    client.request()
    assert "connection refused" in failed(client)


# ---------------------------------------------------------------------------------- the source


def counted() -> tuple[SyntheticKernel, RecordedCounters, CpuUsageSource, Life]:
    """A host with counters, after the first poll, and a process that has worked for 3 ms."""
    kernel, counters = SyntheticKernel(), RecordedCounters()
    source = kernel.source(counters=counters, vigil=True)
    source.poll()
    life = kernel.spawn()
    kernel.run(life, 3 * MS)
    return kernel, counters, source, life


def poll(kernel: SyntheticKernel, source: CpuUsageSource) -> UsageBatch:
    kernel.clock.advance(1.0)
    return source.poll()


def test_usages_of_the_host_and_of_its_socket_have_the_counts_of_processes() -> None:
    kernel, counters, source, life = counted()
    counters.count((life.pid, 0, (1, 2, 3, 4, 5)), (9999, 0, (9, 9, 9, 9, 9)))
    usages = poll(kernel, source).usages
    assert [(one.resource, one.counts) for one in usages] == [
        ("cpu", {life.consumer: Counts(1, 2, 3, 4, 5)}),
        ("cpu:0", {life.consumer: Counts(1, 2, 3, 4, 5)}),
    ]


def test_unknown_counts_are_none_and_change_nothing_else() -> None:
    kernel, _, source, life = counted()
    usages = poll(kernel, source).usages
    assert [one.counts for one in usages] == [None, None]
    assert [dict(one.spent) for one in usages] == [{life.consumer: 3 * MS}] * 2


def test_counts_of_a_second_are_divided_among_its_ticks() -> None:
    kernel, counters, source, life = counted()
    poll(kernel, source)
    asked = counters.requests
    for work in (1, 2, 5):
        kernel.run(life, work * MS)
        kernel.clock.advance(0.1)
        counters.count((life.pid, 0, (80, 8, 16, 0, 7)))
        batch = source.poll(settle=work == 5)
    hosts = [one for one in batch.usages if one.resource == "cpu"]
    parts = [(one.counts or {})[life.consumer] for one in hosts]
    assert [part[:4] for part in parts] == [(10, 1, 2, 0), (20, 2, 4, 0), (50, 5, 10, 0)]
    assert sum(part.misses for part in parts) == 7
    assert counters.requests == asked + 1


@pytest.mark.parametrize("words", [(1, 0, 3, 4, 5), (1, 2, 0, 4, 5)])
def test_work_without_cycles_is_not_counted(words: tuple[int, ...]) -> None:
    kernel, counters, source, life = counted()
    counters.count((life.pid, 0, words))
    assert [one.counts for one in poll(kernel, source).usages] == [{}, {}]


def test_pid_that_was_used_again_has_no_counts() -> None:
    kernel, counters, source, life = counted()
    poll(kernel, source)
    kernel.run(life, MS)
    kernel.exit(life)
    while (heir := kernel.spawn()).pid != life.pid:
        kernel.exit(heir)
    kernel.run(heir, 2 * MS)
    counters.count((life.pid, 0, (1, 2, 3, 4, 5)))
    host, *_ = poll(kernel, source).usages
    assert {life.consumer, heir.consumer} <= host.spent.keys()
    assert host.counts == {}


def test_short_processes_in_one_account_have_the_sum_of_their_counts() -> None:
    kernel, counters, source, _ = counted()
    poll(kernel, source)
    lives = [kernel.spawn() for _ in range(2)]
    for life in lives:
        kernel.run(life, MS)
        kernel.exit(life)
    counters.count(*((life.pid, 0, (1, 2, 3, 4, 5)) for life in lives))
    host, *_ = poll(kernel, source).usages
    assert host.counts is not None
    assert list(host.counts.values()) == [(2, 4, 6, 8, 10)]


def test_source_closes_the_counters() -> None:
    _, counters, source, _ = counted()
    source.close()
    assert counters.closed


def test_source_reports_the_failure_of_counters(tmp_path: Path, client: CountersClient) -> None:
    (tmp_path / "counters.sock").write_text("no socket")
    kernel = SyntheticKernel()
    kernel.spawn()
    source = kernel.source(counters=client)
    source.poll()
    (failure,) = poll(kernel, source).failures
    assert "performance counters" in failure.thing


@pytest.mark.parametrize(
    ("times", "parts"),
    [
        ((10 * MS, 20 * MS), (10 * MS, 20 * MS)),
        ((9 * MS, 19 * MS), (9_642_857, 20_357_143)),
        ((1, 10 * MS), (30 * MS, 0)),  # where it is seen
    ],
    ids=["all time", "most of it", "others had the counters of a socket"],
)
def test_counted_time_divides_work_between_sockets(
    tmp_path: Path, times: tuple[int, int], parts: tuple[int, int]
) -> None:
    """If that is nearly all time: what is left out may be that of one socket."""
    for cpu in range(2):
        (folder := tmp_path / f"devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu}\n")
    kernel, counters = SyntheticKernel(cpus=2), RecordedCounters()
    source = kernel.source(counters=counters, topology=CpuTopology(tmp_path))
    source.poll()
    life = kernel.spawn()
    kernel.run(life, 30 * MS)
    counters.count(*((life.pid, at, (time, 2, 3, 4, 5)) for at, time in enumerate(times)))
    host, *sockets = poll(kernel, source).usages
    assert host.spent == {life.consumer: 30 * MS}
    assert tuple(one.spent.get(life.consumer, 0) for one in sockets) == parts
    counts = [(one.counts or {}).get(life.consumer) for one in (host, *sockets)]
    of_sockets = [(time, 2, 3, 4, 5) for time, part in zip(times, parts, strict=True) if part]
    assert [one for one in counts if one] == [(sum(times), 4, 6, 8, 10), *of_sockets]


CONSUMERS = [Consumer(pid, 0) for pid in range(1, 4)]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(CONSUMERS), st.integers(0, 10**12), max_size=3),
        min_size=1,
        max_size=10,
    ),
    st.dictionaries(
        st.integers(1, 4), st.tuples(*[st.integers(1, 2**63)] * 5), min_size=1, max_size=4
    ),
)
def test_counts_of_each_payer_add_up_to_its_sums(spent: list, rows: dict) -> None:
    edges = [Instant(at, at) for at in range(len(spent) + 1)]
    usages = [
        Usage("cpu", start, end, work)
        for start, end, work in zip(edges, edges[1:], spent, strict=False)
    ]
    sums = CounterSums.decoded(body(*((pid, 0, words) for pid, words in rows.items())))
    found = add_counts(usages, sums, {})
    for payer in CONSUMERS:
        parts = [one.counts[payer] for one in found if one.counts and payer in one.counts]
        worked = any(one.get(payer) for one in spent) and payer.pid in rows
        expected = rows[payer.pid] if worked else ()
        assert tuple(map(sum, zip(*parts, strict=True))) == expected
