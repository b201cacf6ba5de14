"""Interpretation of collectors' responses."""

from __future__ import annotations

import pytest

from wattspan.model import SECOND
from wattspan.otlp.transport import (
    MAX_RETRY_DELAY,
    ExportResult,
    ExportStatus,
    parse_retry_after,
    result_of_grpc,
    result_of_http,
)

NOON = 1_763_726_400 * SECOND  # 2025-11-21T12:00:00Z


def answer(
    status: int, body: bytes = b"", content_type: str = "application/x-protobuf"
) -> ExportResult:
    return result_of_http(
        status, body, content_type=content_type, retry_after="", location="", now=NOON
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        (" 12 ", 12),
        ("Fri, 21 Nov 2025 12:00:30 GMT", 30),
        ("Fri, 21 Nov 2025 11:00:00 GMT", 0),
        ("Fri, 21 Nov 2025 13:00:30 +0100", 30),
        ("Friday, 21-Nov-25 12:00:30 GMT", 30),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str, seconds: int):
    assert parse_retry_after(text, NOON) == seconds * SECOND


@pytest.mark.parametrize("text", ["", "soon", "-5", "1.5", "Fri, 99 Nov 2025 12:00:30 GMT", "²"])
def test_invalid_retry_after_is_ignored(text: str):
    assert parse_retry_after(text, NOON) is None


@pytest.mark.parametrize("text", ["999999999999999999999", "Fri, 21 Nov 9999 12:00:00 GMT"])
def test_retry_delays_are_bounded(text: str):
    assert parse_retry_after(text, NOON) == MAX_RETRY_DELAY


def test_empty_success_is_a_success():
    assert answer(200) == ExportResult(ExportStatus.TAKEN)
    assert answer(202, content_type="") == ExportResult(ExportStatus.TAKEN)


def test_collector_that_answers_in_json_is_understood():
    body = b'{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "old"}}'
    taken = answer(200, body, "application/json; charset=utf-8")
    assert taken == ExportResult(ExportStatus.TAKEN)
    assert answer(200, b"{}", "application/json") == ExportResult(ExportStatus.TAKEN)


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"\xff",
        b'{"partialSuccess": []}',
        b"null",
        b'{"partialSuccess": {"rejectedSpans": 1e999}}',
    ],
)
def test_unexpected_json_is_a_success(body: bytes):
    assert answer(200, body, "application/json").verdict is ExportStatus.TAKEN


def test_invalid_success_response_is_a_reported_success():
    strange = answer(200, b"\xff\xff\xff")
    assert strange.verdict is ExportStatus.TAKEN
    assert "not answer as OTLP" in strange.why


def test_gateway_errors_leave_delivery_unknown():
    assert [answer(s).perhaps_taken for s in (429, 502, 503, 504)] == [False, True, False, True]


def test_messages_of_a_collector_are_one_short_line():
    why = answer(400, b"one\ntwo\x1b[31m " + b"x" * 5000, "text/plain").why
    assert why.isprintable()
    assert len(why) < 300


def test_web_page_is_not_quoted():
    assert answer(404, b"<html>", "text/html").why == "it answered 404"


def test_refused_credentials_name_the_remedy():
    assert "forward_headers" in answer(401).remedy
    assert "forward_headers" in result_of_grpc(16, "UNAUTHENTICATED", "", None).remedy


def test_grpc_codes_follow_the_otlp_specification():
    again = {
        code
        for code in range(1, 17)
        if result_of_grpc(code, "", "", None).verdict is ExportStatus.AGAIN
    }
    assert again == {1, 4, 10, 11, 14, 15}
    assert result_of_grpc(8, "", "", 5).verdict is ExportStatus.AGAIN
    assert result_of_grpc(8, "", "", None).verdict is ExportStatus.TOO_LARGE
