"""Energy of spans against the truth of an emulated host: benchmarks/span_accuracy.py, a part of it.

The goals are for a quiet machine. The usual span is held to twice its goal, so that a failure is
caused by the agent and not by neighbours. What the error of the learned idle power causes is added:
how well that is learned depends on the other work of the machine, and is bounded by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import pytest
from testbed.spans.accuracy import (
    KINDS,
    LEARNED,
    PROFILE,
    Judged,
    after_learning,
    measure,
    neighbour,
    settle,
)
from testbed.spans.agent import SpanAgent
from testbed.spans.collector import Collector
from testbed.spans.workload import Edge, Mark, Trial, divided, trials

from wattspan.emulation.host import PROFILES

pytestmark = pytest.mark.alone

LENGTHS = (0.1, 1.0)
IDLE = PROFILES[PROFILE].law.package_idle / 1000  # watts


def at(time: int, span: int, *, opens: bool) -> Mark:
    return Mark(Edge(time / 1e9, opens, span), time, time, time)


def test_truth_divides_energy_among_innermost_open_spans() -> None:
    trial = Trial("made", 1.0, [], [-1, 0, -1], [])
    marks = [
        at(0, 0, opens=True),
        at(10, 1, opens=True),
        at(20, 2, opens=True),
        at(40, 1, opens=False),
        at(50, 0, opens=False),
        at(90, 2, opens=False),
    ]
    course = [0, 100, 300, 700, 800, 900]
    exclusive, inclusive = divided(trial, marks, course)
    # 0..10 the outer alone, 10..20 the inner, 20..40 inner and other, 40..50 outer and other.
    assert exclusive == [100 + 50, 200 + 200, 200 + 50 + 100]
    assert inclusive == [800, 600, 600]
    assert sum(exclusive) == course[-1] - course[0]


def test_trials_open_spans_before_closing_them() -> None:
    for trial in trials(KINDS, (0.1, 1.0), (2, 1), seed=5):
        for span, parent in enumerate(trial.parents):
            begin, end = (edge for edge in trial.edges if edge.span == span)
            assert begin.opens
            assert not end.opens
            assert 0 < begin.at < end.at < trial.load[-1][0]
            assert parent < span


def test_first_recurring_spans_of_each_length_are_not_judged() -> None:
    recurring = [
        {"kind": "recurring", "seconds": seconds, "number": number}
        for number in range(LEARNED + 2)
        for seconds in (0.1, 1.0)
    ]
    single = {"kind": "single", "seconds": 0.1}
    judged = list(after_learning([single, *recurring]))
    assert judged == [single, *recurring[-4:]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SpanAgent, Collector]]:
    with (
        Collector() as collector,
        SpanAgent(
            tmp_path_factory.mktemp("agent"),
            profile=PROFILE,
            emulation__counters="2ms",
            spans__forward=collector.url,
        ) as agent,
    ):
        settle(agent, collector)
        yield agent, collector


def package_joules(agent: SpanAgent) -> float:
    (joules,) = agent.samples("hw_energy_joules_total", hw_type="cpu")
    return joules


def of(judged: Sequence[Judged], device: str, kind: str, seconds: float) -> list[Judged]:
    return [one for one in judged if (one.device, one.kind, one.seconds) == (device, kind, seconds)]


def test_cpu_energy_of_spans_is_true(bench: tuple[SpanAgent, Collector]) -> None:
    agent, collector = bench
    repeats = {"single": (15, 6), "inside": (15, 6), "nested": (5, 2), "concurrent": (1, 1)}
    expected = 21 + 21 + 3 * 7 + 64 * 2

    def complaints() -> Iterator[str]:
        with neighbour(agent, None):
            joules, began = package_joules(agent), time.monotonic()
            judged = measure(agent, collector, gpu=None, repeats=repeats, lengths=LENGTHS)
            watts = (package_joules(agent) - joules) / (time.monotonic() - began)
        print(*judged, sep="\n")
        (learned,) = agent.samples("wattspan_idle_power_watts", hw_type="cpu")
        if abs(learned - IDLE) >= 0.015 * IDLE:
            yield f"the idle power is {learned} W instead of {IDLE} W"
        common = abs(learned - IDLE) / (watts - IDLE)  # of every span
        print(f"{learned} W at idle, {watts:.2f} W on average: {common:.3f} of every span")
        if len(judged) <= 0.95 * expected:  # some spans spend next to nothing
            yield f"{len(judged)} of {expected} spans were judged"
        if (outcomes := {one.outcome for one in judged}) != {"joined"}:
            yield f"not all are joined: {outcomes}"
        for kind in ("single", "inside"):
            for seconds, goal in ((0.1, 0.05), (1.0, 0.01)):
                errors = [abs(one.error) for one in of(judged, "cpu", kind, seconds)]
                if statistics.median(errors) >= 2 * goal + common:
                    yield f"{kind} spans of {seconds} s err by {sorted(errors)}"
        for kind in ("nested", "concurrent"):  # few trials, whose spans err together
            errors = [abs(one.inclusive_error) for one in of(judged, "cpu", kind, 1.0)]
            if statistics.median(errors) >= 0.06 + common:
                yield f"{kind} spans err by {sorted(errors)}"

    assert list(complaints()) == []


def test_gpu_span_energy_error_is_within_its_uncertainty(
    bench: tuple[SpanAgent, Collector],
) -> None:
    agent, collector = bench
    repeats = {"single": (15, 8), "inside": (15, 8)}

    def complaints() -> Iterator[str]:
        judged = [
            one
            for one in measure(agent, collector, gpu=0, repeats=repeats, lengths=LENGTHS, seed=4)
            if one.device == "gpu"
        ]
        print(*judged, sep="\n")
        if len(judged) != 46:
            yield f"{len(judged)} of 46 spans were judged"
        within = sum(one.within for one in judged)
        if within < 0.9 * len(judged):
            yield f"{within} of {len(judged)} spans are within what is stated"
        errors = [abs(one.inclusive_error) for one in judged if one.seconds == 1.0]
        if statistics.median(errors) >= 0.05:
            yield f"spans of a second err by {sorted(errors)}"

    assert list(complaints()) == []
