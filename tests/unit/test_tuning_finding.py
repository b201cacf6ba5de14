"""Jobs are found by the shape of their spans."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from support.queueing import serve, trace
from wattspan.tuning import WorkloadKind
from wattspan.tuning.decisions.unit_detection import (
    MAX_NAMES,
    MIN_SPANS,
    DetectedUnit,
    DetectionResult,
    UnitDetector,
    UnitRejection,
    majority_result,
)

MS = 1_000_000
S = 1000 * MS

Span = tuple[str, int, int]


def looked_at(spans: Iterable[Span]) -> DetectionResult:
    """What is found in spans that come, as they do, in the order of their ends."""
    finder = UnitDetector()
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        finder.add(name, start, end)
    return finder.findings()


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


def test_the_outermost_repeated_span_of_a_training_loop_is_its_step() -> None:
    findings = looked_at(loop(100, *TRAINING))
    assert findings.found is not None
    assert findings.found.name == "train_step"
    assert findings.found.kind is WorkloadKind.STEPS
    assert findings.found.spans == 100
    assert findings.found.mean == pytest.approx(485 * MS, rel=0.01)
    assert findings.found.variation < 0.01
    assert findings.found.cover == pytest.approx(0.97, abs=0.01)
    assert findings.passed == {
        "forward": UnitRejection.NESTED,
        "backward": UnitRejection.NESTED,
        "optimizer": UnitRejection.NESTED,
        "log": UnitRejection.SHORT,
    }


def test_what_comes_once_around_everything_is_no_unit() -> None:
    run = [("fit", 0, 50 * S), ("epoch", 0, 25 * S), ("epoch", 25 * S, 50 * S)]
    findings = looked_at([*run, *loop(100, *TRAINING)])
    assert findings.found is not None
    assert findings.found.name == "train_step"
    assert findings.passed["fit"] is UnitRejection.RARE
    assert findings.passed["epoch"] is UnitRejection.RARE


def test_a_span_around_many_steps_is_too_long_a_unit() -> None:
    epochs = [("epoch", number * 70 * S, (number + 1) * 70 * S) for number in range(20)]
    findings = looked_at([*epochs, *loop(2800, *TRAINING)])
    assert findings.found is not None
    assert findings.found.name == "train_step"
    assert findings.passed["epoch"] is UnitRejection.LONG


def test_a_layer_is_not_taken_for_the_step_because_it_comes_often_sooner() -> None:
    """Eight micro-batches a step: after three steps they have come often, the step has not."""
    micro = [("micro", (1 + 400 * k) * MS, (399 + 400 * k) * MS) for k in range(8)]
    layers = [("train_step", 0, 3300 * MS), *micro]
    early = looked_at(loop(4, *layers, every=3400 * MS))
    assert early.found is None
    assert early.passed == {"train_step": UnitRejection.RARE, "micro": UnitRejection.RARE}
    later = looked_at(loop(MIN_SPANS, *layers, every=3400 * MS))
    assert later.found is not None
    assert later.found.name == "train_step"
    assert later.passed == {"micro": UnitRejection.NESTED}


def test_a_layer_of_only_some_steps_is_still_a_layer() -> None:
    steps = loop(100, *TRAINING)
    saves = loop(25, ("save", 100 * MS, 400 * MS), every=2 * S)
    findings = looked_at([*steps, *saves])
    assert findings.found is not None
    assert findings.found.name == "train_step"
    assert findings.passed["save"] is UnitRejection.NESTED


def test_what_comes_once_is_not_waited_for() -> None:
    findings = looked_at([("warm_up", 0, 5 * S), *loop(100, TRAINING[0])])
    assert findings.found is not None
    assert findings.found.name == "train_step"


def test_nothing_is_found_in_the_first_seconds() -> None:
    findings = looked_at(loop(400, ("step", 0, 9 * MS), every=10 * MS))
    assert findings == DetectionResult(None, {"step": UnitRejection.RARE})


def test_a_process_without_spans_has_no_unit() -> None:
    assert UnitDetector().findings() == DetectionResult(None, {})


def test_a_layer_that_also_comes_elsewhere_is_no_layer() -> None:
    """A forward pass in each evaluation, and in each step, which has no span of its own."""
    evaluations = loop(30, ("evaluate", 4490 * MS, 4990 * MS), every=5 * S)
    steps = loop(300, ("forward", 0, 450 * MS), every=500 * MS)
    findings = looked_at([*evaluations, *steps])
    assert findings.found is not None
    assert findings.found.name == "forward"


def test_a_server_is_found_by_spans_side_by_side() -> None:
    units = serve(trace(), 1000, lambda _: 1.0)
    spans: list[Span] = []
    for unit in units:
        spans.append(("POST /v1/chat", unit.start, unit.end))
        spans.append(("generate", unit.start + MS, unit.end - MS))
    findings = looked_at(spans)
    assert findings.found is not None
    assert findings.found.name == "POST /v1/chat"
    assert findings.found.kind is WorkloadKind.REQUESTS
    assert findings.found.cover > 0.9
    assert findings.passed == {"generate": UnitRejection.NESTED}


def test_equally_long_requests_side_by_side_are_no_steps() -> None:
    findings = looked_at(loop(100, ("embed", 0, 450 * MS), every=200 * MS))
    assert findings.found is not None
    assert findings.found.kind is WorkloadKind.REQUESTS
    assert findings.found.variation < 0.01


def test_requests_one_at_a_time_are_known_by_their_irregularity() -> None:
    chance = random.Random(2)
    spans, at = [], 0
    for _ in range(200):
        at += round(chance.expovariate(1) * S)
        spans.append(("handle", at, at := at + round(chance.expovariate(5) * S)))
    findings = looked_at(spans)
    assert findings.found is not None
    assert findings.found.kind is WorkloadKind.REQUESTS
    assert findings.found.variation > 0.5


def test_what_comes_like_clockwork_but_fills_little_time_is_no_unit() -> None:
    findings = looked_at(loop(100, ("scrape", 0, 30 * MS)))
    assert findings == DetectionResult(None, {"scrape": UnitRejection.SPARSE})


def test_of_two_that_would_do_the_one_that_fills_more_time_is_it() -> None:
    layers = [("generate", 0, 300 * MS), ("discriminate", 310 * MS, 490 * MS)]
    shorter = looked_at(loop(100, *layers, at=0))
    assert shorter.found is not None
    assert shorter.found.name == "generate"
    assert shorter.passed == {"discriminate": UnitRejection.SPARSE}

    chance = random.Random(3)
    kinds = {"embed": 2, "chat": 3}
    spans = []
    for name, seconds in kinds.items():
        for number in range(100):
            begin = number * S + chance.randrange(S)
            spans.append((name, begin, begin + round(chance.uniform(0.2, 2) * seconds * S)))
    findings = looked_at(spans)
    assert findings.found is not None
    assert findings.found.name == "chat"
    assert findings.passed == {"embed": UnitRejection.LESSER}


def test_many_short_requests_may_fill_more_time_than_a_few_long_ones() -> None:
    chance = random.Random(4)
    spans = []
    for second in range(200):
        for _ in range(4):
            begin = second * S + chance.randrange(S)
            spans.append(("short", begin, begin + 400 * MS))
        if second % 8 == 0:
            begin = second * S + chance.randrange(S)
            spans.append(("long", begin, begin + round(chance.expovariate(0.5) * S)))
    findings = looked_at(spans)
    assert findings.found is not None
    assert findings.found.name == "short"
    assert findings.passed == {"long": UnitRejection.LESSER}


def test_a_span_told_late_is_not_counted_twice() -> None:
    finder = UnitDetector()
    for number in range(MIN_SPANS):
        finder.add("step", number * S, number * S + 900 * MS)
    finder.add("step", 0, 900 * MS)
    finder.add("step", (MIN_SPANS - 1) * S, (MIN_SPANS - 1) * S + 900 * MS)
    found = finder.findings().found
    assert found is not None
    assert found.spans == MIN_SPANS + 2
    assert found.cover <= 0.91


def test_names_beyond_so_many_are_counted_and_left_alone() -> None:
    names = [(f"GET /{number}", number * MS, number * MS + MS) for number in range(MAX_NAMES + 5)]
    findings = looked_at(names)
    assert findings.crowded_out == 5
    assert len(findings.passed) == MAX_NAMES


# ---------------------------------------------------------------------------- several processes


def one(name: str, spans: int = 100, kind: WorkloadKind = WorkloadKind.STEPS) -> DetectionResult:
    return DetectionResult(DetectedUnit(name, kind, spans, 1e9, 0.1, 0.9), {})


def test_what_most_processes_of_a_service_do_is_what_it_does() -> None:
    findings = [
        one("step", 90),
        one("step", 100),
        one("step", 80),
        one("load"),
        DetectionResult(None, {}),
    ]
    assert majority_result(findings) == one("step", 100).found


def test_without_a_majority_nothing_is_agreed() -> None:
    assert majority_result([one("a"), one("b")]) is None
    assert majority_result([one("a"), one("a", kind=WorkloadKind.REQUESTS)]) is None
    assert majority_result([one("a"), DetectionResult(None, {})]) is None
    assert majority_result([DetectionResult(None, {})]) is None
    assert majority_result([]) is None
