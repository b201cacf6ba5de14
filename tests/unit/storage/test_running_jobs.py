"""Slowdown accounts and evidence about loads survive their tuner and the agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from testbed.tuned_host import Host

from wattspan.model import Consumer, DecisionReason, Move, TuningRow
from wattspan.storage.tuning import MAX_JOBS, RunningAccounts, RunningEvidence
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.load_cells import LatencyObjective, MissTally
from wattspan.tuning.decisions.load_tracking import (
    TrackingEvidence,
    TrackingPolicy,
    begin_tracking,
    collected_evidence,
)

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
    for number in range(MAX_JOBS + 2):
        accounts.store(f"{number}/step", [PROCESS], ACCOUNT)
    assert accounts.recall("1/step", [PROCESS]) is None
    assert accounts.recall("2/step", [PROCESS]) == ACCOUNT


POLICY = TrackingPolicy((LatencyObjective(True, 400_000_000, 0.01),), (1980, 1590, 1185))


def evidence() -> TrackingEvidence:
    """1590 MHz are certified in two load bins, and 1185 MHz have failed in one."""
    state = begin_tracking(POLICY, 0)
    cells = state.cells.add_energy(3, 0, 9e6, 400.0)
    for _ in range(40):
        cells = cells.add_tally(2, 1, MissTally(((20, 0, 0),)))
        cells = cells.add_tally(3, 1, MissTally(((20, 0, 1),)))
    found = collected_evidence(state._replace(cells=cells, failed={(3, 2): 77}, doublings=2))
    assert found.certified == {2: 1, 3: 1}
    return found


def opened_evidence(path: Path) -> RunningEvidence:
    return RunningEvidence.open(path, emulated=True, log=[].append)


def test_evidence_of_a_running_server_survives_the_agent(tmp_path: Path) -> None:
    opened_evidence(tmp_path).store("llm/chat", [PROCESS], POLICY, evidence())
    again = opened_evidence(tmp_path)
    assert again.recall("llm/chat", [PROCESS, Consumer(9, 1)], POLICY) == evidence()
    assert again.recall("llm/chat", [Consumer(7, 101)], POLICY) is None
    assert again.recall("llm/chat", [PROCESS], replace(POLICY, settings=(1980, 1590))) is None
    assert again.recall("llm/chat", [PROCESS], replace(POLICY, by_length=True)) is None
    stricter = (LatencyObjective(True, 300_000_000, 0.01),)
    assert again.recall("llm/chat", [PROCESS], replace(POLICY, objectives=stricter)) is None


def test_recalled_evidence_needs_no_new_certification() -> None:
    state = begin_tracking(POLICY, 1000, evidence())
    assert (state.cells.lowest(2), state.cells.lowest(4)) == (1, 0)
    assert state.setting == 0
    assert state.may_lower_at == 1000 + (POLICY.dwell << 2)
    assert state.committed is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [("cells", [[2, 7, [[], 0.0, 0.0, 0]]]), ("cells", [[99, 1, [[], 0.0, 0.0, 0]]]),
     ("cells", [[2, 1, [[], 0.0, 0.0, 0]]]), ("certified", [[2, 3]]), ("failed", [[2, 3, 1]]),
     ("cells", [[2, 1, [[[{"requests": 1, "misses": 2}, {}]], 0.0, 0.0, 0]]]),
     ("doublings", -1), ("settings", "all"), ("processes", [[-7, 100]])],
)  # fmt: skip
def test_inconsistent_evidence_is_ignored(tmp_path: Path, field: str, value: object) -> None:
    opened_evidence(tmp_path).store("llm/chat", [PROCESS], POLICY, evidence())
    (path,) = (tmp_path / "tuning").iterdir()
    assert path.name == "load-evidence-emulated.json"
    content = msgspec.json.decode(path.read_bytes())
    content["llm/chat"][field] = value
    path.write_bytes(msgspec.json.encode(content))
    assert opened_evidence(tmp_path).recall("llm/chat", [PROCESS], POLICY) is None


def learned(host: Host) -> bool:
    row = host.row()
    return row is not None and row.decision.move is Move.PROBE and bool(row.decision.caps)


def learned_host() -> tuple[Host, TuningRow]:
    """A host whose tuner has tried a setting, and the state of its job."""
    host = Host()
    host.train()
    host.run(600, until=lambda: learned(host))
    host.run(30)
    before = host.row()
    assert before is not None
    return host, before


def test_run_keeps_its_account_over_a_restart_of_the_agent() -> None:
    host, before = learned_host()
    host.restart()
    host.run(5)
    after = host.row()
    assert after.allowance > 0.6 * before.allowance
    assert after.lost > 0.5 * before.lost


def test_run_keeps_its_account_when_its_tuner_restarts() -> None:
    host, before = learned_host()
    (job,) = host.tuner._jobs.values()
    job.fail(DecisionReason.CHANGED, "A decision could not be applied.", host.clock.now())
    host.run(5)
    after = host.row()
    assert after.allowance >= before.allowance
    assert before.units <= after.units <= before.units + 60
