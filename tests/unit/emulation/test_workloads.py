"""Processes on an emulated GPU, as values advanced by time."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from testbed.scripted_load import ScriptedLoad

from wattspan.emulation.workloads import (
    FOREVER,
    GpuWork,
    RequestServing,
    Training,
)

MS = 1_000_000


def run(work, seconds: float, speed: float = 1.0, every: int = 10 * MS):
    for _ in range(round(seconds * 1e9) // every):
        work = work.after(every, speed)
    return work


def test_script_repeats() -> None:
    work = ScriptedLoad(((1.0, 0.8), (0.5, 0.0)))
    demands = []
    for _ in range(6):
        demands.append(work.demand)
        work = work.after(500 * MS, 1.0)
    assert demands == [0.8, 0.8, 0.0, 0.8, 0.8, 0.0]


def test_training_alternates_between_host_and_gpu() -> None:
    work = Training(step=1.0, host=0.25)
    assert work.demand == 0.0
    assert work.after(260 * MS, 1.0).demand == 1.0
    assert work.after(1010 * MS, 1.0).demand == 0.0


def test_slow_gpu_stretches_the_gpus_part_of_a_step_only() -> None:
    work = Training(step=1.0, host=0.25)
    fast, slow = run(work, 70, speed=1.0), run(work, 70, speed=0.5)
    assert fast.steps == pytest.approx(70, abs=1)
    assert slow.steps == pytest.approx(70 / (0.25 + 0.75 / 0.5), abs=1)


def test_progress_does_not_depend_on_the_step_size() -> None:
    work = Training(step=0.3, host=0.2, noise=0.05, seed=4)
    fine, coarse = run(work, 30, every=MS), run(work, 30, every=500 * MS)
    assert (coarse.steps, coarse.computing) == (fine.steps, fine.computing)
    assert coarse.left == pytest.approx(fine.left, abs=1e-6)


def test_step_noise_has_the_configured_spread() -> None:
    steps = Training(step=0.1, noise=0.05, seed=2)
    lengths = [steps.variation(step) for step in range(2000)]
    assert statistics.stdev(lengths) == pytest.approx(0.05, rel=0.1)
    assert lengths == [steps.variation(step) for step in range(2000)]


def test_requests_arrive_in_bursts_at_the_configured_rate() -> None:
    work, idle, busy = RequestServing(rate=10, cost=0.01, seed=3), 0, 0
    for _ in range(60_000):
        work = work.after(10 * MS, 1.0)
        idle, busy = idle + (work.demand == 0), busy + (work.demand > 0)
    assert work.served == pytest.approx(6000, rel=0.15)
    assert idle > 1000
    assert busy > 1000


def test_overloaded_server_falls_behind_but_loses_no_request() -> None:
    work = run(RequestServing(rate=20, cost=0.1, seed=3), 30)
    assert work.demand > 0
    assert work.served == pytest.approx(300, rel=0.1)
    assert work.backlog > 10


# ------------------------------------------------------------------- reports at the end


def finishes(work: GpuWork, seconds: float, speed: float = 1.0, host: float = 1.0, every: int = 7):
    """Every finished unit's begin and end, in seconds since the start."""
    found, at = [], 0.0
    for _ in range(round(seconds * 1000) // every):
        work = work.after(every * MS, speed, host)
        at += every / 1000
        found += [(at - one.began, at - one.ended, one.ideal) for one in work.finished]
    return found


def test_step_times_are_exact_at_any_step_size() -> None:
    work = Training(step=0.12, host=0.1, noise=0.05, seed=3)
    fine, coarse = finishes(work, 10, every=1), finishes(work, 10, every=500)
    assert len(coarse) > 80
    for one, other in zip(fine, coarse, strict=False):
        assert one == pytest.approx(other, abs=1e-8)
    for (_, ended, _), (began, _, _) in pairwise(coarse):
        assert began == pytest.approx(ended, abs=1e-8)


def test_capped_step_slows_down_by_its_gpu_share() -> None:
    work = Training(step=0.1, host=0.2, noise=0.05, seed=3)
    for began, ended, ideal in finishes(work, 20, speed=0.8):
        assert (ended - began) / ideal == pytest.approx(0.2 + 0.8 / 0.8)


def test_slow_package_stretches_the_hosts_part_of_a_step_only() -> None:
    work = Training(step=0.1, host=0.2)
    for began, ended, ideal in finishes(work, 5, host=0.5):
        assert (ended - began) / ideal == pytest.approx(0.2 / 0.5 + 0.8)


def test_paused_job_finishes_its_step_and_starts_no_other() -> None:
    work = run(Training(step=0.1, host=0.2), 0.35)
    paused = run(replace(work, paused=True), 60)
    assert (paused.steps, paused.demand, paused.lasts(1.0)) == (4, 0.0, FOREVER)
    ((began, ended, ideal), *_) = finishes(replace(paused, paused=False), 0.2, every=1)
    assert ended - began == pytest.approx(ideal), "the pause belongs to no step"


@pytest.mark.parametrize(
    "work",
    [
        Training(step=0.3, host=0.2, noise=0.1),
        ScriptedLoad(((0.2, 1.0), (0.1, 0.0))),
        RequestServing(rate=5, cost=0.05, burst=1.0),
    ],
    ids=lambda work: type(work).__name__,
)
def test_demand_is_constant_for_the_predicted_time(work: GpuWork) -> None:
    work = work.after(1, 0.7)
    for _ in range(20):
        lasts = work.lasts(0.7)
        if lasts == FOREVER:
            break
        ns = int(lasts * 1e9)
        assert work.after(max(0, ns - 10), 0.7).demand == work.demand
        work = work.after(ns + 10, 0.7)


def test_queued_request_lasts_from_arrival_to_end() -> None:
    told = finishes(RequestServing(rate=4, cost=0.1, burst=3, seed=2), 60)
    assert min(end - start for start, end, _ in told) == pytest.approx(0.1, abs=1e-6)
    assert max(end - start for start, end, _ in told) > 0.3, "those behind wait"
    assert all(late >= early + 0.1 - 1e-6 for (_, early, _), (_, late, _) in pairwise(told))
