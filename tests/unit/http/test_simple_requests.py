"""Requests that are read without the general parser, and their responses."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest
from testbed.web import post, read_answer, serving, statuses

from wattspan.http.messages import response_head, simple_request

SIMPLE = (
    b"POST /v1/traces?a=b HTTP/1.1\r\nHost: a\r\nX-Thing: \tone two \r\nContent-Length: 4\r\n\r\n"
)


def test_simple_request_has_its_target_headers_and_length() -> None:
    found = simple_request(SIMPLE + b"body")
    assert (found.method, found.target, found.length) == (b"POST", b"/v1/traces?a=b", 4)
    assert dict(found.headers)[b"x-thing"] == b"one two"
    assert found.size == len(SIMPLE)


@pytest.mark.parametrize(("value", "closes"), [(b"Keep-Alive", False), (b"close", True)])
def test_request_that_states_the_end_of_its_connection_is_simple(
    value: bytes, closes: bool
) -> None:
    found = simple_request(SIMPLE.replace(b"Host", b"Connection: " + value + b"\r\nHost"))
    assert found is not None
    assert found.closes is closes


def test_get_without_a_body_is_simple() -> None:
    found = simple_request(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    assert found is not None
    assert (found.method, found.target, found.length) == (b"GET", b"/metrics", 0)


@pytest.mark.parametrize(
    "head",
    [
        SIMPLE[:-2],
        SIMPLE.replace(b"POST", b"GET"),
        SIMPLE.replace(b"HTTP/1.1", b"HTTP/1.0"),
        SIMPLE.replace(b"Host: a", b"Host : a"),
        SIMPLE.replace(b"Host: a\r\n", b""),
        SIMPLE.replace(b"\r\n", b"\n"),
        SIMPLE.replace(b"X-Thing", b"Content-Length: 4\r\nX-Thing"),
        SIMPLE.replace(b"X-Thing", b"X-THING: b\r\nX-Thing"),
        SIMPLE.replace(b"X-Thing", b"Transfer-Encoding"),
        SIMPLE.replace(b"Content-Length: 4", b"Transfer-Encoding: chunked"),
        SIMPLE.replace(b"X-Thing", b"Expect"),
        SIMPLE.replace(b"X-Thing", b"Upgrade"),
        SIMPLE.replace(b"X-Thing", b"Connection"),
        SIMPLE.replace(b": 4", b": +4"),
        SIMPLE.replace(b": 4", b": 4, 4"),
        SIMPLE.replace(b": 4", b": " + b"4" * 16),
        SIMPLE.replace(b"Content-Length: 4\r\n", b""),
        SIMPLE.replace(b"POST", b"HEAD"),
        b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_other_requests_are_for_the_general_parser(head: bytes) -> None:
    assert simple_request(head) is None


def test_header_with_a_line_break_is_no_header_of_a_response() -> None:
    with pytest.raises(ValueError, match="is invalid"):
        response_head(200, "OK", [("X-A", "1\r\nX-B: 2")])


@pytest.mark.parametrize("cut", range(1, len(post(b"body"))))
def test_request_in_two_parts_is_answered_once(tmp_path: Path, cut: int) -> None:
    """Then another one on the same connection."""
    whole = post(b"body")
    with serving(tmp_path) as site, closing(site.connect()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(whole[:cut])
        connection.sendall(whole[cut:])
        assert read_answer(connection) == (200, b"body")
        connection.sendall(post(b"more"))
        assert read_answer(connection) == (200, b"more")
    assert [request.body for request in site.asked] == [b"body", b"more"]


def test_simple_and_other_requests_share_a_connection(tmp_path: Path) -> None:
    chunked = post(b"1\r\nb\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
    with serving(tmp_path) as site:
        answers = site.tell(post(b"a") + chunked + post(b"c") + chunked)
    assert statuses(answers) == [200] * 4
    assert [request.body for request in site.asked] == [b"a", b"b", b"c", b"b"]


def test_simple_request_without_a_body_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as site:
        assert statuses(site.tell(post(b"") + post(b"x"))) == [200, 200]
    assert [request.body for request in site.asked] == [b"", b"x"]


def test_connection_ends_after_the_response_if_the_client_wants_that(tmp_path: Path) -> None:
    get = b"GET /echo HTTP/1.1\r\nHost: a\r\n"
    with serving(tmp_path) as site:
        answers = site.tell(get + b"\r\n" + get + b"Connection: close\r\n\r\n" + get + b"\r\n")
    assert statuses(answers) == [200, 200]
    assert answers.lower().count(b"connection: close\r\n") == 1
    assert [request.method for request in site.asked] == ["GET", "GET"]
