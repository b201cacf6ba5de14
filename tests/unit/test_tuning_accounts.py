"""The slowdown account of a run survives its tuner and the agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tuned_host import Host
from wattspan.model import Consumer, DecisionReason, Move
from wattspan.storage.tuning_accounts import MAX_ACCOUNTS, RunningAccounts
from wattspan.tuning.decisions.budget import SlowdownAccount

ACCOUNT = SlowdownAccount(
    elapsed=3_000_000_000,
    units=40,
    closed_lost=1e8,
    closed_bound=2e8,
    closed_saved=(1.0, 2.0, 3.0),
    closed_explored=5e7,
)
PROCESS = Consumer(7, 100)


def opened(path: Path, log: list[str] | None = None) -> RunningAccounts:
    return RunningAccounts.open(path, emulated=False, log=(log if log is not None else []).append)


def test_account_of_a_running_process_survives_the_agent(tmp_path: Path) -> None:
    opened(tmp_path).store("trainer/step", [PROCESS, Consumer(8, 100)], ACCOUNT)
    again = opened(tmp_path)
    assert again.recall("trainer/step", [PROCESS]) == ACCOUNT
    assert again.recall("trainer/step", [Consumer(7, 101)]) is None
    assert again.recall("other/step", [PROCESS]) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"trainer/step": {"processes": [[7, 100]]}}',
     b'{"trainer/step": {"processes": [[7, 100]], "elapsed": -1, "units": 1, "lost": 0, "bound": 0,'
     b' "explored": 0, "saved": [0, 0, 0]}}'],
)  # fmt: skip
def test_invalid_file_of_accounts_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tuning" / "accounts.json"
    path.parent.mkdir()
    path.write_bytes(content)
    accounts = opened(tmp_path)
    assert accounts.recall("trainer/step", [PROCESS]) is None
    accounts.store("trainer/step", [PROCESS], ACCOUNT)
    assert opened(tmp_path).recall("trainer/step", [PROCESS]) == ACCOUNT


def test_unwritable_accounts_are_reported_once(tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("")
    logged: list[str] = []
    accounts = opened(tmp_path / "none", logged)
    accounts = RunningAccounts(tmp_path / "tuning" / "accounts.json", {}, logged.append)
    for _ in range(2):
        accounts.store("trainer/step", [PROCESS], ACCOUNT)
    assert [line.startswith("Cannot write slowdown accounts") for line in logged] == [True]


def test_accounts_are_bounded(tmp_path: Path) -> None:
    accounts = RunningAccounts(tmp_path / "accounts.json", {}, [].append)
    for number in range(MAX_ACCOUNTS + 2):
        accounts.store(f"{number}/step", [PROCESS], ACCOUNT)
    assert accounts.recall("1/step", [PROCESS]) is None
    assert accounts.recall("2/step", [PROCESS]) == ACCOUNT


def learned(host: Host) -> bool:
    row = host.row()
    return row is not None and row.decision.move is Move.PROBE and bool(row.decision.caps)


def test_run_keeps_its_account_over_a_restart_of_the_agent() -> None:
    host = Host()
    host.train()
    host.run(600, until=lambda: learned(host))
    host.run(30)
    before = host.row()
    assert before is not None
    assert before.lost is not None
    assert before.allowance is not None
    host.restart()
    host.run(5)
    after = host.row()
    assert after is not None
    assert after.lost is not None
    assert after.allowance is not None
    assert after.allowance > 0.6 * before.allowance
    assert after.lost > 0.5 * before.lost


def test_run_keeps_its_account_when_its_tuner_restarts() -> None:
    host = Host()
    host.train()
    host.run(600, until=lambda: learned(host))
    host.run(30)
    before = host.row()
    assert before is not None
    (job,) = host.tuner._jobs.values()
    job.fail(DecisionReason.CHANGED, "A decision could not be applied.", host.clock.now())
    host.run(5)
    after = host.row()
    assert after is not None
    assert after.allowance is not None
    assert before.allowance is not None
    assert after.allowance >= before.allowance
    assert before.units <= after.units <= before.units + 60
