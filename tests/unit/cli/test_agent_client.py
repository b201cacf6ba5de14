"""Unit tests of the client of ``GET /v1/snapshot``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from testbed.query_server import QueryServer
from testbed.snapshots import busy_host
from testbed.top_view import document

from wattspan.cli.agent_client import AgentReadError, SnapshotClient, fetch_with_fallback
from wattspan.testing import ManualClock

BODY = msgspec.json.encode(document(busy_host()))


def answering(*bodies: bytes) -> Callable[[str], bytes]:
    """A fetch that returns each body once and fails afterwards."""
    remaining = iter(bodies)

    def fetch(url: str) -> bytes:
        for body in remaining:
            return body
        raise AgentReadError(f"Cannot read {url}: connection refused.")

    return fetch


def test_client_returns_the_snapshot_of_the_agent() -> None:
    assert SnapshotClient("host:1", ManualClock(), answering(BODY))() == document(busy_host())


def test_client_returns_the_last_snapshot_with_a_notice_when_the_agent_stops() -> None:
    clock = ManualClock(wall=busy_host().at.wall)
    client = SnapshotClient("host:1", clock, answering(BODY))
    first = client()
    assert client.notice == ""
    clock.advance(7)
    assert client() is first
    assert client.notice == (
        "Cannot read http://host:1/v1/snapshot: connection refused. These figures are 7 s old."
    )


def test_client_removes_the_notice_when_the_agent_answers_again() -> None:
    bodies = iter([BODY, b"", BODY])
    client = SnapshotClient("host:1", ManualClock(), lambda _: next(bodies))
    notices = []
    for _ in range(3):
        client()
        notices.append(bool(client.notice))
    assert notices == [False, True, False]


def test_client_raises_when_the_first_read_fails() -> None:
    with pytest.raises(AgentReadError, match="connection refused"):
        SnapshotClient("host:1", ManualClock(), answering())()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("node7:9949", "http://node7:9949/v1/snapshot"),
        ("https://node7/", "https://node7/v1/snapshot"),
        ("http://node7/prefix/metrics", "http://node7/prefix/v1/snapshot"),
        ("http://node7:9949/v1/snapshot", "http://node7:9949/v1/snapshot"),
    ],
)
def test_client_completes_a_short_address(address: str, url: str) -> None:
    asked: list[str] = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        return BODY

    SnapshotClient(address, ManualClock(), fetch)()
    assert asked == [url]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"node_cpu_seconds_total 3\n",
        b"<html>",
        b"{}",
        b"[]",
        b"\x00",
        BODY.replace(b'"schema_version":1', b'"schema_version":2'),
    ],
)
def test_client_rejects_an_invalid_snapshot(body: bytes) -> None:
    with pytest.raises(AgentReadError, match="Cannot use the answer of http://host:1/v1/snapshot"):
        SnapshotClient("host:1", ManualClock(), answering(body))()


def test_client_ignores_fields_of_a_newer_agent() -> None:
    body = BODY.replace(b'{"schema_version"', b'{"new_field":[1],"schema_version"', 1)
    assert body != BODY
    assert SnapshotClient("host:1", ManualClock(), answering(body))() == document(busy_host())


def refuse(url: str) -> bytes:
    raise AgentReadError(f"Cannot read {url}: it answers 401 Unauthorized.")


def test_refused_snapshot_is_read_from_the_unix_socket(tmp_path: Path) -> None:
    with QueryServer(tmp_path):
        fetch = fetch_with_fallback(refuse, (str(tmp_path / "none"), str(tmp_path)))
        assert SnapshotClient("host:1", ManualClock(), fetch)().host_name == "testhost"


def test_answered_snapshot_is_not_read_again(tmp_path: Path) -> None:
    fetch = fetch_with_fallback(answering(BODY), (str(tmp_path),))
    assert fetch("http://host:1") == BODY


def test_without_a_unix_socket_the_first_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(AgentReadError, match="401 Unauthorized"):
        fetch_with_fallback(refuse, (str(tmp_path),))("http://host:1")
