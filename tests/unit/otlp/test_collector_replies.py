"""Interpretation of replies of gRPC servers and of proxies."""

from __future__ import annotations

import base64

import pytest
from testbed.http2 import framed

from wattspan.model import SECOND
from wattspan.otlp.grpc_transport import result_of_reply
from wattspan.otlp.transport import ExportStatus
from wattspan.util.encoding import FRAME_PREFIX
from wattspan.util.encoding import frame_message as ours
from wattspan.util.grpc_client import GrpcReply
from wattspan.util.protobuf import encode_status

GRPC = {":status": "200", "content-type": "application/grpc"}


def told(code: str, **more: str) -> dict[str, str]:
    return {"grpc-status": code, **{name.replace("_", "-"): value for name, value in more.items()}}


def test_frame_is_a_flag_a_length_and_the_message() -> None:
    assert ours(b"abc", zipped=False) == framed(b"abc") == b"\0\0\0\0\3abc"
    assert ours(b"abc", zipped=True) == framed(b"abc", compressed=1)
    assert FRAME_PREFIX.size == 5


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto"])
def test_ok_after_a_message_is_taken(kind: str) -> None:
    reply = GrpcReply({**GRPC, "content-type": kind}, trailers=told("0"))
    assert not reply.headers_say_all
    assert result_of_reply(reply).verdict is ExportStatus.TAKEN


def test_failure_has_reason_and_delay_from_headers_or_trailers() -> None:
    details = base64.b64encode(encode_status(14, "busy", 3)).rstrip(b"=").decode()
    failure = told("14", grpc_message="slow%20down", grpc_status_details_bin=details)
    alone, after = GrpcReply(GRPC | failure), GrpcReply(GRPC, trailers=failure)
    assert alone.headers_say_all
    assert not after.headers_say_all
    for reply in (alone, after):
        answer = result_of_reply(reply)
        assert reply.failed
        assert (answer.verdict, answer.after) == (ExportStatus.AGAIN, 3 * SECOND)
        assert answer.why == "it answered UNAVAILABLE (slow down)"


@pytest.mark.parametrize("details", ["!", "A", "é", "////"])
def test_invalid_details_have_no_delay(details: str) -> None:
    answer = result_of_reply(GrpcReply(GRPC | told("14", grpc_status_details_bin=details)))
    assert (answer.verdict, answer.after) == (ExportStatus.AGAIN, None)


@pytest.mark.parametrize(
    ("status", "verdict", "said"),
    [
        ("400", ExportStatus.REFUSED, "INTERNAL (HTTP 400)"),
        ("401", ExportStatus.REFUSED, "UNAUTHENTICATED (HTTP 401)"),
        ("403", ExportStatus.REFUSED, "PERMISSION_DENIED (HTTP 403)"),
        ("404", ExportStatus.REFUSED, "UNIMPLEMENTED (HTTP 404)"),
        ("418", ExportStatus.REFUSED, "UNKNOWN (HTTP 418)"),
        ("429", ExportStatus.AGAIN, "UNAVAILABLE (HTTP 429)"),
        ("502", ExportStatus.AGAIN, "UNAVAILABLE (HTTP 502)"),
        ("503", ExportStatus.AGAIN, "UNAVAILABLE (HTTP 503)"),
        ("504", ExportStatus.AGAIN, "UNAVAILABLE (HTTP 504)"),
    ],
)
def test_http_statuses_map_to_grpc_statuses(status: str, verdict: ExportStatus, said: str) -> None:
    reply = GrpcReply({":status": status, "content-type": "text/html"})
    assert reply.headers_say_all
    assert reply.failed
    answer = result_of_reply(reply)
    assert (answer.verdict, answer.why) == (verdict, f"it answered {said}")


def test_reply_that_is_not_grpc_is_unknown() -> None:
    page = result_of_reply(GrpcReply({":status": "200", "content-type": "text/html"}))
    assert page.why == "it answered UNKNOWN (its content is text/html)"
    nothing = result_of_reply(GrpcReply({":status": "200"}))
    assert nothing.why == "it answered UNKNOWN (its content is of no type)"


@pytest.mark.parametrize("code", ["", "17", "-1", "many", "²", "0000000000014"])
def test_invalid_status_is_unknown(code: str) -> None:
    answer = result_of_reply(GrpcReply(GRPC, trailers=told(code)))
    assert (answer.verdict, answer.why) == (
        ExportStatus.REFUSED,
        "it answered UNKNOWN (it has no gRPC status)",
    )


@pytest.mark.parametrize(
    "reply",
    [
        GrpcReply(),
        GrpcReply(GRPC),
        GrpcReply(GRPC, trailers=told("0")),
        GrpcReply(GRPC | told("0")),
    ],
    ids=["nothing", "a beginning", "ok", "ok at once"],
)
def test_reply_without_status_has_not_failed(reply: GrpcReply) -> None:
    assert not reply.failed
    assert not reply.blames_encoding


@pytest.mark.parametrize(
    ("failure", "blamed"),
    [
        (told("12"), True),
        (told("12", grpc_accept_encoding="identity,deflate"), True),
        (told("12", grpc_accept_encoding="identity, gzip"), False),
        (told("2"), True),
        (told("13"), True),
        (told("3"), False),
        (told("14"), False),
        (told("16"), False),
    ],
)
def test_failures_with_gzip_as_possible_cause(failure: dict[str, str], blamed: bool) -> None:
    assert GrpcReply(GRPC | failure).blames_encoding is blamed
    assert GrpcReply(GRPC, trailers=failure).blames_encoding is blamed
