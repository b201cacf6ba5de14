"""Detection of the unit of work from names and times of spans."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from testbed.queueing import serve, trace

from wattspan.tuning.decisions.unit_detection import (
    MAX_NAMES,
    MIN_SPANS,
    DetectedUnit,
    DetectionResult,
    UnitDetector,
    majority_result,
)
from wattspan.tuning.decisions.values import WorkloadKind

MS = 1_000_000
S = 1000 * MS

Span = tuple[str, int, int]


def detected(spans: Iterable[Span]) -> DetectionResult:
    """The result for spans in the order of their ends."""
    detector = UnitDetector()
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        detector.add(name, start, end)
    return detector.result()


def loop(
    steps: int, *layers: tuple[str, int, int], at: int = 0, every: int = 500 * MS
) -> Iterator[Span]:
    """So many rounds of the layers, each with its begin and end within a round."""
    chance = random.Random(1)
    for step in range(steps):
        begin = at + step * every
        for name, start, end in layers:
            yield name, begin + start, begin + end + chance.randrange(MS // 100)


TRAINING = [
    ("train_step", 5 * MS, 490 * MS),
    ("forward", 10 * MS, 160 * MS),
    ("backward", 160 * MS, 400 * MS),
    ("optimizer", 400 * MS, 480 * MS),
    ("log", 480 * MS, 480 * MS + 100_000),
]


def test_unit_of_a_training_loop_is_its_outermost_repeated_span() -> None:
    result = detected(loop(100, *TRAINING))
    assert result.found.name == "train_step"
    assert result.found.kind is WorkloadKind.STEPS
    assert result.found.spans == 100
    assert result.found.mean == pytest.approx(485 * MS, rel=0.01)
    assert result.found.variation < 0.01
    assert result.found.cover == pytest.approx(0.97, abs=0.01)


def test_span_around_all_steps_is_rare() -> None:
    run = [("fit", 0, 50 * S), ("epoch", 0, 25 * S), ("epoch", 25 * S, 50 * S)]
    result = detected([*run, *loop(100, *TRAINING)])
    assert result.found.name == "train_step"
    assert result.rare == {"fit", "epoch"}


def test_span_longer_than_the_limit_is_no_unit() -> None:
    epochs = [("epoch", number * 70 * S, (number + 1) * 70 * S) for number in range(20)]
    result = detected([*epochs, *loop(2800, *TRAINING)])
    assert result.found.name == "train_step"
    assert not result.rare


def test_layer_is_not_chosen_before_its_step_is_frequent() -> None:
    """Eight micro-batches a step: after three steps they have come often, the step has not."""
    micro = [("micro", (1 + 400 * k) * MS, (399 + 400 * k) * MS) for k in range(8)]
    layers = [("train_step", 0, 3300 * MS), *micro]
    early = detected(loop(4, *layers, every=3400 * MS))
    assert early.found is None
    assert early.rare == {"train_step", "micro"}
    later = detected(loop(MIN_SPANS, *layers, every=3400 * MS))
    assert later.found.name == "train_step"


def test_layer_of_some_steps_is_no_unit() -> None:
    steps = loop(100, *TRAINING)
    saves = loop(25, ("save", 100 * MS, 400 * MS), every=2 * S)
    result = detected([*steps, *saves])
    assert result.found.name == "train_step"


def test_single_span_does_not_delay_the_result() -> None:
    result = detected([("warm_up", 0, 5 * S), *loop(100, TRAINING[0])])
    assert result.found.name == "train_step"


def test_detection_has_no_result_in_the_first_seconds() -> None:
    result = detected(loop(400, ("step", 0, 9 * MS), every=10 * MS))
    assert result == DetectionResult(None, frozenset({"step"}))


def test_detection_has_no_result_without_spans() -> None:
    assert UnitDetector().result() == DetectionResult(None)


def test_name_that_also_occurs_outside_of_another_is_a_unit() -> None:
    """A forward pass in each evaluation, and in each step, which has no span of its own."""
    evaluations = loop(30, ("evaluate", 4490 * MS, 4990 * MS), every=5 * S)
    steps = loop(300, ("forward", 0, 450 * MS), every=500 * MS)
    result = detected([*evaluations, *steps])
    assert result.found.name == "forward"


def test_concurrent_spans_are_requests() -> None:
    units = serve(trace(), 1000, lambda _: 1.0)
    spans: list[Span] = []
    for unit in units:
        spans.append(("POST /v1/chat", unit.start, unit.end))
        spans.append(("generate", unit.start + MS, unit.end - MS))
    result = detected(spans)
    assert result.found.name == "POST /v1/chat"
    assert result.found.kind is WorkloadKind.REQUESTS
    assert result.found.cover > 0.9


def test_concurrent_spans_of_equal_duration_are_requests() -> None:
    result = detected(loop(100, ("embed", 0, 450 * MS), every=200 * MS))
    assert result.found.kind is WorkloadKind.REQUESTS
    assert result.found.variation < 0.01


def test_sequential_spans_of_varying_duration_are_requests() -> None:
    chance = random.Random(2)
    spans, at = [], 0
    for _ in range(200):
        at += round(chance.expovariate(1) * S)
        spans.append(("handle", at, at := at + round(chance.expovariate(5) * S)))
    result = detected(spans)
    assert result.found.kind is WorkloadKind.REQUESTS
    assert result.found.variation > 0.5


def test_regular_span_with_little_coverage_is_no_unit() -> None:
    result = detected(loop(100, ("scrape", 0, 30 * MS)))
    assert result == DetectionResult(None)


def test_unit_is_the_candidate_with_the_most_time() -> None:
    layers = [("generate", 0, 300 * MS), ("discriminate", 310 * MS, 490 * MS)]
    shorter = detected(loop(100, *layers, at=0))
    assert shorter.found.name == "generate"

    chance = random.Random(3)
    kinds = {"embed": 2, "chat": 3}
    spans = []
    for name, seconds in kinds.items():
        for number in range(100):
            begin = number * S + chance.randrange(S)
            spans.append((name, begin, begin + round(chance.uniform(0.2, 2) * seconds * S)))
    result = detected(spans)
    assert result.found.name == "chat"


def test_short_frequent_requests_can_have_the_most_time() -> None:
    chance = random.Random(4)
    spans = []
    for second in range(200):
        for _ in range(4):
            begin = second * S + chance.randrange(S)
            spans.append(("short", begin, begin + 400 * MS))
        if second % 8 == 0:
            begin = second * S + chance.randrange(S)
            spans.append(("long", begin, begin + round(chance.expovariate(0.5) * S)))
    result = detected(spans)
    assert result.found.name == "short"


def test_span_that_arrives_late_is_not_covered_twice() -> None:
    detector = UnitDetector()
    for number in range(MIN_SPANS):
        detector.add("step", number * S, number * S + 900 * MS)
    detector.add("step", 0, 900 * MS)
    detector.add("step", (MIN_SPANS - 1) * S, (MIN_SPANS - 1) * S + 900 * MS)
    found = detector.result().found
    assert found.spans == MIN_SPANS + 2
    assert found.cover <= 0.91


def test_names_beyond_the_limit_are_ignored() -> None:
    names = [(f"GET /{number}", number * MS, number * MS + MS) for number in range(MAX_NAMES + 5)]
    assert len(detected(names).rare) == MAX_NAMES


# ---------------------------------------------------------------------------- several processes


def one(name: str, spans: int = 100, kind: WorkloadKind = WorkloadKind.STEPS) -> DetectedUnit:
    return DetectedUnit(name, kind, spans, 1e9, 0.1, 0.9)


def test_majority_result_is_the_unit_of_most_processes() -> None:
    units = [one("step", 90), one("step", 100), one("step", 80), one("load"), None]
    assert majority_result(units) == one("step", 100)


def test_majority_result_is_none_without_a_majority() -> None:
    assert majority_result([one("a"), one("b")]) is None
    assert majority_result([one("a"), one("a", kind=WorkloadKind.REQUESTS)]) is None
    assert majority_result([one("a"), None]) is None
    assert majority_result([None]) is None
    assert majority_result([]) is None
