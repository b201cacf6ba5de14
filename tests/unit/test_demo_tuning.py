"""What the demo tunes, and what it tells of a step's cost while it does."""

from __future__ import annotations

import pytest

from wattspan.cli.demo_tuning import JUST_NOW, StepCost, tuned_job, what_to_watch, with_tuning
from wattspan.config import Config
from wattspan.emulation.profiles import PROFILES
from wattspan.model import SECOND, HwType, Knob, Microjoules, Nanoseconds, SpanRow


def row(steps: int, joules: float, seconds: float, service: str = "trainer") -> SpanRow:
    return SpanRow(
        service=service,
        name="train_step",
        count=steps,
        time=Nanoseconds(round(seconds * 1e9)),
        energy={HwType.GPU: Microjoules(round(joules * 1e6))},
    )


def test_only_the_training_job_is_tuned_and_by_the_knob_that_its_host_has() -> None:
    config = with_tuning(Config(), PROFILES["two-socket-h100"])
    assert config.autotune.mode == "apply"
    assert [(job.service, job.span) for job in config.autotune.job] == [("trainer", "train_step")]
    assert config.autotune.knobs == (Knob.GPU_POWER,)
    assert with_tuning(Config(), PROFILES["batch"]).autotune.knobs == (Knob.CPU_POWER,)


@pytest.mark.parametrize("profile", ["laptop", "serving-h100"])
def test_where_nothing_trains_nothing_is_tuned(profile: str) -> None:
    assert with_tuning(Config(), PROFILES[profile]) == Config()
    assert (what_to_watch(PROFILES[profile]), tuned_job(PROFILES[profile])) == ("", None)


def test_the_viewer_is_told_what_to_watch() -> None:
    assert what_to_watch(PROFILES["synchronous-h100"]).startswith("Watch train_step of trainer: ")
    assert "within 5% of its speed" in what_to_watch(PROFILES["two-socket-h100"])


def test_a_step_is_told_beside_the_first_ones_as_they_are_now() -> None:
    cost = StepCost("trainer")
    told, energy, time = [], 0.0, 0.0
    for second in range(60):
        energy += 800 if second < 30 else 700
        time += 1.2 if second < 30 else 1.26
        told.append(cost.see(second * SECOND, [row(10 * (second + 1), energy, time)]))
    assert told[: JUST_NOW // SECOND] == [""] * 10
    assert told[15] == "A step just now: 80.0 J in 120 ms; at first: 80.0 J in 120 ms."
    assert told[-1] == "A step just now: 70.0 J in 126 ms; at first: 80.0 J in 120 ms."


def test_without_steps_nothing_is_told() -> None:
    cost = StepCost("trainer")
    assert cost.see(0, []) == cost.see(SECOND, [row(9, 1.0, 1.0, service="other")]) == ""
    for second in range(20):
        assert cost.see(second * SECOND, [row(10, 800, 1.2)]) == "", "none has ended"
