"""The record of a host's newest session, for the agent that follows a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.fleet.member import SessionRecord

FILE = "fleet-session.json"


def noted(folder: Path, session: str, boot_id: str = "boot-1") -> None:
    record = SessionRecord(folder, boot_id)
    record.note(session)
    record.close()


def test_next_agent_of_a_boot_knows_the_last_session(tmp_path: Path) -> None:
    noted(tmp_path, "one")
    noted(tmp_path, "two")
    record = SessionRecord(tmp_path, "boot-1")
    assert record.former == "two"
    record.close()
    record.close()


@pytest.mark.parametrize("boot_id", ["boot-2", ""])
def test_session_of_another_or_an_unknown_boot_is_unknown(tmp_path: Path, boot_id: str) -> None:
    noted(tmp_path, "one", boot_id and "boot-1")
    assert SessionRecord(tmp_path, boot_id).former == ""


def test_agent_beside_a_live_one_neither_reads_nor_writes(tmp_path: Path) -> None:
    first = SessionRecord(tmp_path, "boot-1")
    first.note("one")
    second = SessionRecord(tmp_path, "boot-1")
    assert second.former == ""
    second.note("two")
    second.close()
    first.close()
    assert SessionRecord(tmp_path, "boot-1").former == "one"


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"session":1}'])
def test_damaged_record_is_unknown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert SessionRecord(tmp_path, "boot-1").former == ""


def test_folder_that_cannot_be_written_leaves_the_session_unknown(tmp_path: Path) -> None:
    record = SessionRecord(tmp_path / "missing", "boot-1")
    assert record.former == ""
    record.note("one")
    full = SessionRecord(tmp_path, "boot-1")
    (tmp_path / FILE).mkdir()
    full.note("one")
    full.close()
    assert SessionRecord(tmp_path, "boot-1").former == ""
