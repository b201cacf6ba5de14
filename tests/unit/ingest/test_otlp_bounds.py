"""Bounds on the cost of one request, and memory after a refused one."""

from __future__ import annotations

import asyncio
import gc
import gzip
import sys
from collections.abc import Iterator

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from testbed.hostile_otlp import JSONS, PERMITTED, PERMITTED_JSON, PROTOBUFS, bombs
from testbed.otlp import KeptSink, Receiver, request, span, span_names
from testbed.otlp_reference import json_of

from wattspan.http.sockets import Peer
from wattspan.ingest.request_limits import (
    MAX_FIELDS,
    SPAN,
    FieldBudget,
    MalformedRequestError,
    ReceiverBusyError,
    RequestTooLargeError,
    count_fields,
)
from wattspan.ingest.trace_receiver import LARGE_JSON_REQUEST, LARGE_REQUEST, TraceReceiver
from wattspan.testing import ManualClock
from wattspan.util.encoding import (
    MAX_COMPRESSION_RATIO,
    RATIO_EXEMPT_BYTES,
    BodyEncodingError,
    BodyTooLongError,
    gzip_decompress,
)
from wattspan.util.protobuf import encode_message, length_delimited, message_class

PEER = Peer(pid=7, uid=0)
MIB = 1 << 20
FLOODS = [
    *("attributes", "events", "links", "unknown fields", "unknown varints", "groups"),
    *("nested groups", "attributes of events", "attributes of links", "values of an array"),
    *("values of a list", "nested values", "attributes of a resource", "attributes of a scope"),
    *("varints of ten bytes", "field behind an overlong varint"),
]


def count(message: bytes, most: int) -> int:
    return count_fields(message, SPAN, most, FieldBudget(1 << 40))


# -------------------------------------------------------------------------------------- fields


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_fields_is_refused_at_any_depth(name: str) -> None:
    with pytest.raises(
        RequestTooLargeError, match="at most 131072 fields, attributes, events and links"
    ):
        Receiver(4 * MIB).take(PROTOBUFS[name](2 * MIB), PEER)


@pytest.mark.parametrize("json", [False, True])
def test_span_of_too_many_values_costs_no_other_span(*, json: bool) -> None:
    """OpenInference: each vector of a call for embeddings is a list of doubles (issue 2210)."""
    vectors = span(2)
    for number in range(44):
        name = f"embedding.embeddings.{number}.embedding.vector"
        values = vectors.attributes.add(key=name).value.array_value.values
        values.extend([AnyValue(double_value=0.5)] * 1536)
    whole = request(span(1), vectors, span(3))
    receiver = Receiver(16 * MIB, keep=True)
    body = json_of(whole) if json else whole.SerializeToString()
    rejected = receiver.take(body, PEER, json=json)
    assert (rejected.spans, receiver.sink.refused) == (1, {"too_large": 1})
    assert "pan has at most 131072 fields" in rejected.reason
    assert span_names(receiver.sink.deliveries[0].message) == ["work 1", "work 3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PERMITTED)
def test_request_within_the_bounds_is_accepted(name: str) -> None:
    receiver = Receiver(16 * MIB)
    receiver.take(PERMITTED[name](2 * MIB), PEER)
    assert receiver.sink.count > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PERMITTED_JSON)
def test_json_request_within_the_bounds_is_accepted(name: str) -> None:
    receiver = Receiver(16 * MIB)
    receiver.take(PERMITTED_JSON[name](MIB), PEER, json=True)
    assert receiver.sink.count > 0


def test_attributes_that_are_searched_in_one_request_are_bounded() -> None:
    with pytest.raises(RequestTooLargeError, match="at most 131072 fields and attributes"):
        Receiver(MIB).take(PROTOBUFS["searched spans"](2 * MIB), PEER)


def test_batch_at_the_sdk_limits_is_accepted() -> None:
    """512 spans of 128 attributes and 8 events each, and one of 128 events of 128 attributes."""
    event = length_delimited(
        11,
        encode_message(
            (3, length_delimited(1, b"key") + length_delimited(2, length_delimited(1, b"v")))
            for _ in range(128)
        ),
    )
    assert count(event * 128, MAX_FIELDS) <= MAX_FIELDS
    usual = span(1, **{f"attribute_{number}": number for number in range(128)})
    whole = request(*[usual] * 512)
    receiver = Receiver(16 * MIB)
    receiver.take(whole.SerializeToString(), PEER)
    assert receiver.sink.count == 512


_FIELDS = st.lists(
    st.sampled_from(
        [
            length_delimited(1, b"trace id"),
            b"\x40\x01",
            b"\x40" + b"\xff" * 9 + b"\x01",
            b"\x40" + b"\xff" * 9 + b"\x7f",  # of 70 bits: the parser drops six of them
            b"\x39" + bytes(8),
            b"\x45" + bytes(4),
            length_delimited(99, b"unknown" * 9),
        ]
    ),
    max_size=60,
)


@given(_FIELDS)
def test_field_count_matches_the_parser(fields: list[bytes]) -> None:
    message = b"".join(fields)
    message_class("Span").FromString(message)
    most = max(0, len(message) // 2 - 1)
    assert count(message, most) == min(len(fields), most + 1)


@given(st.binary(max_size=300), st.integers(0, 5))
def test_every_field_of_a_valid_message_is_counted(prefix: bytes, most: int) -> None:
    message = prefix + b"\x4a\0" * 300
    try:
        message_class("Span").FromString(message)
    except DecodeError:
        return
    seen = len(message_class("SpanAttributes").FromString(message).attributes)
    assert count(message, most) == most + 1 or seen <= most


def test_nested_fields_are_counted_once() -> None:
    attribute = length_delimited(
        9, length_delimited(1, b"a") + length_delimited(2, length_delimited(1, b"value"))
    )  # 1 + 2 + 1 fields
    assert count(attribute * 10, 60) == 40
    assert count(length_delimited(99, attribute * 10), 60) == 1  # its content is unknown


@pytest.mark.parametrize("end", [b"\x0e", b"\n\xff", b"\n\xff\xff\xff\x7f", b"\xff", b"\xff" * 11])
def test_count_ends_where_a_message_is_malformed(end: bytes) -> None:
    message = length_delimited(5, bytes(100)) + end
    assert count(message, 10) <= 2
    with pytest.raises(DecodeError):
        message_class("Span").FromString(message)


# --------------------------------------------------------------------------------- compression


def test_bomb_is_refused_at_its_ratio() -> None:
    with pytest.raises(BodyTooLongError, match=f"more than {MAX_COMPRESSION_RATIO} times its size"):
        gzip_decompress(gzip.compress(bytes(16 * MIB)), 64 * MIB)


def test_small_body_may_have_any_ratio() -> None:
    assert (
        len(gzip_decompress(gzip.compress(bytes(RATIO_EXEMPT_BYTES)), 64 * MIB))
        == RATIO_EXEMPT_BYTES
    )


@pytest.mark.parametrize("name", bombs(MIB))
def test_body_with_a_wrong_encoding_is_refused(name: str) -> None:
    with pytest.raises((BodyTooLongError, BodyEncodingError, MalformedRequestError)):
        Receiver(4 * MIB).traces.decoder().decode(gzip_decompress(bombs(16 * MIB)[name], 4 * MIB))


# ------------------------------------------------------------------- the listeners' thread


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("size", "json", "at_once"),
    [
        (LARGE_JSON_REQUEST, True, True),
        (LARGE_JSON_REQUEST + 1, True, False),
        (LARGE_JSON_REQUEST + 1, False, True),
        (LARGE_REQUEST + 1, False, False),
    ],
)
def test_large_request_leaves_the_turn_to_others(
    size: int, json: bool, at_once: bool, zipped: bool
) -> None:
    whole = request(span(1)).SerializeToString()
    body = whole + length_delimited(15, bytes(size - len(whole) - 4))  # an unknown field
    if json:
        fields = (
            b'"traceId":"0af7651916cd43dd8448eb211c80319c","spanId":"b7ad6b7169203331",'
            b'"startTimeUnixNano":1,"endTimeUnixNano":2'
        )
        text = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{%b}]}]}]}' % fields
        body = text.ljust(size)
    assert len(body) == size
    sink = KeptSink()
    reader = TraceReceiver(sink, ManualClock(), max_request=MIB)
    sent = gzip.compress(body) if zipped else body

    async def send() -> None:
        task = asyncio.create_task(reader.receive(sent, PEER, json=json, coding="gzip" * zipped))
        loop = asyncio.get_running_loop()
        turned = loop.create_future()
        loop.call_soon(turned.set_result, None)
        await turned  # the task has had its first turn
        assert sink.count == at_once
        await task

    asyncio.run(send())
    assert sink.count == 1


def test_scope_without_spans_delivers_nothing() -> None:
    whole = request(span(1))
    whole.resource_spans[0].scope_spans.add()
    receiver = Receiver(MIB)
    receiver.take(whole.SerializeToString(), PEER)
    assert receiver.sink.count == 1
    del whole.resource_spans[0].scope_spans[0]
    receiver.take(whole.SerializeToString(), PEER)
    assert receiver.sink.count == 1


# ------------------------------------------------------------------------ retained memory


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Cycles stay: memory is freed without the garbage collector."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def references(reader: TraceReceiver, body: bytes, *, json: bool = False, coding: str = "") -> int:
    """The references to a body that a refused request leaves behind."""
    before = sys.getrefcount(body)

    async def refused() -> None:
        try:
            await reader.receive(body, PEER, json=json, coding=coding)
        except (
            MalformedRequestError,
            RequestTooLargeError,
            BodyEncodingError,
            BodyTooLongError,
            ReceiverBusyError,
        ):
            return
        raise AssertionError("the request was taken")

    asyncio.run(refused())
    return sys.getrefcount(body) - before


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("size", [LARGE_REQUEST // 2, 2 * LARGE_REQUEST])
@pytest.mark.parametrize("kind", ["garbage", "cut short", "attributes", "numbers", "objects"])
def test_refused_body_is_freed_without_the_collector(kind: str, size: int) -> None:
    json = kind in JSONS
    build = JSONS[kind] if json else PROTOBUFS[kind]
    for zipped in (False, True):
        plain = build(size)
        body = gzip.compress(plain) if zipped else plain
        reader = TraceReceiver(KeptSink(), ManualClock(), max_request=max(1 << 16, size // 2))
        assert references(reader, body, json=json, coding="gzip" * zipped) == 0
        assert references(reader, body, json=not json, coding="gzip" * (not zipped)) == 0


@pytest.mark.usefixtures("uncollected")
def test_body_refused_as_busy_is_freed_without_the_collector() -> None:
    sink = KeptSink()
    sink.busy = 1
    reader = TraceReceiver(sink, ManualClock(), max_request=MIB)
    assert references(reader, request(span(1, text="x" * LARGE_REQUEST)).SerializeToString()) == 0
