"""Damaged journals: no wrong limit is written, and every limit is restored or named."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from testbed.capper_bench import BOOT, Bench, W
from testbed.journal_corruption import corrupt_audit, corrupt_journal, snapshot

from wattspan.capper.audit import AuditLog
from wattspan.capper.host_directory import CapperHost
from wattspan.capper.process import RestoreContext, RestoreReport, restore_limits
from wattspan.capper.protocol import CapperClient
from wattspan.config import Config
from wattspan.model import CapKey

pytestmark = pytest.mark.slow

SEEDS, PARTS = 1000, 4
MEMORY = next((path for path in ("/dev/shm",) if Path(path).is_dir()), None)
"""A file system on which fsync costs nothing, if there is one."""
ORIGINALS = (700 * W, 650 * W, 620 * W)


@dataclass
class Killed:
    """A capper that was killed while it held limits, and the devices that it left."""

    folder: Path
    rng: Random
    history: list[dict[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bench = Bench(self.folder, boards=4)
        self.originals = {}
        for name, board in self.bench.actuator.boards.items():
            board.stands = self.originals[name] = self.rng.choice(ORIGINALS)
        audit = AuditLog(self.folder / "audit.jsonl", 1 << 20)
        self.bench.manager.devices.find()
        for _ in range(self.rng.randint(2, 4)):
            number = self.rng.randrange(3)  # the fourth board is never touched
            self.bench.hold(self.rng.randint(43, 60) * 10 * W, number, job=f"job{number}")
            self.keep()
        for event in self.bench.events:
            audit.record(event)
        self.capped = {
            name: board.stands
            for name, board in self.bench.actuator.boards.items()
            if board.stands != self.originals[name]
        }
        self.foreign: set[str] = set()
        if self.rng.random() < 0.2:
            name = self.rng.choice(sorted(self.capped))
            self.bench.actuator.boards[name].stands = 333_333
            self.foreign.add(name)
        self.bench.actuator.written.clear()
        self.bench.actuator.watch = self.before_write

    def keep(self) -> None:
        self.history.append(snapshot(self.folder))

    def before_write(self, key: CapKey, value: int | None) -> None:
        name = key.device
        assert name in self.capped, f"{name} was never capped"
        assert name not in self.foreign, f"{name} has a limit of somebody else"
        assert value == self.originals[name], f"{name}: {value} was written"

    def restored(self) -> RestoreReport:
        return restore_limits(
            RestoreContext(
                lambda: CapperHost(self.folder, BOOT),
                lambda who: CapperClient(
                    self.folder / "capper.sock", self.bench.clock, who=who, timeout=5.0
                ),
                Config(),
                lambda: [self.bench.actuator],
                self.bench.clock,
                lambda sentence: None,
            )
        )

    def check(self, done: RestoreReport) -> bool:
        """True if every limit was restored; otherwise each of the others is named."""
        told = " ".join([*done.troubles, *(row.state.key.device for row in done.foreign)])
        whole = True
        for name in self.capped:
            stands = self.bench.actuator.boards[name].stands
            if name not in self.foreign and stands != self.originals[name]:
                whole = False
                assert any(name in one for one in done.troubles), f"{name} is not named: {told}"
            elif name in self.foreign and stands != 333_333:
                raise AssertionError(f"{name} has a limit of somebody else, and was set")
        return whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_corrupted_journal_restores_or_names_every_limit(part: int) -> None:
    outcomes: Counter[bool] = Counter()
    for seed in range(part, SEEDS, PARTS):
        folder, rng = Path(tempfile.mkdtemp(dir=MEMORY)), Random(seed)
        killed = Killed(folder, rng)
        done_to_it = ""
        try:
            done_to_it = corrupt_journal(folder, [{}, *killed.history], rng)
            done_to_it += "; " + corrupt_audit(folder / "audit.jsonl", rng)
            for _ in range(2):  # lost devices remain named
                whole = killed.check(killed.restored())
        except Exception as error:
            error.add_note(f"seed {seed}: {done_to_it}")
            raise
        finally:
            shutil.rmtree(folder)
        outcomes[whole] += 1
    assert outcomes[True] > outcomes[False] > 0
