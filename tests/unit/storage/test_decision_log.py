"""The history of decisions: kept over restarts, bounded, and never in the way."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.tuned import HELD, HOLD, NOW, PROBE, RELEASE, decided

from wattspan.model import Decision, DecisionReason, Instant, Knob, Move, RecordedDecision
from wattspan.storage.tuning import (
    MAX_UNWRITTEN,
    REPEAT_INTERVAL,
    DecisionLog,
    decisions_path,
    read_decisions,
)
from wattspan.testing import ManualClock


def book(folder: Path, size: int = 2**20, log: list[str] | None = None) -> DecisionLog:
    said = log if log is not None else []
    return DecisionLog(folder / "tuning" / "d.jsonl", ManualClock(), size, said.append)


def numbered(number: int, job: str = "job") -> RecordedDecision:
    """Decisions of which no two are the same, a second apart."""
    at = Instant(NOW.mono + number * 10**9, NOW.wall + number * 10**9)
    caps = {"GPU-0": 700_000 - number}
    decision = Decision(Move.PROBE, DecisionReason.SCREENING, f"Try {number}.", caps)
    return RecordedDecision(at, job, Knob.GPU_POWER, decision, True)


def lines(folder: Path) -> int:
    return (folder / "tuning" / "d.jsonl").read_bytes().count(b"\n")


def test_decisions_are_read_oldest_first(tmp_path: Path) -> None:
    kept = book(tmp_path)
    told = [decided(30, PROBE), decided(20, HOLD), decided(10, RELEASE)]
    for one in told:
        kept.add(one)
    assert kept.recent() == told
    assert kept.recent(limit=2) == told[1:]
    assert kept.recent(since=NOW.wall - 15 * 10**9) == told[2:]


def test_decisions_are_filtered_by_job(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(decided(30, PROBE))
    kept.add(decided(20, HOLD, "another"))
    assert [one.job for one in kept.recent("another")] == ["another"]
    assert kept.recent("nobody") == []
    assert len(kept.recent()) == 2


def test_decision_with_only_newer_figures_is_not_written(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(decided(30, HOLD))
    kept.add(decided(20, replace(HOLD, sentence="Newer.", shown={"pairs": 99.0})))
    assert [one.decision.sentence for one in kept.recent()] == [HOLD.sentence]
    kept.add(decided(10, RELEASE))
    kept.add(decided(5, HOLD))
    assert lines(tmp_path) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"applied": False},
        {"job": "another"},
        {"knob": Knob.GPU_CLOCK},
        {"decision": replace(HOLD, caps={"GPU-0": 1})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_decision_is_written(change: dict[str, object], tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(decided(30, HOLD))
    kept.add(decided(20, HOLD)._replace(**change))
    assert len(kept.recent()) == 2


def test_back_and_forth_between_a_setting_and_the_original_is_one_decision(
    tmp_path: Path,
) -> None:
    kept = book(tmp_path)
    for second in range(100, 0, -10):
        kept.add(decided(second, PROBE))
        kept.add(decided(second - 5, replace(PROBE, caps={})))
    assert kept.recent() == [decided(100, PROBE)]
    kept.add(decided(0, replace(PROBE, caps={"GPU-0": 520_000})))
    assert len(kept.recent()) == 2


def test_reviewed_hold_is_one_decision(tmp_path: Path) -> None:
    kept = book(tmp_path)
    sentinel = Decision(Move.PROBE, DecisionReason.SENTINEL, "Compare 560 W.")
    for second in range(100, 0, -10):
        kept.add(decided(second, HOLD))
        kept.add(decided(second - 5, sentinel))
    assert kept.recent() == [decided(100, HOLD)]
    kept.add(decided(0, RELEASE))
    assert [one.decision.move for one in kept.recent()] == [Move.HOLD, Move.RELEASE]


def test_first_decision_is_always_written(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(decided(2, Decision(Move.PROBE, DecisionReason.BASELINE, "Learn.")))
    kept.add(decided(1, Decision(Move.PROBE, DecisionReason.SCREENING, "Compare.")))
    assert len(kept.recent()) == 2


def test_history_outlives_a_restart(tmp_path: Path) -> None:
    book(tmp_path).add(decided(30, HOLD))
    again = book(tmp_path)
    again.add(decided(20, HOLD))  # the same as before the restart
    again.add(decided(10, RELEASE))
    assert again.recent() == [decided(30, HOLD), decided(10, RELEASE)]


@pytest.mark.parametrize("torn", [2, 20, 100])
def test_torn_last_line_is_skipped(torn: int, tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(numbered(1))
    kept.add(numbered(2))
    path = tmp_path / "tuning" / "d.jsonl"
    os.truncate(path, path.stat().st_size - torn)
    again = book(tmp_path)
    assert again.recent() == [numbered(1)]
    again.add(numbered(3))
    assert again.recent() == [numbered(1), numbered(3)]


def test_lines_of_others_are_passed_over(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(numbered(1))
    with (tmp_path / "tuning" / "d.jsonl").open("ab") as file:
        file.write(b'{"job": "half"}\n[]\n1\n\xff\xfe\n{"reason": "of a later version"}\n\n')
    kept.add(numbered(2))
    assert kept.recent() == [numbered(1), numbered(2)]


def test_decision_log_is_limited_to_two_files(tmp_path: Path) -> None:
    size = 4_000
    kept = book(tmp_path, size)
    for number in range(100):
        kept.add(numbered(number))
    files = list((tmp_path / "tuning").iterdir())
    assert sorted(file.name for file in files) == ["d.jsonl", "d.jsonl.1"]
    assert all(file.stat().st_size <= size for file in files)
    told = kept.recent()
    assert told == [numbered(number) for number in range(100 - len(told), 100)]
    assert len(told) > 10


def test_size_smaller_than_a_line_still_keeps_the_last(tmp_path: Path) -> None:
    kept = book(tmp_path, 10)
    kept.add(numbered(1))
    kept.add(numbered(2))
    assert kept.recent() == [numbered(1), numbered(2)]


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_full_disk_is_logged_once_without_an_exception(tmp_path: Path) -> None:
    said: list[str] = []
    clock = ManualClock()
    path = tmp_path / "d.jsonl"
    path.symlink_to(FULL)
    kept = DecisionLog(path, clock, log=said.append)
    for number in range(3):
        kept.add(numbered(number))
    (sentence,) = said
    assert "the disk is full" in sentence
    assert "Free some space" in sentence
    clock.advance(ns=REPEAT_INTERVAL)
    kept.add(numbered(3))
    assert len(said) == 2


def test_unwritten_decisions_are_reported_and_written_later(tmp_path: Path) -> None:
    said: list[str] = []
    blocked = tmp_path / "tuning"
    blocked.write_text("a file where the directory should be")
    kept = book(tmp_path, log=said)
    kept.add(numbered(1))
    kept.add(numbered(2))
    assert kept.recent() == [numbered(1), numbered(2)]
    assert len(said) == 1
    blocked.unlink()
    kept.add(numbered(3))
    assert read_decisions(tmp_path / "tuning" / "d.jsonl") == [numbered(n) for n in (1, 2, 3)]


def test_unwritten_decisions_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("")
    kept = book(tmp_path)
    for number in range(MAX_UNWRITTEN + 10):
        kept.add(numbered(number))
    assert kept.recent(limit=10_000)[0] == numbered(10)


def test_line_that_was_cut_by_a_full_disk_is_written_whole_afterwards(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(numbered(1))
    with (tmp_path / "tuning" / "d.jsonl").open("ab") as file:
        file.write(b'{"at_unix_ns": 17')
    kept.add(numbered(2))
    kept.add(numbered(3))
    assert kept.recent() == [numbered(1), numbered(2), numbered(3)]
    assert lines(tmp_path) == 4


def test_others_may_not_read_the_file(tmp_path: Path) -> None:
    book(tmp_path).add(decided(1, HOLD))
    path = tmp_path / "tuning" / "d.jsonl"
    assert path.stat().st_mode & 0o007 == 0
    assert path.parent.stat().st_mode & 0o007 == 0


def test_decision_log_is_readable_during_writes(tmp_path: Path) -> None:
    kept = book(tmp_path, 3_000)
    done = threading.Event()
    seen: list[int] = []

    def ask() -> None:
        while not done.is_set():
            told = [one.at.wall for one in kept.recent(limit=1000)]
            assert told == sorted(told)
            seen.append(len(told))

    asking = threading.Thread(target=ask)
    asking.start()
    for number in range(200):
        kept.add(numbered(number))
    done.set()
    asking.join()
    assert kept.recent(limit=1) == [numbered(199)]
    assert seen


def test_job_is_forgotten_before_memory_is_full(tmp_path: Path) -> None:
    kept = book(tmp_path)
    for number in range(1_001):
        kept.add(decided(1, HOLD, f"job{number}"))
    assert len(kept._last) == 1_000
    kept.add(decided(0, HOLD, "job0"))  # written again: a forgotten job is new
    assert len(kept.recent("job0")) == 2


def test_emulated_decisions_have_their_own_file(tmp_path: Path) -> None:
    assert decisions_path(tmp_path) == tmp_path / "tuning" / "decisions.jsonl"
    assert decisions_path(tmp_path, emulated=True) != decisions_path(tmp_path)


def test_missing_decision_file_reads_as_empty(tmp_path: Path) -> None:
    assert read_decisions(tmp_path / "nothing.jsonl") == []
    assert book(tmp_path).recent(HELD.job) == []
