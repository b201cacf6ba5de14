"""Numbers of Slurm's jobs are found once, and searched seldom while no daemon names them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wattspan.processes.cgroup_names import SlurmJobs
from wattspan.processes.procfs import ProcFs

SLUID = "s5K1KKYAYG5D00"


def test_missing_number_is_searched_seldom_and_found_later(tmp_path: Path) -> None:
    searched = []

    def directories(call: int) -> Iterator[str]:
        searched.append(call)
        yield str(tmp_path)

    jobs = SlurmJobs(ProcFs(tmp_path / "proc"))
    for call in range(1, 40):
        asked = directories(call)
        assert jobs.number_of(SLUID, asked) is None
    assert searched == [1, 2, 4, 8, 16, 32]


def test_other_processes_and_broken_files_cost_nothing(tmp_path: Path) -> None:
    for step, text in {"step_0": "x\n7\n", "step_1": "\xff", "other": "1\n"}.items():
        (tmp_path / step / "slurm").mkdir(parents=True)
        (tmp_path / step / "slurm/cgroup.procs").write_text(text, encoding="latin-1")
    (tmp_path / "step_2").touch()
    jobs = SlurmJobs(ProcFs(tmp_path / "proc"))
    assert jobs.number_of(SLUID, [str(tmp_path), "/nonexistent"]) is None
