"""Log records of decisions and of the capper's actions; the tail of the audit log."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from testbed.tuned import HOLD, NOW
from testbed.tuned import decided as tuned_decision

from wattspan.capper.audit import AuditAction, AuditEvent, AuditLog
from wattspan.model import Decision, DecisionReason, Instant, Knob, Move, RecordedDecision
from wattspan.service.decision_events import (
    MAX_READ_BYTES,
    AuditTail,
    audit_record,
    decision_record,
    store_and_send,
)
from wattspan.testing import ManualClock

WRITE = AuditEvent(
    at=7,
    deed=AuditAction.WRITE,
    knob=Knob.GPU_POWER,
    device="gpu:GPU-0",
    name="H100 0",
    old=700_000,
    new=525_500,
    why="A try.",
    job="train",
    pid=11,
    uid=0,
)


def decided(move: Move, reason: DecisionReason) -> RecordedDecision:
    decision = Decision(move, reason, "So it is.", {"gpu:GPU-0": 500_000}, {"slowdown": 0.02})
    return RecordedDecision(Instant(1, 10**18), "job", Knob.GPU_POWER, decision, True)


# ------------------------------------------------------------------------------- messages


def test_decision_record_has_the_sentence_and_the_figures():
    record = decision_record(decided(Move.HOLD, DecisionReason.CERTIFIED))
    assert (record.name, record.wall) == ("wattspan.autotune.decision", 10**18)
    assert record.body == "So it is."
    assert record.attributes["wattspan.autotune.settings"] == [500.0]
    assert record.attributes["wattspan.autotune.shown.slowdown"] == 0.02
    assert not record.warns


@pytest.mark.parametrize(
    ("move", "reason", "warns"),
    [
        (Move.RELEASE, DecisionReason.OVER_BUDGET, True),
        (Move.RELEASE, DecisionReason.FOREIGN_WRITER, True),
        (Move.RELEASE, DecisionReason.LOST_DEVICE, True),
        (Move.DECLINE, DecisionReason.NO_PERMISSION, True),
        (Move.RELEASE, DecisionReason.ENDED, False),
        (Move.DECLINE, DecisionReason.NO_SAVING, False),
        (Move.PROBE, DecisionReason.SCREENING, False),
    ],
)
def test_decision_record_warns_of_exceeded_budgets_and_faults(move, reason, warns):
    assert decision_record(decided(move, reason)).warns is warns


def test_decision_record_attributes_have_the_projects_prefix() -> None:
    record = decision_record(tuned_decision(10, HOLD))
    assert (record.name, record.wall, record.body) == (
        "wattspan.autotune.decision",
        NOW.wall - 10 * 10**9,
        HOLD.sentence,
    )
    prefix = "wattspan.autotune."
    assert {name.removeprefix(prefix): value for name, value in record.attributes.items()} == {
        "job": "trainer/train_step",
        "knob": "gpu_power",
        "unit": "W",
        "move": "hold",
        "reason": "certified",
        "applied": True,
        "devices": ["GPU-0", "GPU-1"],
        "settings": [560.0, 560.0],
        "shown.slowdown": 0.031,
        "shown.bound": 0.044,
        "shown.pairs": 46.0,
    }
    assert all(name.startswith(prefix) for name in record.attributes)


def test_decision_record_has_only_values_that_opentelemetry_accepts() -> None:
    from opentelemetry.attributes import BoundedAttributes

    record = decision_record(
        tuned_decision(10, replace(HOLD, shown={"slowdown": float("inf"), "pairs": 3}))
    )
    taken = BoundedAttributes(attributes=dict(record.attributes), immutable=True)
    assert set(taken) == set(record.attributes)
    assert "wattspan.autotune.shown.slowdown" not in taken


def test_forwarded_decisions_are_stored_and_sent():
    kept, told = [], []
    one = decided(Move.HOLD, DecisionReason.CERTIFIED)
    store_and_send(kept.append, told.append, one)
    assert kept == [one]
    assert told == [decision_record(one)]


def test_audit_record_of_a_write_names_device_job_reason_and_watts():
    record = audit_record(WRITE)
    assert record.name == "wattspan.caps.write"
    assert (
        record.body
        == "The capper set gpu_power of H100 0 to 525.5 W, from 700 W, for train: A try."
    )
    assert record.attributes == {
        "wattspan.caps.deed": "write",
        "wattspan.caps.knob": "gpu_power",
        "wattspan.caps.unit": "W",
        "wattspan.caps.old": 700.0,
        "wattspan.caps.new": 525.5,
        "wattspan.caps.device": "gpu:GPU-0",
        "wattspan.caps.name": "H100 0",
        "wattspan.caps.job": "train",
        "wattspan.caps.why": "A try.",
        "wattspan.caps.pid": 11,
        "wattspan.caps.uid": 0,
    }


@pytest.mark.parametrize(
    ("event", "body", "warns"),
    [
        (
            AuditEvent(
                at=1, deed=AuditAction.RESTORE, knob=Knob.GPU_CLOCK, device="gpu:0", old=1200
            ),
            "The capper restored gpu_clock of gpu:0 to unlocked, from 1200 MHz.",
            False,
        ),
        (
            AuditEvent(
                at=1, deed=AuditAction.FOREIGN, knob=Knob.CPU_POWER, device="rapl:0", new=90_000
            ),
            "Another program set cpu_power of rapl:0 to 90 W; the capper leaves it unchanged.",
            True,
        ),
        (
            AuditEvent(at=1, deed=AuditAction.REFUSE, why="No such knob.", uid=5),
            "No such knob.",
            True,
        ),
        (AuditEvent(at=1, deed=AuditAction.FAIL, why="It did not obey."), "It did not obey.", True),
        (AuditEvent(at=1, deed=AuditAction.FAIL), "The capper recorded: fail.", True),
        (
            AuditEvent(
                at=1,
                deed=AuditAction.SNAPSHOT,
                knob=Knob.GPU_POWER,
                device="gpu:0",
                old=7000,
                new=5000,
            ),
            "The cap on gpu_power of gpu:0 is 5 W; the original limit is 7 W.",
            False,
        ),
        (
            AuditEvent(
                at=1, deed=AuditAction.CEILING, new=900_000, ttl=60 * 10**9, uid=5, why="Grid."
            ),
            "A ceiling of 900 W was set: Grid.",
            False,
        ),
        (
            AuditEvent(at=1, deed=AuditAction.LIFT, old=900_000),
            "The ceiling of 900 W was removed.",
            False,
        ),
        (
            AuditEvent(at=1, deed=AuditAction.LAPSE, old=900_000),
            "The ceiling of 900 W expired.",
            False,
        ),
        (AuditEvent(at=1, deed=AuditAction.START), "The capper started.", False),
        (AuditEvent(at=1, deed=AuditAction.END), "The capper ended.", False),
    ],
)
def test_audit_record_body_is_a_sentence(event, body, warns):
    record = audit_record(event)
    assert record.body == body
    assert record.warns is warns


def test_audit_record_of_a_ceiling_is_in_watts_and_seconds():
    record = audit_record(
        AuditEvent(at=1, deed=AuditAction.CEILING, old=1, new=900_000, ttl=60 * 10**9, uid=5)
    )
    assert record.attributes == {
        "wattspan.caps.deed": "ceiling",
        "wattspan.caps.unit": "W",
        "wattspan.caps.old": 0.001,
        "wattspan.caps.new": 900.0,
        "wattspan.caps.ttl": 60.0,
        "wattspan.caps.uid": 5,
    }


@pytest.mark.parametrize("deed", list(AuditAction))
def test_audit_record_of_every_action_has_a_name_and_a_sentence(deed):
    assert audit_record(AuditEvent(at=1, deed=deed)).name == f"wattspan.caps.{deed}"
    assert audit_record(AuditEvent(at=1, deed=deed)).body.endswith(".")


# ------------------------------------------------------------------------- following the log


class Bench:
    """A log written by a capper, and the events read from it."""

    def __init__(self, folder: Path, size: int = 10**6) -> None:
        self.path = folder / "audit.jsonl"
        self.audit = AuditLog(self.path, size)
        self.told: list[str] = []
        self.said: list[str] = []
        self.tail = AuditTail(
            self.path, lambda event: self.told.append(event.why), ManualClock(), self.said.append
        )

    def record(self, *whys: str) -> None:
        for why in whys:
            self.audit.record(AuditEvent(at=1, deed=AuditAction.FAIL, why=why))


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.tail.close()


def test_only_new_audit_rows_become_events_once(bench):
    bench.record("before")
    bench.tail.begin()
    bench.record("a", "b")
    for _ in range(3):
        bench.tail.turn()
    bench.record("c")
    bench.tail.turn()
    assert bench.told == ["a", "b", "c"]


def test_later_audit_log_is_read_from_its_first_line(bench):
    bench.tail.begin()
    bench.tail.turn()
    bench.record("first")
    bench.tail.turn()
    assert bench.told == ["first"]
    assert bench.said == []


def test_rotation_neither_loses_nor_repeats_events(tmp_path):
    bench = Bench(tmp_path, size=200)
    bench.record("before")
    bench.tail.begin()
    wanted = [str(number) for number in range(50)]
    for number in wanted:
        bench.record(number)
        if int(number) % 2:
            bench.tail.turn()
    bench.tail.turn()
    bench.tail.close()
    assert (tmp_path / "audit.jsonl.1").exists()
    assert bench.told == wanted


def test_partial_line_is_read_once_complete(bench):
    bench.tail.begin()
    line = msgspec.json.encode(AuditEvent(at=1, deed=AuditAction.FAIL, why="whole")) + b"\n"
    with bench.path.open("ab", buffering=0) as file:
        file.write(line[:10])
        bench.tail.turn()
        assert bench.told == []
        file.write(line[10:])
    bench.tail.turn()
    assert bench.told == ["whole"]


def test_invalid_event_is_skipped(bench):
    bench.tail.begin()
    bench.record("a")
    with bench.path.open("ab") as file:
        file.write(
            b'\xff\n{"at":1,"deed":"of a later version"}\n[]\n\n' + b"x" * (MAX_READ_BYTES + 9)
        )
        file.write(b"\n")
    bench.record("b")
    bench.tail.turn()
    assert bench.told == ["a", "b"]


def test_truncated_log_is_followed(bench):
    bench.record("before")
    bench.tail.begin()
    os.truncate(bench.path, 0)
    bench.record("a")
    bench.tail.turn()
    assert bench.told == ["a"]


def test_recreated_log_is_followed(bench):
    bench.record("before")
    bench.tail.begin()
    bench.path.unlink()
    bench.tail.turn()
    bench.record("a")
    bench.tail.turn()
    assert bench.told == ["a"]


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo, lambda p: p.symlink_to(p)])
def test_non_file_audit_log_is_logged_once(bench, make):
    make(bench.path)
    bench.tail.begin()
    for _ in range(3):
        bench.tail.turn()
    (said,) = bench.said
    assert str(bench.path) in said
    assert bench.told == []
