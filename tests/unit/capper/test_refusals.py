"""Refusals on record: refusals are audited, and floods of them cannot hide other rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.capper_bench import Bench, W

from wattspan.capper import protocol
from wattspan.capper.audit import (
    REFUSAL_DIVISOR,
    REFUSAL_PERIOD,
    REFUSAL_ROWS,
    AuditAction,
    AuditEvent,
    AuditLog,
    AuditRowLimiter,
)
from wattspan.capper.protocol import MAX_NAME_LENGTH, RefusedReply
from wattspan.model import SECOND, Knob
from wattspan.util.unix_sockets import PeerCredentials

ONE, OTHER = PeerCredentials(71, 1001), PeerCredentials(72, 1002)
SIZE = 64 * 1024


class Asked:
    """A desk and its record, asked by as many connections as anybody opens."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.audit = AuditLog(folder / "audit.jsonl", SIZE)
        self.bench.manager._record = self.audit.record
        self.limiter = AuditRowLimiter(self.bench.clock, self.audit.record)
        self.desk = self.bench.desk(record=self.limiter.record)
        self.holder = 0

    def refused(
        self, times: int, peer: PeerCredentials = ONE, device: str = "x" * MAX_NAME_LENGTH
    ) -> None:
        """The same number, each over another connection: by that alone each is news."""
        for _ in range(times):
            self.hold(device, peer, refused=True)
            self.desk.gone(self.holder)

    def hold(self, device: str, peer: PeerCredentials = ONE, *, refused: bool = False) -> None:
        self.holder += 1
        self.desk.answer(self.holder, peer, protocol.HelloRequest("test"))
        wishes = [protocol.RequestedCap(Knob.GPU_POWER, device, 500 * W)]
        answer = self.desk.answer(self.holder, peer, protocol.HoldRequest("job", wishes, "why"))
        assert isinstance(answer, RefusedReply) == refused

    def minute(self) -> None:
        self.bench.clock.advance(REFUSAL_PERIOD / SECOND)
        self.desk.turn()
        self.limiter.turn()

    def rows(self, deed: AuditAction = AuditAction.REFUSE) -> list[AuditEvent]:
        found = []
        for path in (Path(f"{self.audit.path}.1"), self.audit.path):
            if path.exists():
                found += [json.loads(line) for line in path.read_text().splitlines()]
        return [AuditEvent(**row) for row in found if row["deed"] == deed]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_listed_refusals_are_limited_per_user_not_per_connection(asked: Asked) -> None:
    asked.refused(100)
    assert len(asked.rows()) == REFUSAL_ROWS
    asked.minute()
    rest = asked.rows()[REFUSAL_ROWS:]
    assert [row.uid for row in rest] == [ONE.uid]
    assert rest[0].why.startswith(f"{100 - REFUSAL_ROWS} more refusals of this user; the last: ")


def test_refusal_limit_does_not_affect_another_user(asked: Asked) -> None:
    asked.refused(100)
    asked.refused(1, OTHER)
    assert [row.uid for row in asked.rows()] == [*[ONE.uid] * REFUSAL_ROWS, OTHER.uid]


def test_refusals_are_listed_again_after_a_minute_with_the_omitted_count(asked: Asked) -> None:
    asked.refused(REFUSAL_ROWS + 2)
    asked.bench.clock.advance(REFUSAL_PERIOD / SECOND)
    asked.refused(1)
    assert [row.why.startswith("2 more refusals") for row in asked.rows()[REFUSAL_ROWS:]] == [
        True,
        False,
    ]


def test_omitted_count_is_absent_at_the_limit(asked: Asked) -> None:
    asked.refused(REFUSAL_ROWS)
    asked.minute()
    asked.minute()
    assert len(asked.rows()) == REFUSAL_ROWS


def test_omitted_count_is_written_at_shutdown(asked: Asked) -> None:
    asked.refused(REFUSAL_ROWS + 3)
    asked.limiter.close()
    assert asked.rows()[-1].why.startswith("3 more")


def test_users_hours_of_refusals_leave_every_other_row_on_record(asked: Asked) -> None:
    asked.audit.record(AuditEvent(at=0, deed=AuditAction.START))
    asked.hold("gpu0", OTHER)
    for _ in range(60):
        asked.refused(30, device='\x00"' * (MAX_NAME_LENGTH // 2))
        asked.minute()
    assert len(asked.rows(AuditAction.START)) == 1
    assert len(asked.rows(AuditAction.WRITE)) == 1
    assert not Path(f"{asked.audit.path}.1").exists()
    told = asked.audit.path.stat().st_size
    assert SIZE // REFUSAL_DIVISOR - 6000 < told < SIZE // REFUSAL_DIVISOR + 1000


# -------------------------------------------------------------------------- their part of the file


def refusal(number: int) -> AuditEvent:
    return AuditEvent(at=number, deed=AuditAction.REFUSE, why="w" * 100)


def write(number: int) -> AuditEvent:
    # Its text does not make it a refusal.
    return AuditEvent(at=number, deed=AuditAction.WRITE, device='"deed":"refuse"', why="w" * 100)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def size_of_refusals(path: Path) -> int:
    lines = path.read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in lines if json.loads(line)["deed"] == "refuse")


def test_refusals_take_their_part_of_the_record_and_one_row_tells_of_the_rest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, 8000)
    for number in range(500):
        audit.record(refusal(number))
    assert 2000 - 200 < size_of_refusals(path) <= 2000
    kept = len(rows(path))
    while not path.with_name("audit.jsonl.1").exists():
        audit.record(write(1))
    assert [row["deed"] for row in rows(path)] == ["write", "refuse"]
    assert (
        rows(path)[1]["why"]
        == f"{500 - kept} refusals have no rows: they may take 1/4 of the record."
    )
    audit.record(refusal(9))  # there is room again
    assert rows(path)[-1]["at"] == 9


def test_shutdown_reports_refusals_without_room(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 800)
    for number in range(3):
        audit.record(refusal(number))
    audit.record(AuditEvent(at=3, deed=AuditAction.END))
    deeds = [(row["deed"], str(row.get("why"))[:2]) for row in rows(audit.path)]
    assert deeds == [("refuse", "ww"), ("refuse", "2 "), ("end", "No")]


def test_restart_counts_refusals_in_the_audit_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(100):
        audit = AuditLog(path, 8000)
        audit.record(write(number)) if number < 10 else audit.record(refusal(number))
    assert 2000 - 200 < size_of_refusals(path) <= 2000
    assert len(rows(path)) > 10


@pytest.mark.parametrize("gone", [lambda p: p.unlink(), lambda p: p.write_bytes(b"")])
def test_record_that_somebody_removed_or_emptied_has_room_again(
    tmp_path: Path, gone: Callable[[Path], object]
) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 8000)
    for number in range(100):
        audit.record(refusal(number))
    gone(audit.path)
    audit.record(refusal(100))
    assert [row["at"] for row in rows(audit.path)] == [100]
