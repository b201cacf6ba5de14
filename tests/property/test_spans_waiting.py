"""Spans that are open beside others, for random spans of one thread and of several."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.spans.values import Span, SpanColumns
from wattspan.spans.waiting_spans import SpanOverlaps

Times = list[tuple[int, int]]


def spans(times: Times, parents: list[int]) -> SpanColumns:
    """Spans in the order of their ends; their numbers, and those of their parents, from 1 on."""
    made = [
        Span(bytes(16), (n + 1).to_bytes(8), parent.to_bytes(8) if parent else b"", "s", "n", *each)
        for n, (each, parent) in enumerate(zip(times, parents, strict=True))
    ]
    return SpanColumns.of(sorted(made, key=lambda one: one.end))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=12))
def test_spans_without_parents_are_beside_others_if_two_have_common_time(drawn: Times) -> None:
    times = [(start, start + length) for start, length in drawn]
    common = any(
        max(one[0], other[0]) < min(one[1], other[1]) for one, other in combinations(times, 2)
    )
    assert SpanOverlaps().add(spans(times, [0] * len(times))) is common


@given(st.lists(st.sampled_from(["begin", "end"]), max_size=40), st.integers(1, 40))
def test_spans_of_one_thread_are_beside_no_others(calls: list[str], size: int) -> None:
    """Nested calls, one event a second, exported in batches once they have ended."""
    times: Times = []
    parents: list[int] = []
    around: list[int] = []
    for at, call in enumerate([*calls, *["end"] * len(calls)]):
        now = at * 10**9
        if call == "begin":
            times.append((now, now))
            parents.append(around[-1] + 1 if around else 0)
            around.append(len(times) - 1)
        elif around:
            start, _ = times[around[-1]]
            times[around.pop()] = (start, now)
    overlaps, rows = SpanOverlaps(), list(spans(times, parents))
    batches = [rows[at : at + size] for at in range(0, len(rows), size)]
    assert not any(overlaps.add(SpanColumns.of(batch)) for batch in batches)
