"""A synchronous job on two GPUs under an agent that tunes; the emulated host knows the truth.

Its second rank has more work, so that the first one waits in every step. Lowering it takes more
minutes than a test may; simulated hosts show it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.tuned_profile import Done, ProfileHost
from support.waiting import eventually

pytestmark = pytest.mark.search

JOB, ORIGINAL, BUDGET = "trainer/train_step", 700_000, 0.15
SETTINGS = """\
max_slowdown = 0.15
confidence = 0.9
floor = 0.8
block = "250ms"
block_units = 5
settle = "100ms"
settle_units = 1
[[autotune.job]]
service = "trainer"
span = "train_step"
kind = "steps"
compute = "compute"
"""


def until(host: ProfileHost, holds: Callable[[], bool], what: str) -> None:
    try:
        eventually(holds, what, 240.0)
    except AssertionError as error:
        raise AssertionError(f"{error}{host.explain(JOB)}") from None


def over(host: ProfileHost, units: int, lowered: bool) -> tuple[list[int], Done]:
    """Limits in force for so many steps, with the true values of these.

    At times the original is in force for a comparison, and boards are changed one after the
    other: such steps do not count.
    """
    limits, found = host.limits, Done(0, 0, 0, 0)

    def undisturbed() -> bool:
        nonlocal limits, found
        limits = host.limits
        if any((limit < ORIGINAL) != lowered for limit in limits):
            return False
        before = host.done("rank-1")
        eventually(lambda: host.done("rank-1").units >= before.units + units, "steps are done")
        found = host.done("rank-1").since(before)
        return host.limits == limits

    until(host, undisturbed, f"{units} steps under one setting")
    return limits, found


def test_ranks_get_one_cap_that_keeps_the_step_of_all_within_the_budget(tmp_path: Path) -> None:
    with ProfileHost("synchronous-h100", tmp_path, SETTINGS) as host:
        host.steer("rank-0", step=0.04, noise=0.003)
        host.steer("rank-1", step=0.0448, noise=0.003)
        until(host, lambda: host.reason(JOB) == "baseline", "the original is learned")
        _, free = over(host, 20, lowered=False)
        until(host, lambda: host.reason(JOB) == "certified", "a setting is held")
        limits, held = over(host, 40, lowered=True)
        assert len(set(limits)) == 1
        assert held.each < (1 + BUDGET) * free.each
        assert held.energy / held.units < free.energy / free.units
