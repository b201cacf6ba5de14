"""The whole stack, in real time: an agent, its capper, an emulated host, and spans of its job.

Each run is a `wattspan run --emulate` of its own with `mode = "apply"`. The job's steps are short,
so that minutes are as many steps as hours are elsewhere. Its score uses the emulated host's truth,
not the tuner's report: actual and uncapped time of each step, and the energy of the boards.

With ``--callback`` the configuration names no job: a process trains on the board in a
``wattspan.training.Loop``, which declares it, and ends by SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.machine import describe
from testbed.program import host_of
from testbed.tuner.stats import clopper_pearson, mean

from wattspan.emulation.boards import Demand, EmulatedBoard, operate
from wattspan.emulation.control import ControlClient
from wattspan.emulation.host import profile_named
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import Training
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

JOB, STEP = "trainer", "train_step"
LOOK = 0.5  # seconds
CONFIG = """\
[agent]
state_dir = "{folder}/state"
run_dir = "{folder}/run"
log_level = "warning"
[spans]
http = ""
[exporters.prometheus]
listen = "127.0.0.1:0"
[caps]
users = []
[autotune]
mode = "apply"
declared = "allow"
max_slowdown = {budget}
block = "{block}"
block_units = 5
settle = "{settle}"
settle_units = 1
dwell = "1m"
"""
NAMED_JOB = """\
[[autotune.job]]
service = "trainer"
span = "train_step"
"""
LOOP = """\
import itertools, json, sys, time
from pathlib import Path
from testbed.emulated_training import EmulatedTraining
from wattspan.training import Loop
host, truth, terms = Path(sys.argv[1]), open(sys.argv[2], "w"), json.loads(sys.argv[3])
with EmulatedTraining(host=host, **terms) as training:
    with Loop(service="trainer", max_slowdown=float(sys.argv[4])) as loop:
        for number in loop(itertools.count(1)):
            training.step()
            if number % 10 == 0:
                done = {"at": time.monotonic_ns(), **training.truth()}
                print(json.dumps(done), file=truth, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings shared by all runs. Seconds, but for the budget."""

    profile: str
    seconds: float
    budget: float
    block: str
    settle: str
    callback: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The truth about a job's steps up to a time: nanoseconds."""

    at: int
    units: int
    took: int
    ideal: int


@dataclass(frozen=True, slots=True)
class Score:
    """One run by the emulated host's truth; ``told`` is the tuner's final report."""

    seed: int
    units: int
    slowdown: float
    saving: float
    committed: float  # seconds; NaN if it never did
    settings: tuple[int, ...]  # every limit that was seen in force, in watts, as they came
    original: int
    final: int
    told: dict[str, Any]

    @property
    def restored(self) -> bool:
        return self.original == self.final


def main(words: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(words)
    terms = Terms(
        options.profile, options.seconds, options.budget, options.block, options.settle,
        options.callback,
    )  # fmt: skip
    print(f"{describe()}; emulated host {terms.profile}, {terms.seconds:.0f} s a run\n")
    best, at = oracle(terms.profile, terms.budget)
    print(f"Within {terms.budget:.0%} the best limit, {at} W, saves {best:.1%}.\n")
    print("run  steps  slowdown  saving  of best  committed  settings (W)        final")
    scores = []
    for seed in range(1, options.runs + 1):
        score = run(terms, seed)
        scores.append(score)
        print(line(score, best), flush=True)
    print(f"\n{summary(scores, terms, best)}")


def line(score: Score, best: float) -> str:
    """One run as a row."""
    settings = " ".join(map(str, score.settings[-4:]))
    committed = "never" if math.isnan(score.committed) else f"{score.committed:.0f} s"
    final = "original" if score.restored else f"{score.final} W"
    sentence = score.told.get("decision", {}).get("sentence", "The agent said nothing.")
    return (
        f"{score.seed:3}  {score.units:5}  {score.slowdown:8.2%}  {score.saving:6.1%}  "
        f"{score.saving / best:7.0%}  {committed:>9}  {settings:18}  {final}\n"
        f"     {sentence}"
    )


def summary(scores: Sequence[Score], terms: Terms, best: float) -> str:
    """All runs in three lines, with the statistical limits of so few."""
    over = sum(score.slowdown > terms.budget for score in scores)
    low, high = clopper_pearson(over, len(scores))
    bounded = sum(score.slowdown <= (score.told.get("slowdown_bound") or 0) for score in scores)
    restored = sum(score.restored for score in scores)
    return (
        f"Over the budget of {terms.budget:.0%}: {over} of {len(scores)} "
        f"(95 % interval {low:.0%} to {high:.0%}).\n"
        f"Saving {mean([s.saving for s in scores]):.1%} of the board's energy on average, "
        f"{mean([s.saving for s in scores]) / best:.0%} of what was possible, learning included.\n"
        f"The true slowdown was within the bound told in {bounded} of {len(scores)}; "
        f"the limit was the original again at the end of {restored}."
    )


def oracle(profile: str, budget: float) -> tuple[float, int]:
    """The most that any one limit saves within the budget, and that limit in watts."""
    board, work = _tuned(profile)
    host, demands, silicon = work.host, [Demand(work.load, work.kernel)], board.silicon

    def cost(limit: int) -> tuple[float, float]:
        point = operate(silicon, demands, limit)
        busy = (1 - host) / point.grants[0].speed
        return host + busy, host * silicon.idle + busy * point.power

    time_free, energy_free = cost(board.limits[1])
    found = [
        (1 - energy / energy_free, limit // 1000)
        for limit in range(board.limits[0], board.limits[1], 1000)
        for took, energy in (cost(limit),)
        if took <= (1 + budget) * time_free
    ]
    return max(found)


def free_power(profile: str) -> float:
    """The mean power of the board over a step under its default limit, in milliwatts."""
    board, work = _tuned(profile)
    busy = operate(board.silicon, [Demand(work.load, work.kernel)], board.limits[1]).power
    return work.host * board.silicon.idle + (1.0 - work.host) * busy


def _tuned(profile: str) -> tuple[EmulatedBoard, Training]:
    """The board and the work of the tuned job."""
    chosen = profile_named(profile)
    work = next(job.gpus[0] for job in chosen.jobs if job.name == JOB)
    assert isinstance(work, Training)
    return chosen.gpus[0], work


def run(terms: Terms, seed: int) -> Score:
    """One job, from its start to its end, under an agent that tunes it."""
    with running_agent(_config(terms), terms.profile) as (folder, host):
        board = BoardClient(host.directory)
        original = board.limit
        time.sleep(5)  # the agent learns the idle power while the host is idle
        began = time.monotonic()
        job = (_LoopJob if terms.callback else _ProfileJob)(terms, host, folder, seed)
        first = job.done()
        spent = host.energy(first.at)
        settings, told = [original], dict[str, Any]()
        while time.monotonic() - began < terms.seconds:
            time.sleep(LOOK)
            if (limit := board.limit) != settings[-1]:
                settings.append(limit)
            told = job_report(folder, f"{JOB}/{STEP}") or told
        last = job.done()
        energy = host.energy(last.at) - spent
        job.end()
        until(lambda: board.limit == original, 30)
        took, ideal = last.took - first.took, last.ideal - first.ideal
        # energy of the same steps at the original limit; edges count with the whole
        free = free_power(terms.profile) * ideal * (last.at - first.at) / took / 1e6
        return Score(
            seed, last.units, took / ideal - 1, 1 - energy / free,
            told.get("committed_seconds") or math.nan,
            tuple(watts // 1000 for watts in settings), original, board.limit, told,
        )  # fmt: skip


class _ProfileJob:
    """The job of the emulated host itself, whose spans are as long as its steps."""

    def __init__(self, terms: Terms, host: StackHost, folder: Path, seed: int) -> None:
        del terms
        self._host = host
        host.ask(do="start-jobs", agent=str(folder / "run" / "otlp.sock"))
        host.ask(do="steer", job=JOB, seed=seed)

    def done(self) -> Done:
        at, truth = time.monotonic_ns(), self._host.ask(do="work", job=JOB)
        return Done(at, truth["units"], truth["took"], truth["ideal"])

    def end(self) -> None:
        os.kill(self._host.ask(do="work", job=JOB)["pid"], signal.SIGTERM)


class _LoopJob:
    """A process that trains in a loop of ours, whose spans are as long as it observes."""

    def __init__(self, terms: Terms, host: StackHost, folder: Path, seed: int) -> None:
        work = _tuned(terms.profile)[1]
        same = {"step": work.step, "host_part": work.host, "noise": work.noise, "seed": seed}
        self._truth = folder / "truth.jsonl"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", LOOP, str(host.directory), str(self._truth)),
                *(json.dumps(same), str(terms.budget)),
            ],
            env=os.environ
            | {"WATTSPAN_RUN_DIR": str(folder / "run"), "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def done(self) -> Done:
        until(lambda: self._lines() or self._process.poll() is not None, 30)
        truth = json.loads(self._lines()[-1])
        return Done(truth["at"], truth["units"], truth["took"], truth["ideal"])

    def _lines(self) -> list[str]:
        """The complete lines of the truth."""
        lines = self._truth.read_text().splitlines() if self._truth.exists() else []
        return [line for line in lines if line.endswith("}")]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class StackHost(ControlClient):
    """The emulated host of an agent, by its door."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    def energy(self, at: int) -> int:
        """Energy of the first board so far, in microjoules."""
        time.sleep(0.05)
        answer = self.ask(do="truth", at=[at])
        return int(answer["at"][0]["gpus"][0]["energy"])


class BoardClient:
    """The first board as any client sees it."""

    def __init__(self, directory: Path) -> None:
        self._nvml: Any = EmulatedNvml(directory / "gpus")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)

    @property
    def clock(self) -> int:
        """The SM clock in megahertz; the lowest one while the board is idle."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, 1))

    @property
    def limit(self) -> int:
        """Milliwatts, as last requested by anybody."""
        return int(self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle))


def _config(terms: Terms) -> str:
    return CONFIG.replace("{budget}", str(terms.budget)).replace("{block}", terms.block).replace(
        "{settle}", terms.settle
    ) + ("" if terms.callback else NAMED_JOB)


@contextmanager
def running_agent(config_text: str, profile: str) -> Iterator[tuple[Path, StackHost]]:
    """An agent that runs, and the emulated host it has started.

    ``{folder}`` in the configuration is the directory of its files, which ends with it.
    """
    with tempfile.TemporaryDirectory(prefix="wattspan-stack-") as name:
        folder = Path(name)
        config = folder / "config.toml"
        config.write_text(config_text.replace("{folder}", name))
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from wattspan.cli import main; main()"),
                *("run", "--config", str(config), "--emulate", profile),
            ],
            env={k: v for k, v in os.environ.items() if not k.startswith("WATTSPAN_")},
        )
        try:
            until(lambda: (folder / "run" / "otlp.sock").exists(), 60)
            yield folder, StackHost(host_of(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def job_report(folder: Path, job: str) -> dict[str, Any]:
    """The agent's report of a job; empty while it does not respond."""
    try:
        rows = request_json("/v1/tuning", {}, directories=(str(folder / "run"),))["jobs"]
    except (MeasurementError, KeyError):
        return {}
    return next((row for row in rows if row["job"] == job), {})


def until(holds: Callable[[], object], seconds: float) -> None:
    """Wait until ``holds`` is true, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuner.stack", description="The whole stack in real time."
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0, help="how long a job lasts")
    parser.add_argument("--profile", default="one-socket-h100")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--block", default="500ms")
    parser.add_argument("--settle", default="500ms")
    parser.add_argument("--callback", action="store_true", help="a job that declares itself")
    return parser


if __name__ == "__main__":
    main()
