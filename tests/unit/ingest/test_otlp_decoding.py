"""Records decoded from an OTLP request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from testbed.otlp import BEGIN, TRACE, KeptSink, Receiver, attribute, request, span, span_names
from testbed.otlp_reference import json_of

from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import MAX_NAME, ResourceClaim, WorkAttribute
from wattspan.ingest.request_limits import (
    MalformedRequestError,
    ReceiverBusyError,
    RequestTooLargeError,
)
from wattspan.ingest.trace_receiver import RejectedSpans
from wattspan.spans import values
from wattspan.util.protobuf import length_delimited

PEER = Peer(pid=7, uid=0)


def told(*spans: Span, service: str = "", **options: Any) -> list[values.Span]:
    """Records of the spans of one resource."""
    receiver = Receiver(**options)
    whole = request(*spans, resource={"service.name": service})
    receiver.take(whole.SerializeToString(), PEER)
    return list(receiver.sink.deliveries[0].parts[0].spans)


def claim(**resource: str | int) -> ResourceClaim:
    receiver = Receiver()
    named = {name.replace("__", "."): value for name, value in resource.items()}
    receiver.take(request(resource=named).SerializeToString(), PEER)
    return receiver.sink.deliveries[0].parts[0].claim


# ---------------------------------------------------------------------------------- one span


def test_record_has_all_fields_that_energy_needs() -> None:
    one = span(5, gen_ai__usage__input_tokens=12, gen_ai__usage__output_tokens=34)
    one.parent_span_id = b"parent!!"
    assert told(one) == [
        values.Span(
            trace=TRACE,
            id=bytes(7) + b"\5",
            parent=b"parent!!",
            service="",
            name="work 5",
            start=BEGIN + 5,
            end=BEGIN + 1005,
            weight=None,
            tokens_in=12,
            tokens_out=34,
        )
    ]


def test_attributes_belong_to_their_span() -> None:
    spans = [
        span(1, gen_ai__usage__input_tokens=1),
        span(2),
        span(3, gen_ai__usage__input_tokens=3),
    ]
    assert [one.tokens_in for one in told(*spans)] == [1, 0, 3]


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (0, 0),
        (127, 127),
        (128, 128),
        (10**7, 10**7),
        (10**7 + 1, 0),
        (2**63 - 1, 0),
        (-1, 0),
        ("42", 42),
        ("42.0", 42),
        ("-42", 0),
        ("1e3", 0),
        (" 42", 0),
        ("9" * 30, 0),
        (3.0, 3),
        (2.6, 3),
        (float("nan"), 0),
        (float("inf"), 0),
        (True, 0),
        ("main", 0),
        ("", 0),
        ("\u0663", 0),  # a digit
    ],
)
def test_counts_are_read_from_every_numeric_encoding(value: str | float, count: int) -> None:
    assert told(span(gen_ai__usage__input_tokens=value))[0].tokens_in == count


def test_weight_is_read_from_the_configured_attribute() -> None:
    values = [17, 0, 1.6, -1, True, "much"]
    spans = [span(), *(span(2, app__tokens=value) for value in values)]
    weights = [one.weight for one in told(*spans, weight="app.tokens")]
    assert weights == [None, 17, 0, 2, None, None, None]


@pytest.mark.parametrize(
    ("value", "work"),
    [
        (17, 17),
        (2**53 + 1, 2**53 + 1),  # no float is that
        (0, 0),
        (-3, -3),
        (0.5, 0.5),
        (-0.5, -0.5),
        (1e-320, 0),  # a wrong value in a ratio is worse than an absent one
        (1e300, None),
        (float("nan"), None),
        (float("inf"), None),
        ("64", 64),
        ("2.5", 2.5),
        ("-1", -1),
        ("1e5", None),
        ("nan", None),
        ("", None),
        ("many", None),
        (True, None),
    ],
)
def test_work_is_the_reported_number_also_if_it_is_not_positive(
    value: str | float, work: float | None
) -> None:
    assert told(span(batch__samples=value), work=[WorkAttribute("batch.samples")])[0].work == work


def test_work_in_json_is_as_in_protobuf() -> None:
    receiver = Receiver(work=[WorkAttribute("samples", span="work 1"), WorkAttribute("tokens")])
    rows = [
        {"key": "samples", "value": {"doubleValue": 0.5}},
        {"key": "tokens", "value": {"intValue": "17"}},
    ]
    ids = {"traceId": TRACE.hex(), "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    spans = [
        {**ids, "spanId": f"{number:016x}", "name": f"work {number}", "attributes": rows}
        for number in (1, 2)
    ]
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    receiver.take(body, PEER, json=True)
    assert [one.work for one in receiver.sink.deliveries[0].parts[0].spans] == [0.5, 17]


def test_work_is_read_only_where_configured_and_present() -> None:
    assert told(span(samples=4))[0].work is None
    both = told(span(1, samples=4), span(2), span(3, samples=5), work=[WorkAttribute("samples")])
    assert [one.work for one in both] == [4, None, 5]


@pytest.mark.parametrize("json_encoded", [False, True])
def test_work_attribute_that_is_added_later_is_read(json_encoded: bool) -> None:
    receiver = Receiver()
    whole = request(span(samples=4), resource={"service.name": "trainer"})
    body = json_of(whole) if json_encoded else whole.SerializeToString()
    for attributes in ((), (WorkAttribute("samples", "trainer"),), ()):
        receiver.work = attributes
        receiver.take(body, PEER, json=json_encoded)
    work = [one.parts[0].spans[0].work for one in receiver.sink.deliveries]
    assert work == [None, 4, None]


def test_work_attributes_are_selected_by_service_and_span() -> None:
    both = [span(1, samples=4, tokens=900), span(2, samples=5, tokens=800)]
    work = [
        WorkAttribute("samples", service="trainer", span="work 1"),
        WorkAttribute("tokens", service="trainer"),
        WorkAttribute("samples"),
    ]
    assert [one.work for one in told(*both, service="trainer", work=work)] == [4, 800]
    assert [one.work for one in told(*both, service="other", work=work)] == [4, 5]


def test_only_the_first_matching_work_attribute_counts() -> None:
    work = [WorkAttribute("samples", span="work 1"), WorkAttribute("tokens")]
    assert [one.work for one in told(span(1, tokens=9), span(2, tokens=8), work=work)] == [None, 8]


def test_one_attribute_may_be_tokens_weight_and_work() -> None:
    name = "gen_ai.usage.output_tokens"
    spans = [span(1, **{name: -5}), span(2, **{name: 2.5}), span(3, **{name: 2.5})]
    seen = told(*spans, work=[WorkAttribute(name)], weight=name)
    assert [(one.tokens_out, one.weight, one.work) for one in seen] == [
        (0, None, -5),
        (2, 2, 2.5),
        (2, 2, 2.5),
    ]


def test_attribute_of_an_event_is_not_the_spans() -> None:
    one = span()
    attribute(one.events.add(name="e"), "gen_ai.usage.input_tokens", 9)
    assert told(one)[0].tokens_in == 0
    attribute(one, "gen_ai.usage.input_tokens", 4)
    assert told(one)[0].tokens_in == 4


def test_attribute_name_inside_a_text_value_is_ignored() -> None:
    text = "\n\x19gen_ai.usage.input_tokens\x12\x02\x18\x05"
    assert told(span(note=text))[0].tokens_in == 0
    assert told(span(note=text, gen_ai__usage__input_tokens=6))[0].tokens_in == 6
    assert (
        told(span(gen_ai__usage__input_tokens__short=7, agen_ai__usage__input_tokens=8))[
            0
        ].tokens_in
        == 0
    )


def test_encoded_attribute_inside_a_text_value_is_ignored() -> None:
    """Like an application whose operator stores prompts: one may not."""
    forged = KeyValue(key="gen_ai.usage.input_tokens", value=AnyValue(int_value=99))
    raw = forged.SerializeToString()
    text = (b"J" + bytes([len(raw)]) + raw).decode()
    for note in (text, f"please {text} thanks"):
        assert told(span(note=note))[0].tokens_in == 0
        (one,) = told(span(note=note, gen_ai__usage__input_tokens=7))
        assert one.tokens_in == 7


def test_value_written_before_its_key_is_found() -> None:
    """No encoder writes so, but protobuf lets it."""
    value = KeyValue(value=AnyValue(int_value=5)).SerializeToString()
    pair = value + KeyValue(key="gen_ai.usage.input_tokens").SerializeToString()
    receiver = Receiver()
    raw = span().SerializeToString() + b"\x4a" + bytes([len(pair)]) + pair
    body = b"\x12" + _length(raw) + raw
    body = b"\x12" + _length(body) + body
    receiver.take(b"\n" + _length(body) + body, PEER)
    assert receiver.sink.deliveries[0].parts[0].spans[0].tokens_in == 5


def test_attribute_with_a_long_value_is_not_a_count() -> None:
    assert told(span(gen_ai__usage__input_tokens="7" * 200))[0].tokens_in == 0


def test_attribute_that_is_cut_short_costs_its_span_only() -> None:
    receiver = Receiver(keep=True)
    body = request(span(1), span(2, gen_ai__usage__input_tokens=5), span(3)).SerializeToString()
    rejected = receiver.take(body.replace(b"\x12\x02\x18\x05", b"\x12\x09\x18\x05"), PEER)
    assert rejected.spans == receiver.sink.refused["malformed"] == 1
    assert "resource_spans[0].scope_spans[0].spans[1] is invalid" in rejected.reason
    (delivery,) = receiver.sink.deliveries
    assert [one.name for one in delivery.parts[0].spans] == ["work 1", "work 3"]
    assert delivery.message == request(span(1), span(3)).SerializeToString()


@pytest.mark.parametrize(
    ("place", "good", "refused"),
    [((0,), ["work 3"], 1), ((0, 0), ["work 3"], 1), ((0, 0, 0), ["work 2", "work 3"], 1),
     ((0, -1), ["work 3"], 2)],
)  # fmt: skip
def test_malformed_message_costs_its_own_spans_only(
    place: tuple[int, ...], good: list[str], refused: int
) -> None:
    """A place of (0, -1) is the resource of the first two spans."""
    cut = b"\x0a\x7f"  # a field of 127 bytes that are not there
    first, second = (length_delimited(2, span(at).SerializeToString()) for at in (1, 2))
    if len(place) == 3:
        first = length_delimited(2, cut)
    scope = cut if place == (0, 0) else first + second
    resource = length_delimited(1, length_delimited(1, cut)) if place[-1] < 0 else b""
    outer = cut if place == (0,) else resource + length_delimited(2, scope)
    whole = length_delimited(1, outer) + request(span(3)).SerializeToString()
    receiver = Receiver(keep=True)
    rejected = receiver.take(whole, PEER)
    assert rejected.spans == refused
    parts = [part for delivery in receiver.sink.deliveries for part in delivery.parts]
    assert [one.name for part in parts for one in part.spans] == good
    assert span_names(receiver.sink.deliveries[0].message) == good


def test_request_of_a_single_malformed_resource_is_malformed() -> None:
    with pytest.raises(MalformedRequestError, match=r"resource_spans\[0\] is invalid"):
        Receiver().take(length_delimited(1, b"\x0a\x7f"), PEER)


@pytest.mark.parametrize("field", ["start_time_unix_nano", "end_time_unix_nano"])
def test_span_without_a_time_is_refused_alone(field: str) -> None:
    bad = span(2)
    bad.ClearField(field)  # type: ignore[arg-type]
    receiver = Receiver()
    rejected = receiver.take(request(span(1), bad).SerializeToString(), PEER)
    assert (rejected.spans, receiver.sink.refused) == (1, {"invalid_time": 1})
    assert "a start and an end" in rejected.reason
    assert [one.name for one in receiver.sink.deliveries[0].parts[0].spans] == ["work 1"]


def test_empty_value_is_neither_count_nor_text() -> None:
    body = request(
        span(gen_ai__usage__input_tokens=5), resource={"service.name": "abc"}
    ).SerializeToString()
    receiver = Receiver()
    body = body.replace(b"\x18\x05", b"\x18\xff").replace(b"\n\x03abc", b"\n\x04abc")
    receiver.take(body, PEER)
    (part,) = receiver.sink.deliveries[0].parts
    assert (part.claim.service, part.spans[0].tokens_in) == ("", 0)


def test_weight_with_a_very_long_name_is_found() -> None:
    name = "w" * 300
    assert told(span(**{name: 3}), weight=name)[0].weight == 3


@pytest.mark.parametrize("parent", [bytes(8), b"short", b"much too long"])
def test_invalid_parent_id_is_no_parent(parent: bytes) -> None:
    one = span()
    one.parent_span_id = parent
    assert told(one)[0].parent == b""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("GET /a b", "GET /a b"),
        ("", ""),
        ("é→日本", "é→日本"),
        ("a\nb\x00c\x1b[31m", "abc[31m"),
        ("a\u202eb\u200bc", "abc"),
        ("x" * 1000, "x" * MAX_NAME),
        ("日" * 1000, "日" * MAX_NAME),
    ],
)
def test_names_are_shortened_and_printable(name: str, shown: str) -> None:
    one = span()
    one.name = name
    assert told(one)[0].name == shown


def test_undecodable_name_does_not_lose_the_span() -> None:
    body = request().SerializeToString().replace(b"work 1", b"wo\xffk 1")
    receiver = Receiver()
    receiver.take(body, PEER)
    assert receiver.sink.deliveries[0].parts[0].spans[0].name == "wo\ufffdk 1"


# ------------------------------------------------------------------------------ one resource


def test_claim_has_the_resource_attributes() -> None:
    assert claim(
        service__name="shop",
        process__pid=4242,
        process__creation__time="2026-01-01T00:00:00Z",
        container__id="abc",
    ) == ResourceClaim("shop", 4242, "2026-01-01T00:00:00Z", "abc")


@pytest.mark.parametrize("pid", [0, -5, 2**40, "x", True])
def test_invalid_pid_is_none(pid: str | int) -> None:
    assert claim(process__pid=pid) == ResourceClaim()


def test_pid_written_as_text_is_one() -> None:
    assert claim(process__pid="12").pid == 12


def test_resource_attributes_beyond_a_thousand_are_not_searched() -> None:
    before = {f"a{number}": 1 for number in range(1022)}
    assert claim(**before, service__name="shop", process__pid=5) == ResourceClaim("shop", 5)
    assert claim(**before, service__name="shop", b=1, process__pid=5) == ResourceClaim("shop")


def test_records_are_grouped_by_resource_in_order() -> None:
    whole = request(span(1), span(2), resource={"service.name": "a"})
    whole.resource_spans[0].scope_spans.add().spans.append(span(3))
    whole.MergeFrom(request(span(4), resource={"service.name": "b"}))
    receiver = Receiver()
    receiver.take(whole.SerializeToString(), PEER)
    (delivery,) = receiver.sink.deliveries
    assert [(part.claim.service, [s.name for s in part.spans]) for part in delivery.parts] == [
        ("a", ["work 1", "work 2", "work 3"]),
        ("b", ["work 4"]),
    ]


# ------------------------------------------------------------------------------- a delivery


def test_export_request_has_peer_time_and_size() -> None:
    receiver, body = Receiver(), request().SerializeToString()
    receiver.take(body, PEER)
    (delivery,) = receiver.sink.deliveries
    assert delivery.peer == PEER
    assert delivery.received == receiver.clock.monotonic()
    assert (delivery.size, delivery.count, delivery.message) == (len(body), 1, None)


def test_forwarded_request_contains_its_message() -> None:
    receiver, body = Receiver(keep=True), request(span(1, any="thing")).SerializeToString()
    body += b"\xfa\x01\x04news"  # an unknown future field
    receiver.take(body, PEER)
    assert receiver.sink.deliveries[0].message == body


def test_spans_with_unusable_ids_are_skipped_and_counted() -> None:
    bad = [span(number) for number in range(2, 6)]
    bad[0].trace_id = bytes(16)
    bad[1].trace_id = b"short"
    bad[2].span_id = bytes(8)
    bad[3].span_id = b""
    receiver = Receiver()
    body = request(span(1), *bad[:2], span(7), *bad[2:]).SerializeToString()
    refused = receiver.take(body, PEER)
    assert refused.spans == 4
    assert "neither is all zeros" in refused.reason
    assert receiver.sink.refused == {"invalid_id": 4}
    (delivery,) = receiver.sink.deliveries
    assert [one.name for one in delivery.parts[0].spans] == ["work 1", "work 7"]
    assert delivery.skipped == {1, 2, 4, 5}


def test_positions_of_skipped_spans_run_through_all_resources() -> None:
    bad = span(3)
    bad.span_id = b""
    whole = request(span(1), span(2))
    whole.MergeFrom(request(bad))
    whole.MergeFrom(request(span(4), bad))
    receiver = Receiver()
    receiver.take(whole.SerializeToString(), PEER)
    (delivery,) = receiver.sink.deliveries
    assert delivery.skipped == {2, 4}
    assert [len(part.spans) for part in delivery.parts] == [2, 1]


def test_invalid_spans_are_not_counted_for_a_busy_sink() -> None:
    bad = span(3)
    bad.span_id = b""
    receiver, body = Receiver(), request(span(1), bad).SerializeToString()
    receiver.sink.busy = 1
    with pytest.raises(ReceiverBusyError):
        receiver.take(body, PEER)
    receiver.take(body, PEER)
    assert receiver.sink.refused == {"invalid_id": 1}


@pytest.mark.parametrize("body", [b"", request().SerializeToString()[:0], b"\n\0", b"\n\2\x12\0"])
def test_request_without_spans_is_not_queued(body: bytes) -> None:
    receiver = Receiver()
    assert receiver.take(body, PEER) == RejectedSpans()
    assert receiver.sink.deliveries == []


@pytest.mark.parametrize(
    "body", [b"garbage", b"\n\x05ab", b"\xff" * 100, request().SerializeToString()[:-3]]
)
def test_invalid_body_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedRequestError, match="no ExportTraceServiceRequest"):
        Receiver().take(body, PEER)


@pytest.mark.parametrize("layer", [b"\n\0", b"\n\2\x12\0"], ids=["resources", "scopes"])
def test_request_of_tiny_messages_is_refused_before_parsing(layer: bytes) -> None:
    sink = KeptSink()
    receiver = Receiver()
    with pytest.raises(RequestTooLargeError, match="at most 8192 spans"):
        receiver.take(layer * 10_000, PEER)
    tiny = b"\x12\0" * 10_000
    scope = b"\x12" + _length(tiny) + tiny
    with pytest.raises(RequestTooLargeError, match="at most 8192 spans"):
        receiver.take(b"\n" + _length(scope) + scope, PEER)
    assert sink.deliveries == []


def _length(of: bytes) -> bytes:
    """The length of a message as protobuf writes it."""
    value, written = len(of), bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])
