"""OTLP/JSON requests: values, names, errors with their place, and limits."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from testbed.otlp import attribute, request, span, span_names

from wattspan.ingest.otlp_json import repaired
from wattspan.ingest.request_limits import MalformedRequestError, RequestTooLargeError
from wattspan.ingest.trace_decoder import DecodedRequest, TraceDecoder

MOST, FIELDS = 100, 1 << 20
SPAN = {
    "traceId": "0af7651916cd43dd8448eb211c80319c",
    "spanId": "b7ad6b7169203331",
    "startTimeUnixNano": "1764412345678901234",
    "endTimeUnixNano": 1764412345678901235,
}


def decode(content: object, *, keep: bool = True, fields: int = FIELDS) -> DecodedRequest:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    decoder = TraceDecoder(max_spans=MOST, max_fields=fields, keep_message=keep)
    return decoder.decode(body, json=True)


def read(content: object) -> ExportTraceServiceRequest:
    """The request as it is forwarded."""
    message = decode(content).message
    assert message is not None
    return ExportTraceServiceRequest.FromString(message)


def around(*spans: object) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def the_span(**fields: object) -> Any:
    return read(around({**SPAN, **fields})).resource_spans[0].scope_spans[0].spans[0]


def wrong(content: object) -> str:
    with pytest.raises(MalformedRequestError) as caught:
        read(content)
    return str(caught.value)


def refused(span: object) -> str:
    """The cause for which a span is refused beside two that are accepted."""
    decoded = decode(around(SPAN, span, {**SPAN, "name": "last"}))
    assert [each.name for part in decoded.parts for each in part.spans] == ["", "last"]
    assert decoded.refused.counts == {"malformed": 1}
    assert decoded.message is not None
    forwarded = ExportTraceServiceRequest.FromString(decoded.message)
    assert [one.name for one in forwarded.resource_spans[0].scope_spans[0].spans] == ["", "last"]
    return decoded.refused.cause


def test_request_with_every_field_is_complete() -> None:
    one = span(1, text="é", whole=-5, real=1.5, yes=True)
    one.parent_span_id, one.trace_state, one.kind, one.flags = b"parent!!", "a=b", 3, 257
    one.dropped_attributes_count = 4
    one.status.code, one.status.message = 2, "no"
    event = one.events.add(name="happened", time_unix_nano=2**64 - 1)
    attribute(event, "thread.id", 7)
    link = one.links.add(trace_id=bytes(range(16, 32)), span_id=b"linked!!")
    attribute(link, "a", "b")
    values = one.attributes.add(key="list").value.array_value.values
    values.add(string_value="x")
    values.add(bytes_value=b"\0\xff\xfe")
    inner = one.attributes.add(key="map").value.kvlist_value.values.add(key="k")
    inner.value.double_value = float("inf")
    whole = request(one, resource={"service.name": "shop", "process.pid": 7})
    outer = whole.resource_spans[0]
    outer.schema_url = "https://opentelemetry.io/schemas/1.38.0"
    outer.scope_spans[0].scope.name, outer.scope_spans[0].scope.version = "lib", "1"
    outer.scope_spans[0].schema_url = "https://example.org"
    content = {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [
                        {"key": "service.name", "value": {"stringValue": "shop"}},
                        {"key": "process.pid", "value": {"intValue": "7"}},
                    ]
                },
                "scopeSpans": [
                    {
                        "scope": {"name": "lib", "version": "1"},
                        "spans": [
                            {
                                "traceId": one.trace_id.hex(),
                                "spanId": one.span_id.hex(),
                                "parentSpanId": one.parent_span_id.hex().upper(),
                                "traceState": "a=b",
                                "flags": 257,
                                "name": "work 1",
                                "kind": "SPAN_KIND_CLIENT",
                                "startTimeUnixNano": str(one.start_time_unix_nano),
                                "endTimeUnixNano": one.end_time_unix_nano,
                                "attributes": [
                                    {"key": "text", "value": {"stringValue": "é"}},
                                    {"key": "whole", "value": {"intValue": -5}},
                                    {"key": "real", "value": {"doubleValue": 1.5}},
                                    {"key": "yes", "value": {"boolValue": True}},
                                    {
                                        "key": "list",
                                        "value": {
                                            "arrayValue": {
                                                "values": [
                                                    {"stringValue": "x"},
                                                    {"bytesValue": "AP/+"},
                                                ]
                                            }
                                        },
                                    },
                                    {
                                        "key": "map",
                                        "value": {
                                            "kvlistValue": {
                                                "values": [
                                                    {
                                                        "key": "k",
                                                        "value": {"doubleValue": "Infinity"},
                                                    }
                                                ]
                                            }
                                        },
                                    },
                                ],
                                "droppedAttributesCount": 4,
                                "events": [
                                    {
                                        "timeUnixNano": str(2**64 - 1),
                                        "name": "happened",
                                        "attributes": [
                                            {"key": "thread.id", "value": {"intValue": "7"}}
                                        ],
                                    }
                                ],
                                "links": [
                                    {
                                        "traceId": bytes(range(16, 32)).hex(),
                                        "spanId": b"linked!!".hex(),
                                        "attributes": [{"key": "a", "value": {"stringValue": "b"}}],
                                    }
                                ],
                                "status": {"code": 2, "message": "no"},
                            }
                        ],
                        "schemaUrl": "https://example.org",
                    }
                ],
                "schemaUrl": "https://opentelemetry.io/schemas/1.38.0",
            }
        ]
    }
    assert read(content) == whole


def test_field_names_of_protobuf_are_accepted() -> None:
    snake = {
        "resource_spans": [
            {
                "schema_url": "u",
                "scope_spans": [
                    {
                        "schema_url": "v",
                        "spans": [{"trace_id": "aa", "start_time_unix_nano": 5}],
                    }
                ],
            }
        ]
    }
    camel = {
        "resourceSpans": [
            {
                "schemaUrl": "u",
                "scopeSpans": [
                    {"schemaUrl": "v", "spans": [{"traceId": "aa", "startTimeUnixNano": 5}]}
                ],
            }
        ]
    }
    assert read(snake) == read(camel)
    assert read(camel).resource_spans[0].schema_url == "u"


@pytest.mark.parametrize(
    "content", [{}, {"resourceSpans": []}, {"resourceSpans": None}, {"resourceSpans": [{}]}]
)
def test_absent_parts_are_empty(content: object) -> None:
    assert not any(one.scope_spans for one in read(content).resource_spans)


def test_unknown_fields_are_ignored() -> None:
    content = {**around({**SPAN, "news": {"a": [1, {}]}, "name": "n"}), "more": [[[]]]}
    content["resourceSpans"][0]["scope_spans_2"] = 7
    assert read(content).resource_spans[0].scope_spans[0].spans[0].name == "n"


def test_null_is_an_absent_field() -> None:
    assert the_span(name=None, attributes=None, status=None, kind=None) == the_span()
    assert read({"resourceSpans": [{"resource": None, "scopeSpans": None}]}).resource_spans


@pytest.mark.parametrize("written", [5, "5", 5.0])
def test_integers_may_be_text_or_end_with_point_zero(written: object) -> None:
    assert the_span(startTimeUnixNano=written).start_time_unix_nano == 5


@pytest.mark.parametrize("written", ["SPAN_KIND_SERVER", 2])
def test_enum_values_may_be_names_or_numbers(written: object) -> None:
    assert the_span(kind=written).kind == 2


@pytest.mark.parametrize("written", ["AP/+", "AP_-", "AP/-"[:3]])
def test_bytes_are_base64_in_either_alphabet(written: str) -> None:
    value = the_span(attributes=[{"key": "b", "value": {"bytesValue": written}}])
    assert value.attributes[0].value.bytes_value.startswith(b"\0\xff")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the request is invalid: Input data was truncated"),
        (b"[]", "the request is invalid: Expected `object`, got `array`"),
        (b'{"resourceSpans": [', "the request is invalid: Input data was truncated"),
        (b'{"resourceSpans": 7}', "resourceSpans is invalid: Expected `array"),
        (b'{"resourceSpans": [7]}', "resourceSpans[0] is invalid: Expected `object`, got `int`"),
        ({"resourceSpans": [{"resource": []}]}, "resourceSpans[0].resource is invalid: Expected"),
        ({"resourceSpans": [{"scopeSpans": [[]]}]}, "scopeSpans[0] is invalid: Expected `object`"),
    ],
)
def test_error_of_a_request_names_its_place(content: object, sentence: str) -> None:
    assert sentence in wrong(content)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (7, "resourceSpans[0].scopeSpans[0].spans[1] is invalid: Expected `object`"),
        ({"name": 5}, "scopeSpans[0].spans[1].name is invalid: Expected `str | null`"),
        ({"traceId": "xyz"}, "spans[1].traceId is invalid: Expected hexadecimal digits"),
        ({"traceId": "CvdlGRbNQ92ESOshHIAxnA=="}, "traceId is invalid"),
        ({"traceId": " aa "}, "traceId is invalid"),
        ({"traceId": 7}, "traceId is invalid"),
        ({"startTimeUnixNano": -1}, "startTimeUnixNano is invalid: Expected a whole number"),
        ({"endTimeUnixNano": 2**64}, "endTimeUnixNano is invalid: Expected a whole number"),
        ({"endTimeUnixNano": "18446744073709551616"}, "endTimeUnixNano is invalid"),
        ({"startTimeUnixNano": "9" * 5000}, "startTimeUnixNano is invalid"),
        ({"startTimeUnixNano": 1.5}, "startTimeUnixNano is invalid"),
        ({"startTimeUnixNano": "NaN"}, "startTimeUnixNano is invalid"),
        ({"startTimeUnixNano": True}, "startTimeUnixNano is invalid"),
        ({"startTimeUnixNano": "soon"}, "startTimeUnixNano is invalid"),
        ({"startTimeUnixNano": [1, 2]}, "startTimeUnixNano is invalid"),
        ({"attributes": {}}, "attributes is invalid: Expected `array | null`, got `object`"),
        ({"events": 5}, "events is invalid: Expected `array | null`, got `int`"),
    ],
)
def test_invalid_span_is_refused_alone_with_its_place(fields: Any, sentence: str) -> None:
    assert sentence in refused({**SPAN, **fields} if isinstance(fields, dict) else fields)


@pytest.mark.parametrize("level", ["resource", "scope", "span", "event", "link"])
@pytest.mark.parametrize(
    "bad",
    [
        *(None, 5, [], {"key": 5}, {"key": "k", "value": "plain"}),
        *(
            {"key": "k", "value": value}
            for value in (
                *(
                    {"stringValue": 5},
                    {"doubleValue": {}},
                    {"doubleValue": "x"},
                    {"boolValue": "yes"},
                ),
                *({"bytesValue": "?"}, {"intValue": "abc"}, {"arrayValue": [1]}),
                *(
                    {"kvlistValue": {"values": [None]}},
                    {"arrayValue": {"values": [{"intValue": []}]}},
                ),
            )
        ),
    ],
    ids=str,
)
def test_invalid_attribute_costs_only_itself(level: str, bad: Any) -> None:
    good = [{"key": name, "value": {"intValue": 7}} for name in ("gen_ai.usage.input_tokens", "b")]

    def of(expected: Any) -> Any:
        attributes = {"attributes": expected}
        inner = {
            "span": attributes,
            "event": {"events": [attributes]},
            "link": {"links": [attributes]},
        }
        content = around({**SPAN, **inner.get(level, {})}, {**SPAN, "name": "last"})
        outer = content["resourceSpans"][0]
        if level in ("resource", "scope"):
            {"resource": outer, "scope": outer["scopeSpans"][0]}[level][level] = attributes
        return content

    decoded = decode(of([good[0], bad, good[1], bad]))
    assert not decoded.refused.total
    assert [one.tokens_in for one in decoded.parts[0].spans] == [7 * (level == "span"), 0]
    assert decoded.message == decode(of(good)).message


@pytest.mark.parametrize(
    "fields",
    [
        {"events": [None, 5, {"name": 5}, {"timeUnixNano": "soon"}]},
        {"links": [None, {"traceId": "xyz"}], "status": 7},
        {
            "parentSpanId": "xyz",
            "traceState": 5,
            "flags": "x",
            "kind": [],
            "droppedEventsCount": {},
        },
    ],
)
def test_invalid_optional_part_of_a_span_is_absent(fields: Any) -> None:
    assert the_span(**fields) == the_span()


def test_request_of_too_many_invalid_parts_costs_bounded_time() -> None:
    spans = [{**SPAN, "name": str(n), "attributes": [0] * 40_000} for n in range(4)]
    decoded = decode(around(*spans))
    assert [one.name for one in decoded.parts[0].spans] == ["0", "1"]
    assert decoded.refused.counts == {"malformed": 2}


@pytest.mark.parametrize("level", ["resourceSpans", "scopeSpans", "resource", "scope"])
def test_invalid_message_costs_its_own_spans_only(level: str) -> None:
    broken = around(SPAN, SPAN)["resourceSpans"][0]
    match level:
        case "resourceSpans":
            broken = 7
        case "scopeSpans":
            broken["scopeSpans"].insert(0, [])
        case "resource":
            broken["resource"] = []
        case "scope":
            broken["scopeSpans"][0]["scope"] = "library"
    content = around({**SPAN, "name": "good"})
    content["resourceSpans"].insert(0, broken)
    decoded = decode(content)
    names = [each.name for part in decoded.parts for each in part.spans]
    assert names == ["", "", "good"] if level == "scopeSpans" else names == ["good"]
    assert decoded.refused.total == (2 if level in ("resource", "scope") else 1)
    assert f"resourceSpans[0]{'' if level == 'resourceSpans' else '.'}" in decoded.refused.cause
    assert decoded.message is not None
    assert span_names(decoded.message) == names


def test_span_without_a_time_is_refused_alone() -> None:
    decoded = decode(
        around({**SPAN, "startTimeUnixNano": 0}, SPAN, {**SPAN, "endTimeUnixNano": None})
    )
    assert decoded.refused.counts == {"invalid_time": 2}
    assert decoded.skipped == [0, 2]


@pytest.mark.parametrize("written", [1.7e18, "1.7e18", "1700000000000000000.0"])
def test_time_may_be_a_double(written: object) -> None:
    assert the_span(startTimeUnixNano=written).start_time_unix_nano == 17 * 10**17


@pytest.mark.parametrize("written", ["SPAN_KIND_ODD", "", "server"])
def test_unknown_name_of_an_enum_value_is_unspecified(written: str) -> None:
    assert the_span(kind=written, status={"code": written}) == the_span(status={})


def test_enum_value_may_be_a_number_as_text() -> None:
    assert the_span(kind="3").kind == 3


@pytest.mark.parametrize("keep", [False, True], ids=["kept", "forwarded"])
@pytest.mark.parametrize(
    "fields",
    [
        *({"flags": number} for number in (1 << 32, -1, 0.5, "NaN")),
        *({"kind": number} for number in (3_000_000_000, -(1 << 40), 1.5, "9" * 5000)),
        *({"status": {"code": number}} for number in (99_999_999_999, 0.5)),
        *({"events": [{"timeUnixNano": number}]} for number in (-1, 1.5, 1 << 64)),
        *({"links": [{"flags": number}]} for number in (-5, 1 << 32)),
        {"droppedAttributesCount": 1.5},
    ],
)
def test_number_that_its_field_cannot_have_is_absent(fields: Any, keep: bool) -> None:
    decoded = decode(around({**SPAN, **fields}), keep=keep)
    assert not decoded.refused.total
    assert [len(part.spans) for part in decoded.parts] == [1]
    if keep:
        absent = {
            name: [{}] if isinstance(value, list) else {} if isinstance(value, dict) else None
            for name, value in fields.items()
        }
        assert read(around({**SPAN, **fields})) == read(around({**SPAN, **absent}))


@pytest.mark.parametrize("keep", [False, True], ids=["kept", "forwarded"])
@pytest.mark.parametrize("written", [1.5, "NaN", "Infinity"])
def test_attribute_that_is_no_whole_number_has_no_value(written: object, keep: bool) -> None:
    attributes = [{"key": "k", "value": {"intValue": written}}]
    content = around({**SPAN, "attributes": attributes})
    content["resourceSpans"][0]["resource"] = {"attributes": attributes}
    decoded = decode(content, keep=keep)
    assert not decoded.refused.total
    assert [len(part.spans) for part in decoded.parts] == [1]
    if keep:
        outer = read(content).resource_spans[0]
        for found in (outer.resource.attributes, outer.scope_spans[0].spans[0].attributes):
            assert found[0].HasField("value")
            assert found[0].value.WhichOneof("value") is None


def test_times_are_checked_where_nothing_is_forwarded() -> None:
    decoded = decode(around({**SPAN, "endTimeUnixNano": 2**64}, SPAN), keep=False)
    assert decoded.refused.counts == {"malformed": 1}


def test_only_forwarded_requests_become_protobuf() -> None:
    decoded = decode(around({**SPAN, "name": "n", "kind": "SPAN_KIND_ODD"}), keep=False)
    assert [record.name for record in decoded.parts[0].spans] == ["n"]
    assert decoded.message is None


def test_id_of_the_wrong_length_is_kept_in_the_forwarded_request() -> None:
    assert the_span(traceId="aabb").trace_id == b"\xaa\xbb"


@pytest.mark.parametrize("depth", [60, 5_000, 20_000])
def test_deeply_nested_values_are_refused(depth: int) -> None:
    value = '{"arrayValue":{"values":[' * depth + "]}}" * depth
    body = json.dumps(around(SPAN, {"attributes": [{"key": "k", "value": "HERE"}]}))
    raw = body.replace('"HERE"', value).encode()
    cause = decode(raw).refused.cause if depth < 100 else wrong(raw)
    assert "nested too deeply" in cause


def test_deeply_nested_unknown_fields_are_refused() -> None:
    assert "nested too deeply" in wrong(b'{"x":' * 100_000 + b"1" + b"}" * 100_000)


def test_too_many_spans_are_refused() -> None:
    with pytest.raises(RequestTooLargeError, match="at most 100 spans"):
        read(around(*[SPAN] * MOST))


@pytest.mark.parametrize("tiny", [b"0,", b'"",', b"[],", b"{},", b'"\\",":0,'])
def test_too_many_values_are_refused_before_decoding(tiny: bytes) -> None:
    with pytest.raises(RequestTooLargeError, match="at most 65536 fields"):
        decode(b'{"resourceSpans": [' + tiny * 70_000 + b"0]}", fields=1 << 16)


@pytest.mark.parametrize("text", ["," * 99_999, '",[' * 40_000, "\\" * 99_999 + ",{"])
def test_punctuation_in_a_string_is_not_counted_as_values(text: str) -> None:
    assert len(read(around({**SPAN, "name": text})).resource_spans) == 1


def test_span_of_too_many_values_is_refused() -> None:
    with pytest.raises(RequestTooLargeError, match="a Span has at most 131072 fields"):
        read(around({**SPAN, "attributes": [{"key": "a"}] * 44_000}))


def test_large_request_of_too_many_spans_is_refused() -> None:
    with pytest.raises(RequestTooLargeError, match="at most 100 spans"):
        read(around(*[{**SPAN, "name": "x" * 10_000}] * 150))
    assert len(read(around(*[{**SPAN, "name": "x" * 20_000}] * 90)).resource_spans) == 1


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "byte order mark"])
@pytest.mark.parametrize(
    ("written", "name"),
    [
        (rb'"a\ud83d"', "a\ufffd"),
        (rb'"\\ud83d\ud83d\ude00\ude00"', "\\ud83d\U0001f600\ufffd"),
        (b'"a\tb"', "a b"),
        (b'"r\xf4le"', "r\ufffdle"),
        (b'"NaN,", "loss": NaN, "best": [-Infinity]', "NaN,"),
    ],
)
def test_text_of_a_large_request_is_repaired(written: bytes, name: str, mark: bytes) -> None:
    spans = [{**SPAN, "prompt": "x" * 60_000, "name": "?"}] * 90
    body = mark + json.dumps(around(*spans)).encode().replace(b'"?"', written)
    assert len(body) > 5 << 20
    decoded = decode(body)
    assert not decoded.refused.total
    assert decoded.parts[0].spans.name == [name] * 90


@given(
    st.integers(0, 20),
    st.lists(
        st.sampled_from([r"\ud83d", r"\ude00", r"\\", r"\n", r"\u00e9", "d83d", "x"]), min_size=1
    ),
)
def test_lone_surrogates_are_replaced_wherever_they_are(before: int, parts: list[str]) -> None:
    text = '"' + "".join(["x" * (65_536 - before), *parts, "x" * 65_536, *parts]) + '"'
    loaded = json.loads(repaired(text.encode()))
    assert loaded == re.sub("[\ud800-\udfff]", "\ufffd", json.loads(text))


@pytest.mark.parametrize("text", [b"\xff", rb"\ud800\\", rb"\ud800\udc00\udc00", b"x" * 999])
def test_repair_of_a_large_request_takes_bounded_memory(text: bytes) -> None:
    body = json.dumps(around({**SPAN, "name": "?"})).encode()
    body = body.replace(b"?", text * ((4 << 20) // len(text)) + rb"\ud800")
    tracemalloc.start()
    try:
        assert not decode(body).refused.total
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 9 * len(body)
