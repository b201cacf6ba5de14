"""Nothing that is sent crashes or hangs a receiver, and nothing that was taken is lost."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.otlp import JSON, PROTOBUF, KeptSink, Receiver, request, span
from support.otlp_reference import expected, json_of
from wattspan.spanfeed.delivery import Counted
from wattspan.spanfeed.errors import MalformedError
from wattspan.spanfeed.json import to_protobuf
from wattspan.web.message import Peer, Response

NOBODY = Peer()

# ---------------------------------------------------------------------------------- requests

names = st.sampled_from(["thread.id", "gen_ai.usage.input_tokens", "w", "other", ""])
plain_values = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=200),
)
all_values = plain_values | st.just(float("nan"))


@st.composite
def spans(draw: st.DrawFn, values: st.SearchStrategy[object]) -> object:
    made = span(1)
    made.trace_id = draw(st.one_of(st.binary(min_size=16, max_size=16), st.binary(max_size=20)))
    made.span_id = draw(st.one_of(st.binary(min_size=8, max_size=8), st.binary(max_size=10)))
    made.parent_span_id = draw(st.sampled_from([b"", bytes(8), b"parent!!", b"x"]))
    made.name = draw(st.just("idle") | st.text(max_size=30))
    made.start_time_unix_nano = draw(st.integers(0, 2**64 - 1))
    made.end_time_unix_nano = draw(st.integers(0, 2**64 - 1))
    for name, value in draw(st.lists(st.tuples(names, values), max_size=4)):
        pair = made.attributes.add(key=name)
        field = {bool: "bool", int: "int", float: "double", str: "string"}[type(value)]
        setattr(pair.value, f"{field}_value", value)
    return made


@st.composite
def requests(
    draw: st.DrawFn, values: st.SearchStrategy[object] = all_values
) -> ExportTraceServiceRequest:
    whole = ExportTraceServiceRequest()
    for batch in draw(st.lists(st.lists(spans(values), max_size=4), max_size=3)):
        one = request(*batch, resource={"service.name": draw(st.text(max_size=5))})
        if not batch:
            del one.resource_spans[0].scope_spans[:]
        whole.MergeFrom(one)
    return whole


@given(requests())
def test_reading_no_deeper_than_needed_reads_the_same(whole: ExportTraceServiceRequest) -> None:
    work = [Counted("nothing", span="idle"), Counted("w")]
    receiver = Receiver(weight="w", work=work)
    refused = receiver.intake.take(whole.SerializeToString(), NOBODY)
    told, skipped = expected(whole)
    parts = [part for delivery in receiver.sink.deliveries for part in delivery.parts]
    assert [one for part in parts for one in part.spans] == told
    assert refused.spans == len(skipped) == receiver.sink.refused["invalid_id"]
    if told:
        assert receiver.sink.deliveries[0].skipped == skipped


# ----------------------------------------------------------------------------------- mutations


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """``valid`` cut, with bytes changed, taken out, put in and repeated; or anything else."""
    places = st.integers(0, len(valid))

    def change(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = valid
        for start, length, new in edits:
            data = data[:start] + new + data[start + length :]
        return data

    edit = st.tuples(places, st.integers(0, 8), st.binary(max_size=8))
    return st.one_of(
        places.map(lambda cut: valid[:cut]),
        st.lists(edit, min_size=1, max_size=4).map(change),
        places.map(lambda at: valid[:at] + valid),
        st.binary(max_size=300),
    )


WHOLE = request(
    span(1, thread__id=5, gen_ai__usage__input_tokens=7),
    span(2, text="x" * 40),
    resource={"service.name": "s", "process.pid": 9},
).SerializeToString()

AS_JSON = json.dumps(
    {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"intValue": "5"}}]},
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": "0a" * 16,
                                "spanId": "0b" * 8,
                                "name": "n",
                                "kind": 2,
                                "startTimeUnixNano": "5",
                                "attributes": [
                                    {"key": "thread.id", "value": {"intValue": "9"}},
                                    {"key": "x", "value": {"arrayValue": {"values": [{}]}}},
                                ],
                            }
                        ]
                    }
                ],
            }
        ]
    }
).encode()


def check(ask: Callable[[Receiver], Response], content_type: str) -> KeptSink:
    """Whatever is asked is answered as the protocol has it, and so is what is asked next."""
    receiver = Receiver()
    answer = ask(receiver)
    assert answer.status in (200, 400, 413)
    assert answer.content_type == content_type
    if content_type == JSON:
        json.loads(answer.body)
    elif answer.status == 200:
        ExportTraceServiceResponse.FromString(answer.body)
    taken = len(receiver.sink.deliveries)
    assert receiver.ask(WHOLE).status == 200
    assert len(receiver.sink.deliveries) == taken + 1
    return receiver.sink


@given(mutations(WHOLE))
def test_protobuf_that_was_tampered_with_is_answered(body: bytes) -> None:
    sink = check(lambda receiver: receiver.ask(body), PROTOBUF)
    for delivery in sink.deliveries:
        for part in delivery.parts:
            assert all(len(one.trace) == 16 and len(one.id) == 8 for one in part.spans)


@given(mutations(AS_JSON))
def test_json_that_was_tampered_with_is_answered(body: bytes) -> None:
    check(lambda receiver: receiver.ask(body, JSON), JSON)


@given(mutations(gzip.compress(WHOLE, mtime=0)))
def test_gzip_that_was_tampered_with_is_answered(body: bytes) -> None:
    check(lambda receiver: receiver.ask(body, encoding="gzip"), PROTOBUF)


FIELDS = (
    *("resourceSpans", "scopeSpans", "spans", "resource", "scope", "attributes", "key", "value"),
    *("traceId", "spanId", "kind", "name", "flags", "startTimeUnixNano", "events", "links"),
    *("stringValue", "intValue", "doubleValue", "bytesValue", "arrayValue", "values", "status"),
)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(anything)
@example({"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "\ud800"}]}]}]})
@example({"resourceSpans": [{"scopeSpans": [{"spans": [{"flags": 1e400}]}]}]})
@example({"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"value": []}]}]}]}]})
def test_any_json_is_read_or_refused(told: object) -> None:
    for shape in (
        told,
        {"resourceSpans": [told]},
        {"resourceSpans": [{"scopeSpans": [{"spans": [told]}]}]},
    ):
        try:
            ExportTraceServiceRequest.FromString(to_protobuf(json.dumps(shape).encode(), 50, 9999))
        except MalformedError as error:
            assert str(error)  # noqa: PT017 - that it has words is all there is to say


@given(requests(plain_values))  # a NaN equals nothing, not even itself
def test_json_and_protobuf_are_the_same_request(whole: ExportTraceServiceRequest) -> None:
    assert ExportTraceServiceRequest.FromString(to_protobuf(json_of(whole), 1000, 1 << 16)) == whole
