"""What processes do on an emulated GPU, as values moved by time."""

from __future__ import annotations

import statistics

import pytest

from wattspan.emulation.gpu_work import Resident, Script, Serving, Steady, Training

MS = 1_000_000


def run(work, seconds: float, speed: float = 1.0, every: int = 10 * MS):
    for _ in range(round(seconds * 1e9) // every):
        work = work.after(every, speed)
    return work


def test_a_resident_never_works() -> None:
    work = run(Resident(), 5)
    assert (work.demand, work.done) == (0.0, 0.0)


def test_steady_work_counts_seconds_at_full_speed() -> None:
    assert run(Steady(), 2, speed=0.5).done == pytest.approx(1.0)


def test_a_script_repeats() -> None:
    work = Script(((1.0, 0.8), (0.5, 0.0)))
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


def test_a_slow_gpu_stretches_the_gpus_part_of_a_step_only() -> None:
    work = Training(step=1.0, host=0.25)
    fast, slow = run(work, 70, speed=1.0), run(work, 70, speed=0.5)
    assert fast.done == pytest.approx(70, abs=0.1)
    assert slow.done == pytest.approx(70 / (0.25 + 0.75 / 0.5), abs=0.1)


def test_progress_does_not_depend_on_how_often_time_is_told() -> None:
    work = Training(step=0.3, host=0.2, noise=0.05, seed=4)
    fine, coarse = run(work, 30, every=MS), run(work, 30, every=500 * MS)
    assert coarse.done == pytest.approx(fine.done, rel=1e-6)


def test_step_noise_has_the_asked_spread() -> None:
    work = Training(step=0.1, host=0.0001, noise=0.05, seed=2)
    lengths = [work._noise(step) for step in range(2000)]
    assert statistics.stdev(lengths) == pytest.approx(0.05, rel=0.1)
    assert lengths == [work._noise(step) for step in range(2000)]


def test_requests_arrive_in_bursts_at_the_asked_rate() -> None:
    work, idle, busy = Serving(rate=10, cost=0.01, seed=3), 0, 0
    for _ in range(60_000):
        work = work.after(10 * MS, 1.0)
        idle, busy = idle + (work.demand == 0), busy + (work.demand > 0)
    assert work.done == pytest.approx(6000, rel=0.15)
    assert idle > 1000
    assert busy > 1000


def test_an_overloaded_server_falls_behind_but_loses_no_request() -> None:
    work = run(Serving(rate=20, cost=0.1, seed=3), 30)
    assert work.demand > 0
    assert work.served == pytest.approx(30, rel=0.1)
    assert work.backlog > 10
