"""The first saving without a configuration file: the service, two variables, and one callback line.

The operator puts the two variables into the environment of the units. The author of the training
adds one line. Everything else has its default; agent, capper and training are processes of a booted
host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import emulated_training
from testbed.capper_process import Gpu
from testbed.fixtures import entered_once_in
from testbed.systemd_training import TOLD_UNITS, board_inside, training
from testbed.systemd_wattspan import AGENT, CAPPER, PROGRAM, Installed, installed
from testbed.waiting import eventually

pytestmark = [
    pytest.mark.needs_systemd,
    pytest.mark.needs_cc,
    pytest.mark.search,
    pytest.mark.exhaustive,
]

ORIGINAL = 700_000
WITHIN = 600.0
"""Seconds of work until the first saving."""

OPERATOR = "WATTSPAN_AUTOTUNE_MODE=apply\nWATTSPAN_AUTOTUNE_DECLARED=allow\n"
PROGRAM_OF_THE_AUTHOR = (
    f"{Path(emulated_training.__file__).read_text()}\n"
    + """
import itertools, os, sys, threading

from wattspan.training import Loop

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
with EmulatedTraining(step=0.25, noise=0.003) as training:
    print("trains", flush=True)
    for _ in Loop(service="trainer", max_slowdown=0.1)(itertools.count()):  # the only added line
        training.step()
"""
)


it = entered_once_in(lambda folder: installed(folder, "one-socket-h100"), "saving")


@pytest.fixture(scope="module")
def gpu(it: Installed) -> Iterator[Gpu]:
    with board_inside(it) as gpu:
        yield gpu


def told(it: Installed) -> dict[str, Any]:
    """The agent's report of the job; empty before its discovery."""
    found = it.host.run(PROGRAM, "tune", "status", "--json", check=False).stdout
    jobs = json.loads(found)["jobs"] if found else []
    return next((one for one in jobs if one["job"] == "trainer/train_step"), {})


def test_service_and_one_line_save_energy_without_a_configuration_file(
    it: Installed, gpu: Gpu
) -> None:
    it.fresh()
    it.host.inside("/etc/wattspan/config.toml").unlink()
    variables = it.host.inside(TOLD_UNITS)
    variables.write_text(variables.read_text() + OPERATOR)
    it.host.systemctl("start", CAPPER)
    it.host.systemctl("start", AGENT)
    it.metrics()
    with training(it, PROGRAM_OF_THE_AUTHOR):
        row = eventually(lambda: told(it), "the job is known", 120.0)
        assert (row["declared"]["decision"], row["declared"]["given"]["mode"]) == (
            "accepted",
            "apply",
        )
        assert row["budget"] == 0.1
        eventually(lambda: gpu.limit < ORIGINAL, "a lower limit is tried", WITHIN)
        eventually(lambda: told(it)["saved_surely_joules"] > 0, "energy is saved", WITHIN)
        assert told(it)["slowdown"] <= 0.1
    eventually(lambda: gpu.limit == ORIGINAL, "the original limit is restored", 60.0)
