"""Division of GPU energy inside counter steps, by the names of spans."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from statistics import fmean

import pytest

from wattspan.model import SECOND, HwType, Instant, Interval, Microjoules
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.power_model import ENOUGH_STEPS, PowerModel, Segment, Step
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.step_division import LEARN_AFTER, MAX_OPEN, MAX_RECENT, StepDivider
from wattspan.spans.values import Span, SpanColumns, SpanEnd, SpanEnergy, SpanStart

GPU = HwType.GPU
MS = 1_000_000
STEP = 100 * MS
NEVER = 2**70
IDS = count(1)
Load = Sequence[tuple[int, int, float]]
"""Begin, end and watts."""


def span(start: float, end: float, name: str = "n", parent: bytes = b"") -> Span:
    """From and to milliseconds."""
    ident = next(IDS).to_bytes(8, "big")
    return Span(bytes(16), ident, parent, "s", name, round(start * MS), round(end * MS))


def add(
    profile: EnergyProfile, start: int, energy: int, noise: int = 0, board: str = "gpu"
) -> None:
    """One counter step, from a time in milliseconds."""
    edges = Instant(start * MS, 0), Instant((start + 100) * MS, 0)
    profile.add(board, GPU, Interval(board, *edges, Microjoules(0)), energy, noise)


def known(model: PowerModel, process: object, board: str = "gpu", **watts: float) -> PowerModel:
    """``model`` with mean powers of span names; none outside of spans."""
    draw = random.Random(1)
    for _ in range(ENOUGH_STEPS):
        for name, power in watts.items():
            energy = power * draw.uniform(0.8, 1.2) * STEP / 1000
            model.learn(Step([Segment(0, STEP, {(board, ("s", name)): 1.0})], energy))
        model.learn(Step([Segment(0, STEP, {(board, process): 1.0})], 0))
    return model


def spent(load: Load, time: int) -> int:
    """The true microjoules up to ``time``."""
    ends = [end for _, end, _ in load]
    last = bisect_right(ends, time)
    parts = [(end - start) * watts for start, end, watts in load[:last]]
    if last < len(load) and load[last][0] < time:
        parts.append((time - load[last][0]) * load[last][2])
    return round(sum(parts) / 1000)


def bursts(length: int, number: int) -> Load:
    """A load of random power for ``length`` milliseconds, at random times."""
    draw, at, load = random.Random(length), SECOND, []
    for _ in range(number):
        at += draw.randrange(100 * MS, 700 * MS)
        load.append((at, at + length * MS, draw.uniform(200, 550)))
        at += length * MS
    return load


def measured(load: Load, steps: StepDivider | None) -> Iterator[tuple[SpanEnergy, int]]:
    """Spans around each burst with their true energy; a batch of spans a second."""
    profile, process = EnergyProfile(), ProcessSpans(steps=steps)
    waiting = [span(start / MS, end / MS) for start, end, _ in load]
    edges = range(37 * MS, load[-1][1] + 2 * SECOND, STEP)
    for number, (left, right) in enumerate(pairwise(edges)):
        interval = Interval("gpu", Instant(left, 0), Instant(right, 0), Microjoules(0))
        profile.add("gpu", GPU, interval, spent(load, right) - spent(load, left), 0)
        if number % 10 == 9:
            batch = [one for one in waiting if one.end <= profile.watermark]
            del waiting[: len(batch)]
            for result in process.settle(batch, profile, NEVER):
                yield result, spent(load, result.span.end) - spent(load, result.span.start)


def errors(results: Sequence[tuple[SpanEnergy, int]]) -> list[float]:
    return [result.exclusive[GPU] / truth - 1 for result, truth in results]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "most"), [(30, 0.15), (100, 0.15), (1000, 0.05)])
def test_recurring_spans_have_their_true_energy(length: int, most: float) -> None:
    load = bursts(length, 250)
    results = list(measured(load, StepDivider(PowerModel(), "process")))[-150:]
    found = errors(results)
    assert abs(fmean(found)) <= 0.03
    assert sorted(map(abs, found))[round(0.95 * len(found))] <= most
    assert len(results) == 150
    if length == 100:
        even = errors(list(measured(load, None))[-150:])
        assert fmean(even) < -0.2


def test_truth_of_recurring_spans_is_within_the_stated_uncertainty() -> None:
    results = list(measured(bursts(100, 250), StepDivider(PowerModel(), "process")))
    within = [
        abs(result.inclusive.energy[GPU] - truth) <= result.inclusive.uncertainty[GPU]
        for result, truth in results
    ]
    assert fmean(within) >= 0.95
    stated = [result.inclusive.uncertainty[GPU] / truth for result, truth in results]
    assert fmean(stated[-150:]) < 0.1 < fmean(stated[:20])


def test_energy_is_spread_evenly_before_enough_steps() -> None:
    load = bursts(100, 8)
    with_model = list(measured(load, StepDivider(PowerModel(), "process")))
    assert len(with_model) == 8
    assert errors(with_model) == errors(list(measured(load, None)))


# -------------------------------------------------------------------------------- conservation


def shaped(
    model: PowerModel, *, energy: int = 1_000_003, announced: bool = False
) -> tuple[EnergyProfile, ProcessSpans]:
    """A profile of five steps of the same energy, and its process."""
    profile = EnergyProfile()
    for start in range(0, 500, 100):
        add(profile, start, energy)
    process = ProcessSpans(steps=StepDivider(model, "process"))
    if announced:
        process.open(SpanStart(b"announce", b"", 10 * MS, 1, 0))
        process.close(SpanEnd(b"announce", 20 * MS, 1, 0))
    return profile, process


def test_energy_of_each_step_is_unchanged() -> None:
    profile, process = shaped(known(PowerModel(), "process", n=200, m=400))
    whole = [profile.between(at * MS, (at + 100) * MS).energy for at in range(0, 500, 100)]
    batch = [span(130, 171), span(150, 260, "m"), span(320, 340)]
    results = process.settle(batch, profile, NEVER)
    assert whole == [profile.between(at * MS, (at + 100) * MS).energy for at in range(0, 500, 100)]
    assert profile.between(100 * MS, 130 * MS).energy[GPU] < 10_000
    assert results[2].exclusive[GPU] == pytest.approx(1_000_003, rel=0.02)
    taken = sum(result.exclusive[GPU] for result in results)
    outside = process.outside(profile, NEVER)[GPU]
    assert taken + outside == profile.between(130 * MS, 500 * MS).energy[GPU]


def test_energy_of_settled_spans_is_unchanged_by_later_spans() -> None:
    profile, process = shaped(known(PowerModel(), "process", n=200, m=400))
    (first,) = process.settle([span(110, 140)], profile, NEVER)
    assert profile.between(110 * MS, 140 * MS).energy == first.inclusive.energy
    assert first.exclusive[GPU] == pytest.approx(1_000_003, rel=0.02)
    (second,) = process.settle([span(150, 260, "m")], profile, NEVER)
    assert profile.between(110 * MS, 140 * MS).energy == first.inclusive.energy
    rest = 1_000_003 - first.exclusive[GPU]
    assert second.exclusive[GPU] == pytest.approx(1_000_003 + rest, rel=0.02)


def test_energy_before_the_announced_front_is_unchanged() -> None:
    profile, process = shaped(known(PowerModel(), "process", n=200), announced=True)
    own = Span(bytes(16), b"announce", b"", "s", "n", 10 * MS, 20 * MS)
    (first,) = process.settle([own], profile, NEVER)
    (second,) = process.settle([span(120, 160)], profile, NEVER)
    process.settle([span(170, 175)], profile, NEVER)
    assert process.outside(profile, 185 * MS)
    (fourth,) = process.settle([span(190, 240)], profile, NEVER)
    assert min(first.exclusive[GPU], second.exclusive[GPU]) > 900_000
    assert fourth.exclusive[GPU] > 900_000
    assert profile.between(0, 500 * MS).energy[GPU] == 5 * 1_000_003


def test_boards_are_divided_by_themselves() -> None:
    model = known(known(PowerModel(), "process", n=300), "process", "other", n=300)
    profile = EnergyProfile()
    for board in ("gpu", "other"):
        profile.expect(board, GPU, 0)
    for start in range(0, 500, 100):
        add(profile, start, 1_000_000)
        add(profile, start, 500_000, board="other")
    process = ProcessSpans(steps=StepDivider(model, "process"))
    (result,) = process.settle([span(110, 140)], profile, NEVER)
    assert result.exclusive[GPU] == pytest.approx(1_500_000, rel=0.02)
    (rest,) = process.settle([span(150, 170)], profile, NEVER)
    assert result.exclusive[GPU] + rest.exclusive[GPU] <= 1_500_000
    assert profile.between(100 * MS, 200 * MS).energy[GPU] == 1_500_000


def test_span_inside_its_parent_is_divided_from_it() -> None:
    # 60 ms of 100 W and 20 ms of 300 W.
    profile, process = shaped(known(PowerModel(), "process", n=300, m=100), energy=12_000_000)
    parent = span(110, 190, "m")
    child = span(130, 150, parent=parent.id)
    above, below = process.settle([parent, child], profile, NEVER)
    assert above.exclusive[GPU] == pytest.approx(6_000_000, rel=0.1)
    assert below.exclusive[GPU] == pytest.approx(6_000_000, rel=0.1)


def test_step_with_many_edges_has_fewer_periods() -> None:
    profile, process = shaped(known(PowerModel(), "process", n=300))
    batch = [span(110 + i, 150 + i) for i in range(10)]
    results = process.settle(batch, profile, NEVER)
    assert sum(result.exclusive[GPU] for result in results) == pytest.approx(1_000_003, rel=0.02)


@pytest.mark.parametrize("numbers", [(MAX_OPEN + 1,), (MAX_RECENT + 1,), (MAX_RECENT, 1)])
def test_step_with_too_many_spans_is_spread_evenly(numbers: Sequence[int]) -> None:
    profile, process = shaped(known(PowerModel(), "process", n=300))
    results = [
        result
        for number in numbers
        for result in process.settle([span(110, 150) for _ in range(number)], profile, NEVER)
    ]
    assert sum(result.exclusive[GPU] for result in results) == pytest.approx(400_000, rel=0.01)
    (later,) = process.settle([span(320, 340)], profile, NEVER)
    divided = sum(numbers) <= MAX_RECENT  # otherwise other spans may be missing
    assert later.exclusive[GPU] == pytest.approx(1_000_003 if divided else 200_000, rel=0.02)


def test_many_activities_in_a_step_are_spread_evenly() -> None:
    names = [f"n{i}" for i in range(10)]
    profile, process = shaped(known(PowerModel(), "process", **dict.fromkeys(names, 300.0)))
    batch = [span(110 + 4 * i, 112 + 4 * i, name) for i, name in enumerate(names)]
    results = process.settle(batch, profile, NEVER)
    assert sum(result.exclusive[GPU] for result in results) == pytest.approx(200_000, rel=0.01)


# ------------------------------------------------------------------------------------ learning


def test_steps_are_learned_after_a_delay() -> None:
    model, profile = PowerModel(), EnergyProfile()
    process = ProcessSpans(steps=StepDivider(model, "process"))
    late = LEARN_AFTER // MS
    for start in range(0, late + 1000, 100):
        add(profile, start, 1_000_000)
        if start == 1000:
            process.settle([span(100, 900)], profile, NEVER)
            assert not len(model)
    process.settle([span(late + 500, late + 600)], profile, NEVER)
    assert len(model) == 2  # the name, and the time outside of spans
    process.forget()
    assert len(model) == 1
    ProcessSpans().forget()


def test_blurred_steps_are_divided_as_one_and_keep_their_uncertainty() -> None:
    model, profile = known(PowerModel(), "process", n=300), EnergyProfile()
    # The energy of a span of 30 ms at 300 W is in the steps around it.
    for start, energy in zip(range(0, 500, 100), (3, 4, 2, 0, 0), strict=True):
        add(profile, start, energy * 1_000_000, noise=1_000_000)
    assert {step.blurred for step in profile.counter_steps["gpu"]} == {True}
    before = profile.between(110 * MS, 140 * MS)
    process = ProcessSpans(steps=StepDivider(model, "process"))
    (result,) = process.settle([span(110, 140)], profile, NEVER)
    assert result.exclusive[GPU] == pytest.approx(9_000_000, rel=0.02)
    assert result.inclusive.uncertainty[GPU] >= before.uncertainty[GPU]


def test_blurred_loads_with_a_quiet_step_between_them_are_divided_apart() -> None:
    model, profile = known(PowerModel(), "process", n=300), EnergyProfile()
    for start, energy in zip(range(0, 600, 100), (6, 3, 0, 1, 2, 0), strict=True):
        add(profile, start, energy * 1_000_000, noise=1_000_000)
    process = ProcessSpans(steps=StepDivider(model, "process"))
    results = process.settle([span(80, 110), span(380, 410)], profile, NEVER)
    assert [round(result.exclusive[GPU] / 1e6) for result in results] == [9, 3]


def test_waiting_spans_keep_the_blurred_energy_of_their_time() -> None:
    shares = []
    for waiting in ([], [SpanColumns.of([span(260, 290)])]):
        model, profile = known(PowerModel(), "process", n=300), EnergyProfile()
        for start in range(0, 400, 100):
            add(profile, start, 9_000_000, noise=9_000_000)
        process = ProcessSpans(steps=StepDivider(model, "process"))
        (result,) = process.settle([span(110, 140)], profile, NEVER, waiting=waiting)
        shares.append(result.exclusive[GPU])
    assert shares[1] == pytest.approx(shares[0] / 2, rel=0.05)


def test_blurred_steps_of_a_long_load_are_divided_in_parts() -> None:
    model, profile = known(PowerModel(), "process", n=300), EnergyProfile()
    for start in range(0, 4000, 100):
        add(profile, start, 9_000_000 * (300 <= start < 3500), noise=9_000_000)
    process = ProcessSpans(steps=StepDivider(model, "process"))
    batch = [span(start + 30, start + 60) for start in range(300, 3500, 100)]
    results = process.settle(batch, profile, NEVER)
    assert {round(result.exclusive[GPU] / 9e6, 1) for result in results} == {1.0}


@pytest.mark.parametrize("noise", [0, 1_000_000])
def test_steps_are_divided_only_once_other_energy_of_their_time_is_known(noise: int) -> None:
    model, profile = known(PowerModel(), "process", n=300), EnergyProfile()
    process = ProcessSpans(steps=StepDivider(model, "process"))
    profile.expect("cpu", HwType.CPU, 0)
    for start in range(0, 500, 100):
        add(profile, start, 1_000_000, noise=noise)
    edges = Instant(0, 0), Instant(450 * MS, 0)
    profile.add("cpu", HwType.CPU, Interval("cpu", *edges, Microjoules(0)), 45, 0)
    assert profile.watermark == 400 * MS  # the begin of the step
    process.settle([span(310, 390)], profile, NEVER)
    assert profile.watermark == 400 * MS
    edges = edges[1], Instant(500 * MS, 0)
    profile.add("cpu", HwType.CPU, Interval("cpu", *edges, Microjoules(0)), 5, 0)
    assert profile.watermark == 500 * MS
    assert profile.between(0, 500 * MS).energy == {HwType.CPU: 50, GPU: 5_000_000}


def test_blurred_steps_are_learned_together() -> None:
    model, profile = PowerModel(), EnergyProfile()
    process = ProcessSpans(steps=StepDivider(model, "process"))
    periods = 2 * ENOUGH_STEPS
    for start in range(1000, 1000 * periods, 1000):
        # 40 J of a span of 0.1 s appear in four steps; then there are three of nothing, and a gap.
        for i, energy in enumerate([10_000_000] * 4 + [0] * 3):
            add(profile, start + 100 * i, energy, noise=energy)
        process.settle([span(start + 150, start + 250)], profile, NEVER)
    span_power, rest = model.power(("gpu", ("s", "n"))), model.power(("gpu", "process"))
    assert span_power == pytest.approx(0.4, rel=0.05)  # kilowatts
    assert rest == pytest.approx(0, abs=0.01)


def test_long_blurred_periods_are_learned_in_parts() -> None:
    model, profile = PowerModel(), EnergyProfile()
    process = ProcessSpans(steps=StepDivider(model, "process"))
    for start in range(0, 60_000, 100):
        add(profile, start, 10_000_000, noise=9_000_000)
        process.settle([span(start, start + 100)], profile, NEVER)
    assert model.power(("gpu", ("s", "n"))) == pytest.approx(0.1, rel=0.01)


def test_counter_steps_begin_with_energy_and_are_limited() -> None:
    profile = EnergyProfile()
    add(profile, 0, 0)
    assert profile.counter_steps == {}
    for start in range(100, 100_000, 100):
        add(profile, start, 7)
    steps = profile.counter_steps["gpu"]
    assert 256 <= len(steps) <= 512
    assert steps[-1] == CounterStep(99_900 * MS, 100_000 * MS, 7, blurred=False)


def test_spans_without_gpu_energy_are_not_kept() -> None:
    model = PowerModel()
    profile = EnergyProfile()
    interval = Interval("cpu", Instant(0, 0), Instant(SECOND, 0), Microjoules(0))
    profile.add("cpu", HwType.CPU, interval, 1000, 0)
    process = ProcessSpans(steps=StepDivider(model, "process"))
    (result,) = process.settle([span(100, 200)], profile, NEVER)
    assert result.exclusive.keys() == {HwType.CPU}
    assert not len(model)


def test_memory_of_a_busy_process_is_bounded() -> None:
    model, profile = PowerModel(limit=8), EnergyProfile(64)
    process = ProcessSpans(steps=StepDivider(model, "process"))
    for start in range(0, 60_000, 100):
        add(profile, start, 1_000_000)
        batch = [span(start + 3 * i, start + 3 * i + 2, f"{start}") for i in range(4)]
        process.settle(batch, profile, NEVER)
    assert len(model) <= 8
    assert len(profile.rows.times) <= 64 + 16


def test_time_before_evenly_divided_spans_is_divided() -> None:
    model = PowerModel()
    profile, process = shaped(model)
    (even,) = process.settle([span(150, 260)], profile, NEVER)
    assert even.exclusive[GPU] == pytest.approx(1_100_003, rel=0.01)
    known(model, "process", n=300)
    (shared,) = process.settle([span(110, 140)], profile, NEVER)
    assert shared.exclusive[GPU] == pytest.approx(500_000, rel=0.02)
    assert profile.between(150 * MS, 260 * MS).energy == even.inclusive.energy
    assert profile.between(0, 500 * MS).energy[GPU] == 5 * 1_000_003


def test_divided_steps_leave_the_profile_within_its_limit() -> None:
    profile = EnergyProfile(16)
    for start in range(0, 1000, 100):
        add(profile, start, 1_000_000)
    process = ProcessSpans(steps=StepDivider(known(PowerModel(), "process", n=300), "process"))
    batch = [span(start + 20, start + 40) for start in range(0, 1000, 100)]
    process.settle(batch, profile, NEVER)
    assert len(profile.rows.times) <= 16
    assert profile.between(0, 1000 * MS).energy[GPU] == 10_000_000


def test_steps_with_too_many_spans_are_not_learned() -> None:
    model, profile = PowerModel(), EnergyProfile()
    process = ProcessSpans(steps=StepDivider(model, "process"))
    for start in range(0, 9000, 100):
        add(profile, start, 1_000_000)
        if start == 200:
            process.settle([span(0, 300) for _ in range(MAX_OPEN + 1)], profile, NEVER)
    process.settle([span(8800, 8850)], profile, NEVER)
    assert model.power(("gpu", ("s", "n"))) is None
    assert len(model) == 1  # the time outside of spans


def test_steps_of_an_absent_board_are_learned() -> None:
    model, profile = PowerModel(), EnergyProfile()
    process = ProcessSpans(steps=StepDivider(model, "process"))
    for start in range(0, 1000, 100):
        add(profile, start, 1_000_000)
    process.settle([span(100, 900)], profile, NEVER)
    for start in range(0, 20):
        edges = Instant(start * SECOND, 0), Instant((start + 1) * SECOND, 0)
        profile.add("cpu", HwType.CPU, Interval("cpu", *edges, Microjoules(0)), 1000, 0)
    process.settle([span(18_000, 18_100)], profile, NEVER)
    assert len(model) == 2
