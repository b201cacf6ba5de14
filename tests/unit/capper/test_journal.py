"""The journal, the record and the lock: content on disk, and its validation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from testbed.capper_bench import BOOT, Disk, W, entry

from wattspan.capper.audit import GENERATIONS, AuditAction, AuditEvent, AuditLog
from wattspan.capper.host_directory import (
    CapperHost,
    lock_capper,
    open_capper_directory,
)
from wattspan.capper.journal import EntrySource, Journal, JournalError
from wattspan.model import Knob

EARLIER = "00000000-1111-4000-8000-000000000000"
CAPPED = entry()
ENTRIES = {CAPPED.key: CAPPED}
LOCKS = """
import sys
from pathlib import Path
from wattspan.capper.journal import JournalError
from wattspan.capper.host_directory import lock_capper, CapperHost
try:
    lock_capper(CapperHost(Path(sys.argv[1]), "boot"))
except JournalError as error:
    print(error)
"""


def test_saved_journal_is_loaded_after_a_restart(tmp_path: Path) -> None:
    Journal(tmp_path, BOOT).save(ENTRIES)
    assert Journal(tmp_path, BOOT).entries == ENTRIES


def test_empty_journal_removes_its_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, BOOT)
    journal.save(ENTRIES)
    journal.save({})
    assert list(tmp_path.iterdir()) == []


def test_journal_of_an_earlier_boot_becomes_one_of_this_boot(tmp_path: Path) -> None:
    Journal(tmp_path, EARLIER).save(ENTRIES)
    journal = Journal(tmp_path, BOOT)
    assert journal.trouble == ""
    assert [entry.source for entry in journal.entries.values()] == [EntrySource.EARLIER]
    journal.save(journal.entries)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"journal-{BOOT}.a.jsonl",
        f"journal-{BOOT}.b.jsonl",
    }
    assert Journal(tmp_path, BOOT).entries == journal.entries


def test_foreign_limit_of_an_earlier_boot_is_forgotten(tmp_path: Path) -> None:
    foreign = entry(foreign=333 * W)
    Journal(tmp_path, EARLIER).save({foreign.key: foreign})
    assert Journal(tmp_path, BOOT).entries == {}


def test_boot_is_identified_by_the_boot_id_in_the_journal(tmp_path: Path) -> None:
    Journal(tmp_path, EARLIER).save(ENTRIES)
    for copy in ("a", "b"):
        there = tmp_path / f"journal-{EARLIER}.{copy}.jsonl"
        there.rename(tmp_path / f"journal-{BOOT}.{copy}.jsonl")
    (found,) = Journal(tmp_path, BOOT).entries.values()
    assert found.source is EntrySource.EARLIER


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\x00", b'{"check": 3}', b"[]" * 10_000])
@pytest.mark.parametrize("copy", ["a.jsonl", "b.jsonl", "json"])
def test_damaged_journal_is_named_and_kept(tmp_path: Path, text: bytes, copy: str) -> None:
    path = tmp_path / f"journal-{BOOT}.{copy}"
    path.write_bytes(text)
    journal = Journal(tmp_path, BOOT)
    assert {(e.device, e.source) for e in journal.entries.values()} == {("*", EntrySource.LOST)}
    assert {e.knob for e in journal.entries.values()} == set(Knob)
    assert str(path) in journal.trouble
    assert "by hand" in journal.trouble
    assert (tmp_path / f"damaged-{path.name}").read_bytes() == text
    journal.save(journal.entries)
    again = Journal(tmp_path, BOOT)
    assert (again.entries, again.trouble) == (journal.entries, "")


@pytest.mark.parametrize("copy", ["a", "b"])
def test_single_damaged_journal_copy_is_recovered(tmp_path: Path, copy: str) -> None:
    entries = {one.key: one for one in (entry(), entry(device="gpu1", written=False))}
    Journal(tmp_path, BOOT).save(entries)
    path = tmp_path / f"journal-{BOOT}.{copy}.jsonl"
    path.write_bytes(path.read_bytes().replace(b"650000", b"650001", 1))
    journal = Journal(tmp_path, BOOT)
    assert journal.entries == entries
    assert "Every entry was recovered" in journal.trouble
    journal.save(entries)
    assert Journal(tmp_path, BOOT).trouble == ""


def test_records_of_two_damaged_copies_are_merged(tmp_path: Path) -> None:
    entries = {one.key: one for one in (entry(), entry(device="gpu1"))}
    Journal(tmp_path, BOOT).save(entries)
    for copy, line in (("a", 0), ("b", 1)):
        path = tmp_path / f"journal-{BOOT}.{copy}.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        lines[line] = b"{" + lines[line]
        path.write_bytes(b"".join(lines))
    assert Journal(tmp_path, BOOT).entries == entries


def test_crash_between_the_copies_leaves_the_newer_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path, BOOT)
    journal.save(ENTRIES)
    second = tmp_path / f"journal-{BOOT}.b.jsonl"
    before = second.read_bytes()
    newer = {CAPPED.key: entry(value=450 * W, before=500 * W, written=False)}
    journal.save(newer)
    second.write_bytes(before)
    again = Journal(tmp_path, BOOT)
    assert (again.entries, again.trouble) == (newer, "")
    again.save(newer)
    assert second.read_bytes() == journal.path.read_bytes()


def test_missing_second_copy_after_a_crash_is_not_damage(tmp_path: Path) -> None:
    intended = {CAPPED.key: entry(written=False)}
    Journal(tmp_path, BOOT).save(intended)
    (tmp_path / f"journal-{BOOT}.b.jsonl").unlink()
    again = Journal(tmp_path, BOOT)
    assert (again.entries, again.trouble) == (intended, "")


def test_copy_of_long_ago_is_not_the_newest(tmp_path: Path) -> None:
    now = iter(range(100, 200))
    journal = Journal(tmp_path, BOOT, stamp=lambda: next(now))
    for value in (600 * W, 550 * W, 500 * W):
        journal.save({CAPPED.key: entry(value=value)})
    first = journal.path.read_bytes()
    journal.save({})  # a generation counter in memory alone would restart here
    journal.save(ENTRIES)
    (tmp_path / f"journal-{BOOT}.b.jsonl").write_bytes(first)
    found = Journal(tmp_path, BOOT).entries[CAPPED.key]
    assert (found.value, found.original) == (CAPPED.value, CAPPED.original)


def test_journal_of_an_older_release_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / f"journal-{BOOT}.json"
    told = msgspec.to_builtins(CAPPED)
    del told["imposed"], told["source"]
    path.write_text(json.dumps({"boot_id": BOOT, "version": 1, "entries": [told]}))
    journal = Journal(tmp_path, BOOT)
    assert journal.trouble == ""
    assert journal.entries == {CAPPED.key: entry(source=EntrySource.SALVAGED)}
    journal.save(journal.entries)
    assert not path.exists()
    assert Journal(tmp_path, BOOT).entries == journal.entries


def test_drafts_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, BOOT)
    journal.save(ENTRIES)
    before = set(tmp_path.iterdir())
    (tmp_path / "journal.draft").write_bytes(b'{"check":')
    (tmp_path / f"journal-{BOOT}.new").write_bytes(b'{"boot_id":')
    (tmp_path / f"journal-{EARLIER}.new").write_bytes(b'{"boot_id":')
    assert Journal(tmp_path, BOOT).entries == ENTRIES
    assert set(tmp_path.iterdir()) == before


def test_full_disk_leaves_the_journal_unchanged(tmp_path: Path) -> None:
    journal = Disk(tmp_path, BOOT)
    journal.save(ENTRIES)
    journal.full = True
    with pytest.raises(JournalError, match="No space left on device"):
        journal.save({**ENTRIES, entry(device="gpu1").key: entry(device="gpu1")})
    assert journal.entries == ENTRIES
    assert Journal(tmp_path, BOOT).entries == ENTRIES
    journal.full = False
    journal.save(ENTRIES)
    assert Journal(tmp_path, BOOT).entries == ENTRIES


def test_journal_in_a_writable_directory_is_rejected(tmp_path: Path) -> None:
    directory = open_capper_directory(tmp_path)
    directory.chmod(0o777)
    with pytest.raises(JournalError, match="other users may write it"):
        open_capper_directory(tmp_path)


def test_link_in_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "capper").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="other users may write"):
        open_capper_directory(tmp_path)


def test_directory_without_a_journal_may_be_removed(tmp_path: Path) -> None:
    open_capper_directory(tmp_path).chmod(0o777)
    with pytest.raises(JournalError, match="Remove it, and let the capper make its own"):
        open_capper_directory(tmp_path)


def test_error_advises_against_removal_of_the_journal(tmp_path: Path) -> None:
    directory = open_capper_directory(tmp_path)
    Journal(directory, BOOT).save(ENTRIES)
    directory.chmod(0o777)
    with pytest.raises(JournalError, match="other users may write") as refused:
        open_capper_directory(tmp_path)
    assert "Remove" not in str(refused.value)
    remedy = str(refused.value).partition("`")[2].partition("`")[0]
    subprocess.run(remedy, shell=True, check=True, timeout=60)
    assert Journal(open_capper_directory(tmp_path), BOOT).entries == ENTRIES


def test_error_advises_against_removal_of_a_linked_journal(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Journal(tmp_path / "elsewhere", BOOT).save(ENTRIES)
    (tmp_path / "capper").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="put that in its place") as refused:
        open_capper_directory(tmp_path)
    assert "Remove" not in str(refused.value)


@pytest.mark.parametrize(
    ("owner", "said"),
    [(0, "belongs to root, and only root may. Use sudo."), (4_000_000, "Run this as user 4000000")],
)
def test_unreadable_journal_error_names_its_owner(
    owner: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = open_capper_directory(tmp_path)
    Journal(directory, BOOT).save(ENTRIES)
    found = os.stat_result((*directory.lstat()[:4], owner, *directory.lstat()[5:]))
    monkeypatch.setattr(Path, "lstat", lambda path: found)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(JournalError) as refused:
        open_capper_directory(tmp_path)
    assert said in str(refused.value)
    assert "Remove" not in str(refused.value)


def test_emulated_hosts_journal_is_kept_apart(tmp_path: Path) -> None:
    assert open_capper_directory(tmp_path) != open_capper_directory(tmp_path, emulated=True)


def test_journal_lock_is_exclusive_and_ends_with_its_holder(tmp_path: Path) -> None:
    place = CapperHost(tmp_path, BOOT)
    first = lock_capper(place)
    with pytest.raises(JournalError, match=r"Process \d+ is the one capper of this host"):
        lock_capper(place)
    first.release()
    lock_capper(place).release()
    assert (tmp_path / "lock").exists()


def test_capper_lock_file_is_private(tmp_path: Path) -> None:
    (tmp_path / "lock").touch(0o640)  # format of earlier versions
    lock_capper(CapperHost(tmp_path, BOOT)).release()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_foreign_lock_holder_is_named_as_not_a_capper(
    tmp_path: Path,
) -> None:
    lock = lock_capper(CapperHost(tmp_path, BOOT))
    (tmp_path / "lock").write_text("1\n")  # a capper that has released everything
    with pytest.raises(JournalError) as refused:
        lock_capper(CapperHost(tmp_path, BOOT))
    lock.release()
    assert f"Process {os.getpid()} has the lock" in str(refused.value)
    assert "is the capper" not in str(refused.value)
    assert "End it" in str(refused.value)


@pytest.mark.needs_root
def test_invisible_lock_holder_is_reported_as_unknown(
    tmp_path: Path,
) -> None:
    lock = lock_capper(CapperHost(tmp_path, BOOT))
    (tmp_path / "lock").write_text("4194304\n")  # more than any process has for a number
    alone = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", LOCKS]
    told = subprocess.run(
        [*alone, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    lock.release()
    path = tmp_path / "lock"
    assert told == (
        f"An unknown process has the lock {path} of this host's capper: process"
        f" 4194304, whose pid is in the file, has ended. Find it with"
        f" `fuser -v {path}`, and end it.\n"
    )


# -------------------------------------------------------------------------------------- record


def event(number: int) -> AuditEvent:
    return AuditEvent(
        at=number,
        deed=AuditAction.WRITE,
        knob=Knob.GPU_POWER,
        device="gpu0",
        old=700 * W,
        new=500 * W,
    )


def test_every_event_is_a_line(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 100_000)
    for number in range(3):
        audit.record(event(number))
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["at"] for line in lines] == [0, 1, 2]
    assert json.loads(lines[0]) == {
        "at": 0,
        "deed": "write",
        "knob": "gpu_power",
        "device": "gpu0",
        "old": 700_000,
        "new": 500_000,
    }


def test_files_of_the_record_are_bounded_in_number_and_size(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 500)
    for number in range(100):
        audit.record(event(number))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == GENERATIONS + 1
    assert max(sizes) <= 500
    last = (tmp_path / "audit.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["at"] == 99


def test_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "nowhere" / "audit.jsonl", 500)
    audit.record(event(0))
    assert "No such file" in audit.trouble
