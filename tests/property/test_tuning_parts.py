"""Invariants of the tuner's parts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from string import ascii_letters

from hypothesis import given
from hypothesis import strategies as st
from testbed.queueing import load_sample, request_block

from wattspan.model import Knob
from wattspan.tuning.decisions.blocks import Block
from wattspan.tuning.decisions.certified_settings import (
    MAX_CERTIFIED,
    CertifiedSettings,
    command_digest,
    from_json,
    to_json,
)
from wattspan.tuning.decisions.ranks import (
    Lockstep,
    RankWaits,
    SynchronousStep,
    propose_rank_settings,
)
from wattspan.tuning.decisions.sequential_test import MissAlarm, MissCounts
from wattspan.tuning.decisions.serving import (
    MAX_LOAD_DIFFERENCE,
    ServingComparison,
    log_ratio,
)
from wattspan.tuning.decisions.unit_detection import MAX_NAMES, UnitDetector
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    Fingerprint,
    KnobRange,
    TunerPolicy,
    WorkUnit,
)

S = 10**9
parts = st.floats(0.001, 0.2)

# -------------------------------------------------------------------------------------- misses


@given(requests=st.integers(1, 10**6), part=st.floats(0, 1), error=parts)
def test_observed_rate_is_within_its_bounds(requests: int, part: float, error: float) -> None:
    misses = round(requests * part)
    tally = MissCounts().add(requests, misses)
    slip = 1e-6
    low, high = tally.at_least(error), tally.at_most(error)
    assert 0 <= low <= misses / requests + slip
    assert misses / requests - slip <= high <= 1
    assert tally.at_most(error / 2) >= high
    assert tally.at_least(error / 2) <= low


@given(groups=st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1)), max_size=30), error=parts)
def test_bounds_hold_for_any_groups(groups: list[tuple[int, float]], error: float) -> None:
    tally = MissCounts()
    for requests, part in groups:
        tally = tally.add(requests, round(requests * part))
    assert tally.dispersion >= 1
    assert 0 <= tally.at_least(error) <= tally.at_most(error) + 1e-6 <= 1 + 1e-6


@given(requests=st.integers(0, 2000), more=st.integers(1, 2000), error=parts)
def test_more_requests_without_a_miss_tighten_the_bound(
    requests: int, more: int, error: float
) -> None:
    assert MissCounts().add(requests + more, 0).at_most(error) <= MissCounts().add(
        requests, 0
    ).at_most(error)


@given(allowed=st.floats(0, 1), batches=st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1))))
def test_alarm_accepts_any_input(allowed: float, batches: list[tuple[int, float]]) -> None:
    alarm = MissAlarm(allowed)
    for requests, part in batches:
        alarm = alarm.add(requests, round(requests * part))
    assert alarm.alarmed in (True, False)
    if not any(round(requests * part) for requests, part in batches):
        assert not alarm.alarmed


@given(
    allowed=st.sampled_from([0.001, 0.01, 0.1]),
    before=st.lists(st.tuples(st.integers(1, 99), st.integers(0, 1)), max_size=5),
    half=st.integers(0, 60),
    misses=st.integers(1, 40),
)
def test_mixed_requests_alarm_as_those_at_even_distances(
    allowed: float, before: list[tuple[int, int]], half: int, misses: int
) -> None:
    alarm = MissAlarm(allowed)
    for each in before:
        alarm = alarm.add(*each)
    mixed = alarm.add_mixed(misses * (2 * half + 1), misses)
    for _ in range(misses):
        for late in (*half * [0], 1, *half * [0]):
            alarm = alarm.add(1, late)
    for exponent in range(40):
        patience = 2**exponent
        own = replace(mixed, patience=patience), replace(alarm, patience=patience)
        assert own[0].alarmed is own[1].alarmed


@given(allowed=parts, requests=st.integers(0, 99))
def test_mixed_requests_without_misses_are_no_alarm(allowed: float, requests: int) -> None:
    assert MissAlarm(allowed).add_mixed(requests, 0) == MissAlarm(allowed).add(requests, 0)


# ------------------------------------------------------------------------------------- serving

moments = st.integers(0, 100 * S)


@st.composite
def requests(draw: st.DrawFn) -> list[WorkUnit]:
    spans = draw(st.lists(st.tuples(moments, st.integers(0, 20 * S), parts), max_size=40))
    return sorted((WorkUnit(at, at + time, work) for at, time, work in spans), key=lambda u: u.end)


@given(units=requests(), edges=st.lists(moments, min_size=2, max_size=6, unique=True))
def test_stretches_that_follow_each_other_add_up(units: list[WorkUnit], edges: list[int]) -> None:
    edges.sort()
    whole = load_sample(units, edges[0], edges[-1], 5 * S)
    pieces = [load_sample(units, start, end, 5 * S) for start, end in pairwise(edges)]
    assert sum(piece.arrived for piece in pieces) == whole.arrived
    assert sum(piece.units for piece in pieces) == whole.units
    assert sum(piece.busy for piece in pieces) == whole.busy
    assert sum(piece.late for piece in pieces) == whole.late


blocks = st.builds(
    lambda at, arrived, ended, work, time, late: request_block(
        at, at + 60 * S, arrived, ended, ended * work, ended * time, min(late, ended)
    ),
    st.integers(0, 3000).map(lambda second: second * S),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.floats(0.1, 1e6),
    st.integers(0, 1000 * S),
    st.integers(0, 50),
)


@given(one=blocks, other=blocks)
def test_ratio_needs_equal_load_or_a_growing_queue(one: Block, other: Block) -> None:
    ratio = log_ratio(one, other)
    if ratio is None:
        return
    alike = any(
        abs(a - b) <= (2.7183**MAX_LOAD_DIFFERENCE - 1) * max(a, b)
        for a, b in ((one.rate, other.rate), (one.concurrency, other.concurrency))
    )
    assert alike or (other.rate < one.rate and other.concurrency > one.concurrency)


@given(served=st.lists(st.tuples(blocks, st.booleans()), max_size=40))
def test_blocks_are_paired_skipped_or_waiting(served: list[tuple[Block, bool]]) -> None:
    serving = ServingComparison()
    for block, capped in sorted(served):
        serving = serving.add(block, capped)
    waiting = len(serving._waiting)
    assert 2 * serving.ratios.pairs + waiting <= len(served)
    policy = TunerPolicy(latency=5 * S)
    assert not (serving.passes(policy) and serving.fails(policy))
    if serving.passes(policy):
        assert serving.ratios.pairs >= policy.least_pairs


# --------------------------------------------------------------------------------------- ranks


@given(
    ranks=st.integers(1, 4),
    steps=st.integers(1, 30),
    cuts=st.lists(st.integers(0, 120), max_size=10),
    lost=st.sets(st.integers(0, 119), max_size=6),
)
def test_steps_are_independent_of_unit_batching(
    ranks: int, steps: int, cuts: list[int], lost: set[int]
) -> None:
    units = [
        WorkUnit(step * 100 + rank, step * 100 + 90 + rank, 1, rank)
        for step in range(steps)
        for rank in range(ranks)
    ]
    units = [unit for number, unit in enumerate(units) if number not in lost]
    begin = [WorkUnit(-100 + rank, -10 + rank, 1, rank) for rank in range(ranks)]
    known, _ = Lockstep().add(begin)
    _, at_once = known.add(units)
    piecewise: list[SynchronousStep] = []
    edges = [0, *sorted(min(cut, len(units)) for cut in cuts), len(units)]
    for start, end in pairwise(edges):
        known, made = known.add(units[start:end])
        piecewise += made
    assert tuple(piecewise) == at_once
    assert all(one.end <= other.start for one, other in pairwise(at_once))
    assert all(step.work == ranks for step in at_once)


@given(
    parts=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    level=st.integers(200, 300),
    floor=st.integers(150, 300),
    steepness=st.floats(0, 0.1),
)
def test_proposal_is_within_bounds_and_spares_the_critical_rank(
    parts: list[int], level: int, floor: int, steepness: float
) -> None:
    waiting = RankWaits()
    for _ in range(200):
        waiting = waiting.add(SynchronousStep(0, 100, 1, dict(enumerate(parts))))
    ranges = [KnobRange(str(rank), 300, floor, 5, rank) for rank in range(len(parts))]
    levels = {one.device: level for one in ranges}

    def curve(setting: int) -> float:
        return 1 + steepness * (300 - setting)

    proposed = propose_rank_settings(levels, ranges, waiting, curve)
    assert proposed.keys() == levels.keys()
    for one in ranges:
        setting = proposed[one.device]
        assert min(level, floor) <= setting <= level
        if setting < level:
            assert curve(setting) <= curve(level) * (1 + waiting.slack(one.rank))
    if waiting.critical is not None:
        assert proposed[str(waiting.critical)] == level


# ------------------------------------------------------------------------------------- finding


@given(
    spans=st.lists(
        st.tuples(st.sampled_from(ascii_letters), moments, st.integers(0, 70 * S)), max_size=300
    )
)
def test_unit_detection_finds_one_of_the_first_names(spans: list[tuple[str, int, int]]) -> None:
    detector = UnitDetector()
    for name, start, time in spans:
        detector.add(name, start, start + time)
    found, rare = detector.result()
    names = list(dict.fromkeys(name for name, _, _ in spans))[:MAX_NAMES]
    assert rare <= set(names)
    if found is not None:
        assert found.name in names
        assert found.name not in rare
        assert 0 <= found.cover <= 1
        assert found.variation >= 0


# -------------------------------------------------------------------------------------- memory

names = st.text(max_size=20)
fingerprints = st.builds(Fingerprint, names, names, names, st.integers(0, 64), names, names)
levels = st.integers(0, 700_000)
settings = st.builds(
    CertifiedLevels,
    levels,
    st.just(700_000),
    st.floats(-1, 1),
    st.floats(-1, 1),
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.dictionaries(names, levels, max_size=3),
)
knobs = st.sampled_from(Knob)
acts = st.lists(
    st.tuples(st.sampled_from(["certified", "failed"]), fingerprints, knobs, settings),
    max_size=30,
)


@given(acts=acts)
def test_certificate_file_round_trips(
    acts: list[tuple[str, Fingerprint, Knob, CertifiedLevels]],
) -> None:
    book = CertifiedSettings()
    for act, fingerprint, knob, setting in acts:
        if act == "certified":
            book = book.certified(fingerprint, knob, setting)
            assert book.recall(fingerprint, knob) == setting
        else:
            book = book.failed(fingerprint, knob)
    assert len(book.entries) <= MAX_CERTIFIED
    again = from_json(json.loads(json.dumps(to_json(book))))
    assert list(again.entries.items()) == list(book.entries.items())


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=20,
)
keys = st.sampled_from(["version", "entries", "fingerprint", "setting", "knob", "levels", "level"])


@given(
    facts=anything
    | st.dictionaries(keys, anything)
    | st.lists(anything).map(lambda entries: {"version": 1, "entries": entries})
)
def test_damaged_certificate_file_raises_no_error(facts: object) -> None:
    assert len(from_json(facts).entries) <= MAX_CERTIFIED


@given(command=st.text() | st.lists(st.text()))
def test_digest_has_sixteen_digits(command: str | list[str]) -> None:
    assert len(command_digest(command)) == 16
    assert command_digest(command) == command_digest(command)
