"""OTLP's JSON is the same request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.otlp import attribute, request, span
from wattspan.ingest.export_request import MalformedRequestError, RequestTooLargeError
from wattspan.ingest.otlp_json import to_protobuf

MOST, FIELDS = 100, 1 << 20
SPAN = {"traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331"}


def read(told: object) -> ExportTraceServiceRequest:
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    return ExportTraceServiceRequest.FromString(to_protobuf(body, MOST, FIELDS))


def around(*spans: object) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def the_span(**fields: object) -> Any:
    return read(around({**SPAN, **fields})).resource_spans[0].scope_spans[0].spans[0]


def wrong(told: object) -> str:
    with pytest.raises(MalformedRequestError) as caught:
        read(told)
    return str(caught.value)


def test_everything_a_request_can_say_is_read() -> None:
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
    told = {
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
    assert read(told) == whole


def test_names_may_be_those_of_the_protobuf() -> None:
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
    "told", [{}, {"resourceSpans": []}, {"resourceSpans": None}, {"resourceSpans": [{}]}]
)
def test_what_is_left_out_is_not_there(told: object) -> None:
    assert not any(one.scope_spans for one in read(told).resource_spans)


def test_what_nobody_knows_is_passed_over() -> None:
    told = {**around({**SPAN, "news": {"a": [1, {}]}, "name": "n"}), "more": [[[]]]}
    told["resourceSpans"][0]["scope_spans_2"] = 7
    assert read(told).resource_spans[0].scope_spans[0].spans[0].name == "n"


def test_null_is_nothing() -> None:
    assert the_span(name=None, attributes=None, status=None, kind=None) == the_span()
    assert read({"resourceSpans": [{"resource": None, "scopeSpans": None}]}).resource_spans


@pytest.mark.parametrize("written", [5, "5", 5.0, "05"])
def test_a_whole_number_may_be_text_or_have_an_empty_fraction(written: object) -> None:
    assert the_span(startTimeUnixNano=written).start_time_unix_nano == 5


@pytest.mark.parametrize("written", ["SPAN_KIND_SERVER", 2, "2"])
def test_a_kind_may_be_its_name_or_its_number(written: object) -> None:
    assert the_span(kind=written).kind == 2


@pytest.mark.parametrize("written", ["AP/+", "AP_-", "AP/-"[:3]])
def test_bytes_are_base64_in_either_alphabet(written: str) -> None:
    value = the_span(attributes=[{"key": "b", "value": {"bytesValue": written}}])
    assert value.attributes[0].value.bytes_value.startswith(b"\0\xff")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (b"", "the request cannot be read: Input data was truncated"),
        (b"[]", "the request cannot be read: Expected `object`, got `array`"),
        (b'{"resourceSpans": [', "the request cannot be read"),
        (b'{"resourceSpans": 7}', "at `$.resourceSpans`"),
        (b'{"resourceSpans": [7]}', "resourceSpans[0] cannot be read"),
        (around(7), "resourceSpans[0].scopeSpans[0].spans[0] is not an object"),
        (around(SPAN, {"name": 5}), "scopeSpans[0].spans[1].name is not a string"),
        (around({"traceId": "xyz"}), "spans[0].traceId is not hexadecimal"),
        (around({"traceId": "CvdlGRbNQ92ESOshHIAxnA=="}), "spans[0].traceId is not hexadecimal"),
        (around({"traceId": " aa "}), "spans[0].traceId is not hexadecimal"),
        (around({"startTimeUnixNano": -1}), "startTimeUnixNano is out of bounds"),
        (around({"startTimeUnixNano": 2**64}), "startTimeUnixNano is out of bounds"),
        (around({"startTimeUnixNano": "9" * 5000}), "startTimeUnixNano is not a whole number"),
        (around({"startTimeUnixNano": 1.5}), "startTimeUnixNano is not a whole number"),
        (around({"startTimeUnixNano": True}), "startTimeUnixNano is not a whole number"),
        (around({"startTimeUnixNano": "soon"}), "startTimeUnixNano is not a whole number"),
        (around({"kind": "SPAN_KIND_ODD"}), "kind is not a whole number"),
        (around({"attributes": {}}), "attributes is not an array"),
        (around({"attributes": [{}, {"value": 5}]}), "attributes[1].value is not an object"),
        (
            around({"attributes": [{"value": {"doubleValue": "x"}}]}),
            "attributes[0].value.doubleValue is not a number",
        ),
        (
            around({"attributes": [{"value": {"boolValue": 1}}]}),
            "attributes[0].value.boolValue is neither true nor false",
        ),
        (
            around({"attributes": [{"value": {"bytesValue": "?"}}]}),
            "attributes[0].value.bytesValue is not base64",
        ),
        ({"resourceSpans": [{"resource": []}]}, "resourceSpans[0].resource is not an object"),
        (b'{"resourceSpans": [{"schemaUrl": "\xff"}]}', "resourceSpans[0] cannot be read"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(told: object, sentence: str) -> None:
    assert sentence in wrong(told)


def test_an_id_of_the_wrong_length_is_left_to_who_counts_them() -> None:
    assert the_span(traceId="aabb").trace_id == b"\xaa\xbb"


@pytest.mark.parametrize("depth", [60, 5_000, 20_000])
def test_what_is_nested_without_end_is_refused(depth: int) -> None:
    value = '{"arrayValue":{"values":[' * depth + "]}}" * depth
    body = json.dumps(around({"attributes": [{"key": "k", "value": "HERE"}]}))
    assert "nested too deeply" in wrong(body.replace('"HERE"', value).encode())


def test_what_nobody_knows_may_not_be_nested_without_end_either() -> None:
    assert "nested too deeply" in wrong(b'{"x":' * 100_000 + b"1" + b"}" * 100_000)


def test_more_spans_than_are_taken_are_too_many() -> None:
    with pytest.raises(RequestTooLargeError, match="at most 100 spans"):
        read(around(*[SPAN] * MOST))


@pytest.mark.parametrize("tiny", [b"0,", b'"",', b"[],", b"{},", b'"\\",":0,'])
def test_a_request_of_too_many_values_is_refused_before_it_is_read(tiny: bytes) -> None:
    with pytest.raises(RequestTooLargeError, match="at most 65536 fields"):
        to_protobuf(b'{"resourceSpans": [' + tiny * 70_000 + b"0]}", MOST, 1 << 16)


@pytest.mark.parametrize("text", ["," * 99_999, '",[' * 40_000, "\\" * 99_999 + ",{"])
def test_the_marks_in_a_text_are_no_values(text: str) -> None:
    assert len(read(around({**SPAN, "name": text})).resource_spans) == 1


def test_a_span_of_too_many_values_is_refused() -> None:
    with pytest.raises(RequestTooLargeError, match="a Span has at most 131072 fields"):
        read(around({**SPAN, "attributes": [{"key": "a"}] * 44_000}))


def test_a_large_request_of_too_many_spans_is_refused_before_they_are_read() -> None:
    with pytest.raises(RequestTooLargeError, match="at most 100 spans"):
        read(around(*[{**SPAN, "name": "x" * 10_000}] * 150))
    assert len(read(around(*[{**SPAN, "name": "x" * 20_000}] * 90)).resource_spans) == 1
