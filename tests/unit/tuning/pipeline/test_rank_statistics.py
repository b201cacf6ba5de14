"""Waiting and saved energy of the ranks of a pipeline."""

from __future__ import annotations

import pytest
from testbed.pipelines import RunningPipeline

from wattspan.tuning.pipeline.control import RankStatistics

BASES = (0.1, 0.05)


def statistics(
    *clocks: tuple[int, int], metered: bool = True, until: float = 0.0
) -> RankStatistics:
    """The statistics after an iteration at each of these clocks."""
    pipeline, one = RunningPipeline(BASES, 3), RankStatistics()
    for each in clocks:
        executed = pipeline.iteration(each, metered=metered, until=until)
        one = one.add(executed, 2, straggler=until > 0)
    return one


def joules(clocks: tuple[int, int]) -> list[float]:
    executed = RunningPipeline(BASES, 3).iteration(clocks)
    return [one.joules for one in sorted(executed.energy, key=lambda one: one.rank)]


def test_rank_with_less_work_waits_longer() -> None:
    executed = RunningPipeline(BASES, 3).iteration()
    first, second = statistics((1600, 1600)).waiting
    assert first == pytest.approx(1 - 0.9 / executed.seconds)
    assert second == pytest.approx(1 - 0.45 / executed.seconds)
    assert statistics((1600, 1600)).seconds == pytest.approx(executed.seconds)


def test_waiting_for_another_pipeline_counts() -> None:
    alone, beside = statistics((1600, 1600)), statistics((1600, 1600), until=10.0)
    assert beside.waiting[0] == pytest.approx(1 - 0.09)
    assert beside.seconds == pytest.approx(alone.seconds)


def test_saved_energy_is_the_difference_to_the_original_clocks() -> None:
    saved = statistics((1600, 1600), (1600, 1400), (1600, 1400)).saved(1600)
    usual, lower = joules((1600, 1600)), joules((1600, 1400))
    assert saved is not None
    assert saved[1] == pytest.approx(2e6 * (usual[1] - lower[1]), rel=1e-6)
    assert saved[0] == pytest.approx(2e6 * (usual[0] - lower[0]), abs=2)


def test_iterations_beside_a_straggler_are_compared_with_each_other() -> None:
    one = statistics((1600, 1600), (1600, 1400))
    pipeline = RunningPipeline(BASES, 3)
    beside = one.add(pipeline.iteration((1600, 1200), until=3.0), 2, straggler=True)
    assert beside.saved(1600) == one.saved(1600)


def test_unmetered_iterations_count_with_the_mean() -> None:
    one = statistics((1600, 1600), (1600, 1400))
    executed = RunningPipeline(BASES, 3).iteration((1600, 1400), metered=False)
    before, after = one.saved(1600), one.add(executed, 2, straggler=False).saved(1600)
    assert before is not None
    assert after is not None
    assert after[1] == pytest.approx(2 * before[1], abs=2)


@pytest.mark.parametrize("clocks", [((1600, 1400),), ((1600, 1600),), ()])
def test_saving_is_unknown_without_both_energies(clocks: tuple[tuple[int, int], ...]) -> None:
    assert statistics(*clocks).saved(1600) is None
    assert statistics((1600, 1600), (1600, 1400), metered=False).saved(1600) is None


def test_iteration_without_clocks_has_no_energy() -> None:
    one = statistics((1600, 1600))
    unknown = RunningPipeline(BASES, 3).iteration(reported=False)
    assert one.add(unknown, 2, straggler=False).settings == one.settings


def test_settings_are_bounded() -> None:
    one, pipeline = RankStatistics(), RunningPipeline(BASES, 3)
    for mhz in range(1000, 1600):
        one = one.add(pipeline.iteration((1600, mhz)), 2, straggler=False)
    assert len(one.settings) == 512
    assert len(one.recent) == 20


def test_other_ranks_begin_anew() -> None:
    one = statistics((1600, 1600), (1600, 1400))
    more = one.add(RunningPipeline((0.1, 0.1, 0.1), 3).iteration(), 3, straggler=False)
    assert (more.ranks, len(more.recent), more.saved(1600)) == (3, 1, None)


def test_nothing_is_known_before_an_iteration() -> None:
    one = RankStatistics()
    assert (one.seconds, one.waiting, one.saved(1600)) == (None, (), None)
