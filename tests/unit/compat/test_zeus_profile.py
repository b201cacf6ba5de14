"""Profiles of energy and time by power limit: Zeus's JSON, studies, settings of the tuner."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from testbed.query_server import QueryServer
from testbed.studies import power_settings, study, trial
from testbed.training_spans import FakeDeclaration, RecordedTraining
from testbed.tuned import DECLARED, HELD

from wattspan.compat.zeus.optimizer import (
    GlobalPowerLimitOptimizer,
    HFOptimizerHooks,
)
from wattspan.compat.zeus.profile import (
    MaxSlowdownConstraint,
    OptimumSelector,
    PowerLimitMeasurement,
    ProfileExport,
    Time,
    read_profile,
    tried_settings,
    write_profile,
)
from wattspan.frontier.trials import StudyFile
from wattspan.model import Knob, Microjoules, Nanoseconds, TuningAccounts, TuningRow
from wattspan.training.session import TuningRequest
from wattspan.tuning.serialization import row_to_json

MONITOR: Any = SimpleNamespace(gpu_indices=[0])
CURVE = [
    PowerLimitMeasurement(300, 400.0, 10.0),
    PowerLimitMeasurement(250, 330.0, 10.2),
    PowerLimitMeasurement(200, 280.0, 11.5),
]
KNOWN = replace(HELD, unit_time=Nanoseconds(250_000_000), unit_energy=Microjoules(150_000_000))


class SecondHighest(OptimumSelector):
    """A selector of an application."""

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        return sorted(one.power_limit for one in measurements)[-2]


# -------------------------------------------------------------------------------------- files


def test_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("an older one")
    write_profile(path, reversed(CURVE))
    assert read_profile(path) == CURVE
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_profile_of_zeus_is_read(tmp_path: Path) -> None:
    """The layout of pydantic's ``json(indent=4)``, as Zeus 0.16 writes it."""
    path = tmp_path / "zeus.json"
    one = {"power_limit": 200, "energy": 280.5, "time": 11.5}
    path.write_text(json.dumps({"measurements": [one]}, indent=4))
    assert read_profile(path) == [PowerLimitMeasurement(200, 280.5, 11.5)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 5000,
        b'{"measurements": []}',
        b'{"measurements": [{"power_limit": 200}]}',
        b'{"measurements": [{"power_limit": -1, "energy": 1, "time": 1}]}',
        b'{"measurements": [{"power_limit": 1, "energy": "x", "time": 1}]}',
        b'{"measurements": [{"power_limit": 1, "energy": NaN, "time": 1}]}',
    ],
)
def test_other_file_is_refused_by_name_before_the_training(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.json"):
        GlobalPowerLimitOptimizer(MONITOR, profile_path=path)


def test_unwritable_profile_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "profile.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_profile(tmp_path / "profile.json", CURVE)
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_study_of_a_frontier_is_a_profile(tmp_path: Path) -> None:
    full, capped = power_settings(100, 80)
    other = msgspec.structs.replace(full, parameters=(("batch", "32"),))
    trials = [
        trial(full, 0, 1.0, 300.0),
        msgspec.structs.replace(trial(capped, 0, 1.1, 250.0), limits={"gpu:0": 240.0}),
        msgspec.structs.replace(trial(capped, 1, 1.3, 270.0), limits={"gpu:0": 240.2}),
        trial(capped, 2, 9.0, 9.0, failure="it ended"),
        trial(other, 0, 0.5, 100.0),
    ]
    path = tmp_path / "frontier.json"
    StudyFile(path).write(study([full, capped, other], trials=trials))
    found = read_profile(path)
    assert [one.power_limit for one in found] == [300, 240]
    assert [one.energy for one in found] == pytest.approx([300.0, 260.0])
    assert [one.time for one in found] == pytest.approx([1.0, 1.2])


# ------------------------------------------------------------------------------------- import


def test_choice_from_a_profile_is_asked_for_first(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, CURVE)
    hooks = HFOptimizerHooks(MONITOR, MaxSlowdownConstraint(1.05), profile_path=path)
    assert hooks._request == TuningRequest(0.05, "energy", first_watts=250)
    assert HFOptimizerHooks(MONITOR, Time(), profile_path=path)._request == TuningRequest(
        objective="time", first_watts=300
    )
    assert read_profile(path) == CURVE


def test_selector_of_an_application_chooses_from_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, CURVE)
    plo = GlobalPowerLimitOptimizer(MONITOR, SecondHighest(), profile_path=str(path))
    assert plo._request == TuningRequest(objective="energy", first_watts=250, floor_watts=250)
    assert plo.declined is None


def test_selector_without_a_choice_is_an_error(tmp_path: Path) -> None:
    class Nothing(OptimumSelector):
        def select(self, measurements: list[PowerLimitMeasurement]) -> int:
            return 0

    path = tmp_path / "profile.json"
    write_profile(path, CURVE)
    with pytest.raises(ValueError, match="watts = 0"):
        GlobalPowerLimitOptimizer(MONITOR, Nothing(), profile_path=path)


# ------------------------------------------------------------------------------------- export


def test_tried_settings_have_the_energy_and_time_of_the_steps() -> None:
    found = tried_settings(row_to_json(KNOWN), 40)
    assert [one.power_limit for one in found] == [700, 650, 600, 560, 520]
    assert (found[0].energy, found[0].time) == pytest.approx((40 * 150.0, 40 * 0.25))
    assert found[3].time == pytest.approx(10 * 1.031)
    assert found[3].energy == pytest.approx(6000 * (1 - 0.182))


@pytest.mark.parametrize(
    "row",
    [
        HELD,  # time and energy of a unit are unknown
        replace(KNOWN, knob=Knob.GPU_CLOCK),
        replace(KNOWN, original={}),
    ],
)
def test_unknown_figures_are_no_profile(row: TuningRow) -> None:
    assert tried_settings(row_to_json(row), 40) == []


def test_setting_with_unknown_energy_is_left_out() -> None:
    tried = [replace(KNOWN.tried[0], saving=None), KNOWN.tried[1]]
    found = tried_settings(row_to_json(replace(KNOWN, tried=tuple(tried))), 1)
    assert [one.power_limit for one in found] == [700, 600]


class Trained:
    """A training under an agent that has tried the settings of ``KNOWN`` for it."""

    def __init__(self, folder: Path, name: str = "trainer") -> None:
        declared = replace(DECLARED, name=name, uid=os.geteuid())
        row = replace(KNOWN, declared=declared)
        self.agent = QueryServer(folder, tuning=lambda: TuningAccounts("apply", (row,)))
        self.training = RecordedTraining(FakeDeclaration())

    def optimizer(self, path: Path) -> GlobalPowerLimitOptimizer:
        optimizer = GlobalPowerLimitOptimizer(MONITOR, profile_path=path, profile_steps=40)
        optimizer._provider, optimizer._declare = self.training.options.values()
        return optimizer


def test_new_profile_is_written_at_the_end_of_an_epoch_and_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    path = tmp_path / "profile.json"
    trained = Trained(tmp_path)
    with trained.agent:
        plo = trained.optimizer(path)
        plo.on_epoch_begin()
        plo.on_step_begin()
        plo.on_epoch_end()
        assert [one.power_limit for one in read_profile(path)] == [700, 650, 600, 560, 520]
        path.unlink()
        plo.on_train_end()
        assert len(read_profile(path)) == 5
    assert trained.training.answer.withdrawals == 1


def test_profile_of_another_job_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    with Trained(tmp_path, name="another").agent:
        ProfileExport(tmp_path / "profile.json", 40).write(FakeDeclaration())
    assert not (tmp_path / "profile.json").exists()


def test_missing_agent_leaves_the_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    ProfileExport(tmp_path / "profile.json", 40).write(FakeDeclaration())
    ProfileExport(tmp_path / "profile.json", 40).write(None)
    (message,) = caplog.messages
    assert "is not written: No wattspan agent answers" in message
