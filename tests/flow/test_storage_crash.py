"""An agent that is killed while it writes: its written rows are complete and unique."""

import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from testbed.known_totals import PACKAGE, Books, J, history, totals

from wattspan.config import StoreSettings as Settings
from wattspan.storage.store import Store

WRITER = """
import pathlib, sys
from testbed.known_totals import Books
from wattspan.config import StoreSettings as Settings
from wattspan.storage.store import Store
host = Books()
store = Store(pathlib.Path(sys.argv[1]), Settings(), host.clock)
begun = store.last_checkpoint()
if begun is not None:  # go on with the books of the one that was killed
    host.turns = begun.other["cpu"] // 10**6
    host.spent = {row.info.payer.pid: row.energy["cpu"] for row in begun.processes}
    host.clock.advance(ns=begun.at.mono + 1 - host.clock.now().mono)
while True:
    books = host.spend({pid: 1 for pid in range(host.turns % 30)}, seconds=45)
    assert store.write(books)
    print(next(a.energy for a in books.accounts if a.domain.id == "package-0"), flush=True)
"""

MOST_IN_A_WRITE = (29 + 1 + 3) * J


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 6))]
)
def test_kill_at_any_moment_loses_at_most_one_write(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(4):
        told = _write_until_killed(tmp_path, chance)
        host = Books()
        with closing(Store(tmp_path, Settings(), host.clock)) as store:
            assert store.health.failures == ()
            kept = totals(store.last_checkpoint())
            assert history(store.path) == kept
        # the reported writes, and possibly one more completed before the report
        assert told[-1] <= kept[PACKAGE.id, "energy"] <= told[-1] + MOST_IN_A_WRITE
    assert not list(tmp_path.glob("*.corrupt*"))


def _write_until_killed(state_dir: Path, chance: random.Random) -> list[int]:
    """Everything that a writer said it had written when it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(state_dir)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(chance.randint(1, 40))]
        for _ in range(chance.randint(0, 20_000)):  # somewhere between two lines
            pass
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout if line.endswith("\n")]
    return told
