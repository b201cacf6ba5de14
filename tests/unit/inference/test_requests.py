"""Phases of requests from the latencies of their spans, and their work in a period."""

from __future__ import annotations

from itertools import pairwise

import pytest

from wattspan.inference.requests import InferenceRequest, work_in
from wattspan.inference.token_power import NO_WORK
from wattspan.model import MILLISECOND, SECOND
from wattspan.spans.values import InferenceDetails

S = SECOND


def _request(
    details: InferenceDetails, *, start: int = 10 * S, end: int = 20 * S, tokens=(100, 51)
) -> InferenceRequest:
    return InferenceRequest.of(b"r" * 8, start, end, tokens, details)


@pytest.mark.parametrize(
    ("details", "phases"),
    [
        (InferenceDetails(queue=2 * S, first_token=3 * S), (12 * S, 13 * S)),
        (InferenceDetails(first_token=3 * S), (10 * S, 13 * S)),
        (InferenceDetails(queue=2 * S, prefill=S), (12 * S, 13 * S)),
        (InferenceDetails(first_token=3 * S, prefill=S), (12 * S, 13 * S)),
        (InferenceDetails(prefill=S, decode=7 * S), (12 * S, 13 * S)),
        (InferenceDetails(decode=7 * S), (10 * S, 13 * S)),
        (InferenceDetails(queue=5 * S, first_token=3 * S), (13 * S, 13 * S)),
        (InferenceDetails(first_token=30 * S), (10 * S, 20 * S)),
        (InferenceDetails(decode=30 * S), (10 * S, 10 * S)),
    ],
)
def test_phases_follow_from_latencies(details: InferenceDetails, phases: tuple[int, int]) -> None:
    request = _request(details)

    assert (request.start, request.first, request.end) == (*phases, 20 * S)
    assert request.known_phases


@pytest.mark.parametrize("details", [InferenceDetails(), InferenceDetails(prefill=S)])
def test_phases_without_enough_latencies_are_the_whole_span(details: InferenceDetails) -> None:
    request = _request(details)

    assert not request.known_phases
    (work,) = work_in([([request], float)], 10 * S, 15 * S)[0]
    assert work.prefill == pytest.approx(50)
    assert work.decode == pytest.approx(25)


def test_request_without_latencies_but_a_queue_begins_after_it() -> None:
    request = _request(InferenceDetails(queue=2 * S))

    assert not request.known_phases
    assert (request.start, request.first) == (12 * S, 12 * S)


def test_cached_tokens_are_context_but_not_computed() -> None:
    request = _request(InferenceDetails(cached=60, queue=0, first_token=S))

    assert (request.prefill, request.context, request.decode) == (40, 100, 50)
    ((work,),) = work_in([([request], float)], 10 * S, 20 * S)
    assert work.prefill == pytest.approx(40)
    assert work.attention == pytest.approx(40 * (60 + 20))
    assert work.decode == pytest.approx(50)
    assert work.context == pytest.approx(50 * (100 + 1 + 25))


def test_impossible_token_counts_are_limited() -> None:
    request = _request(InferenceDetails(cached=200), tokens=(100, 0))

    assert (request.prefill, request.decode) == (0, 0)


def test_work_of_periods_adds_up_to_all_tokens() -> None:
    request = _request(InferenceDetails(queue=S, first_token=2 * S))
    edges = [10 * S + i * 700 * MILLISECOND for i in range(20)]

    works = [work_in([([request], float)], a, b)[0][0] for a, b in pairwise(edges)]

    total = NO_WORK
    for work in works:
        total = total.plus(work)
    ((whole,),) = work_in([([request], float)], 0, 30 * S)
    assert total == pytest.approx(whole)
    assert total.active == pytest.approx(9)


def test_phases_without_duration_belong_to_one_period() -> None:
    request = _request(InferenceDetails(first_token=0), start=10 * S, end=10 * S)

    before, at, after = (
        work_in([([request], float)], 10 * S + a, 10 * S + b)[0][0]
        for a, b in ((-2 * S, -S), (-S, 0), (0, S))
    )

    assert (before.prefill, at.prefill, after.prefill) == (0, 100, 0)


def test_request_outside_of_the_period_has_no_work() -> None:
    request = _request(InferenceDetails(first_token=S))

    assert work_in([([request], float)], 30 * S, 31 * S) == [[NO_WORK]]


def test_decode_follows_the_clock_of_the_engine() -> None:
    request = _request(InferenceDetails(first_token=0))

    def clock(time: int) -> float:  # nothing before 15 s, even progress after it
        return float(max(0, time - 15 * S))

    before, after = (
        work_in([([request], clock)], a, b)[0][0] for a, b in ((10 * S, 15 * S), (15 * S, 20 * S))
    )

    assert before.decode == 0
    assert after.decode == pytest.approx(50)


def test_common_time_and_iterations_are_divided_equally() -> None:
    one = _request(InferenceDetails(first_token=0), tokens=(1, 101))
    other = one._replace(id=b"o" * 8, start=15 * S, first=15 * S, decode=50)

    ((first, second),) = work_in([([one, other], float)], 10 * S, 20 * S)

    assert first.active == pytest.approx(5 + 2.5)
    assert second.active == pytest.approx(2.5)
    # Ten iterations a second, those of the second half for both.
    assert first.iterations + second.iterations == pytest.approx(100, rel=0.01)
    assert second.iterations == pytest.approx(25)


def test_common_time_is_divided_equally_among_engines() -> None:
    one = _request(InferenceDetails(first_token=0))
    others = [one._replace(id=bytes([i]) * 8) for i in range(4)]

    (alone,), crowd = work_in([([one], float), (others, float)], 10 * S, 20 * S)

    assert alone.active == pytest.approx(5)
    assert [each.active for each in crowd] == pytest.approx([1.25] * 4)
