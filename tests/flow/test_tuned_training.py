"""A training job under an agent that tunes, from its first span to the next start of the same job.

The configuration has `mode = "apply"`, the span name of a step, and short observation times only.
Its reports are compared with the emulated host's true values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from testbed.tuned_training import JOB, Done, Training, TuningAgent
from testbed.waiting import eventually

pytestmark = [pytest.mark.search, pytest.mark.needs_apps]

ORIGINAL, BUDGET = 700_000, 0.05
WITHIN = 600.0  # seconds; a search takes one to three minutes, for it is the noise that decides


@dataclass
class Season:
    """Observations of a job from its start to its held setting, and of its next start."""

    began: Done
    free: Done  # from then on, before any change
    held: Done  # when the setting was held
    later: Done  # some time later
    limit: int  # the held setting
    metrics: dict[str, float] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    history_again: str = ""
    first_again: str = ""  # the first sentence about a setting that the second agent said
    limit_again: int = 0
    ended: int = 0  # the limit when the job had ended


@pytest.fixture(scope="module")
def season(tmp_path_factory: pytest.TempPathFactory) -> Season:
    folder = tmp_path_factory.mktemp("season")
    with TuningAgent(folder) as agent, start(agent) as job:
        began = job.done()
        until(agent, lambda: agent.reason == "baseline", "the original is learned")
        free = job.done().since(began)
        until(agent, lambda: agent.reason == "certified", "a setting is held")
        (watts,) = agent.told()["decision"]["caps"].values()
        seen = Season(began, free, job.done(), job.done(), round(1000 * watts))
        eventually(lambda: job.done().units > seen.held.units + 100, "it works on")
        seen.later = job.done()
        seen.metrics = autotune(agent.running.scrape("text/plain"))
        # at times the original is in force for a comparison
        seen.says["tune status"] = eventually(
            lambda: (told := agent.says("tune", "status")) * ("Hold " in told), "a setting is held"
        )
        seen.says["tune history"] = agent.says("tune", "history")
        for words in ("tune explain", "caps status"):
            seen.says[words] = eventually(
                lambda words=words: (
                    (told := agent.says(*words.split())) * (f"held for {JOB}: " in told)
                ),
                "a cap",
            )
        job.end()
        eventually(lambda: agent.told()["state"] == "ended", "the end is noticed")
        seen.ended = agent.limit
        seen.says["the end"] = eventually(  # the command reads the snapshot, which follows
            lambda: (told := agent.says("tune", "status")) * (" ended " in told), "its status"
        )
    with TuningAgent(folder) as agent, start(agent) as job:
        seen.history_again = agent.says("tune", "history")
        until(agent, lambda: agent.limit < ORIGINAL, "a cap is in force again")
        seen.limit_again = agent.limit
        eventually(lambda: agent.reason not in ("", "baseline"), "the agent says why")
        seen.first_again = agent.told()["decision"]["sentence"]
    return seen


def until(agent: TuningAgent, holds: Callable[[], bool], what: str) -> None:
    """Wait for the tuner; if it does not come to that, its own explanation is the error."""
    try:
        eventually(holds, what, WITHIN)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{agent.says('tune', 'explain')}") from None


def start(agent: TuningAgent) -> Training:
    """The job, whose spans are exact and come soon: the search takes a minute, not five."""
    return agent.train(exact=True, OTEL_BSP_SCHEDULE_DELAY="200")


def words(lines: str) -> list[str]:
    """Status of the job; column widths vary."""
    return [" ".join(line.split()) for line in lines.splitlines() if JOB in line]


def autotune(scrape: str) -> dict[str, float]:
    """Samples of the job, by name and other labels."""
    return {
        " ".join([sample.name, *(v for k, v in sample.labels.items() if k in ("bound", "state"))]):
            sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
        if sample.labels.get("job") == JOB
    }  # fmt: skip


def test_job_ends_capped(season: Season) -> None:
    assert 0.6 * ORIGINAL <= season.limit < ORIGINAL


def test_whole_run_is_within_its_budget_exploration_included(season: Season) -> None:
    assert season.free.slowdown < 0.005
    assert 0 < season.later.slowdown <= BUDGET


def test_setting_held_is_within_the_budget_and_truly_saves(season: Season) -> None:
    holding = season.later.since(season.held)
    assert holding.slowdown <= BUDGET + 0.005
    assert holding.saving(season.free) > 0.02


def test_tuning_metrics_match_the_truth(season: Season) -> None:
    told, true = season.metrics, season.later
    assert told["wattspan_autotune_state holding"] == 1
    assert told["wattspan_autotune_budget_ratio"] == BUDGET
    bound = told["wattspan_autotune_slowdown_bound_ratio"]
    assert true.slowdown <= bound <= BUDGET
    assert told["wattspan_autotune_slowdown_ratio"] == pytest.approx(true.slowdown, abs=0.02)
    run, free = true.since(season.began), season.free
    saved = (free.energy / free.ideal * run.ideal - run.energy) / 1e6
    assert 0 < told["wattspan_autotune_saved_joules_total"] <= saved * 1.02
    assert told["wattspan_autotune_saved_bound_joules upper"] >= saved


def test_tuning_status_is_one_line(season: Season) -> None:
    told = season.says["tune status"]
    assert told.startswith("EMULATED: ")
    (line,) = [line for line in told.splitlines() if line.startswith(JOB)]
    assert "holding" in line
    assert re.search(r"\d of 700 W|  700 W", line)
    assert re.search(
        rf"{season.limit / 1000:.0f} W: \d\.\d % slower \(95 % bound \d\.\d %\) of a 5 % budget, "
        r"\d+\.\d % less energy, \d+ pairs\.",
        line,
    )


def test_explain_lists_trials_and_reasons(season: Season) -> None:
    told = season.says["tune explain"]
    for expected in (
        "Tried",
        "certified",
        "Not lower: ",
        "Not higher: ",
        "Lost so far: ",
        "held for trainer/train_step: ",
    ):
        assert expected in told


def test_caps_status_lists_holder_and_reason(season: Season) -> None:
    told = season.says["caps status"]
    assert re.search(rf"held for {JOB}: [\d.]+ W; the original is 700 W", told)
    assert "because: " in told


def test_end_of_the_job_is_logged(season: Season) -> None:
    (line,) = [line for line in season.says["the end"].splitlines() if line.startswith(JOB)]
    assert line.split()[1] == "ended"
    assert "the job has ended" in line
    assert season.ended == ORIGINAL


def test_history_outlives_the_agent(season: Season) -> None:
    before, after = words(season.says["tune history"]), words(season.history_again)
    assert any("certified" in line for line in before)
    assert set(before) <= set(after)


def test_next_start_of_the_job_uses_the_held_setting(season: Season) -> None:
    assert season.limit_again == pytest.approx(season.limit, abs=1000)
    watts = round(season.limit_again / 1000)
    assert f"Certify {watts} W again" in season.first_again


def test_usual_exporter_with_its_batches_of_five_seconds_will_do(tmp_path: Path) -> None:
    with TuningAgent(tmp_path) as agent, agent.train() as job:
        until(agent, lambda: agent.limit < ORIGINAL, "a cap is in force")
        until(agent, lambda: agent.told()["pairs"] >= 1, "a setting is compared")
        assert job.done().slowdown < BUDGET
        job.end()
        eventually(lambda: agent.told()["state"] == "ended", "the end is noticed")
        assert agent.limit == ORIGINAL
