"""Files of pipelines: profiles of Zeus, plans that are data, and files that are refused."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from testbed.pipelines import profile

from wattspan.tuning.pipeline.dag import BadPipelineError
from wattspan.tuning.pipeline.files import (
    PipelineFileError,
    StoredPlan,
    plan_json,
    profile_text,
    read_plan,
    read_profile,
    write_file,
    zeus_text,
)

HEADER = "stage,instruction,frequency,time,energy\n"
TWO = HEADER + "0,forward,1740,0.1,30\n0,backward,1740,0.2,60\n"
PLAN = StoredPlan(
    schedule="1f1b",
    stages=2,
    ranks=2,
    microbatches=4,
    blocking_watts=70.0,
    each="rank",
    clocks_mhz=[1200, 1600],
    seconds=1.0,
    joules=100.0,
    uncapped_seconds=0.9,
    uncapped_joules=120.0,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "profile.csv"


def test_written_profile_is_read_back_exactly(file: Path) -> None:
    known = profile([0.1, 0.08])
    write_file(file, profile_text(known))
    assert read_profile([file])[0].points == known.points


def test_instructions_that_are_not_planned_are_named(file: Path) -> None:
    file.write_text(TWO + "0,load,1740,0.1,30\n0,load,1725,0.1,30\n")
    profile, left_out = read_profile([file])
    assert left_out == ("load",)
    assert profile.stage_count == 1


def test_first_iterations_of_a_file_are_left_out(file: Path) -> None:
    lines = [
        f"0,{kind},1740,{9 - n},{n + 1},{n}" for kind in ("forward", "backward") for n in range(3)
    ]
    file.write_text(HEADER.strip() + ",iteration\n" + "\n".join(lines))
    points = read_profile([file])[0].points
    assert {one.seconds for of_key in points.values() for one in of_key} == {7.0}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("x,forward,1740,0.1,30", "x"),
        ("-1,forward,1740,0.1,30", "stage -1"),
        ("99999999999,forward,1740,0.1,30", "stage 99999999999"),
        ("0.5,forward,1740,0.1,30", "stage 0.5"),
        ("nan,forward,1740,0.1,30", "stage nan"),
        ("0,forward,0,0.1,30", "frequency 0"),
        ("0,forward,1740,nan,30", "time nan"),
        ("0,forward,1740,0,30", "time 0"),
        ("0,forward,1740,0.1,-3", "energy -3"),
        ("0,forward,1740,0.1,inf", "energy inf"),
        ("0,forward,1740", "line 4"),
    ],
)
def test_invalid_line_of_a_profile_is_refused_by_its_number(
    file: Path, line: str, cause: str
) -> None:
    file.write_text(TWO + line + "\n")
    with pytest.raises(PipelineFileError, match=re.escape(cause)) as refusal:
        read_profile([file])
    assert "line 4" in str(refusal.value)


def test_profile_without_a_column_is_refused_by_its_name(file: Path) -> None:
    file.write_text("stage,instruction,frequency\n")
    with pytest.raises(PipelineFileError, match="no column time, energy"):
        read_profile([file])


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", HEADER.encode() + b'0,"forward\n'])
def test_profile_that_is_no_table_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(PipelineFileError, match="no table"):
        read_profile([file])


def test_missing_file_and_folder_are_refused(file: Path) -> None:
    with pytest.raises(PipelineFileError, match="no such file"):
        read_profile([file])
    with pytest.raises(PipelineFileError, match="Cannot read"):
        read_profile([file.parent])
    with pytest.raises(PipelineFileError, match="regular file"):
        read_profile([Path("/dev/zero")])
    with pytest.raises(PipelineFileError, match="Cannot write"):
        write_file(file / "below", "")


def test_profile_with_a_missing_stage_is_a_bad_pipeline(file: Path) -> None:
    file.write_text(TWO + "2,forward,1740,0.1,30\n")
    with pytest.raises(BadPipelineError, match="Stage 1 of 3"):
        read_profile([file])


def test_plan_is_read_back(file: Path) -> None:
    file.write_text(plan_json(PLAN))
    assert read_plan(file) == PLAN


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"version": 2}, "version 2"),
        ({"ranks": 3}, "clocks of 2 ranks"),
        ({"each": "instruction"}, "not by instruction"),
        ({"clocks_mhz": [[["forward", 1200]], [["forward", 1]]]}, "not by rank"),
        ({"clocks_mhz": "1200"}, "Expected"),
        ({"command": "rm"}, "unknown field"),
    ],
)
def test_altered_plan_is_refused(file: Path, changes: dict[str, object], cause: str) -> None:
    file.write_text(json.dumps(json.loads(plan_json(PLAN)) | changes))
    with pytest.raises(PipelineFileError, match=cause):
        read_plan(file)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('run').touch()",
        "[('forward', __import__('pathlib').Path('run').touch())]",
        "[" * 100_000,
        "",
    ],
)
def test_code_in_a_plan_is_refused_and_not_executed(file: Path, text: str, tmp_path: Path) -> None:
    file.write_text(text.replace("'run'", repr(str(tmp_path / "run"))))
    with pytest.raises(PipelineFileError, match="no plan"):
        read_plan(file)
    assert not (tmp_path / "run").exists()


def test_zeus_plan_is_a_literal_of_names_and_clocks() -> None:
    orders = [[("forward", 1200), ("backward", 1600)], [("forward", 1000), ("backward", 1740)]]
    assert ast.literal_eval(zeus_text(orders)) == orders


def test_zeus_plan_refuses_other_names() -> None:
    with pytest.raises(KeyError):
        zeus_text([[("'); import os", 1200)]])
