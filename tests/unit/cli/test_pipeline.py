"""`wattspan pipeline` on profiles in files."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from testbed.pipelines import executed, profile

from wattspan.cli import cli
from wattspan.tuning.pipeline.dag import PipelineSchedule, scheduled
from wattspan.tuning.pipeline.files import SPAN_COLUMNS, profile_text

PIPELINE = ("--blocking-watts", 70, "--microbatches", 4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.csv"
    path.write_text(profile_text(profile([0.1, 0.06, 0.1])))
    return path


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["pipeline", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def test_profile_shows_every_instruction_at_two_clocks(file: Path) -> None:
    lines = run("profile", file, "--blocking-watts", 70).output.splitlines()
    assert len(lines) == 1 + 6
    assert lines[2].split()[:4] == ["0", "forward", "1600", "100.0"]
    facts = json.loads(run("profile", file, "--blocking-watts", 70, "--json").output)
    assert facts["instructions"][1]["highest"]["mhz"] == 1600
    assert facts["instructions"][1]["cheapest"]["mhz"] == 1000


def test_several_profiles_are_combined_in_a_file(file: Path, tmp_path: Path) -> None:
    combined = tmp_path / "both.csv"
    run("profile", file, file, "--blocking-watts", 70, "--output", combined)
    lines = combined.read_text().splitlines()
    assert len(lines) == 1 + 3 * 2 * 4


def test_profile_names_instructions_that_are_left_out(file: Path) -> None:
    file.write_text(file.read_text() + "0,load\x1b[2J,1600,0.1,3\n")
    result = run("profile", file, "--blocking-watts", 70)
    assert "not planned: load?[2J." in result.stderr


def test_frontier_energy_lies_between_bound_and_highest_clock(file: Path) -> None:
    found = json.loads(run("frontier", file, *PIPELINE, "--points", 5, "--json").output)
    assert len(found["points"]) == 5
    for one in found["points"]:
        assert one["least_joules"] <= one["joules"] * (1 + 1e-9)
        assert one["joules"] < found["uncapped"]["joules"]
    lines = run("frontier", file, *PIPELINE, "--points", 5).output.splitlines()
    assert len(lines) == 2 + 5
    assert "computed from the profile" in lines[0]


def test_plan_keeps_the_slowdown_and_is_shown_again(file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    words = (file, *PIPELINE, "--max-slowdown", 0.05)
    run("plan", *words, "--format", "json", "--output", plan)
    stored = json.loads(run("show", plan, "--json").output)
    assert stored["seconds"] <= 1.05 * stored["uncapped_seconds"]
    assert stored["joules"] < stored["uncapped_joules"]
    assert len(stored["clocks_mhz"]) == 3
    assert run("show", plan).output == run("plan", *words).output
    assert "not measured" in run("show", plan).output


def test_zeus_plan_has_a_clock_for_each_instruction(file: Path) -> None:
    text = run("plan", file, *PIPELINE, "--each", "instruction", "--format", "zeus").output
    orders = ast.literal_eval(text)
    assert [len(order) for order in orders] == [8, 8, 8]
    assert {name for order in orders for name, _ in order} == {"forward", "backward"}
    assert len({mhz for order in orders for _, mhz in order}) > 1


def test_instruction_plan_names_its_ranges_of_clocks(file: Path) -> None:
    lines = run("plan", file, *PIPELINE, "--each", "instruction").output.splitlines()
    assert "forward 1" in lines[-1]
    assert lines[-1].endswith("changes")


def test_plan_beside_a_straggler_counts_the_waiting(file: Path) -> None:
    output = run("plan", file, *PIPELINE, "--straggler", 3).output
    assert "waiting for a pipeline of 3.000 s" in output


def test_interleaved_plan_has_a_clock_for_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(profile_text(profile([0.1, 0.1, 0.1, 0.1])))
    words = ("--schedule", "interleaved", "--ranks", 2)
    lines = run("plan", path, *PIPELINE, *words).output.splitlines()
    assert "4 stages on 2 ranks" in lines[0]
    assert len(lines) == 6 + 2


def spans_text(skew: float = 0.0) -> str:
    spans = executed(scheduled(PipelineSchedule.GPIPE, 3, 4))
    lines = [",".join(SPAN_COLUMNS)] + [
        f"{one.iteration},{one.rank},{one.instruction.stage},{one.instruction.kind.value},"
        f"{one.instruction.microbatch},{one.start - skew * one.rank},{one.end - skew * one.rank}"
        for one in spans
    ]
    return "\n".join([*lines, "0,0,0,load,0,1,2"])


def test_order_of_a_plan_is_taken_from_spans(file: Path, tmp_path: Path) -> None:
    spans = tmp_path / "spans.csv"
    spans.write_text(spans_text())
    output = run("plan", file, "--blocking-watts", 70, "--spans", spans).output
    assert output.startswith("gpipe, 3 stages on 3 ranks, 4 micro-batches")
    spans.write_text(spans_text(skew=0.02))
    words = ("plan", file, "--blocking-watts", 70, "--spans", spans)
    assert "bad_pipeline: The clocks of ranks 0 and 1" in run(*words, code=1).stderr
    spans.write_text(spans_text() + "\n2,0,0,forward,0,9,8")
    assert "is invalid (start 9, end 8)" in run(*words, code=1).stderr


def test_pipeline_is_given_in_one_way(file: Path) -> None:
    run("plan", file, "--blocking-watts", 70, code=2)
    run("plan", file, *PIPELINE, "--spans", file, code=2)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--straggler", 0.1), "bad_pipeline: No clock keeps 0.1 s"),
        (("--ranks", 2), "bad_pipeline: Each rank has one stage"),
        (("--schedule", "interleaved", "--ranks", 2), "bad_pipeline: The schedule interleaved"),
    ],
)
def test_pipeline_that_cannot_be_planned_is_declined(
    file: Path, words: tuple[object, ...], cause: str
) -> None:
    assert cause in run("plan", file, *PIPELINE, *words, code=1).stderr


def test_profile_without_a_stage_is_declined_by_its_number(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("1,")]
    file.write_text("\n".join(lines))
    for words in (("profile", file, "--blocking-watts", 70), ("frontier", file, *PIPELINE)):
        assert "bad_pipeline: Stage 1 of 3 is missing" in run(*words, code=1).stderr


def test_plan_of_another_program_is_refused(file: Path) -> None:
    assert "it is no plan" in run("show", file, code=1).stderr
