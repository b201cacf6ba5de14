"""Ranks of a synchronous job: they end every step together, at the moment the last has come."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from support.emulated_faults import GpuFaults
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import RankWork, SteadyLoad, StepTiming
from wattspan.testing import ManualClock


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[EmulatedGpus]:
    with EmulatedGpus(tmp_path / "gpus", ["h100", "h100"], ManualClock()) as gpus:
        yield gpus


def attach(gpus: EmulatedGpus, *steps: float) -> None:
    for rank, step in enumerate(steps):
        work = RankWork("job", rank, len(steps), StepTiming(step, host=0.1))
        gpus.attach(rank, 100 + rank, work)


def test_step_ends_for_all_when_the_slowest_has_computed(gpus: EmulatedGpus) -> None:
    attach(gpus, 0.100, 0.113)
    gpus.run(20, every=0.02)
    fast, slow = (gpus.work_log(rank, 100 + rank).since(1) for rank in (0, 1))
    assert len(fast) == len(slow) == 175
    for one, other in zip(fast, slow, strict=True):
        assert one.ended == pytest.approx(other.ended, abs=5)
        assert other.ended - other.began == pytest.approx(113_000_000, abs=5)
        assert one.computed - one.began == pytest.approx(100_000_000, abs=5)
    for before, after in pairwise(fast):
        assert after.began == pytest.approx(before.ended, abs=5)


def test_cap_on_a_waiting_rank_does_not_slow_the_job(gpus: EmulatedGpus) -> None:
    attach(gpus, 0.100, 0.115)
    gpus.run(5)
    free, spent, units = (
        gpus.work_log(1, 101).took,
        gpus.truth(0).energy,
        gpus.work_log(1, 101).units,
    )
    GpuFaults(gpus).foreign_limit(0, 480_000)
    gpus.run(1)
    before = gpus.work_log(1, 101)
    took, begun, energy = before.took, before.units, gpus.truth(0).energy
    gpus.run(10)
    after = gpus.work_log(1, 101)
    assert (after.took - took) / (after.units - begun) == pytest.approx(free / units)
    assert (gpus.truth(0).energy - energy) / 10 < 0.9 * spent / 5


def test_missing_rank_blocks_the_other_ranks(gpus: EmulatedGpus) -> None:
    attach(gpus, 0.1, 0.1)
    gpus.run(1)
    gpus.detach(1, 101)
    gpus.attach(1, 200, SteadyLoad(0.1))
    gpus.run(1)
    units = gpus.work_log(0, 100).units
    gpus.run(5)
    assert gpus.work_log(0, 100).units == units
    assert gpus.state(0).tenants[0].work.demand == pytest.approx(0.25), "it spins"


def test_only_waiting_rank_can_be_released() -> None:
    with pytest.raises(ValueError, match="does not wait"):
        RankWork("job", 0, 1).released(0.1)
