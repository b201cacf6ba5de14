"""Trace requests as real clients write them: what is accepted, repaired, and refused alone."""

from __future__ import annotations

import base64

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from testbed.field import FieldCase, field_cases
from testbed.otlp import JSON, PROTOBUF, Receiver


def body_of(case: FieldCase) -> bytes:
    sent = case["request"]
    if "body" in sent:
        return str(sent["body"]).encode()
    return base64.b64decode(sent["body_base64"])


@pytest.mark.parametrize("forwarded", [False, True], ids=["kept", "forwarded"])
@pytest.mark.parametrize("case", field_cases("otlp_bodies"))
def test_good_spans_are_accepted_and_bad_ones_refused_alone(
    case: FieldCase, forwarded: bool
) -> None:
    receiver, expected = Receiver(keep=forwarded), case["expected"]
    content_type = case["request"]["content_type"].replace("application/grpc", PROTOBUF)
    encoding = case["request"].get("content_encoding", "")
    answer = receiver.ask(body_of(case), content_type, encoding)
    assert answer.status == 200
    spans = [
        span
        for delivery in receiver.sink.deliveries
        for part in delivery.parts
        for span in part.spans
    ]
    assert [span.name for span in spans] == expected["names"]
    assert [span.tokens_in for span in spans] == expected["input_tokens"]
    assert all(0 < span.start <= span.end for span in spans)
    assert receiver.sink.refused.total() == expected["rejected"]
    if content_type == PROTOBUF:
        partial = ExportTraceServiceResponse.FromString(answer.body).partial_success
        assert partial.rejected_spans == expected["rejected"]
    elif expected["rejected"]:
        assert content_type == JSON
        assert f'"rejectedSpans":"{expected["rejected"]}"' in answer.body.decode()
        assert expected.get("reason", "") in answer.body.decode()
    if forwarded:
        message = receiver.sink.deliveries[0].message
        ExportTraceServiceRequest.FromString(message or b"")  # of valid UTF-8
