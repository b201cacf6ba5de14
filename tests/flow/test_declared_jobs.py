"""Jobs that real processes declare to a real agent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from testbed.program import ENVIRONMENT, Running, wattspan
from testbed.tuned_training import JOB, TuningAgent
from testbed.waiting import eventually

from wattspan.emulation.control import Closeable
from wattspan.sdk.client import request_json

OTHER_USER = 64_999
DECLARING = """
import http.client, json, os, select, sys
import wattspan.sdk.client, wattspan.util.unix_sockets
from wattspan.sdk.jobs import declare
if sys.argv[1:]:
    os.setuid(int(sys.argv[1]))  # after the imports: the user may not read this program's files
declaration = declare(name="train", service="trainer", span="train_step", max_slowdown=0.2)
told = None
while not select.select([sys.stdin], [], [], 0.05)[0]:
    declaration.renew()
    now = declaration.decision, declaration.instance
    if now != told:
        print(json.dumps(now), flush=True)
        told = now
"""


class Application(Closeable):
    """A process that declares a job, and renews the declaration, until it is ended."""

    def __init__(self, run_dir: Path, user: int | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DECLARING, *([] if user is None else [str(user)])],
            env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(run_dir)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def answer(self) -> tuple[str, str]:
        """The next decision and instance that it is told."""
        decision, instance = json.loads(self.process.stdout.readline())
        return decision, instance

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with TemporaryDirectory(prefix="wattspan-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def advising(folder: Path, run_dir: Path) -> Running:
    """An agent that advises."""
    return Running(
        folder, emulate="laptop", agent__run_dir=run_dir, autotune__mode="advise"
    ).measuring()


def jobs(run_dir: Path) -> list[dict[str, Any]]:
    found = request_json("/v1/jobs", {}, directories=(str(run_dir),))["jobs"]
    assert isinstance(found, list)
    return found


def test_declared_job_is_shown_until_its_process_is_killed(tmp_path: Path, run_dir: Path) -> None:
    with advising(tmp_path, run_dir), Application(run_dir) as application:
        assert application.answer()[0] == "limited"
        (job,) = jobs(run_dir)
        assert (job["job"], job["processes"], job["own"]) == ("train", 1, False)
        assert (job["asked"]["max_slowdown"], job["given"]["max_slowdown"]) == (0.2, 0.05)
        place = f"agent.run_dir={run_dir}"
        line = eventually(
            lambda: next((one for one in status(place).splitlines() if one.startswith(JOB)), ""),
            "the job is listed",
        )
        assert line.endswith('Declared as "train": limited.')
        application.process.kill()
        application.process.wait()
        eventually(lambda: not jobs(run_dir), "its declaration has ended")


def status(place: str) -> str:
    done = wattspan("tune", "status", "--set", place)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_declaration_is_repeated_to_the_next_agent(tmp_path: Path, run_dir: Path) -> None:
    with advising(tmp_path, run_dir) as first, Application(run_dir) as application:
        decision, instance = application.answer()
        assert decision == "limited"
        first.end()
        assert application.answer() == ("unavailable", "")
        with advising(tmp_path, run_dir):
            decision, next_instance = application.answer()
            assert decision == "limited"
            assert next_instance != instance
            assert len(jobs(run_dir)) == 1


@pytest.mark.needs_root
def test_users_are_kept_apart(tmp_path: Path, run_dir: Path) -> None:
    with advising(tmp_path, run_dir), Application(run_dir) as ours:
        ours.answer()
        with Application(run_dir, OTHER_USER) as theirs, Application(run_dir, OTHER_USER) as rank:
            theirs.answer()
            rank.answer()
            found = {(job["uid"], job["processes"]) for job in jobs(run_dir)}
            assert found == {(0, 1), (OTHER_USER, 2)}
        eventually(lambda: len(jobs(run_dir)) == 1, "only our declaration is left")


WITHIN = 600.0
"""Seconds of work until the first saving; the agent's settings are the defaults."""


@pytest.mark.search
@pytest.mark.needs_apps
def test_declared_job_saves_energy_without_a_configuration_file(tmp_path: Path) -> None:
    environ = {"WATTSPAN_AUTOTUNE_MODE": "apply", "WATTSPAN_AUTOTUNE_DECLARED": "allow"}
    with (
        TuningAgent(tmp_path, config="", environ=environ) as agent,
        agent.train(
            exact=True, declared={"max_slowdown": 0.08}, OTEL_BSP_SCHEDULE_DELAY="200"
        ) as job,
    ):
        began, original = job.done(), agent.limit
        eventually(lambda: agent.reason == "baseline", "the original is learned", WITHIN)
        free = job.done().since(began)
        eventually(lambda: agent.told()["saved_surely_joules"] > 0, "energy is saved", WITHIN)
        run = job.done().since(began)
        told = agent.told()
        assert (told["declared"]["decision"], told["budget"]) == ("accepted", 0.08)
        assert free.energy / free.ideal * run.ideal > run.energy
        assert run.slowdown <= 0.08
        eventually(lambda: agent.limit < original, "a cap is in force", WITHIN)
        job.process.kill()
        eventually(lambda: agent.limit == original, "the original limit is restored")
