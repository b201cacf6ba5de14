"""The guide for Slurm is correct as far as testable without Slurm."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from testbed.known_totals import Books, an_hour_ago
from testbed.requirements import ROOT

from wattspan.capper.ceilings import (
    CeilingFile,
)
from wattspan.cli import cli
from wattspan.clock import SystemClock
from wattspan.config import StoreSettings as Settings
from wattspan.model import Group, GroupKind
from wattspan.processes.cgroup_names import names_of
from wattspan.storage.store import Store

pytestmark = pytest.mark.slow

GUIDE = (ROOT / "docs" / "how-to" / "run-under-slurm.md").read_text(encoding="utf-8")
EPILOG = ROOT / "packaging" / "slurm" / "epilog"
SUSPEND = ROOT / "packaging" / "slurm" / "suspend"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


host = pytest.fixture(an_hour_ago)


def run(host: Books, state: Path) -> None:
    """Three minutes in which process 1 is job 4711, and spends 30 J, and process 2 is job 4712."""
    with closing(Store(state, Settings(), host.clock)) as store:
        for _ in range(3):
            opening = host.spend({1: 10, 2: 5}, seconds=60)
            jobs = tuple(
                replace(row, group=Group(GroupKind.JOB, f"471{row.group.name[1:]}"))
                for row in opening.groups
                if row.group.kind is GroupKind.CONTAINER
            )
            store.write(replace(opening, groups=jobs))


@pytest.fixture
def state(tmp_path: Path, host: Books) -> Path:
    """A store after one run."""
    folder = tmp_path / "state"
    folder.mkdir()
    run(host, folder)
    return folder


def epilog(tmp_path: Path, program: str, **environ: str) -> tuple[str, str]:
    """Run it with ``program`` for `wattspan`; its file and its output."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in {"wattspan": program, "logger": 'shift 3; echo "$@"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    jobs = tmp_path / "jobs.csv"
    done = subprocess.run(
        [EPILOG],
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "WATTSPAN_JOBS": str(jobs),
            "WATTSPAN_SETTLE": "0",
            "SLURM_JOB_USER": "ann",
            "SLURMD_NODENAME": "node17",
            **environ,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, "Slurm would drain the node"
    return jobs.read_text() if jobs.exists() else "", done.stdout


def program(state: Path) -> str:
    code = "from wattspan.cli import main; main()"
    return f'exec {sys.executable} -c "{code}" "$@" --state-dir {state}'


def test_epilog_writes_energy_of_its_job_only(tmp_path: Path, state: Path) -> None:
    written, said = epilog(tmp_path, program(state), SLURM_JOB_ID="4711")
    assert sorted(written.splitlines()) == [
        "4711,ann,node17,cpu,measured,30.000000",
        "4711,ann,node17,gpu,derived,30.000000",
    ]
    assert said == ""


def test_job_that_is_requeued_pays_for_each_of_its_runs_once(
    tmp_path: Path, state: Path, host: Books
) -> None:
    begun = host.clock.now().wall // 10**9 - 180
    epilog(tmp_path, program(state), SLURM_JOB_ID="4711", SLURM_JOB_START_TIME=str(begun))
    host.clock.advance(600)
    again = host.clock.now().wall // 10**9
    run(host, state)
    written, _ = epilog(
        tmp_path, program(state), SLURM_JOB_ID="4711", SLURM_JOB_START_TIME=str(again)
    )
    assert [line.split(",")[3::2] for line in written.splitlines()] == [
        ["cpu", "30.000000"],
        ["gpu", "30.000000"],
    ] * 2


@pytest.mark.parametrize("start", ["N/A", "$(reboot)"])
def test_epilog_without_a_valid_start_writes_all_job_energy(
    tmp_path: Path, state: Path, start: str
) -> None:
    called = f'echo "$4" >{tmp_path}/called; {program(state)}'
    written, _ = epilog(tmp_path, called, SLURM_JOB_ID="4711", SLURM_JOB_START_TIME=start)
    assert (tmp_path / "called").read_text() == "--since=60d\n"
    assert len(written.splitlines()) == 2


def test_epilog_finds_a_job_by_its_sluid(tmp_path: Path, state: Path) -> None:
    written, said = epilog(
        tmp_path, program(state), SLURM_JOB_ID="99", SLURM_JOB_SLUID="4711"
    )  # the store has the name that a node without numbers would have
    assert [line.split(",")[0::5] for line in written.splitlines()] == [["99", "30.000000"]] * 2
    assert said == ""


def test_epilog_file_is_private(tmp_path: Path, state: Path) -> None:
    epilog(tmp_path, program(state), SLURM_JOB_ID="4711")
    assert stat.S_IMODE((tmp_path / "jobs.csv").stat().st_mode) == 0o640


def test_epilog_reports_an_unknown_job(tmp_path: Path, state: Path) -> None:
    written, said = epilog(tmp_path, program(state), SLURM_JOB_ID="9")
    assert written == ""
    assert "Job 9 is in no report" in said


@pytest.mark.parametrize(
    ("failing", "job", "why"),
    [
        ("echo 'wattspan: no store' >&2; exit 5", "1", "job 1 is not known: wattspan: no store"),
        ("exit 0", "", "There is no SLURM_JOB_ID"),
        ("exit 0", "1; reboot", "There is no SLURM_JOB_ID"),
    ],
)
def test_epilog_never_fails(tmp_path: Path, failing: str, job: str, why: str) -> None:
    written, said = epilog(tmp_path, failing, SLURM_JOB_ID=job)
    assert written == ""
    assert why in said


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("/system.slice/slurmstepd.scope/job_4711/", "4711"),
        ("/slurm/uid_1000/job_4711/", "4711"),
        ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/", "s5K1KKYAYG5D00"),
    ],
)
def test_cgroups_that_the_guide_names_lead_to_the_job(path: str, job: str) -> None:
    assert path.removeprefix("/").removeprefix("system.slice/") in GUIDE
    assert Group(GroupKind.JOB, job) in names_of(f"0::{path}step_0/user/task_0\n").groups


def test_every_shell_block_of_the_guide_parses() -> None:
    for block in blocks("sh"):
        checked = subprocess.run(["sh", "-n"], input=block, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_guide_commands_use_existing_options() -> None:
    used = re.findall(
        r"wattspan (report|top|measure)((?: +-{1,2}[\w-]+(?: +[^-\s|'][^\s']*)?)*)", GUIDE
    )
    assert {command for command, _ in used} == {"report", "top", "measure"}
    for command, options in used:
        known = CliRunner().invoke(cli, [command, "--help"]).output
        for option in re.findall(r"(?<!\S)-{1,2}[a-z][\w-]*", options):
            assert re.search(rf"(?<![\w-]){option}\b", known), f"{command} {option}"


def test_ceiling_of_the_guide_is_understood(tmp_path: Path) -> None:
    (text,) = (block for block in blocks("toml") if block.startswith("watts"))
    path = tmp_path / "budget.toml"
    path.write_text(text)
    file = CeilingFile(path, SystemClock())
    ceiling = file.poll(None)
    assert file.trouble == ""
    assert (ceiling.limit, ceiling.why) == (1_200_000, "partition at 80 %")


def test_configuration_of_the_guide_is_accepted(tmp_path: Path) -> None:
    (text,) = (block for block in blocks("toml") if block.startswith("[autotune]"))
    path = tmp_path / "config.toml"
    path.write_text(text)
    done = CliRunner().invoke(cli, ["config", "check", str(path)])
    assert done.exit_code == 0, done.output


# --------------------------------------------------------------------------------------- fleet


def suspend(tmp_path: Path, **programs: str) -> tuple[int, list[str]]:
    """Suspend node17 and node18 with stand-ins; the exit code, and the calls in their order."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    calls.touch()
    stand_ins = {
        "scontrol": 'test "$2" = hostnames && printf "node17\\nnode18\\n"',
        "power-off": "true",
        "wattspan": "true",
        "logger": "true",
        **{name.replace("_", "-"): text for name, text in programs.items()},
    }
    for name, text in stand_ins.items():
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{calls}\n{text}\n')
        (tools / name).chmod(0o755)
    done = subprocess.run(
        [SUSPEND, "node[17-18]"],
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "WATTSPAN_POWER_OFF": "power-off",
            "WATTSPAN_SETTLE": "0",
            "WATTSPAN_TRIES": "3",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, calls.read_text().splitlines()


def test_suspended_nodes_leave_the_fleet_once_they_are_off(tmp_path: Path) -> None:
    code, calls = suspend(tmp_path)
    assert (code, calls) == (
        0,
        [
            "scontrol show hostnames node[17-18]",
            "power-off node17 node18",
            "wattspan fleet remove node17",
            "wattspan fleet remove node18",
        ],
    )


def test_nodes_that_are_not_off_stay_in_the_fleet(tmp_path: Path) -> None:
    code, calls = suspend(tmp_path, power_off="exit 1")
    assert code == 1
    assert not any(call.startswith("wattspan") for call in calls)


def test_removal_is_repeated_and_its_failure_is_logged(tmp_path: Path) -> None:
    refusal = 'test "$3" != node17 || { echo "node17 is in contact" >&2; exit 9; }'
    code, calls = suspend(tmp_path, wattspan=refusal)
    assert code == 0
    assert calls.count("wattspan fleet remove node17") == 3
    (logged,) = (call for call in calls if call.startswith("logger"))
    assert "node17 is off, and its power stays reserved: node17 is in contact" in logged
    assert calls[-1] == "wattspan fleet remove node18"


def test_fleet_command_of_the_suspend_program_exists() -> None:
    (words,) = set(re.findall(r"wattspan (fleet \w+) \"", SUSPEND.read_text()))
    assert CliRunner().invoke(cli, [*words.split(), "--help"]).exit_code == 0
