"""`wattspan frontier` with a real agent and capper, and a training on an emulated board."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from testbed import emulated_training
from testbed.agent_on_host import Standing
from testbed.capper_process import Gpu
from testbed.program import ENVIRONMENT, PROGRAM
from testbed.requirements import ROOT
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

from wattspan import Frontier
from wattspan.emulation.host import profile_named
from wattspan.frontier.trials import Trial
from wattspan.training.session import WORK_ATTRIBUTE
from wattspan.training.units import STEP

pytestmark = pytest.mark.slow

PROFILE, ORIGINAL = "one-socket-h100", 700_000
TRAINING = (
    f"{Path(emulated_training.__file__).read_text()}\n"
    + """
import sys
with EmulatedTraining(step=float(sys.argv[1]), noise=0.003) as training:
    while True:
        training.step()
        print("step done", flush=True)
"""
)
QUICK = ("--warm-up", "1s", "--window", "5s", "--unit", "stdout:step done")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanAgent]:
    with SpanAgent(
        tmp_path_factory.mktemp("agent"), profile=PROFILE, autotune__mode="apply", caps__lease="2s"
    ) as running:
        eventually(lambda: caps(running), "the capper answers", 30)
        yield running


@pytest.fixture
def gpu(agent: SpanAgent) -> Iterator[Gpu]:
    board = Gpu(Standing(agent.host, profile_named(PROFILE)))
    yield board
    board.close()


def environ(agent: SpanAgent) -> dict[str, str]:
    return {
        **ENVIRONMENT,
        "WATTSPAN_RUN_DIR": str(agent.run_dir),
        "WATTSPAN_AGENT_RUN_DIR": str(agent.run_dir),
        "WATTSPAN_EMULATED_HOST": str(agent.host),
        "PYTHONPATH": str(ROOT / "agent"),
    }


def wattspan(agent: SpanAgent, *words: object, code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        [*PROGRAM, *map(str, words)],
        env=environ(agent),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def caps(agent: SpanAgent) -> str:
    done = subprocess.run(
        [*PROGRAM, "caps", "status"],
        env=environ(agent),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else ""


def started(agent: SpanAgent, file: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "frontier", "run", *options, *QUICK, "-o", str(file), "--",
         sys.executable, "-c", TRAINING, "0.05"],
        env=environ(agent), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.exhaustive
def test_frontier_of_power_limits_is_measured_and_recommended(
    agent: SpanAgent, gpu: Gpu, tmp_path: Path
) -> None:
    file = tmp_path / "frontier.json"
    training = (sys.executable, "-c", TRAINING, "0.05")
    limits = ("--power", "100%,60%", "--repeat", "2")
    table, _ = wattspan(agent, "frontier", "run", *limits, *QUICK, "-o", file, "--", *training)
    assert gpu.limit == ORIGINAL
    assert "original limits" in table
    assert "emulated" in table
    found = Frontier.load(file)
    trials: list[Trial] = found.study.trials
    assert len(trials) == 4
    assert all(one.usable for one in trials), trials
    assert {round(one.limits["gpu:" + _uuid(one)]) for one in trials if one.limits} == {420}
    full, capped = found.estimates.power.value(0).value, found.estimates.power.value(1).value
    assert capped < min(full, 425)
    # A lower limit saves energy and takes longer, by the law of the emulated board.
    assert found.recommend(max_slowdown=1.0).setting == found.study.settings[1]
    text, _ = wattspan(agent, "frontier", "recommend", file, "--max-slowdown", "1.0")
    assert text.startswith("Run at: 60 %\n")
    assert "The devices are emulated." in text
    fragment, _ = wattspan(
        agent, "frontier", "recommend", file, "--max-slowdown", "1.0", "--as", "config"
    )
    assert "[[caps.fixed]]" in fragment
    assert "watts = 420" in fragment
    shown, _ = wattspan(agent, "frontier", "show", file)
    assert shown == table
    svg, _ = wattspan(agent, "frontier", "plot", file)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    exported, _ = wattspan(agent, "frontier", "export", file)
    facts = json.loads(exported)
    assert [one["setting"] for one in facts["estimates"]] == ["original limits", "60 %"]
    rows, _ = wattspan(agent, "frontier", "export", file, "--format", "csv")
    assert len(rows.splitlines()) == 5


STEPS_AS_SPANS = (
    f"{Path(emulated_training.__file__).read_text()}\n"
    + """
import sys
from wattspan.training import Loop
with EmulatedTraining(step=0.05, noise=0.003) as training, Loop(service="trainer") as loop:
    while True:
        with loop.step(work=int(sys.argv[1])):
            training.step()
"""
)


@pytest.mark.exhaustive
def test_units_are_the_spans_of_a_training_loop(agent: SpanAgent, tmp_path: Path) -> None:
    file = tmp_path / "frontier.json"
    wattspan(
        agent, "frontier", "run", "--param", "batch=8,16", "--repeat", "1", "--warm-up", "0s",
        "--window", "5s", "--unit", f"span:{STEP}:{WORK_ATTRIBUTE}", "-o", file, "--",
        sys.executable, "-c", STEPS_AS_SPANS, "{batch}",
    )  # fmt: skip
    trials = Frontier.load(file).study.trials
    assert [one.failure or one.taint for one in trials] == ["", ""]
    for one, batch in zip(trials, (8, 16), strict=True):
        assert one.units % batch == 0
        assert one.joules > 0
        assert one.unit_seconds * batch > 0.04


def _uuid(trial: Trial) -> str:
    (device,) = trial.limits
    return device.removeprefix("gpu:")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, signal.SIGTERM],
)
def test_killed_study_restores_the_limits_and_is_resumed(
    agent: SpanAgent, gpu: Gpu, tmp_path: Path, number: int
) -> None:
    file = tmp_path / "frontier.json"
    process = started(agent, file, "--power", "60%,50%", "--repeat", "1")
    try:
        eventually(lambda: gpu.limit == 420_000, "the second trial runs", 60)
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode != 0
        eventually(lambda: gpu.limit == ORIGINAL, "the limit is restored", 30)
    finally:
        process.kill()
        process.communicate()
    before = Frontier.load(file).study.trials
    assert [str(one.setting) for one in before] == ["original limits"]
    resumed = started(agent, file, "--power", "60%,50%", "--repeat", "1", "--resume")
    text, _ = resumed.communicate(timeout=90)
    assert resumed.returncode == 0, text
    after = Frontier.load(file).study.trials
    assert after[0] == before[0]
    assert [str(one.setting) for one in after] == ["original limits", "60 %", "50 %"]
    assert gpu.limit == ORIGINAL


@pytest.mark.exhaustive
def test_study_with_a_time_budget_ends_with_it_and_is_completed_without(
    agent: SpanAgent, gpu: Gpu, tmp_path: Path
) -> None:
    file = tmp_path / "frontier.json"
    limits = ("--power", "100%,60%", "--repeat", "2", *QUICK, "-o", file)
    training = ("--", sys.executable, "-c", TRAINING, "0.05")
    _, error = wattspan(agent, "frontier", "run", *limits, "--time-budget", "14s", *training)
    before = Frontier.load(file).study.trials
    assert f"{4 - len(before)} of 4 trials were not run" in error
    assert str(before[0].setting) == "original limits"
    assert all(one.elapsed_seconds >= one.seconds + 1 for one in before)
    assert sum(one.elapsed_seconds for one in before[:-1]) <= 14
    wattspan(agent, "frontier", "run", *limits, "--resume", *training)
    after = Frontier.load(file).study.trials
    assert after[: len(before)] == before
    pairs = {(str(one.setting), one.block) for one in after if one.usable}
    assert pairs == {(name, block) for name in ("original limits", "60 %") for block in (0, 1)}
    assert gpu.limit == ORIGINAL


def test_unknown_parameter_is_refused_before_anything_runs(
    agent: SpanAgent, tmp_path: Path
) -> None:
    proof = tmp_path / "ran"
    _, error = wattspan(
        agent, "frontier", "run", "--param", "batch=8,16", *QUICK, "-o", tmp_path / "f.json", "--",
        "sh", "-c", f"touch {proof}; echo {{batch}} {{lr}}", code=2,
    )  # fmt: skip
    assert "no --param lr" in error
    assert not proof.exists()


def test_knob_that_must_not_be_set_is_refused_before_anything_runs(
    agent: SpanAgent, tmp_path: Path
) -> None:
    """The agent has the default knobs, which are without `cpu_power`."""
    proof, file = tmp_path / "ran", tmp_path / "f.json"
    answer, _ = wattspan(agent, "caps", "status", "--json")
    cpu = next(one["device"] for one in json.loads(answer)["rows"] if one["knob"] == "cpu_power")
    _, error = wattspan(
        agent, "frontier", "run", "--power", "100%,80%", "--device", cpu, *QUICK, "-o", file,
        "--", "touch", proof, code=6,
    )  # fmt: skip
    assert 'Add "cpu_power" to that list' in error
    assert not proof.exists()
    assert not file.exists()


@pytest.mark.exhaustive
def test_failing_trials_are_marked_and_the_rest_go_on(agent: SpanAgent, tmp_path: Path) -> None:
    file = tmp_path / "frontier.json"
    script = f"{TRAINING}"
    command = (
        f'[ "$1" = 0.06 ] && {{ echo out of memory; exit 9; }}; exec {sys.executable} -c "$2" "$1"'
    )
    table, error = wattspan(
        agent, "frontier", "run", "--param", "step=0.05,0.06,0.07", "--repeat", "1", *QUICK,
        "-o", file, "--", "sh", "-c", command, "train", "{step}", script,
    )  # fmt: skip
    assert "out of memory" in table
    assert "exit code 9" in error
    trials = Frontier.load(file).study.trials
    assert [one.usable for one in trials] == [True, False, True]
    assert "not to accuracy" in table


def test_existing_file_is_not_overwritten(agent: SpanAgent, tmp_path: Path) -> None:
    file = tmp_path / "frontier.json"
    file.write_text("precious")
    _, error = wattspan(
        agent, "frontier", "run", "--power", "90%", *QUICK, "-o", file, "--", "true", code=1
    )
    assert "--resume" in error
    assert file.read_text() == "precious"


def test_without_an_agent_the_remedy_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "frontier", "run", "--power", "90%", *QUICK, "-o", str(tmp_path / "f"), "--",
         "true"],
        env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(tmp_path), "HOME": os.environ["HOME"]},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "wattspan run" in done.stderr
