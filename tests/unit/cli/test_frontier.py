"""`wattspan frontier` on a kept study, and what it measures and sets."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.progress import Progress, TimeRemainingColumn
from testbed.studies import power_settings, study, trial

import wattspan
from wattspan.cli import cli
from wattspan.cli.frontier.measurement import (
    AgentTrialMeter,
    MeasuredHost,
    SettableDevices,
    carry_out,
    check_permission,
    described,
    hold_settings,
    idle_warning,
    resolution_warning,
    time_left,
    without_idle_power,
)
from wattspan.cli.frontier.tables import autotune_lines, configuration_lines
from wattspan.config import load
from wattspan.frontier.runner import HeldLimits
from wattspan.frontier.schedule import Planned, TrialSchedule
from wattspan.frontier.trials import PowerLimit, Setting, Study, StudyFile, Trial
from wattspan.frontier.work import SteadyWindow
from wattspan.model import CapKey, CapRow, Consumer, Knob, KnobState
from wattspan.ports import Caps, CapsError
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device, Energy, Measurement

FULL, SAVING, SLOW = power_settings(100, 80, 60)
CURVE = {FULL: (1.0, 300.0), SAVING: (1.03, 250.0), SLOW: (1.3, 240.0)}
BOARD = Device("gpu:0", "gpu", "GPU 0", 500.0, 1.0, 1.0, "measured", 100.0, 0, "GPU-0")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "frontier.json"
    trials = [
        trial(setting, block, seconds * (1 + 0.001 * block), joules)
        for block in range(3)
        for setting, (seconds, joules) in CURVE.items()
    ]
    failed = Trial(setting=SLOW, block=3, started_unix=9.0, failure="The command failed.")
    StudyFile(path).write(study(list(CURVE), trials=[*trials, failed]))
    return path


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["frontier", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def changed(path: Path, **changes: object) -> Study:
    file = StudyFile(path)
    found: Study = msgspec.structs.replace(file.read(), **changes)
    file.write(found)
    return found


# ------------------------------------------------------------------------------------ a study


def test_table_has_every_setting_and_what_failed(file: Path) -> None:
    lines = run("show", file).output.splitlines()
    (row,) = [line for line in lines if line.startswith("80 %")]
    assert row.split()[1:4] == ["%", "3", "1.031"]
    assert "+3.0%" in row
    assert "-16.7%" in row
    assert row.endswith("frontier")
    assert lines[-1] == "60 %, trial 4: The command failed."
    assert "emulated" in lines[1]


def test_pruned_setting_has_its_reason(file: Path) -> None:
    extra = Setting(PowerLimit(0.4))
    changed(file, settings=[*CURVE, extra], pruned=[(extra, "energy rises from 60 % on")])
    (row,) = [line for line in run("show", file).output.splitlines() if line.startswith("40 %")]
    assert row.endswith("energy rises from 60 % on")


def test_study_without_a_usable_trial_is_shown(file: Path) -> None:
    kept = StudyFile(file).read()
    changed(file, trials=kept.trials[-1:])
    assert "No trial can be used." in run("show", file).output
    assert "baseline has no usable trial" in run("recommend", file, code=1).output
    assert json.loads(run("show", file, "--json").output)["estimates"] == []
    assert "No trial can be used" in run("plot", file, code=1).output


def test_recommendation_names_its_gain_and_its_certainty(file: Path) -> None:
    text = run("recommend", file, "--max-slowdown", "0.05").output
    assert text.startswith("Run at: 80 %\nEnergy -16.7%")
    assert "The devices are emulated." in text


def test_recommendation_of_the_baseline_says_so(file: Path) -> None:
    assert "This is the baseline" in run("recommend", file, "--max-slowdown", "0").output


def test_recommendation_is_a_configuration(file: Path) -> None:
    text = run("recommend", file, "--max-slowdown", "0.05", "--as", "config").output
    (fixed,) = tomllib.loads(text)["caps"]["fixed"]
    assert fixed == {"device": "gpu:0", "watts": 240, "knob": "gpu_power"}
    path = file.with_name("config.toml")
    path.write_text(text)
    assert load(path, environ={}, flags={}).caps.fixed[0].watts == 240


AS_TUNED = ("--max-slowdown", "0.05", "--as", "autotune")


@pytest.mark.parametrize(
    ("options", "default", "floor", "objective"),
    [((), None, 0.8, "energy"), ((), 400.0, 0.6, "energy"), (("--eta", "1"), None, 0.8, "cost")],
)
def test_recommendation_is_a_configuration_of_the_tuner(
    file: Path, options: tuple[str, ...], default: float | None, floor: float, objective: str
) -> None:
    (board,) = StudyFile(file).read().devices
    changed(file, devices=[msgspec.structs.replace(board, default_watts=default)])
    path = file.with_name("config.toml")
    path.write_text(run("recommend", file, *AS_TUNED, *options).output)
    checked = CliRunner().invoke(cli, ["config", "check", str(path)])
    assert (checked.exit_code, checked.stderr) == (0, ""), checked.output
    tuned = load(path, environ={}, flags={}).autotune
    assert (tuned.mode, tuned.max_slowdown, tuned.knobs) == ("advise", 0.05, (Knob.GPU_POWER,))
    assert (tuned.floor, tuned.objective) == (floor, objective)  # 240 W is 60 % of 400 W


@pytest.mark.parametrize(
    ("unit", "span", "work"),
    [("span:train_step", "train_step", ""), ("span:chat:gen_ai.usage.output_tokens", "chat",
     "gen_ai.usage.output_tokens"), ('span:a"\n[b]:c:', 'a"\n[b]:c', "")],
)  # fmt: skip
def test_units_that_are_spans_are_a_job_of_the_tuner(
    file: Path, unit: str, span: str, work: str
) -> None:
    changed(file, unit=unit)
    path = file.with_name("config.toml")
    path.write_text(run("recommend", file, *AS_TUNED).output)
    (job,) = load(path, environ={}, flags={}).autotune.job
    assert (job.span, job.work, job.service) == (span, work, "")


def test_units_of_the_output_are_no_job_of_the_tuner(file: Path) -> None:
    assert "[[autotune.job]]" not in run("recommend", file, *AS_TUNED).output.splitlines()


@pytest.mark.parametrize(
    ("options", "cause"),
    [((), "needs --max-slowdown"), (("--max-slowdown", "0"), "above 0"),
     (("--max-slowdown", "2"), "at most 1"),
     (("--max-slowdown", "0.1", "--deadline", "9s"), "without --deadline")],
)  # fmt: skip
def test_constraint_that_no_tuner_keeps_is_bad_usage(
    file: Path, options: tuple[str, ...], cause: str
) -> None:
    text = " ".join(run("recommend", file, "--as", "autotune", *options, code=2).output.split())
    assert cause in text


def test_tuner_is_not_configured_for_the_baseline_or_unknown_limits(file: Path) -> None:
    kept = StudyFile(file).read()
    bare = [msgspec.structs.replace(kept.devices[0], original_watts=None)]
    for lines in (
        autotune_lines(kept, FULL, 0.05, None),
        autotune_lines(msgspec.structs.replace(kept, devices=bare), SAVING, 0.05, None),
    ):
        assert tomllib.loads("\n".join(lines)) == {}
    clock = tomllib.loads("\n".join(autotune_lines(kept, Setting(clock=1500), 0.05, None)))
    assert clock["autotune"]["knobs"] == ["gpu_clock"]
    assert "floor" not in clock["autotune"]


def test_disobeyed_limit_and_unsteady_window_are_marked(file: Path) -> None:
    kept = StudyFile(file).read()
    one, *others = [one for one in kept.trials if one.setting == SLOW and one.usable]
    limits = {"gpu:0": 180.0}
    marked = msgspec.structs.replace(
        one, limits=limits, device_watts={"gpu:0": 200.0}, unsteady="It changed."
    )
    near = msgspec.structs.replace(others[0], limits=limits, device_watts={"gpu:0": 188.0})
    rest = [one for one in kept.trials if one.setting != SLOW]
    changed(file, trials=[*rest, marked, near])
    lines = run("show", file).output.splitlines()
    (row,) = [line for line in lines if line.startswith("60 %  ")]
    assert row.endswith("frontier; limit not obeyed; not steady")
    assert lines[-2:] == [
        "60 %, trial 1: limit not obeyed: GPU 0 (gpu:0) took 200 W, and its enforced limit was"
        " 180 W.",
        "60 %, trial 1: not steady: It changed.",
    ]
    rows = list(csv.DictReader(io.StringIO(run("export", file, "--format", "csv").output)))
    assert [(one["disobeyed"], one["unsteady"]) for one in rows[-2:]] == [
        ("gpu:0", "It changed."), ("", "")]  # fmt: skip


def test_baseline_and_clocks_need_no_configuration(file: Path) -> None:
    kept = StudyFile(file).read()
    assert tomllib.loads("\n".join(configuration_lines(kept, FULL))) == {}
    clock = configuration_lines(kept, Setting(clock=1500))
    assert any("1500 MHz cannot be fixed" in line for line in clock)


def test_recommendation_is_a_command(file: Path) -> None:
    pair = (("batch", "8 x"),)
    chosen = [Setting(parameters=pair), Setting(parameters=(("batch", "16"),))]
    trials = [trial(one, block, 1.0, 1.0 + n) for block in range(2) for n, one in enumerate(chosen)]
    StudyFile(file).write(study(chosen, trials=trials))
    assert run("recommend", file, "--as", "command").output == "train '8 x'\n"
    assert "not to accuracy" in run("show", file).output


def test_recommendation_as_json_has_no_infinity(file: Path) -> None:
    kept = StudyFile(file).read()
    changed(file, trials=kept.trials[:3])
    facts = json.loads(run("recommend", file, "--json").output)
    assert facts["name"] == "60 %"
    assert facts["seconds"]["high"] is None


@pytest.mark.parametrize(
    ("options", "cause"),
    [(["--eta", "2"], "eta is from 0"), (["--watts", "0"], "watts is above 0"),
     (["--max-slowdown", "-1"], "max_slowdown is at least 0"),
     (["--tolerance", "-1"], "tolerance is at least 0")],
)  # fmt: skip
def test_invalid_constraint_is_bad_usage(file: Path, options: list[str], cause: str) -> None:
    assert cause in run("recommend", file, *options, code=2).output


def test_eta_needs_the_limits_of_all_devices(file: Path) -> None:
    kept = StudyFile(file).read()
    bare = [msgspec.structs.replace(kept.devices[0], original_watts=None)]
    changed(file, devices=bare)
    assert "some are unknown" in run("recommend", file, "--eta", "0.5", code=2).output


def test_plot_is_one_svg(file: Path) -> None:
    output = file.with_name("frontier.svg")
    run("plot", file, "-o", output)
    assert ElementTree.fromstring(output.read_text()).tag == "{http://www.w3.org/2000/svg}svg"


def test_export_has_trials_and_estimates(file: Path) -> None:
    facts = json.loads(run("export", file).output)
    assert [one["frontier"] for one in facts["estimates"]] == [True, True, True]
    assert len(facts["trials"]) == 10
    assert len(facts["command_digest"]) == 16
    rows = list(csv.DictReader(io.StringIO(run("export", file, "--format", "csv").output)))
    assert rows[-1]["failure"] == "The command failed."


def test_python_has_the_same_recommendation(file: Path) -> None:
    found = wattspan.Frontier.load(file)
    assert found.settings == [FULL, SAVING, SLOW]
    assert found.recommend(max_slowdown=0.05).setting == SAVING


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--power", "70"], "write a limit such as"),
        (["--power", "80%", "--window", "2s"], "5 s at least"),
        (["--power", "80%", "--trial-limit", "6s"], "above --warm-up and --window"),
        (["--power", "80%", "--time-budget", "29s"], "two trials need 30s"),
        (["--param", "x=1,2"], "--param x has no effect"),
        ([], "nothing to compare"),
    ],
)
def test_invalid_options_are_refused_first(options: list[str], cause: str, tmp_path: Path) -> None:
    words = ["run", *options, "--unit", "stdout:x", "-o", tmp_path / "f.json", "--", "true"]
    assert cause in run(*words, code=2).output


# ------------------------------------------------------------------------------- a time budget


def run_trials(begun: Study, kept: Path, budget: float | None, seconds: float = 25.0) -> Study:
    """The study with trials of ``seconds`` each."""

    def attempt(planned: Planned) -> Trial:
        done = trial(planned.setting, planned.block, *CURVE[planned.setting])
        return msgspec.structs.replace(done, elapsed_seconds=seconds)

    schedule = TrialSchedule(time_budget=budget, resumed=len(begun.trials))
    return carry_out(begun, schedule, attempt, StudyFile(kept))


def test_study_ends_with_its_time_budget_and_is_resumed_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "frontier.json"
    first = run_trials(study(list(CURVE)), path, 110.0)
    assert len(first.trials) == 4
    assert "5 of 9 trials were not run" in capsys.readouterr().err
    assert StudyFile(path).read() == first
    assert run_trials(first, path, 110.0) == first
    capsys.readouterr()
    second = run_trials(first, path, 160.0)
    assert len(second.trials) == 6
    assert second.trials[:4] == first.trials
    assert "3 of 9 trials were not run" in capsys.readouterr().err
    whole = run_trials(second, path, None)
    assert {(one.setting, one.block) for one in whole.trials} == {
        (setting, block) for setting in CURVE for block in range(3)
    }
    assert len(whole.trials) == 9
    assert "not run" not in capsys.readouterr().err


def test_progress_shows_the_rest_of_the_time_budget() -> None:
    now = 1000.0
    begun = study([FULL], trials=[msgspec.structs.replace(trial(FULL, 0, 1.0, 1.0),
                                                          elapsed_seconds=30.0)])  # fmt: skip
    column = time_left(begun, 300.0)
    progress = Progress(column, get_time=lambda: now, auto_refresh=False, disable=True)
    progress.add_task("")
    (task,) = progress.tasks
    assert str(column(task)) == "4m 30s of the budget left"
    now += 265.0
    assert str(column(task)) == "5.0 s of the budget left"
    now += 60.0
    assert str(column(task)) == "0.0 s of the budget left"
    assert isinstance(time_left(begun, None), TimeRemainingColumn)


# -------------------------------------------------------------------------- devices and limits


def rows(*knobs: Knob, original: int | None = None) -> list[CapRow]:
    return [
        CapRow(KnobState(CapKey(knob, "gpu:0"), "GPU 0", requested=300_000), original=original)
        for knob in knobs
    ]


def test_limits_are_relative_to_the_original_one() -> None:
    devices = SettableDevices(rows(Knob.GPU_POWER, Knob.GPU_CLOCK, original=320_000), [BOARD])
    assert devices.caps(Setting(PowerLimit(0.5), 1500)) == {
        CapKey(Knob.GPU_POWER, "gpu:0"): 160_000,
        CapKey(Knob.GPU_CLOCK, "gpu:0"): 1500,
    }
    assert devices.caps(FULL) == {}
    assert devices.original_watts("gpu:0") == 320.0


def test_missing_knob_is_explained() -> None:
    devices = SettableDevices(rows(Knob.GPU_POWER), [BOARD])
    devices.check([FULL, SAVING])
    with pytest.raises(CapsError, match="The clock of the measured devices cannot be set"):
        devices.check([Setting(clock=1500)])


def test_description_has_the_limits_of_a_device() -> None:
    (row,) = rows(Knob.GPU_POWER, original=320_000)
    row = replace(row, state=replace(row.state, default=350_000))
    (found,) = described([BOARD], SettableDevices([row], [BOARD]))
    assert (found.original_watts, found.default_watts) == (320.0, 350.0)
    (found,) = described([BOARD], SettableDevices([], [BOARD]))
    assert (found.original_watts, found.default_watts) == (None, None)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ([FULL, SAVING, SLOW], Setting(PowerLimit(1.0))),
        ([FULL, Setting(clock=1200), Setting(clock=1500)], Setting(clock=1500)),
        ([Setting(PowerLimit(0.8), 1500)], Setting(PowerLimit(1.0), 1500)),
    ],
)
def test_permission_is_asked_without_lowering_power(
    settings: list[Setting], asked: Setting
) -> None:
    held: list[Setting] = []

    @contextmanager
    def hold(setting: Setting) -> Iterator[HeldLimits]:
        held.append(setting)
        with hold_settings(None, no_capper, "job")(setting) as limits:
            yield limits

    check_permission(settings, hold)
    assert held == [asked]


def no_capper() -> Caps:
    raise AssertionError


def test_setting_without_limits_needs_no_capper() -> None:
    with hold_settings(None, no_capper, "job")(FULL) as held:
        assert (held.lost, held.watts()) == ("", {})


class FixedClient:
    """An agent that attributes ``own`` joules of the board to the command."""

    about = note = ""

    def __init__(self, own: float, board: Device = BOARD) -> None:
        self._own, self._board = own, board

    def watch(self, consumer: Consumer) -> None:
        """Nothing to do."""

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        energy = Energy({"gpu": self._own}, {}, 1.0, [])
        return Measurement(1.0, energy, energy, energy, (self._board,), {}, False, True, "host")


def taint(own: float, board: Device = BOARD) -> str:
    meter = AgentTrialMeter([board], FixedClient(own, board))
    return meter._taint(Consumer(1, 1), SteadyWindow(0, 10, 1.0))


def test_trial_beside_other_programs_is_tainted() -> None:
    assert taint(380.0) == ""  # 20 of 400 J above idle are of others
    assert "used 50% of the active energy" in taint(200.0)


def test_difference_within_the_uncertainty_taints_nothing() -> None:
    assert taint(200.0, BOARD._replace(uncertainty=200.0)) == ""


def test_coarse_figures_need_a_window_of_many_cells() -> None:
    coarse = MeasuredHost("host", "", False, [BOARD], resolution=1.0)
    assert "only in steps of 1 s, so that" in resolution_warning(coarse, 10.0)
    with pytest.raises(MeasurementError, match="Set --window to 10s at least"):
        resolution_warning(coarse, 9.9)


def test_exact_figures_need_no_warning() -> None:
    assert resolution_warning(MeasuredHost("host", "", False, [BOARD]), 5.0) == ""


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [("gpu", "end all programs on the GPU"), ("cpu", "[processes] cpu_idle_watts"),
     ("memory", "[processes] memory_idle_watts"), ("enclosure", "name other devices")],
)  # fmt: skip
def test_unknown_idle_power_is_warned_of_with_its_remedy(kind: str, remedy: str) -> None:
    device = BOARD._replace(kind=kind)
    sentence = idle_warning(MeasuredHost("host", "", False, [device, BOARD], [device]))
    assert sentence.startswith("The idle power of GPU 0 is unknown")
    assert remedy in sentence


def test_device_without_a_known_idle_power_is_found() -> None:
    others = [BOARD._replace(id="gpu:1"), BOARD._replace(id="gpu:2")]
    domains = [{"hw_id": "gpu:0", "idle_power_watts": 60.0},
               {"hw_id": "gpu:1", "idle_power_watts": None}]  # fmt: skip
    assert without_idle_power([BOARD, *others], domains) == others


def test_known_idle_power_needs_no_warning() -> None:
    assert idle_warning(MeasuredHost("host", "", False, [BOARD])) == ""


def test_unknown_idle_power_taints_nothing() -> None:
    assert taint(0.0, BOARD._replace(idle=None)) == ""
