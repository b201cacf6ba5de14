"""For any content of a ring and any time of writing: no record is invented, doubled or silently
lost."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.ingest.side_channel import MAX_RING_RECORDS, RingError, RingReader
from wattspan.sdk.ring import ENDED, RECORD_SIZE, STARTED, WRITE_FORMAT
from wattspan.spans.values import SpanEnd, SpanStart

counts = st.sampled_from([1, 2, 3, 8, 17, 64, 600])


@contextmanager
def ring(count: int) -> Iterator[tuple[int, RingReader]]:
    """The descriptor that the writer has, and the agent's ring."""
    writer = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    reader = None
    try:
        os.ftruncate(writer, count * RECORD_SIZE)
        fcntl.fcntl(writer, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        reader = RingReader(os.dup(writer), count)
        yield writer, reader
    finally:
        os.close(writer)
        if reader is not None:
            reader.close()


def write(writer: int, count: int, number: int) -> None:
    kind = STARTED if number % 2 else ENDED
    data = WRITE_FORMAT.pack(number, number // 2, number * 1000, number * 10, 42, kind, number)
    os.pwrite(writer, data, number % count * RECORD_SIZE)


def numbers(records: list[SpanStart | SpanEnd]) -> list[int]:
    return [int.from_bytes(each.id) for each in records]


@given(counts, st.lists(st.integers(0, 1300), max_size=12))
def test_records_arrive_once_in_order_or_count_as_lost(count: int, bursts: list[int]) -> None:
    written = told = lost = 0
    seen: list[int] = []
    with ring(count) as (writer, reader):
        for burst in bursts:
            for _ in range(burst):
                written += 1
                write(writer, count, written)
            records, missing = reader.drain()
            seen += numbers(records)
            lost += missing
            told += len(records)
            assert told + lost == written
            if burst <= count:
                assert missing == 0
    assert seen == sorted(set(seen))


@given(counts, st.integers(1, 600), st.integers(0, 40))
def test_records_have_the_written_values(count: int, upto: int, drains: int) -> None:
    with ring(count) as (writer, reader):
        for number in range(1, upto + 1):
            write(writer, count, number)
            if number % (drains + 1) == 0:
                reader.drain()
        for each in reader.drain()[0]:
            number = int.from_bytes(each.id)
            assert (each.at, each.thread, each.cpu) == (number * 1000, 42, number * 10)
            assert isinstance(each, SpanStart if number % 2 else SpanEnd)
            if isinstance(each, SpanStart):
                assert each.parent == ((number // 2).to_bytes(8) if number // 2 else b"")


@given(st.permutations(range(1, 13)), st.sets(st.integers(0, 11)))
def test_out_of_order_records_are_read_in_order_or_lost(order: list[int], drains: set[int]) -> None:
    seen: list[int] = []
    lost = 0
    with ring(64) as (writer, reader):
        for step, number in enumerate(order):
            write(writer, 64, number)
            if step in drains:
                records, missing = reader.drain()
                seen += numbers(records)
                lost += missing
        records, missing = reader.drain(last=True)
        seen += numbers(records)
    assert seen == sorted(set(seen))
    assert len(seen) + lost + missing == 12


def test_late_record_is_waited_for_once() -> None:
    with ring(64) as (writer, reader):
        write(writer, 64, 1)
        write(writer, 64, 3)
        assert numbers(reader.drain()[0]) == [1]
        write(writer, 64, 2)
        assert numbers(reader.drain()[0]) == [2, 3]
        write(writer, 64, 5)
        assert reader.drain() == ([], 0)
        records, lost = reader.drain()
        assert (numbers(records), lost) == ([5], 1)


def test_last_drain_does_not_wait() -> None:
    with ring(64) as (writer, reader):
        write(writer, 64, 2)
        records, lost = reader.drain(last=True)
        assert (numbers(records), lost) == ([2], 1)


def test_record_of_an_unknown_kind_is_lost() -> None:
    with ring(64) as (writer, reader):
        os.pwrite(writer, WRITE_FORMAT.pack(1, 0, 0, 0, 0, 9, 1), RECORD_SIZE)
        write(writer, 64, 2)
        records, lost = reader.drain()
        assert (numbers(records), lost) == ([2], 1)


@given(counts, st.binary(min_size=1, max_size=600 * RECORD_SIZE), st.integers(0, 599))
def test_any_ring_content_is_read_in_bounded_time(count: int, junk: bytes, slot: int) -> None:
    with ring(count) as (writer, reader):
        os.pwrite(writer, junk[: count * RECORD_SIZE], 0)
        for number in range(slot % count, slot % count + 3):
            write(writer, count, number)
        try:
            for _ in range(3):
                records, lost = reader.drain()
                assert len(records) <= 4 * MAX_RING_RECORDS
                assert lost >= 0
        except RingError:
            pass


def test_impossible_record_number_is_an_error() -> None:
    with ring(64) as (writer, reader):
        write(writer, 64, (1 << 41) * 64 + 1)
        with pytest.raises(RingError, match="stands in the place of 1"):
            reader.drain()


@pytest.mark.parametrize("count", [0, -1, MAX_RING_RECORDS + 1])
def test_ring_of_invalid_size_is_refused(count: int) -> None:
    with pytest.raises(RingError, match="a ring of"):
        RingReader(0, count)


def test_unsealed_ring_is_refused() -> None:
    with ring(8) as (writer, reader):
        with pytest.raises(PermissionError):
            os.ftruncate(writer, 0)
        write(writer, 8, 1)
        assert numbers(reader.drain()[0]) == [1]
