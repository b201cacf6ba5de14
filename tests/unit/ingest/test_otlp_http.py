"""The duties of OTLP/HTTP, without a server around them."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from testbed.otlp import JSON, PROTOBUF, Receiver, request, span

from wattspan.util.encoding import BodyEncodingError, BodyTooLongError, gzip_decompress
from wattspan.util.protobuf import encode_export_response, encode_retry_info, encode_status

BODY = request().SerializeToString()
JSON_BODY = json.dumps(
    {
        "resourceSpans": [
            {
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": "0a" * 16,
                                "spanId": "0b" * 8,
                                "name": "n",
                                "startTimeUnixNano": "1764412345678901234",
                                "endTimeUnixNano": "1764412345678901235",
                            }
                        ]
                    }
                ]
            }
        ]
    }
).encode()


def status(body: bytes) -> tuple[int, str]:
    """Code and message of a google.rpc.Status, by hand: field 1 is a varint, 2 is a string."""
    assert (body[0], body[2]) == (0x08, 0x12)
    return body[1], body[4:].decode()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


# -------------------------------------------------------------------------------- accepted
# requests


def test_protobuf_is_answered_with_protobuf(receiver: Receiver) -> None:
    answer = receiver.ask(BODY)
    assert (answer.status, answer.content_type) == (200, PROTOBUF)
    assert ExportTraceServiceResponse.FromString(answer.body) == ExportTraceServiceResponse()
    assert receiver.sink.count == 1


def test_json_is_answered_with_json(receiver: Receiver) -> None:
    answer = receiver.ask(JSON_BODY, JSON)
    assert (answer.status, answer.content_type, answer.body) == (200, JSON, b"{}")
    assert receiver.sink.deliveries[0].parts[0].spans[0].id == b"\x0b" * 8


@pytest.mark.parametrize("written", ["application/JSON; charset=utf-8", " application/json "])
def test_content_type_may_have_parameters(receiver: Receiver, written: str) -> None:
    assert receiver.ask(JSON_BODY, written).content_type == JSON


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
def test_gzip_encoding_is_accepted(receiver: Receiver, encoding: str) -> None:
    assert receiver.ask(gzip.compress(BODY), encoding=encoding).status == 200
    assert receiver.sink.deliveries[0].size == len(BODY)


@pytest.mark.parametrize("wbits", [zlib.MAX_WBITS, -zlib.MAX_WBITS], ids=["zlib", "raw"])
def test_deflate_encoding_is_accepted(receiver: Receiver, wbits: int) -> None:
    body = zlib.compress(BODY, wbits=wbits)
    assert receiver.ask(body, encoding="deflate").status == 200
    assert receiver.sink.deliveries[0].size == len(BODY)


@pytest.mark.parametrize("body", [b"", b"x", zlib.compress(BODY)[:-5], zlib.compress(BODY) + b"t"])
def test_invalid_deflate_body_is_400(receiver: Receiver, body: bytes) -> None:
    answer = receiver.ask(body, encoding="deflate")
    assert (answer.status, "not deflate" in status(answer.body)[1]) == (400, True)


def test_identity_encoding_is_accepted(receiver: Receiver) -> None:
    assert receiver.ask(BODY, encoding="identity").status == 200


def test_sink_gets_the_peer(receiver: Receiver) -> None:
    receiver.ask(BODY)
    assert receiver.sink.deliveries[0].peer.pid == 7


# ----------------------------------------------------------------------------- refused requests


def test_spans_with_unusable_ids_are_partial_success(receiver: Receiver) -> None:
    bad = span(2)
    bad.span_id = b""
    body = request(span(1), bad).SerializeToString()
    answer = ExportTraceServiceResponse.FromString(receiver.ask(body).body)
    assert answer.partial_success.rejected_spans == 1
    assert "a trace id has 16 bytes" in answer.partial_success.error_message


def test_json_partial_success_matches_protobuf_json(receiver: Receiver) -> None:
    answer = receiver.ask(JSON_BODY.replace(b"0b", b"00"), JSON)
    partial = json.loads(answer.body)["partialSuccess"]
    assert (answer.status, partial["rejectedSpans"]) == (200, "1")
    assert "neither is all zeros" in partial["errorMessage"]


def test_invalid_body_is_400_with_a_status(receiver: Receiver) -> None:
    answer = receiver.ask(b"garbage")
    assert (answer.status, answer.content_type) == (400, PROTOBUF)
    assert status(answer.body)[0] == 3
    assert "no ExportTraceServiceRequest" in status(answer.body)[1]
    assert receiver.sink.refused == {"malformed": 1}


def test_invalid_json_body_is_400_with_a_status_in_json(receiver: Receiver) -> None:
    answer = receiver.ask(JSON_BODY[:-1], JSON)
    assert (answer.status, answer.content_type) == (400, JSON)
    told = json.loads(answer.body)
    assert told["code"] == 3
    assert "the request is invalid: Input data was truncated" in told["message"]


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        b"",
        gzip.compress(BODY)[:-5],
        gzip.compress(BODY)[:-1] + b"\1",
        zlib.compress(BODY),
        gzip.compress(BODY) + b"more",
    ],
    ids=["plain", "empty", "cut", "wrong length", "zlib", "with a tail"],
)
def test_invalid_gzip_body_is_400(receiver: Receiver, body: bytes) -> None:
    answer = receiver.ask(body, encoding="gzip")
    assert answer.status == 400
    assert "gzip" in status(answer.body)[1]


def test_unknown_content_type_is_415(receiver: Receiver) -> None:
    answer = receiver.ask(BODY, "text/plain")
    assert answer.status == 415
    assert answer.headers["Accept-Post"] == "application/x-protobuf, application/json"
    assert receiver.sink.deliveries == []


@pytest.mark.parametrize("encoding", ["br", "zstd", "snappy", "gzip, gzip"])
def test_unknown_encoding_is_415(receiver: Receiver, encoding: str) -> None:
    answer = receiver.ask(gzip.compress(BODY), encoding=encoding)
    assert (answer.status, answer.headers["Accept-Encoding"]) == (415, "gzip, deflate, identity")
    code, sentence = status(answer.body)
    assert (code, "OTEL_EXPORTER_OTLP_COMPRESSION=gzip" in sentence) == (12, True)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "DELETE"])
def test_another_method_is_405(receiver: Receiver, method: str) -> None:
    answer = receiver.ask(method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/v1/metrics", "no metrics: set OTEL_METRICS_EXPORTER=none in the application"),
        ("/v1/logs", "no logs: set OTEL_LOGS_EXPORTER=none in the application"),
        ("/", "spans are sent to /v1/traces"),
        ("/v1/traces/", "spans are sent to /v1/traces"),
    ],
)
def test_another_path_is_404_with_the_remedy(receiver: Receiver, path: str, sentence: str) -> None:
    answer = receiver.ask(BODY, path=path)
    assert answer.status == 404
    assert sentence in answer.body.decode()


def test_request_above_the_limit_after_decompression_is_413(receiver: Receiver) -> None:
    answer = receiver.ask(gzip.compress(bytes((1 << 20) + 1)), encoding="gzip")
    assert answer.status == 413
    assert "more than 1048576 bytes" in status(answer.body)[1]
    assert receiver.sink.refused == {"too_large": 1}


def test_busy_sink_is_503_with_retry_after(receiver: Receiver) -> None:
    receiver.sink.busy = 1
    answer = receiver.ask(BODY)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "3")
    assert status(answer.body)[0] == 14
    assert receiver.sink.refused == {}
    assert receiver.ask(BODY).status == 200
    assert receiver.sink.count == 1


# --------------------------------------------------------------------------------- decompression


def test_gzip_round_trip_is_exact() -> None:
    assert gzip_decompress(gzip.compress(b"x" * 1000), 1000) == b"x" * 1000
    with pytest.raises(BodyTooLongError):
        gzip_decompress(gzip.compress(b"x" * 1001), 1000)


def test_concatenated_gzip_members_are_one_body() -> None:
    members = gzip.compress(b"a") + gzip.compress(b"b") + gzip.compress(b"c")
    assert gzip_decompress(members, 3) == b"abc"
    assert gzip_decompress(members + bytes(10), 3) == b"abc"
    with pytest.raises(BodyTooLongError):
        gzip_decompress(members, 2)


def test_too_many_gzip_members_are_refused() -> None:
    with pytest.raises(BodyEncodingError, match="too many gzip members"):
        gzip_decompress(gzip.compress(b"") * 5000, 1000)


# ---------------------------------------------------------------------------------- our messages


def test_messages_match_the_protocol() -> None:
    answer = ExportTraceServiceResponse.FromString(encode_export_response(3, "why"))
    assert answer.partial_success.rejected_spans == 3
    assert answer.partial_success.error_message == "why"
    # google.rpc.Status{code: 14, message: "m", details: [Any{RetryInfo{Duration{seconds: 5}}}]}
    retry_info = b"\n\x02\x08\x05"
    url = b"type.googleapis.com/google.rpc.RetryInfo"
    detail = b"\n" + bytes([len(url)]) + url + b"\x12\x04" + retry_info
    assert encode_status(14, "m", 5) == b"\x08\x0e\x12\x01m\x1a" + bytes([len(detail)]) + detail
    assert encode_retry_info(5) == retry_info
