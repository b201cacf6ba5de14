"""JSON of others with deep nesting, long numbers or invalid text is refused, not unexpected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import h11
import pytest

from wattspan.api.snapshot_document import SnapshotSchemaError, decode_snapshot
from wattspan.config.published import PUBLISHED_FILE, PublishedAgent, find_published
from wattspan.fleet.coordination import WatchEndedError
from wattspan.fleet.etcd import EtcdChanges
from wattspan.fleet.http_client import MemberConnection, RefusedCallError
from wattspan.testing import ManualClock

HOSTILE = {
    "nested": b'{"other":' + b"[" * 100_000,
    "digits": b'{"schema_version":' + b"9" * 5000 + b"}",
    "infinite": b'{"schema_version":1e999}',
    "text": b'{"version":"\xff"}',
}


class Stream:
    """One message of a watch; implements MemberConnection."""

    endpoint = "here"

    def __init__(self, message: bytes) -> None:
        self.messages = [message]

    def next_event(self, deadline: int) -> h11.Data:
        assert deadline > 0
        return h11.Data(data=self.messages.pop() + b"\n")

    def close(self) -> None:
        self.messages.clear()


def refuse_snapshot(body: bytes, _: Path) -> None:
    with pytest.raises(SnapshotSchemaError):
        decode_snapshot(body)


def ignore_published(body: bytes, directory: Path) -> None:
    (directory / PUBLISHED_FILE).write_bytes(body)
    assert find_published([str(directory)]).pid == PublishedAgent().pid


def name_the_status(body: bytes, _: Path) -> None:
    assert RefusedCallError(503, body).sentence == "HTTP status 503"


def end_the_watch(body: bytes, _: Path) -> None:
    with pytest.raises(WatchEndedError):
        EtcdChanges(cast("MemberConnection", Stream(body)), ManualClock()).wait(1)


@pytest.mark.parametrize(
    "message",
    [
        {"error": "\x1b[31mNo " + "x" * 500},
        {"result": {"canceled": True, "cancel_reason": "\x1b[31mNo " + "x" * 500}},
    ],
)
def test_cause_from_etcd_is_printable_and_bounded(message: object) -> None:
    stream = cast("MemberConnection", Stream(json.dumps(message).encode()))
    with pytest.raises(WatchEndedError) as ended:
        EtcdChanges(stream, ManualClock()).wait(1)
    said = str(ended.value)
    assert said.isprintable()
    assert "[31mNo xxx" in said
    assert len(said) < 300


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "read", [refuse_snapshot, ignore_published, name_the_status, end_the_watch]
)
def test_hostile_json_is_refused(
    body: bytes, read: Callable[[bytes, Path], None], tmp_path: Path
) -> None:
    read(body, tmp_path)
