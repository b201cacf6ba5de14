"""Serving under a cap is judged at the same load, by its speed and by its tail."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import replace

import pytest
from testbed.queueing import S, load_sample, repeated, request_block, serve, switched, trace

from wattspan.tuning.decisions.blocks import Block
from wattspan.tuning.decisions.sequential_test import MissAlarm
from wattspan.tuning.decisions.serving import (
    MIN_REQUESTS,
    REFERENCE_LIFETIME,
    ServingComparison,
    block_times,
    latency_limit,
    log_ratio,
    units_to_learn,
)
from wattspan.tuning.decisions.values import TunerPolicy, WorkloadKind, WorkUnit

POLICY = TunerPolicy(kind=WorkloadKind.REQUESTS, latency=20 * S)


def stretch(
    rate: float = 5.0, latency: float = 4.0, late: int = 0, at: int = 0, served: float | None = None
) -> Block:
    """A minute in which requests of 100 tokens came at ``rate`` a second."""
    arrived, ended = round(rate * 60), round((rate if served is None else served) * 60)
    return request_block(
        at, at + 60 * S, arrived, ended, 100.0 * ended, round(ended * latency * S), late
    )


def slowdown(serving: ServingComparison) -> float:
    return math.expm1(serving.ratios.evidence.mean)


def slowdown_bound(serving: ServingComparison) -> float:
    return math.expm1(serving.ratios.evidence.upper(1 - POLICY.confidence))


# --------------------------------------------------------------------------------- one stretch


def test_serving_block_has_throughput_arrivals_concurrency_and_token_time() -> None:
    units = [
        WorkUnit(0, 2 * S, 10),  # began before
        WorkUnit(1 * S, 3 * S, 20),
        WorkUnit(4 * S, 7 * S, 30),
        WorkUnit(9 * S, 12 * S, 40),  # ended later
        WorkUnit(11 * S, 12 * S, 40),  # after
    ]
    block = load_sample(units, 1 * S, 11 * S, limit=2 * S)
    assert block == request_block(1 * S, 11 * S, 3, ended=3, work=60, time=7 * S, late=1)
    assert block.rate == 0.3
    assert block.concurrency == 0.7


# ---------------------------------------------------------------------------- the latency limit


def test_operators_latency_is_the_one_that_must_hold() -> None:
    assert latency_limit(POLICY, ()) == 20 * S
    assert units_to_learn(POLICY) == 0


def test_derived_latency_limit_is_exceeded_by_half_the_allowed_share() -> None:
    policy = replace(POLICY, latency=None, percentile=0.9)
    units = [WorkUnit(0, latency) for latency in range(1, 1001)]
    limit = latency_limit(policy, units)
    assert limit is not None
    assert sum(unit.end > limit for unit in units) == 50
    assert units_to_learn(policy) == 21


def test_derived_limit_of_few_requests_is_their_maximum() -> None:
    policy = replace(POLICY, latency=None)
    assert latency_limit(policy, [WorkUnit(0, 5), WorkUnit(0, 9), WorkUnit(0, 7)]) == 9
    assert latency_limit(policy, ()) is None


def test_limit_for_zero_misses_cannot_be_derived() -> None:
    assert units_to_learn(replace(POLICY, latency=None, percentile=1.0)) == 20_000


def test_blocks_are_long_enough_for_the_longest_requests() -> None:
    assert block_times(POLICY, 20 * S) == (20 * S, 80 * S)
    assert block_times(POLICY, S // 10) == (POLICY.settle_time, POLICY.block_time)


# ------------------------------------------------------------------------------------ the load


def test_work_time_is_compared_at_equal_load() -> None:
    ratio = log_ratio(stretch(latency=4.0), stretch(latency=4.2))
    assert ratio == pytest.approx(0.04879, abs=1e-4)


@pytest.mark.parametrize("rate", [2.0, 12.0])
def test_unequal_load_is_no_evidence(rate: float) -> None:
    assert log_ratio(stretch(rate=5.0), stretch(rate=rate)) is None


def test_closed_loop_clients_lower_the_load_of_a_slower_server() -> None:
    # Twenty clients without a pause: equal concurrency, lower throughput
    ratio = log_ratio(stretch(rate=5.0, latency=4.0), stretch(rate=2.5, latency=8.0))
    assert ratio == pytest.approx(0.693, abs=1e-3)


def test_clients_that_pause_between_requests_are_no_excuse_either() -> None:
    assert log_ratio(stretch(rate=5.0, latency=4.0), stretch(rate=3.5, latency=7.5)) is not None


def test_growing_queue_is_evidence_at_unequal_load() -> None:
    behind = stretch(rate=5.0, served=3.0, latency=30.0)
    ratio = log_ratio(stretch(), behind)
    assert ratio > 2


@pytest.mark.parametrize(
    "empty",
    [
        stretch(rate=(MIN_REQUESTS - 1) / 60),
        stretch()._replace(arrived=0),
        stretch()._replace(busy=0),
        stretch()._replace(work=0.0),
    ],
    ids=["too few", "none came", "no time", "no work"],
)
def test_empty_serving_block_is_no_evidence(empty: Block) -> None:
    assert log_ratio(stretch(), empty) is None
    assert log_ratio(empty, stretch()) is None


# --------------------------------------------------------------------------------- the verdict


def judged(
    pairs: int, slower: float = 1.02, late: int = 0, original_late: int = 0, rate: float = 5.0
) -> ServingComparison:
    serving = ServingComparison()
    for pair in range(pairs):
        at = 2 * pair * 60 * S
        noise = 1 + 0.01 * (-1) ** pair
        serving = serving.add(stretch(rate, 4.0, original_late, at), capped=False)
        serving = serving.add(stretch(rate, 4.0 * slower * noise, late, at + 60 * S), capped=True)
    return serving


def test_serving_verdict_is_unknown_without_pairs() -> None:
    assert not ServingComparison().passes(POLICY)
    assert not ServingComparison().fails(POLICY)


def test_single_pair_gives_no_verdict() -> None:
    serving = judged(1, slower=3.0)
    assert (serving.passes(POLICY), serving.fails(POLICY)) == (False, False)
    assert slowdown(serving) == pytest.approx(2.03)


def test_setting_passes_if_speed_and_tail_are_certain() -> None:
    serving = judged(12)
    assert serving.passes(POLICY)
    assert not serving.fails(POLICY)
    assert slowdown(serving) == pytest.approx(0.02, abs=0.001)
    assert 0.02 < slowdown_bound(serving) < 0.05
    assert serving.capped.ratio == 0
    assert serving.miss_bound(POLICY) < 0.01


def test_setting_needs_the_minimum_number_of_pairs() -> None:
    assert not judged(11).passes(POLICY)


def test_setting_that_is_surely_too_slow_fails() -> None:
    serving = judged(12, slower=1.10)
    assert serving.fails(POLICY)
    assert not serving.passes(POLICY)


def test_fast_setting_fails_by_its_tail_alone() -> None:
    serving = judged(12, slower=1.0, late=9)
    assert slowdown_bound(serving) < 0.05
    assert serving.fails(POLICY)
    assert serving.capped.ratio == 0.03


def test_tail_about_as_long_as_allowed_is_not_decided() -> None:
    serving = judged(12, slower=1.0, late=3)
    assert (serving.passes(POLICY), serving.fails(POLICY)) == (False, False)


def test_original_beyond_the_limit_allows_the_cap_an_equal_addition() -> None:
    """5 % are late anyway: a cap that adds nothing passes, one that adds 3 points fails."""
    same = judged(100, late=15, original_late=15)
    assert 0.055 < same.allowed(POLICY) < 0.06
    assert same.passes(POLICY)
    assert not MissAlarm(same.allowed(POLICY)).add(300, 15).alarmed
    assert judged(100, late=24, original_late=15).fails(POLICY)


def test_clustering_of_the_original_applies_to_the_cap() -> None:
    strangers, crowds = judged(20, original_late=3), ServingComparison()
    for pair in range(20):
        at = 2 * pair * 60 * S
        late = 60 if pair == 10 else 0
        crowds = crowds.add(stretch(late=late, at=at), capped=False)
        crowds = crowds.add(stretch(at=at + 60 * S), capped=True)
    assert crowds.original.misses == strangers.original.misses
    assert crowds.miss_bound(POLICY) > 10 * strangers.miss_bound(POLICY)


def test_error_probability_is_split_between_cap_and_original() -> None:
    serving = judged(1)
    assert serving.capped.at_most(0.05) < serving.miss_bound(POLICY) < 0.02


def test_tail_of_the_original_does_not_reject_the_cap() -> None:
    serving = judged(12, late=9, original_late=9)
    assert (serving.passes(POLICY), serving.fails(POLICY)) == (False, False)


def test_slowdown_beyond_all_figures_is_still_one() -> None:
    serving = ServingComparison()
    for pair in range(3):
        at = 2 * pair * 60 * S
        serving = serving.add(stretch(at=at), capped=False)
        slow = stretch(at=at + 60 * S)._replace(busy=10**18 * (pair + 1))
        serving = serving.add(slow, capped=True)
    assert not serving.passes(POLICY)
    assert not serving.fails(POLICY)
    assert serving.ratios.evidence.upper(0.05) > 700  # its exponential overflows


# -------------------------------------------------------------------------------------- pairing


def test_blocks_of_unequal_load_wait_for_a_match() -> None:
    serving = ServingComparison()
    serving = serving.add(stretch(5.0, at=0), capped=False)
    serving = serving.add(stretch(10.0, at=60 * S), capped=True)
    assert serving.ratios.pairs == 0
    serving = serving.add(stretch(10.0, at=120 * S), capped=False)
    serving = serving.add(stretch(5.0, at=180 * S), capped=True)
    assert serving.ratios.pairs == 2
    assert serving._waiting == ()


def test_pair_uses_the_latest_block_of_equal_load() -> None:
    serving = ServingComparison()
    serving = serving.add(stretch(latency=8.0, at=0), capped=False)
    serving = serving.add(stretch(latency=4.0, at=60 * S), capped=False)
    serving = serving.add(stretch(latency=4.0, at=120 * S), capped=True)
    assert serving.ratios.mean == 0


def test_expired_block_is_not_compared() -> None:
    serving = ServingComparison().add(stretch(at=0), capped=False)
    serving = serving.add(stretch(at=60 * S + REFERENCE_LIFETIME), capped=True)
    assert serving.ratios.pairs == 0
    assert len(serving._waiting) == 1


def test_stale_block_is_counted_with_a_fresh_pair() -> None:
    serving = ServingComparison().add(stretch(at=0), capped=False)
    serving = serving.add(stretch(at=REFERENCE_LIFETIME), capped=False)
    serving = serving.add(stretch(at=60 * S + REFERENCE_LIFETIME), capped=True)
    assert serving.ratios.pairs == 1
    assert serving._waiting == ()


def test_empty_block_does_not_wait() -> None:
    serving = ServingComparison().add(stretch(rate=0.1), capped=False)
    assert serving == ServingComparison()


def test_verdict_covers_loads_up_to_the_observed_maximum() -> None:
    serving = judged(12)
    assert serving.load == pytest.approx(20.6, abs=0.1)
    assert serving.covers(stretch(rate=5.5))
    assert serving.covers(stretch(rate=1.0))
    assert not serving.covers(stretch(rate=7.0))
    assert not ServingComparison().covers(stretch())


def test_waiting_blocks_are_bounded() -> None:
    serving = ServingComparison()
    for minute in range(12):
        serving = serving.add(stretch(at=minute * 60 * S), capped=False)
    assert len(serving._waiting) == 8


# -------------------------------------------------------------------------- a server in a queue

BLOCK, SETTLE, LIMIT = 110 * S, 20 * S, 12 * S
SERVED = replace(POLICY, latency=LIMIT)
LIGHT, HEAVY = 160, 82  # slots, of which 77 are taken on average


def watched(cap: float, slots: int, blocks: int = 24) -> tuple[ServingComparison, float]:
    """The verdict of so many blocks, and the throughput under the cap over the original's."""
    units, capped = switched(cap, BLOCK, slots, 4.0, blocks)
    ends = [unit.end for unit in units]
    serving, done = ServingComparison(), {False: 0.0, True: 0.0}
    for number, under_cap in enumerate(capped):
        start, end = number * BLOCK + SETTLE, (number + 1) * BLOCK
        near = units[bisect(ends, start) : bisect(ends, end + LIMIT)]
        block = load_sample(near, start, end, LIMIT)
        serving = serving.add(block, under_cap)
        done[under_cap] += block.work
    return serving, done[True] / done[False]


def test_three_percent_slower_cap_passes_at_light_load() -> None:
    serving, _ = watched(1.03, LIGHT)
    assert serving.passes(SERVED)
    assert slowdown(serving) == pytest.approx(0.03, abs=0.005)


def test_three_percent_slower_cap_fails_at_heavy_load() -> None:
    serving, throughput = watched(1.03, HEAVY)
    assert serving.fails(SERVED)
    assert serving.capped.ratio > 0.01
    assert throughput > 0.98  # sufficient alone to pass


def test_ineffective_cap_passes_at_light_load() -> None:
    assert watched(1.0, LIGHT)[0].passes(SERVED)


def test_cap_twice_over_budget_fails_at_light_load() -> None:
    assert watched(1.10, LIGHT)[0].fails(SERVED)


def test_requests_of_the_trace_are_served_in_their_time() -> None:
    units = list(serve(trace(), 1000, lambda _: 1.0))
    assert len(units) == 2000
    assert all(unit.end > unit.start for unit in units)
    again = repeated(2.0)
    assert [next(again).at for _ in range(3)] == [request.at // 2 for request in trace()[:3]]
