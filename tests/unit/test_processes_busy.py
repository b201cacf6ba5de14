"""Unclaimed busy time is neither invented by rounding nor lost."""

import random
from pathlib import Path

from wattspan.model import MILLISECOND, SECOND
from wattspan.processes.cpus import CpuacctBusyClock, ProcStatBusyClock, UnattributedTime
from wattspan.processes.procfs import TICK

ROW = "cpu{cpu} 10 0 10 {idle} {iowait} 0 0 {steal} 0 0\n"


def write_stat(procfs: Path, idle: dict[int, int], iowait: int = 0, steal: int = 0) -> None:
    rows = [ROW.format(cpu=cpu, idle=i, iowait=iowait, steal=steal) for cpu, i in idle.items()]
    (procfs / "stat").write_text("cpu  1 2 3 4 5 6 7 8 9 10\n" + "".join(rows) + "intr 1 2 3\n")


def test_busy_time_excludes_idle_waiting_and_stolen(tmp_path: Path) -> None:
    write_stat(tmp_path, {0: 1000, 1: 2000})
    busy = ProcStatBusyClock(tmp_path)
    assert busy.read(0) == {0: 0, 1: 0}
    write_stat(tmp_path, {0: 1040, 1: 2000}, iowait=10, steal=20)
    assert busy.read(SECOND) == {0: 300 * MILLISECOND, 1: 700 * MILLISECOND}


def test_offline_cpu_keeps_its_busy_time(tmp_path: Path) -> None:
    write_stat(tmp_path, {0: 0, 1: 0})
    busy = ProcStatBusyClock(tmp_path)
    busy.read(0)
    write_stat(tmp_path, {0: 100, 1: 50})
    busy.read(SECOND)
    write_stat(tmp_path, {0: 200})
    assert busy.read(2 * SECOND) == {0: 0, 1: SECOND // 2}
    write_stat(tmp_path, {0: 300, 1: 50})
    assert busy.read(3 * SECOND) == {0: 0, 1: SECOND // 2}
    write_stat(tmp_path, {0: 400, 1: 50})
    assert busy.read(4 * SECOND) == {0: 0, 1: 3 * SECOND // 2}


def test_unreadable_file_is_unknown_not_zero(tmp_path: Path) -> None:
    (tmp_path / "cpuacct.usage_percpu").write_text("5 7\n")
    busy = CpuacctBusyClock(tmp_path)
    assert busy.read(0) == {0: 0, 1: 0}
    (tmp_path / "cpuacct.usage_percpu").write_text("garbage\n")
    assert busy.read(1) is None
    (tmp_path / "cpuacct.usage_percpu").write_text("9 7\n")
    assert busy.read(2) == {0: 4, 1: 0}


def test_steps_of_the_busy_clock_add_one_step_in_all_and_not_one_each_time() -> None:
    rng = random.Random(1)
    account, true, unclaimed = UnattributedTime(), 0, 0
    for _ in range(10_000):
        true += rng.randrange(100 * MILLISECOND)
        seen = true // TICK * TICK + rng.choice((0, TICK))  # steps, and steps that come early
        new = account.settle(busy=seen, spent=true)
        assert new >= 0
        unclaimed += new
    assert unclaimed <= TICK


def test_unattributed_time_is_exact_to_one_clock_step() -> None:
    rng = random.Random(2)
    account, named, nobody, unclaimed = UnattributedTime(), 0, 0, 0
    for _ in range(10_000):
        named += rng.randrange(90 * MILLISECOND)
        nobody += rng.randrange(5 * MILLISECOND)
        unclaimed += account.settle(busy=(named + nobody) // TICK * TICK, spent=named)
    assert nobody - TICK <= unclaimed <= nobody
