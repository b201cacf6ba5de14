"""Entries that a capper inherits: of damaged journals, of the audit log, of earlier boots."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from testbed.capper_bench import BOOT, Bench, W, entry

from wattspan.capper.audit import AuditAction, AuditEvent, AuditLog
from wattspan.capper.journal import EntrySource, Journal, JournalEntry, audited_writes
from wattspan.capper.ownership import unrecovered_notice
from wattspan.capper.protocol import RefusalReason
from wattspan.model import CapKey, Knob, Trouble
from wattspan.ports import CapsError

EARLIER = "00000000-1111-4000-8000-000000000000"


def left(folder: Path, *entries: JournalEntry, boot: str = BOOT, boards: int = 1) -> Bench:
    """A capper that has just been started where another one left ``entries``."""
    Journal(folder, boot).save({one.key: one for one in entries})
    return Bench(folder, boards=boards)


def damaged(folder: Path, boards: int = 2) -> Bench:
    """A capper that has just been started with a journal of which nothing can be read."""
    (folder / f"journal-{BOOT}.a.jsonl").write_bytes(b"")
    return Bench(folder, boards=boards)


# --------------------------------------------------------------------------------- earlier boots


def test_limit_of_an_earlier_boot_that_is_still_in_force_is_given_back(tmp_path: Path) -> None:
    bench = left(tmp_path, entry(), boot=EARLIER)
    bench.board().stands = 500 * W
    bench.turn()
    assert bench.stands == [650 * W]
    assert bench.deeds() == ["restore"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stands", [650 * W, 700 * W, 333 * W])
def test_entry_of_an_earlier_boot_is_void_if_the_device_differs(
    tmp_path: Path, stands: int
) -> None:
    bench = left(tmp_path, entry(), boot=EARLIER)
    bench.board().stands = stands
    bench.turn()
    assert (bench.stands, bench.actuator.written) == ([stands], [])
    assert [(event.deed, event.old, event.new) for event in bench.events] == [
        (AuditAction.VOID, 500 * W, stands)
    ]
    assert list(tmp_path.iterdir()) == []


def test_entry_of_an_earlier_boot_is_void_at_the_default_limit(tmp_path: Path) -> None:
    bench = left(tmp_path, entry(default=500 * W), boot=EARLIER)
    bench.board().stands = 500 * W
    bench.turn()
    assert (bench.actuator.written, bench.deeds()) == ([], ["void"])


def test_earlier_boot_is_kept_until_the_device_answers(tmp_path: Path) -> None:
    bench = left(tmp_path, entry(), boot=EARLIER)
    bench.board().stands, bench.board().fault = 500 * W, Trouble.RETRY
    bench.turn()
    bench.crash()
    assert bench.on_disk["gpu0"]["source"] == "earlier"
    bench.board().fault = None
    bench.turn(2)
    assert (bench.stands, bench.on_disk) == ([650 * W], {})


def test_absent_device_of_an_earlier_boot_can_be_dropped(tmp_path: Path) -> None:
    bench = left(tmp_path, entry(device="gpu7"), boot=EARLIER)
    assert [trouble.device for trouble in bench.manager.restore()] == ["gpu7"]
    assert bench.manager.accept() == 1
    assert (bench.manager.restore(), bench.on_disk) == ((), {})


def test_journal_of_another_emulated_host_is_removed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Journal(tmp_path, f"{BOOT} {name}").save({entry().key: entry()})
        (tmp_path / f"journal-{EARLIER}_{name}.a.jsonl").write_bytes(b"")
    journal = Journal(tmp_path, f"{BOOT} three")
    assert (journal.entries, journal.trouble) == ({}, "")
    journal.save({})
    assert list(tmp_path.glob("journal-*")) == []


def test_clocks_of_an_earlier_boot_are_reset_once(tmp_path: Path) -> None:
    clock = entry(knob=Knob.GPU_CLOCK, original=None, value=1200)
    Journal(tmp_path, EARLIER).save({clock.key: clock})
    bench = Bench(tmp_path, boards=1, knob=Knob.GPU_CLOCK)
    bench.turn()
    bench.crash()
    assert bench.actuator.written == [("gpu0", None)]


# ------------------------------------------------------------------------------------ plausibility


@pytest.mark.parametrize("original", [701 * W, 199 * W, 499 * W, 0, -1])
def test_implausible_original_is_not_written(tmp_path: Path, original: int) -> None:
    bench = left(tmp_path, entry(original=original))
    bench.board().stands = 500 * W
    (trouble,) = bench.manager.restore()
    assert trouble.refusal == RefusalReason.UNRECOVERED
    assert "gpu0" in str(trouble)
    assert (bench.stands, bench.actuator.written) == ([500 * W], [])


def test_range_that_follows_the_limit_does_not_make_an_original_implausible(
    tmp_path: Path,
) -> None:
    bench = left(tmp_path, entry())
    bench.board().stands = bench.board().maximum = 500 * W
    assert bench.manager.restore() == ()
    assert bench.stands == [650 * W]


# -------------------------------------------------------------------------------- lost originals


def test_devices_of_a_lost_journal_are_named_and_not_written(tmp_path: Path) -> None:
    bench = damaged(tmp_path)
    bench.board(1).stands = 700 * W  # its maximum: no cap can be in force
    bench.turn()
    assert "gpu_power of GPU0" in unrecovered_notice(bench.manager.entries.values())
    assert "GPU1" not in unrecovered_notice(bench.manager.entries.values())
    with pytest.raises(CapsError, match="its original is unknown") as refused:
        bench.hold(500 * W, 0)
    assert refused.value.refusal == RefusalReason.UNRECOVERED
    bench.hold(500 * W, 1)
    assert bench.stands == [650 * W, 500 * W]
    rows = {row.state.key.device: row for row in bench.manager.rows()}
    assert rows["gpu0"].lost
    assert "caps accept" in rows["gpu0"].trouble
    assert not rows["gpu1"].lost


def test_lost_original_stays_lost_over_restarts(tmp_path: Path) -> None:
    bench = damaged(tmp_path)
    for _ in range(2):
        assert [trouble.device for trouble in bench.manager.restore() if trouble.device != "*"] == [
            "gpu0",
            "gpu1",
        ]
        bench.crash()


def test_accept_makes_the_current_limit_the_original(tmp_path: Path) -> None:
    bench = damaged(tmp_path)
    bench.turn()
    assert bench.manager.accept() == 4  # two boards, and "every device" of the two other knobs
    assert unrecovered_notice(bench.manager.entries.values()) == ""
    bench.hold(500 * W, 0)
    assert bench.on_disk["gpu0"]["original"] == 650 * W


def test_manual_limit_ends_the_lost_state(tmp_path: Path) -> None:
    bench = damaged(tmp_path)
    bench.turn()
    bench.board().stands = 600 * W
    bench.turn(1)
    assert "GPU0" not in unrecovered_notice(bench.manager.entries.values())
    assert AuditAction.VOID in [event.deed for event in bench.events]
    bench.hold(500 * W, 0)
    assert bench.on_disk["gpu0"]["original"] == 600 * W


def test_devices_that_cannot_be_listed_are_lost_as_one(tmp_path: Path) -> None:
    bench = damaged(tmp_path)
    assert "cpu_power of every device" in unrecovered_notice(bench.manager.entries.values())
    assert "gpu_power of every device" not in unrecovered_notice(bench.manager.entries.values())
    bench.turn()
    package = CapKey(Knob.CPU_POWER, "rapl:package-0")
    assert bench.manager.observe([package])[package].refusal == RefusalReason.UNRECOVERED


def test_unresponsive_lost_device_is_named_until_it_responds(tmp_path: Path) -> None:
    lost = JournalEntry(knob=Knob.GPU_POWER, device="gpu0", name="GPU0", source=EntrySource.LOST)
    bench = left(tmp_path, lost)
    bench.board().fault = Trouble.RETRY
    assert [str(one) for one in bench.manager.restore()] == ["gpu0 does not answer."]
    bench.board().fault = None
    bench.turn(2)
    assert bench.on_disk["gpu0"]["foreign"] == 650 * W
    bench.board().stands = 700 * W
    bench.turn(2)
    assert bench.on_disk == {}


def test_salvaged_entry_is_lost_if_the_device_limit_differs(tmp_path: Path) -> None:
    bench = left(tmp_path, entry(source=EntrySource.SALVAGED))
    bench.board().stands = 333 * W
    (trouble,) = bench.manager.restore()
    assert trouble.refusal == RefusalReason.UNRECOVERED
    assert bench.stands == [333 * W]


# ------------------------------------------------------------------------------------- audit log


def held(folder: Path) -> tuple[Bench, list[AuditEvent], list[bytes]]:
    """A capper that holds one limit; its audit rows, and their lines."""
    bench = Bench(folder, boards=1)
    audit = AuditLog(folder / "audit.jsonl", 1 << 20)
    bench.hold(550 * W)
    bench.hold(500 * W)
    for event in bench.events:
        audit.record(event)
    return bench, bench.events, (folder / "audit.jsonl").read_bytes().splitlines(keepends=True)


def test_audit_log_replaces_a_lost_journal(tmp_path: Path) -> None:
    bench, _, _ = held(tmp_path)
    for path in tmp_path.glob("journal-*"):
        path.write_bytes(b"")
    journal = Journal(tmp_path, BOOT, tmp_path / "audit.jsonl")
    found = journal.entries[bench.key()]
    assert (found.original, found.value, found.source) == (650 * W, 500 * W, EntrySource.SALVAGED)


def test_crash_between_copy_removals_is_not_damage(tmp_path: Path) -> None:
    bench, events, lines = held(tmp_path)
    second = tmp_path / f"journal-{BOOT}.b.jsonl"
    before = second.read_bytes()
    bench.manager.release(1)
    audit = AuditLog(tmp_path / "audit.jsonl", 1 << 20)
    for event in events[len(lines) :]:
        audit.record(event)
    second.write_bytes(before)
    journal = Journal(tmp_path, BOOT, tmp_path / "audit.jsonl")
    assert (list(journal.entries), journal.complete) == ([bench.key()], True)


def test_audit_rows_tell_the_original_and_our_value(tmp_path: Path) -> None:
    bench, events, lines = held(tmp_path)
    claim = audited_writes(lines, BOOT)[bench.key()]
    assert (claim.original, claim.value) == (650 * W, 500 * W)
    assert audited_writes(lines, EARLIER) == {}
    bench.manager.release(1)
    bench.turn(1)
    rest = [replace(event) for event in events[len(lines) :]]
    audit = AuditLog(tmp_path / "audit.jsonl", 1 << 20)
    for event in rest:
        audit.record(event)
    assert audited_writes((tmp_path / "audit.jsonl").read_bytes().splitlines(), BOOT) == {
        bench.key(): None
    }


def test_damaged_audit_row_invalidates_earlier_rows(tmp_path: Path) -> None:
    bench, _, lines = held(tmp_path)
    damaged_row = lines[-1].replace(b"650000", b"650001")
    assert damaged_row != lines[-1]
    assert audited_writes([*lines, damaged_row], BOOT) == {}
    assert audited_writes([*lines, b"{\n"], BOOT) == {}
    assert audited_writes([damaged_row, lines[-1]], BOOT).keys() == {bench.key()}
