"""Tuning in the demo."""

from __future__ import annotations

import pytest

from wattspan.cli.demo import LOWEST_GPU_LIMIT, tuned_job, tuning_hint, with_tuning
from wattspan.config import Config
from wattspan.emulation.host import PROFILES
from wattspan.model import Knob


def test_only_the_training_job_is_tuned_and_by_the_knob_that_its_host_has() -> None:
    config = with_tuning(Config(), PROFILES["two-socket-h100"])
    assert config.autotune.mode == "apply"
    (job,) = config.autotune.job
    assert (job.service, job.span, job.kind) == ("trainer", "train_step", "steps")
    assert config.autotune.knobs == (Knob.GPU_POWER,)
    assert config.autotune.floor == LOWEST_GPU_LIMIT
    assert with_tuning(Config(), PROFILES["batch"]).autotune.knobs == (Knob.CPU_POWER,)


@pytest.mark.parametrize("profile", ["laptop", "two-socket"])
def test_profile_without_training_is_not_tuned(profile: str) -> None:
    assert with_tuning(Config(), PROFILES[profile]) == Config()
    assert (tuning_hint(PROFILES[profile]), tuned_job(PROFILES[profile])) == ("", None)


def test_hint_names_the_tuned_job() -> None:
    assert tuning_hint(PROFILES["batch"]).startswith("The agent tunes cruncher: ")
    assert "at most 5% slowdown" in tuning_hint(PROFILES["two-socket-h100"])
