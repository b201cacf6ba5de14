"""Files that commit 37257972 of the agent wrote are read: store, checkpoint, journal and others.

They are in `tests/fixtures/state_37257972`: a tuned trainer and a server on an emulated host, six
minutes. The same commit's commands made the expected reports from them.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wattspan.capper.journal import read_journal
from wattspan.cli import cli
from wattspan.config import StoreSettings
from wattspan.model import Consumer, Knob, Move
from wattspan.otlp.spool import Spool
from wattspan.storage.checkpoints import AlternatingCheckpointFiles
from wattspan.storage.store import Store
from wattspan.storage.tuning import CertificationStore, RunningAccounts, read_decisions
from wattspan.testing import ManualClock
from wattspan.tuning.decisions.values import Fingerprint

RECORDED = Path(__file__).parents[2] / "fixtures/state_37257972"
BOARD = "gpu:GPU-e0e0e0e0-0000-4000-8000-000000000000"
BOOT = "970230cb-f915-4f75-a59e-750483aa507a wattspan-emulated-gxi_ed3y"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state directory of that agent."""
    (tmp_path / "tuning").mkdir()
    for path in RECORDED.iterdir():
        if path.suffix == ".gz":
            (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        elif path.stem.endswith("-emulated"):
            shutil.copy(path, tmp_path / "tuning" / path.name)
    return tmp_path


def expected(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def printed(*words: str) -> Any:
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("by", ["kind", "span", "domain", "model"])
def test_store_has_the_energy_that_was_recorded(state: Path, by: str) -> None:
    Store(state, StoreSettings(), ManualClock(), emulated=True).close()  # migrates it
    period = ["--from", "2026-11-29T14:00:00Z", "--to", "2026-11-29T16:00:00Z"]
    report = printed("report", "--emulated", "--state-dir", str(state), "--by", by, *period)
    recorded = expected(f"report-{by}")
    assert report["total"]["energy_microjoules"] == recorded["total"]["energy_microjoules"]
    assert figures(report) == figures(recorded)
    assert recorded["lines"]


def figures(report: Any) -> dict[Any, Any]:
    keys = ("energy_microjoules_by_type", "calls", "seconds", "tokens", "gpu_split")
    return {
        (line["kind"], line["role"], line["name"], line["group"]): [line.get(key) for key in keys]
        for line in report["lines"]
    }


def test_checkpoint_has_the_accounts_of_every_domain(state: Path) -> None:
    files = AlternatingCheckpointFiles(state / "wattspan-emulated.sqlite")
    checkpoint = files.previous()
    files.close()
    assert checkpoint is not None
    assert {
        account.domain.id: [
            account.energy, account.consumers, account.idle, account.unattributed
        ]
        for account in checkpoint.accounts
    } == expected("checkpoint")  # fmt: skip


def test_journal_has_the_original_limit(tmp_path: Path) -> None:
    for copy in "ab":
        name = f"journal-{BOOT.replace(' ', '_')}.{copy}.jsonl"
        shutil.copy(RECORDED / f"journal.{copy}.jsonl", tmp_path / name)
    found = read_journal(tmp_path, BOOT)
    (entry,) = found.entries.values()
    assert (entry.knob, entry.device) == (Knob.GPU_POWER, BOARD)
    assert (entry.original, entry.value, entry.written) == (700_000, 583_000, True)
    assert found.complete


def test_certified_setting_is_recalled(state: Path) -> None:
    settings = CertificationStore.open(state, emulated=True, log=pytest.fail)
    (entry,) = expected("certified-emulated")["entries"]
    found = settings.recall(Fingerprint(**entry["fingerprint"]), Knob.GPU_POWER)
    assert (found.level, found.original) == (591_000, 700_000)
    assert dict(found.levels) == {BOARD: 591_000}


def test_account_of_a_running_job_is_restored(state: Path) -> None:
    accounts = RunningAccounts.open(state, emulated=True, log=pytest.fail)
    account = accounts.recall("trainer/train_step", [Consumer(9081, 2_815_610)])
    assert (account.elapsed, account.units) == (545_036_624_323, 4_424)
    assert account.closed_lost == pytest.approx(14_893_017_193.06)


def test_decisions_are_read(state: Path) -> None:
    decisions = read_decisions(state / "tuning/decisions-emulated.jsonl")
    lines = (RECORDED / "decisions-emulated.jsonl").read_text().splitlines()
    assert [one.at.wall for one in decisions] == [json.loads(x)["at_unix_ns"] for x in lines]
    assert {one.decision.move for one in decisions} >= {Move.PROBE, Move.HOLD}


def test_run_book_has_every_run(state: Path) -> None:
    path = str(state / "recurring-emulated.sqlite")
    (job,) = printed("recurring", "status", "--store", path)["jobs"]
    (recorded,) = expected("recurring")["jobs"]
    del recorded["sentence"]  # a later release names the run that has not ended
    for found, size in zip(job.pop("sizes"), recorded.pop("sizes"), strict=True):
        assert found == found | size
    assert job == job | recorded


def test_spool_returns_the_waiting_requests(state: Path) -> None:
    folder = state / "forward"
    folder.mkdir(mode=0o700)
    shutil.move(state / "000000000003.spans", folder)
    spool = Spool(folder, 1 << 26, pytest.fail)
    waiting = list(spool.restored())
    assert sum(one.spans - one.settled for one in waiting) == 48
    assert all(one.read() for one in waiting)
    spool.close()
