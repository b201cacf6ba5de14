"""Kills of a study, its agent and its capper at random moments: the original limit is restored, and
the study can be continued to its end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed import emulated_training
from testbed.capper_process import Gpu
from testbed.program import ENVIRONMENT, PROGRAM
from testbed.requirements import ROOT
from testbed.tuned_stack import ORIGINAL, PROFILE, Limited, Tuned
from testbed.waiting import eventually

from wattspan import Frontier
from wattspan.emulation.control import Closeable
from wattspan.emulation.host import EmulatedHost, profile_named
from wattspan.frontier.trials import StudyFileError

TRAINING = f"""{Path(emulated_training.__file__).read_text()}
with EmulatedTraining(step=0.05, noise=0.003) as training:
    while True:
        training.step()
        print("step done", flush=True)
"""
TARGETS = ("command", "agent", "capper")
LENGTH = 14.0
"""Seconds from the start of a study of two trials to its end, about."""
CAPPED = 6.0
"""Seconds for which the second trial is capped, about."""

KILLS = int(os.environ.get("WATTSPAN_FRONTIER_KILLS", "6"))
HOSTS = min(5, KILLS)


class IdleHost(Limited, Closeable):
    """An emulated host without jobs, which outlives its agents."""

    def __init__(self) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True)
        self.sockets = Path(self._sockets.name)
        self.emulated: EmulatedHost = EmulatedHost(profile_named(PROFILE))
        self.gpu = Gpu(self.emulated)
        self.gpu.set(ORIGINAL)

    def close(self) -> None:
        self.gpu.close()
        self.emulated.close()
        self._sockets.cleanup()


class Kill(NamedTuple):
    """The killed process, the seconds before the kill, and the state at that moment."""

    target: str
    after: float
    capped: bool
    trials: int
    resumptions: int


class KilledStudy:
    """A study on a host of its own, whose parts are killed and started again."""

    def __init__(self, host: IdleHost, folder: Path) -> None:
        self._host, self._folder = host, folder
        self._agent = self._started_agent()

    def kill(self, target: str, after: float, *, once_capped: bool) -> Kill:
        """One study, from its start to its end after the kill.

        The kill comes ``after`` seconds from the start, or ``once_capped`` from the first cap.
        """
        file = self._folder / f"{target}-{after:.3f}.json"
        process = self._study(file)
        if once_capped:
            eventually(self._host.capped, "a cap is in force", 180)
        with suppress(subprocess.TimeoutExpired):
            process.wait(after)
        capped = self._host.capped()
        {"command": process.kill, "agent": self._kill_agent, "capper": self._kill_capper}[target]()
        eventually(self._host.restored, f"the limit is restored after the kill of {target}", 90)
        process.communicate(timeout=120)
        if target == "agent":
            self._agent.ended()
            self._agent = self._started_agent()
        else:
            self._until_ready(self._agent)
        trials, resumptions = _trials(file), 0
        while not _complete(file):
            assert resumptions < 3
            resumptions += 1
            resumed = self._study(file, *(["--resume"] if file.exists() else []))
            said, _ = resumed.communicate(timeout=180)
        assert not resumptions or resumed.returncode == 0, said
        assert self._host.restored()
        assert self._agent.journal() == []
        return Kill(target, after, capped, trials, resumptions)

    def close(self) -> None:
        self._agent.send(signal.SIGTERM)
        self._agent.ended()

    # --------------------------------------------------------------------------- inner workings

    def _started_agent(self) -> Tuned:
        agent = Tuned(self._host, self._folder)
        self._until_ready(agent)
        return agent

    def _until_ready(self, agent: Tuned) -> None:
        agent.until(self._capper_answers, "the capper answers", 90)

    def _capper_answers(self) -> bool:
        process = self._wattspan("caps", "status")
        process.communicate()
        return process.returncode == 0

    def _kill_agent(self) -> None:
        self._agent.send(signal.SIGKILL)

    def _kill_capper(self) -> None:
        pid = eventually(lambda: self._agent.capper, "the capper runs", 60)
        os.kill(pid, signal.SIGKILL)

    def _study(self, file: Path, *more: str) -> subprocess.Popen[str]:
        return self._wattspan(
            "frontier", "run", "--power", "60%", "--repeat", "1", "--warm-up", "100ms",
            "--window", "5s", "--unit", "stdout:step done", "-o", str(file), *more, "--",
            sys.executable, "-c", TRAINING,
        )  # fmt: skip

    def _wattspan(self, *words: str) -> subprocess.Popen[str]:
        environ = {
            **ENVIRONMENT,
            "WATTSPAN_RUN_DIR": str(self._host.sockets),
            "WATTSPAN_AGENT_RUN_DIR": str(self._host.sockets),
            "WATTSPAN_EMULATED_HOST": str(self._host.emulated.directory),
            "PYTHONPATH": str(ROOT / "agent"),
        }
        return subprocess.Popen(
            [*PROGRAM, *words], env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _trials(file: Path) -> int:
    with suppress(StudyFileError):
        return len(Frontier.load(file).study.trials)
    return 0


def _complete(file: Path) -> bool:
    """True if each setting has a usable trial."""
    with suppress(StudyFileError):
        study = Frontier.load(file).study
        return {one.setting for one in study.usable()} == set(study.settings)
    return False


@pytest.mark.exhaustive
@pytest.mark.slow
def test_study_killed_at_any_moment_restores_the_limit_and_is_resumed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """WATTSPAN_FRONTIER_KILLS=50 makes as many kills, on five hosts at a time."""

    def kills_of(number: int) -> list[Kill]:
        folder = tmp_path / str(number)
        folder.mkdir()
        rng, found = random.Random(number), list[Kill]()
        with IdleHost() as host, closing(KilledStudy(host, folder)) as study:
            for kill in range(number, KILLS, HOSTS):
                target = TARGETS[kill % len(TARGETS)]
                capped = kill % 2 == 0
                after = rng.uniform(0.0, CAPPED if capped else LENGTH)
                found.append(study.kill(target, after, once_capped=capped))
        return found

    with ThreadPoolExecutor(HOSTS) as pool:
        kills = [kill for some in pool.map(kills_of, range(HOSTS)) for kill in some]
    for kill in kills:
        record_property("kill", kill._asdict())
    assert len(kills) == KILLS
    assert any(kill.capped for kill in kills)
