"""Valid requests in both encodings are decoded as the reference decoder reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from testbed.otlp import Receiver, request, span
from testbed.otlp_reference import expected, json_of

from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import LatencyReport, WorkAttribute
from wattspan.ingest.trace_decoder import TraceDecoder

NOBODY = Peer()
WORK = [WorkAttribute("nothing", span="idle"), WorkAttribute("w")]

# ---------------------------------------------------------------------------------- requests

names = st.sampled_from(
    ["gen_ai.usage.output_tokens", "gen_ai.usage.input_tokens", "w", "other", ""]
)
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
def test_protobuf_and_json_give_the_records_of_the_complete_schema(
    whole: ExportTraceServiceRequest,
) -> None:
    claims = []
    for json, body in ((False, whole.SerializeToString()), (True, json_of(whole))):
        receiver = Receiver(weight="w", work=WORK)
        rejected = receiver.take(body, NOBODY, json=json)
        records, skipped = expected(whole)
        parts = [part for delivery in receiver.sink.deliveries for part in delivery.parts]
        assert [one for part in parts for one in part.spans] == records
        assert rejected.spans == len(skipped) == receiver.sink.refused.total()
        if records:
            assert receiver.sink.deliveries[0].skipped == skipped
        claims.append([part.claim for part in parts])
    assert claims[0] == claims[1]


@given(requests(plain_values))  # a NaN equals nothing, not even itself
def test_request_in_json_is_forwarded_as_the_same_request(
    whole: ExportTraceServiceRequest,
) -> None:
    decoder = TraceDecoder(max_spans=1000, max_fields=1 << 16, keep_message=True)
    message = decoder.decode(json_of(whole), json=True).message
    assert message is not None
    assert ExportTraceServiceRequest.FromString(message) == whole


event_names = st.sampled_from(["first", "token", ""]) | st.text(max_size=5)
LATENCIES = [
    LatencyReport("", "idle", "w", "first", "other", "token"),
    LatencyReport("", "late", "", "token", "w", ""),
]


@given(
    st.lists(
        st.tuples(
            spans(all_values),
            st.sampled_from(["idle", "late", "x"]),
            st.lists(st.tuples(st.integers(0, 2**64 - 1), event_names), max_size=5),
        ),
        max_size=4,
    )
)
def test_latencies_are_equal_in_both_encodings(
    chosen: list[tuple[object, str, list[tuple[int, str]]]],
) -> None:
    for one, name, events in chosen:
        one.name = name  # type: ignore[attr-defined]
        for at, title in events:
            one.events.add(time_unix_nano=at, name=title)  # type: ignore[attr-defined]
    whole = request(*(one for one, _, _ in chosen))  # type: ignore[arg-type]
    found = []
    for json, body in ((False, whole.SerializeToString()), (True, json_of(whole))):
        receiver = Receiver(latencies=LATENCIES)
        receiver.take(body, NOBODY, json=json)
        parts = [part for delivery in receiver.sink.deliveries for part in delivery.parts]
        told = [(one.name, one.latency) for part in parts for one in part.spans]
        assert all((latency is None) == (name not in ("idle", "late")) for name, latency in told)
        assert all(time is None or time >= 0 for _, each in told if each for time in each)
        found.append(told)
    assert found[0] == found[1]
