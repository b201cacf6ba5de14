"""The kernel's messages are read as they are, and bad ones cost nothing."""

import errno
import struct

import pytest

from wattspan.processes import kernel_events as netlink
from wattspan.processes.kernel_events import (
    EventChannel,
    ExitRecord,
    ProcessEvents,
    acknowledgement,
    parse_exit,
    record_event,
)

LAST = 0x20


def event(what: int, *numbers: int) -> bytes:
    """A datagram as the kernel makes it: the event is as long as its longest kind."""
    body = struct.pack("=IIQ", what, 0, 5) + struct.pack("=6I", *numbers, *[0] * (6 - len(numbers)))
    return netlink.message(3, 0, struct.pack("=IIIIHH", 1, 1, 0, 0, len(body), 0) + body)


def heard(*events: bytes) -> ProcessEvents:
    news = ProcessEvents()
    for one in events:
        record_event(one, news)
    return news


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
    assert not heard(event(1, 10, 10, 11, 11)[:length]).churn


def test_single_threaded_exit_has_its_own_record() -> None:
    assert parse_exit(exit_message(stats(42, 12345))) == ExitRecord(
        42, 7, 12345, 3_000_000, "work", 1000
    )


def test_exit_of_a_thread_is_ignored() -> None:
    assert parse_exit(exit_message(stats(43, 5, tgid=42, flag=0))) is None


def test_last_thread_reports_the_sum_of_its_group() -> None:
    final = parse_exit(exit_message(stats(43, 5, tgid=42), (42, stats(0, 999))))
    assert final is not None
    assert (final.pid, final.cpu, final.certain) == (42, 999, True)


def test_exit_record_of_an_old_kernel_is_uncertain() -> None:
    final = parse_exit(exit_message(stats(43, 5, version=8)))
    assert final is not None
    assert not final.certain


def test_cpu_time_without_delay_accounting_is_in_ticks() -> None:
    final = parse_exit(exit_message(stats(42, 0, ticks=4000)))
    assert final is not None
    assert final.cpu == 4_000_000


@pytest.mark.parametrize("length", [0, 4, 7, 20, 100, 400])
def test_exit_records_cut_short_are_ignored(length: int) -> None:
    assert parse_exit(exit_message(stats(42, 5))[:length]) is None


def test_sum_of_a_group_replaces_the_record_of_its_leader() -> None:
    news = ProcessEvents()
    news.add_exit(ExitRecord(42, 1, 5, 1, "x", 0, certain=False))
    news.add_exit(ExitRecord(42, 1, 9, 1, "x", 0))
    assert [final.cpu for final in news.exits[42]] == [9]


def test_messages_end_where_one_is_cut() -> None:
    whole = netlink.message(20, 0, b"abcd") + netlink.message(21, 0, b"efgh")
    assert list(netlink.messages(whole)) == [(20, b"abcd"), (21, b"efgh")]
    assert list(netlink.messages(whole[:-1])) == [(20, b"abcd")]
    assert list(netlink.messages(b"\xff" * 40)) == []
    assert list(netlink.attributes(b"\xff" * 40)) == []


class Link:
    """A socket with a few datagrams in it; None is a dropped one."""

    def __init__(self, *datagrams: tuple[bytes, int] | None) -> None:
        self._datagrams = list(datagrams)

    def recvfrom(self, size: int) -> tuple[bytes, tuple[int, int]]:
        if not self._datagrams:
            raise BlockingIOError
        datagram = self._datagrams.pop(0)
        if datagram is None:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return datagram[0], (datagram[1], 0)


def reader(link: Link) -> tuple[EventChannel, list[bytes]]:
    read: list[bytes] = []
    return EventChannel(link, lambda datagram, _: read.append(datagram)), read  # type: ignore[arg-type]


def test_dropped_messages_are_counted_and_the_rest_is_read() -> None:
    channel, read = reader(Link((b"a", 0), None, (b"b", 0)))
    channel.drain(events := ProcessEvents())
    assert read == [b"a", b"b"]
    assert events.lost


def test_only_messages_of_the_kernel_count() -> None:
    channel, read = reader(Link((b"forged", 4711), (b"true", 0)))
    channel.drain(ProcessEvents())
    assert read == [b"true"]
