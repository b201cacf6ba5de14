"""The kernel's messages are read as they are, and bad ones cost nothing."""

import errno
import socket
import struct
from collections.abc import Iterator

import pytest
from testbed.netlink import batch_of, passed

from wattspan.processes import netlink
from wattspan.processes.kernel_events import (
    EventChannel,
    ExitLayout,
    ExitRecord,
    ProcessEvents,
    acknowledgement,
    event_filter,
    parse_exit,
    record_events,
    record_exits,
)
from wattspan.processes.netlink import DatagramBatch, DatagramReader

LAST = 0x20
FAMILY = 31
FORK, EXEC, UID, COMM, EXIT = 1, 2, 4, 0x200, 0x80000000


def event(what: int, *numbers: int) -> bytes:
    """A datagram as the kernel makes it: the event is as long as its longest kind."""
    body = struct.pack("=IIQ", what, 0, 5) + struct.pack("=6I", *numbers, *[0] * (6 - len(numbers)))
    return netlink.message(3, 0, struct.pack("=IIIIHH", 1, 1, 0, 0, len(body), 0) + body)


def heard(*events: bytes) -> ProcessEvents:
    news = ProcessEvents()
    record_events(batch_of(*events), news)
    return news


MEMORY = 8408  # KiB


def stats(
    pid: int,
    cpu: int,
    *,
    tgid: int | None = None,
    flag: int = LAST,
    version: int = 12,
    ticks: int = 0,
) -> bytes:
    raw = bytearray(416)
    struct.pack_into("=H", raw, 0, version)
    raw[8] = flag
    struct.pack_into("=Q", raw, 72, cpu)
    raw[80:84] = b"work"
    struct.pack_into("=IIII", raw, 120, 1000, 1000, pid, 7)
    struct.pack_into("=QQQ", raw, 144, 2500, ticks, 0)
    struct.pack_into("=Q", raw, 200, MEMORY)
    if version >= 12:
        struct.pack_into("=I4xQ", raw, 368, tgid if tgid is not None else pid, 3000)
    return bytes(raw if version >= 12 else raw[:328])


def exit_message(task: bytes, group: tuple[int, bytes] | None = None) -> bytes:
    def part(kind: int, number: int, pid: int, body: bytes) -> bytes:
        inner = netlink.attribute(number, struct.pack("=I", pid)) + netlink.attribute(3, body)
        return netlink.attribute(kind, inner)

    message = bytes(4) + part(4, 1, 1, task)
    return message + part(5, 2, *group) if group is not None else message


def test_fork_event_has_child_and_parent_and_ignores_threads() -> None:
    assert heard(event(1, 10, 10, 11, 11)).born == {11: 10}
    assert heard(event(1, 10, 10, 12, 10)).born == {}


def test_exec_and_exit_events_ignore_threads() -> None:
    news = heard(event(2, 12, 10), event(0x80000000, 12, 10, 0, 0), event(0x80000000, 9, 9, 0, 0))
    assert news.execed == {10}
    assert news.exited == {9}


def test_acknowledgement_carries_its_error() -> None:
    assert acknowledgement(event(0, errno.EPERM)) == errno.EPERM
    assert acknowledgement(event(0, 0)) == 0
    assert acknowledgement(event(1, 10, 10, 11, 11)) is None


@pytest.mark.parametrize("length", range(0, 68, 3))
def test_message_cut_short_is_ignored(length: int) -> None:
    whole = event(FORK, 10, 10, 11, 11)
    news = heard(whole[:length], event(EXIT, 9, 9, 0, 0))
    assert (news.born, news.exited) == ({}, {9})


def test_several_messages_in_a_datagram_are_recorded() -> None:
    news = heard(event(FORK, 10, 10, 11, 11) + event(EXIT, 9, 9, 0, 0))
    assert (news.born, news.exited, news.lost) == ({11: 10}, {9}, False)


def test_event_of_another_process_is_ignored() -> None:
    news = ProcessEvents()
    forged = event(FORK, 10, 10, 11, 11)
    record_events(batch_of(forged, forged + forged, sender=4711), news)
    assert news.born == {}


@pytest.mark.parametrize(
    ("datagram", "expected"),
    [
        pytest.param(event(FORK, 10, 10, 11, 11), True, id="fork of a process"),
        pytest.param(event(FORK, 10, 10, 12, 10), False, id="fork of a thread"),
        pytest.param(event(EXEC, 10, 10), True, id="exec"),
        pytest.param(event(EXIT, 10, 10, 0, 17), True, id="exit of a process"),
        pytest.param(event(EXIT, 12, 10, 0, 17), False, id="exit of a thread"),
        pytest.param(event(UID, 10, 10, 0, 0), False, id="change of the user"),
        pytest.param(event(COMM, 10, 10, 1, 1), False, id="change of the name"),
        pytest.param(event(0, errno.EPERM), True, id="acknowledgement"),
        pytest.param(event(COMM, 10, 10) + event(EXEC, 9, 9), True, id="several messages"),
        pytest.param(event(FORK, 10, 10, 11, 11)[:60], False, id="a message cut short"),
    ],
)
def test_event_filter_passes_processes_only(datagram: bytes, expected: bool) -> None:
    assert passed(event_filter(exits=True), datagram) is expected


def test_event_filter_without_exits_passes_births_and_execs() -> None:
    rules = event_filter(exits=False)
    assert passed(rules, event(FORK, 10, 10, 11, 11))
    assert passed(rules, event(EXEC, 10, 10))
    assert not passed(rules, event(EXIT, 10, 10, 0, 17))


def test_single_threaded_exit_has_its_own_record() -> None:
    assert parse_exit(exit_message(stats(42, 12345))) == ExitRecord(
        42, 7, 12345, 3_000_000, "work", 1000, memory=MEMORY
    )


def test_exit_of_a_thread_is_ignored() -> None:
    assert parse_exit(exit_message(stats(43, 5, tgid=42, flag=0))) is None


def test_last_thread_reports_the_sum_of_its_group() -> None:
    final = parse_exit(exit_message(stats(43, 5, tgid=42), (42, stats(0, 999))))
    assert (final.pid, final.cpu, final.certain) == (42, 999, True)


def test_exit_record_of_an_old_kernel_is_uncertain() -> None:
    final = parse_exit(exit_message(stats(43, 5, version=8)))
    assert not final.certain


def test_cpu_time_without_delay_accounting_is_in_ticks() -> None:
    final = parse_exit(exit_message(stats(42, 0, ticks=4000)))
    assert final.cpu == 4_000_000


@pytest.mark.parametrize("length", [0, 4, 7, 20, 100, 400])
def test_exit_records_cut_short_are_ignored(length: int) -> None:
    assert parse_exit(exit_message(stats(42, 5))[:length]) is None


def test_sum_of_a_group_replaces_the_record_of_its_leader() -> None:
    news = ProcessEvents()
    news.add_exit(ExitRecord(42, 1, 5, 1, "x", 0, certain=False))
    news.add_exit(ExitRecord(42, 1, 9, 1, "x", 0))
    assert [final.cpu for final in news.exits[42]] == [9]


def exit_datagram(task: bytes, group: tuple[int, bytes] | None = None) -> bytes:
    return netlink.message(FAMILY, 0, exit_message(task, group))


def layout(version: int = 12) -> ExitLayout:
    """The layout of a kernel whose answer about process 7 has ``version``."""
    return ExitLayout.of(FAMILY, exit_datagram(stats(7, 1, version=version)), 7)


def recorded(*datagrams: bytes, version: int = 12, sender: int = 0) -> ProcessEvents:
    news = ProcessEvents()
    record_exits(layout(version), batch_of(*datagrams, longest=2048, sender=sender), news)
    return news


EXITS = {
    "one thread": exit_datagram(stats(42, 12345)),
    "thread of a living group": exit_datagram(stats(43, 5, tgid=42, flag=0)),
    "last thread": exit_datagram(stats(43, 5, tgid=42), (42, stats(0, 999))),
    "no delay accounting": exit_datagram(stats(42, 0, ticks=4000)),
    "cut short": exit_datagram(stats(42, 5))[:400],
    "another family": netlink.message(FAMILY + 1, 0, exit_message(stats(42, 5))),
    "several messages": exit_datagram(stats(42, 5)) + exit_datagram(stats(44, 6)),
}


@pytest.mark.parametrize("version", [8, 12])
@pytest.mark.parametrize("datagram", EXITS.values(), ids=EXITS.keys())
def test_records_in_slots_equal_parsed_messages(datagram: bytes, version: int) -> None:
    parsed = [
        record
        for kind, payload in netlink.messages(datagram)
        if kind == FAMILY and (record := parse_exit(payload)) is not None
    ]
    news = recorded(datagram, datagram, version=version)
    assert [record for records in news.exits.values() for record in records] == sorted(2 * parsed)


def test_exit_record_of_another_process_is_ignored() -> None:
    assert not recorded(*EXITS.values(), sender=4711).exits


def test_exit_record_that_fills_its_slot_counts_as_lost() -> None:
    long = netlink.message(FAMILY, 0, bytes(4) + netlink.attribute(9, bytes(3000)))
    assert recorded(long).lost
    assert not recorded(EXITS["one thread"]).lost


@pytest.mark.parametrize("name", [name for name in EXITS if name != "cut short"])
def test_exit_filter_drops_threads_of_living_groups_only(name: str) -> None:
    living = name == "thread of a living group"
    assert passed(layout().filter(), EXITS[name]) is not living


def test_exit_filter_passes_acknowledgements() -> None:
    assert passed(layout().filter(), netlink.message(netlink.ERROR, 0, bytes(20)))


def test_answer_about_another_process_is_an_unknown_layout() -> None:
    with pytest.raises(OSError, match="version 12 has another layout"):
        ExitLayout.of(FAMILY, exit_datagram(stats(7, 1)), 8)


def test_messages_end_where_one_is_cut() -> None:
    whole = netlink.message(20, 0, b"abcd") + netlink.message(21, 0, b"efgh")
    assert list(netlink.messages(whole)) == [(20, b"abcd"), (21, b"efgh")]
    assert list(netlink.messages(whole[:-1])) == [(20, b"abcd")]
    assert list(netlink.messages(b"\xff" * 40)) == []
    assert list(netlink.attributes(b"\xff" * 40)) == []


class Link:
    """A reader of given batches; None is an error."""

    slots = 2

    def __init__(self, *batches: DatagramBatch | None) -> None:
        self._batches = list(batches)

    def read(self) -> DatagramBatch:
        batch = self._batches.pop(0)
        if batch is None:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return batch


def drained(*batches: DatagramBatch | None) -> tuple[list[bytes], ProcessEvents]:
    read: list[bytes] = []
    channel = EventChannel(
        Link(*batches), lambda batch, _: read.extend(map(batch.datagram, range(len(batch.lengths))))
    )
    channel.drain(events := ProcessEvents())
    return read, events


def test_channel_reads_until_a_batch_is_not_full() -> None:
    read, events = drained(batch_of(b"a", b"b"), batch_of(b"c"))
    assert read == [b"a", b"b", b"c"]
    assert not events.lost


def test_dropped_messages_are_counted_and_the_rest_is_read() -> None:
    read, events = drained(batch_of(b"a", b"b"), None, batch_of(b"c"))
    assert read == [b"a", b"b", b"c"]
    assert events.lost


def test_only_messages_of_the_kernel_count() -> None:
    read, _ = drained(batch_of(b"forged", sender=4711))
    assert read == [b""]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets of datagrams, whose sender has no netlink port."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        yield one, other


def test_reader_returns_waiting_datagrams_in_order(pair: tuple) -> None:
    sender, link = pair
    reader = DatagramReader(link, 64, 3)
    for text in (b"a", b"bcd" * 10, b"ef", b"g"):
        sender.send(text)
    first = reader.read()
    assert [first.datagram(at) for at in range(3)] == [b"a", b"bcd" * 10, b"ef"]
    second = reader.read()
    assert [second.datagram(at) for at in range(len(second.lengths))] == [b"g"]
    assert reader.read().lengths == []


def test_reader_knows_whether_datagrams_wait(pair: tuple) -> None:
    sender, link = pair
    reader = DatagramReader(link, 64, 3)
    assert not reader.pending()
    sender.send(b"a")
    assert reader.pending()
    assert reader.read().lengths == [1]
    assert not reader.pending()
    link.close()
    assert reader.pending()  # `read` raises the error


def test_reader_cuts_long_datagrams(pair: tuple) -> None:
    sender, link = pair
    reader = DatagramReader(link, 64, 3)
    for size in (63, 64, 65):
        sender.send(b"x" * size)
    batch = reader.read()
    assert batch.lengths == [63, 64, 64]
    assert [batch.is_full(at) for at in range(3)] == [False, True, True]


def test_reader_raises_errors_of_the_socket(pair: tuple) -> None:
    _, link = pair
    reader = DatagramReader(link, 64, 3)
    link.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.read()
