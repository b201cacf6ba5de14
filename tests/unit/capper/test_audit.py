"""The audit log under a busy peer: rows of writes are limited, and protected rows survive."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from testbed.capper_bench import BOOT, Bench, Board, FakeActuator, W

from wattspan.capper import protocol
from wattspan.capper.audit import (
    GENERATIONS,
    MERGE_PERIOD,
    ROW_BURST,
    AuditAction,
    AuditEvent,
    AuditLog,
    AuditRowLimiter,
)
from wattspan.capper.host_directory import CapperHost
from wattspan.capper.journal import audited_writes
from wattspan.capper.process import CapEngine
from wattspan.capper.protocol import RefusalReason, RefusedReply
from wattspan.capper.server import MOVE_BURST, MOVES_PER_SECOND
from wattspan.config import CapsSettings, load
from wattspan.model import SECOND, CapKey, Knob
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import PeerCredentials

BUSY, OTHER = PeerCredentials(71, 1001), PeerCredentials(72, 1002)


def row(deed: AuditAction, **fields: object) -> AuditEvent:
    given = {"at": 1, "knob": Knob.GPU_POWER, "device": "gpu0", "uid": BUSY.uid, **fields}
    return AuditEvent(deed=deed, **given)  # type: ignore[arg-type]


def write(new: int, **fields: object) -> AuditEvent:
    return row(AuditAction.WRITE, **{"old": 650 * W, "new": new, "job": "job", **fields})


def rows(path: Path) -> list[AuditEvent]:
    return [msgspec.json.decode(line, type=AuditEvent) for line in path.read_bytes().splitlines()]


# ------------------------------------------------------------------------------ rows of writes


class Limited:
    """A limiter, and the rows it admits."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.rows: list[AuditEvent] = []
        self.limiter = AuditRowLimiter(self.clock, self.rows.append)

    def writes(self, count: int, **fields: object) -> None:
        for number in range(count):
            self.limiter.record(write(number, old=number - 1, **fields))

    def pass_time(self, nanoseconds: int) -> None:
        self.clock.advance(nanoseconds / SECOND)
        self.limiter.turn()


@pytest.fixture
def limited() -> Limited:
    return Limited()


def test_writes_of_a_busy_user_have_one_row_together(limited: Limited) -> None:
    limited.writes(ROW_BURST + 500)
    assert len(limited.rows) == ROW_BURST
    limited.pass_time(MERGE_PERIOD)
    (last,) = limited.rows[ROW_BURST:]
    assert (last.deed, last.old, last.new) == (
        AuditAction.WRITE,
        ROW_BURST - 1,
        ROW_BURST + 499,
    )
    assert last.why.startswith("500 writes and restores")


def test_hour_of_writes_and_restores_has_a_bounded_number_of_rows(limited: Limited) -> None:
    for number in range(3600):
        limited.limiter.record(write(number))
        limited.limiter.record(row(AuditAction.RESTORE, new=650 * W))
        limited.pass_time(SECOND)
    assert len(limited.rows) < ROW_BURST + 20 * 60
    limited.limiter.close()
    assert limited.rows[-1].deed is AuditAction.RESTORE


def test_audit_rate_limit_is_per_user(limited: Limited) -> None:
    limited.writes(1000)
    limited.writes(1, uid=OTHER.uid)
    limited.writes(1, device="gpu1")
    assert [(e.uid, e.device) for e in limited.rows[-2:]] == [
        (OTHER.uid, "gpu0"),
        (BUSY.uid, "gpu1"),
    ]


def test_rows_of_one_device_stay_in_the_order_of_the_writes(limited: Limited) -> None:
    limited.writes(ROW_BURST + 5)
    limited.limiter.record(row(AuditAction.FOREIGN, new=300 * W, uid=None))
    assert [e.deed for e in limited.rows[-2:]] == [AuditAction.WRITE, AuditAction.FOREIGN]
    limited.writes(3)
    limited.writes(1, uid=OTHER.uid)
    assert [e.uid for e in limited.rows[-2:]] == [BUSY.uid, OTHER.uid]


def test_long_reason_is_cut(limited: Limited) -> None:
    limited.writes(1, why="w" * 1000)
    assert len(limited.rows[0].why) < 500


def test_pending_audit_rows_are_written_at_shutdown(limited: Limited) -> None:
    limited.writes(ROW_BURST + 7)
    limited.limiter.record(AuditEvent(at=9, deed=AuditAction.END))
    assert [e.deed for e in limited.rows[-2:]] == [AuditAction.WRITE, AuditAction.END]
    assert limited.rows[-2].new == ROW_BURST + 6


# ------------------------------------------------------------------------------------ rotation


def fill(audit: AuditLog, generations: int) -> None:
    """Write so many files full."""
    for number in range(generations * audit.size // 60):
        audit.record(write(number))


def test_old_files_are_kept_in_generations_and_their_total_is_bounded(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 4000)
    fill(audit, 3 * GENERATIONS)
    names = {path.name for path in tmp_path.glob("audit.jsonl*")}
    assert {f"audit.jsonl.{n}" for n in range(1, GENERATIONS)} <= names
    assert f"audit.jsonl.{GENERATIONS}" not in names
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert total <= 4000 * (GENERATIONS + 1)


def test_operators_rows_and_the_first_row_of_each_job_survive_any_number_of_writes(
    tmp_path: Path,
) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 4000)
    audit.record(row(AuditAction.CEILING, new=900 * W, uid=0))
    audit.record(row(AuditAction.COMMAND, uid=0, why="restore"))
    audit.record(write(1, job="victim"))
    fill(audit, 3 * GENERATIONS)
    found = rows(tmp_path / "audit.jsonl.kept")
    assert [e.deed for e in found if e.deed is not AuditAction.WRITE] == [
        AuditAction.CEILING,
        AuditAction.COMMAND,
    ]
    assert {(e.job, e.device) for e in found if e.deed is AuditAction.WRITE} == {
        ("victim", "gpu0"),
        ("job", "gpu0"),
    }


def test_new_job_names_do_not_displace_the_operators_rows(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 4000)
    audit.record(row(AuditAction.CEILING, new=900 * W, uid=0))
    for number in range(GENERATIONS * 200):
        audit.record(write(number, job=f"job {number}"))
    kept = tmp_path / "audit.jsonl.kept"
    assert rows(kept)[0].deed is AuditAction.CEILING
    assert kept.stat().st_size <= 4000


def test_damaged_row_of_the_oldest_file_is_dropped(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 4000)
    audit.path.write_bytes(b'{"at":1,"deed":"ceiling"}\n\xff{\n{"at":1,"deed":"later"}\n[]\n')
    fill(audit, 2 * GENERATIONS)
    assert rows(tmp_path / "audit.jsonl.kept")[0].deed is AuditAction.CEILING


def test_each_new_file_begins_with_the_caps_in_force(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    audit = AuditLog(tmp_path / "audit.jsonl", 4000, outstanding=bench.manager.outstanding)
    bench.hold(500 * W, 0)
    fill(audit, 2)
    for name in ("audit.jsonl", "audit.jsonl.1"):
        first = rows(tmp_path / name)[0]
        assert (first.deed, first.device, first.old, first.new) == (
            AuditAction.SNAPSHOT,
            "gpu0",
            650 * W,
            500 * W,
        )


def test_rotated_audit_log_still_recovers_caps_in_force(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    audit = AuditLog(tmp_path / "audit.jsonl", 4000, outstanding=bench.manager.outstanding)
    bench.hold(500 * W, 0)
    for number in range(GENERATIONS * 100):
        audit.record(AuditEvent(at=number, deed=AuditAction.START))
    lines = audit.path.read_bytes().splitlines()
    (claim,) = audited_writes(lines, BOOT).values()
    assert (claim.device, claim.original, claim.value) == ("gpu0", 650 * W, 500 * W)


def test_capper_restates_its_caps_and_limits_its_rows(tmp_path: Path) -> None:
    clock = ManualClock()
    engine = CapEngine(
        CapperHost(tmp_path, BOOT),
        load(Path(os.devnull), environ={}),
        [FakeActuator({"gpu0": Board(650 * W)})],
        clock,
        lambda sentence: None,
    )
    key = CapKey(Knob.GPU_POWER, "gpu0")
    engine.audit.size = 100 * ROW_BURST
    for number in range(ROW_BURST + 20):
        engine.manager.hold(1, "job", {key: (500 + number) * W}, "why", peer=BUSY)
    engine.close()
    found = rows(tmp_path / "audit.jsonl")
    assert (found[0].deed, found[0].old) == (AuditAction.SNAPSHOT, 650 * W)
    assert found[-1].why.startswith("20 writes")
    assert found[-1].new == (500 + ROW_BURST + 19) * W


# ------------------------------------------------------------------------------ writes themselves


class Asked:
    """A desk that one peer asks as fast as it can."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.desk = self.bench.desk(record=lambda event: None)

    def hold(
        self, watts: int, peer: PeerCredentials = BUSY, number: int = 0, holder: int = 1
    ) -> str:
        self.desk.answer(holder, peer, protocol.HelloRequest("test"))
        wish = protocol.RequestedCap(Knob.GPU_POWER, f"gpu{number}", watts * W)
        answer = self.desk.answer(holder, peer, protocol.HoldRequest("job", [wish]))
        return answer.reason if isinstance(answer, RefusedReply) else ""

    def release(self, holder: int = 1) -> None:
        self.desk.answer(holder, BUSY, protocol.ReleaseRequest())


def test_peer_that_holds_and_releases_quickly_is_refused_and_writes_little(
    tmp_path: Path,
) -> None:
    asked = Asked(tmp_path)
    answers = []
    for holder in range(500):  # another connection each time does not help
        answers.append(asked.hold(500, holder=holder))
        asked.desk.gone(holder)
    assert answers.count("") == MOVE_BURST
    assert set(answers) == {"", RefusalReason.TOO_OFTEN}
    assert len(asked.bench.actuator.written) == 2 * MOVE_BURST
    assert asked.bench.stands == [650 * W, 650 * W]
    assert asked.hold(500, OTHER, holder=501) == ""
    asked.desk.gone(501)
    assert asked.hold(500, number=1, holder=502) == ""


def test_tuner_that_moves_at_every_turn_is_never_refused(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    for number in range(2 * MOVE_BURST):
        assert asked.hold(500 + number % 2) == ""
        asked.bench.clock.advance(1 / MOVES_PER_SECOND)


def test_request_for_the_held_limit_is_not_a_move(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    assert {asked.hold(500) for _ in range(10 * MOVE_BURST)} == {""}


def test_refused_move_leaves_what_is_held(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    while not asked.hold(500 + len(asked.bench.actuator.written)):
        pass
    stands = asked.bench.stands
    assert stands[0] < 650 * W
    asked.desk.turn()
    assert asked.bench.stands == stands
    asked.release()
    assert asked.bench.stands == [650 * W, 650 * W]


def test_ceiling_user_that_asks_too_often_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    desk = bench.desk(CapsSettings(ceiling_users=(str(BUSY.uid),)), record=lambda event: None)
    request = protocol.CeilingRequest(1000 * W, "", 60 * SECOND)
    answers = [desk.answer(1, BUSY, request) for _ in range(MOVE_BURST + 5)]
    assert [isinstance(one, RefusedReply) for one in answers].count(True) == 5
    assert not isinstance(desk.answer(2, PeerCredentials(1, 0), request), RefusedReply)
