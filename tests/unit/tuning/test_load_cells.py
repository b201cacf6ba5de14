"""Evidence about a latency objective by load bin and setting."""

from __future__ import annotations

import pytest

from wattspan.model import MILLISECOND
from wattspan.tuning.decisions.load_cells import (
    LatencyObjective,
    LoadCells,
    MissTally,
    RequestTimes,
    gates,
)

TTFT = LatencyObjective(True, 400 * MILLISECOND, 0.01)
TBT = LatencyObjective(False, 100 * MILLISECOND, 0.01)
GATES = gates((TTFT, TBT), by_length=False, near=1.2)


def request(
    ttft: int | None = 50, tbt: int | None = 10, *, prompt: int | None = 500
) -> RequestTimes:
    """A request; latencies in milliseconds."""
    return RequestTimes(
        0,
        10,
        None if ttft is None else ttft * MILLISECOND,
        None if tbt is None else tbt * MILLISECOND,
        prompt,
        100,
    )


def tally(*counts: tuple[int, int, int], size: int = len(GATES)) -> MissTally:
    """Requests, misses and near misses of the first gates; as many requests at the others."""
    rest = ((counts[0][0], 0, 0),) * (size - len(counts))
    return MissTally((*counts, *rest))


def fed(
    cells: LoadCells, number: int, setting: int, requests: int, misses: int = 0, near: int = 0
) -> LoadCells:
    """Groups of 20 requests, the misses spread evenly over them."""
    groups = max(1, requests // 20)
    for group in range(groups):
        part = misses * (group + 1) // groups - misses * group // groups
        close = near * (group + 1) // groups - near * group // groups
        one = tally((20, part, close), size=len(cells.gates))
        cells = cells.add_tally(number, setting, one)
    return cells


def test_request_over_the_limit_is_a_miss() -> None:
    counted = MissTally.empty(2)
    for one in (request(), request(401), request(350), request(tbt=None), request(tbt=120)):
        counted = counted.add(GATES, one, only_misses=False)
    assert counted.counts == ((5, 1, 2), (4, 1, 1))


def test_request_under_several_settings_counts_only_as_a_miss() -> None:
    counted = MissTally.empty(2).add(GATES, request(401), only_misses=True)
    assert counted.counts == ((1, 1, 1), (0, 0, 0))


def test_gates_by_length_count_requests_of_their_class() -> None:
    each = gates((TTFT,), by_length=True)
    counted = MissTally.empty(len(each))
    for one in (request(prompt=10), request(prompt=256), request(500, prompt=9000)):
        counted = counted.add(each, one, only_misses=False)
    counted = counted.add(each, request(prompt=None), only_misses=False)
    assert counted.counts == ((4, 1, 1), (1, 0, 0), (1, 0, 0), (1, 1, 1))


def test_no_miss_in_enough_requests_certifies() -> None:
    some = fed(LoadCells(GATES), 4, 1, 280)
    assert not some.proves(4, 1)
    assert some.lowest(4) == 0
    many = fed(some, 4, 1, 100)
    assert many.proves(4, 1)
    assert many.lowest(4) == 1


def test_original_needs_no_certification() -> None:
    cells = fed(LoadCells(GATES), 4, 0, 400, 100)
    assert cells.lowest(4) == 0
    assert not cells.certified


def test_evidence_counts_for_lower_loads_only() -> None:
    cells = fed(fed(LoadCells(GATES), 2, 0, 20), 6, 0, 20)
    cells = fed(cells, 4, 1, 400)
    assert cells.lowest(2) == cells.lowest(3) == 1
    assert cells.lowest(5) == cells.lowest(6) == 0


def test_evidence_of_several_bins_adds_up() -> None:
    cells = fed(fed(LoadCells(GATES), 4, 1, 200), 5, 1, 200)
    assert cells.lowest(4) == 1
    assert cells.lowest(5) == 0


def test_misses_at_a_higher_load_do_not_uncertify_a_lower_one() -> None:
    cells = fed(LoadCells(GATES), 4, 1, 400)
    cells = fed(cells, 6, 1, 400, 80)
    assert cells.lowest(4) == 1
    assert cells.lowest(6) == 0


def test_misses_end_a_certification() -> None:
    cells = fed(fed(LoadCells(GATES), 4, 1, 400), 4, 2, 400)
    assert cells.lowest(4) == 2
    cells = fed(cells, 4, 2, 400, 40)
    assert cells.lowest(4) == 1
    assert fed(cells, 4, 1, 400, 40).lowest(4) == 0


def test_clustered_misses_need_more_requests() -> None:
    spread = fed(LoadCells(GATES), 4, 1, 2000, 6)
    cluster = fed(LoadCells(GATES), 4, 1, 1980).add_tally(4, 1, tally((20, 6, 6)))
    assert spread.proves(4, 1)
    assert not cluster.proves(4, 1)


def test_clustering_of_near_misses_counts_before_the_first_miss() -> None:
    spread = fed(LoadCells(GATES), 4, 1, 600, near=6)
    cluster = fed(LoadCells(GATES), 4, 1, 580).add_tally(4, 1, tally((20, 0, 12)))
    assert spread.proves(4, 1)
    assert not cluster.proves(4, 1)


def test_each_objective_must_be_certain() -> None:
    cells = LoadCells(GATES)
    for _ in range(30):
        cells = cells.add_tally(4, 1, MissTally(((20, 0, 0), (5, 0, 0))))
    assert not cells.proves(4, 1)


def test_large_class_needs_evidence_of_its_own() -> None:
    each = gates((TTFT,), by_length=True)
    cells = LoadCells(each)
    for _ in range(30):
        cells = cells.add_tally(4, 1, MissTally(((20, 0, 0), (15, 0, 0), (5, 0, 0), (0, 0, 0))))
    assert not cells.proves(4, 1)
    for _ in range(60):
        cells = cells.add_tally(4, 1, MissTally(((20, 0, 0), (15, 0, 0), (5, 0, 0), (0, 0, 0))))
    assert cells.proves(4, 1)


def test_small_class_must_not_certainly_miss() -> None:
    each = gates((TTFT,), by_length=True)
    cells = LoadCells(each)
    for _ in range(200):
        cells = cells.add_tally(4, 1, MissTally(((100, 0, 0), (99, 0, 0), (0, 0, 0), (1, 0, 0))))
    assert cells.proves(4, 1)
    for _ in range(12):
        cells = cells.add_tally(4, 1, MissTally(((1, 1, 1), (0, 0, 0), (0, 0, 0), (1, 1, 1))))
    assert not cells.proves(4, 1)


def test_misses_of_the_original_are_permitted_too() -> None:
    cells = fed(LoadCells(GATES), 4, 0, 4000, 200)
    assert cells.allowed(0, 4) > 0.04
    assert cells.allowed(1, 4) == 0.01
    assert fed(cells, 4, 1, 4000, 100).lowest(4) == 1


def test_limits_of_a_bin_are_kept_or_missed_or_unknown() -> None:
    few, enough = fed(LoadCells(GATES), 1, 0, 20), fed(LoadCells(GATES), 1, 0, 2000)
    assert few.keeps(1, 0) is few.keeps(2, 0) is None
    assert enough.keeps(1, 0) is True
    assert enough.keeps(0, 0) is True  # evidence of a higher load
    missed = fed(LoadCells(GATES), 1, 0, 400, misses=40)
    lower = fed(missed, 1, 1, 2000, misses=40)
    assert missed.keeps(1, 0) is False
    assert lower.keeps(1, 1) is False  # permitted beside the original's misses, but not kept


def test_lower_setting_needs_room_in_the_latencies() -> None:
    cells = fed(LoadCells(GATES), 4, 0, 80)
    assert not cells.may_try(4, 0)
    assert fed(cells, 4, 0, 40).may_try(4, 0)
    assert not fed(cells, 4, 0, 400, near=40).may_try(4, 0)


def test_failed_setting_loses_the_evidence_at_its_load_and_above() -> None:
    cells = fed(fed(fed(LoadCells(GATES), 2, 2, 400), 4, 1, 400), 4, 2, 400)
    cells = cells.without(4, 2)
    assert cells.lowest(4) == 1
    assert cells.lowest(2) == 2
    assert not cells.cell(4, 2).counts[0].missed.requests


def test_cheapest_setting_ends_before_energy_rises() -> None:
    cells = LoadCells(GATES)
    assert cells.cheapest(4, 3) == 3  # unknown energy
    for setting, energy in enumerate((100.0, 90.0, 80.0, 95.0)):
        for _ in range(30):
            cells = cells.add_energy(4, setting, energy, 1.0)
    assert cells.cheapest(4, 3) == 2
    assert cells.cheapest(4, 1) == 1
    assert cells.cell(4, 1).energy_per_token == pytest.approx(90.0)


def test_energy_per_token_is_unknown_without_tokens() -> None:
    cells = LoadCells(GATES)
    for _ in range(30):
        cells = cells.add_energy(4, 0, 5.0, 0.0)
    assert cells.cell(4, 0).energy_per_token is None
