"""Totals by span name are conserved, monotonic and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.joined_spans import CPU, GPU, joined, moment

from wattspan.model import SpanAccounts, SpanRow
from wattspan.spans.aggregator import SpanAggregator, shortened_name
from wattspan.spans.values import Outcome, SpanEnergy

pytestmark = pytest.mark.slow

LIMIT = 3

names = st.sampled_from(["a", "b", "c", "d", "e", "f", "other", "", "x" * 200, "\ud800" * 130])
energies = st.dictionaries(st.sampled_from([CPU, GPU]), st.integers(0, 10**9), max_size=2)
spans = st.builds(
    joined,
    names,
    energies,
    service=st.sampled_from(["s", "other", "", "y" * 129]),
    start=st.integers(-(10**6), 100),
    end=st.integers(-(10**6), 100),
    tokens=st.tuples(st.integers(-10, 2**70), st.integers(-10, 2**70)),
    outcome=st.sampled_from(Outcome),
)
turns = st.lists(
    st.tuples(
        st.integers(0, 1000), st.lists(spans, max_size=12), st.dictionaries(names, st.integers(0))
    ),
    max_size=12,
)

Turns = list[tuple[int, list[SpanEnergy], dict[str, int]]]


@given(turns)
def test_energy_and_spans_are_conserved_for_any_names(turns: Turns) -> None:
    totals, now = SpanAggregator(LIMIT), 0
    told = {CPU: 0, GPU: 0}
    outside = count = 0
    for seconds, batch, beside in turns:
        now += seconds
        totals.add(batch, moment(now))
        count += len(batch)
        for result in batch:
            for kind, energy in result.exclusive.items():
                told[kind] += energy
        for service, energy in beside.items():
            totals.outside(service, CPU, energy)
            outside += energy
        shown = totals.accounts()
        for kind, energy in told.items():
            shown_here = sum(row.energy.get(kind, 0) for row in shown.rows)
            assert shown_here + totals.released.get(kind, 0) == energy
        assert sum(shown.outside.values()) == outside
        assert sum(shown.outcomes.values()) == count


@given(turns)
def test_rows_never_fall_and_are_limited(turns: Turns) -> None:
    totals, now = SpanAggregator(LIMIT), 0
    before, gone = SpanAccounts(), dict(totals.released)
    for seconds, batch, beside in turns:
        now += seconds
        totals.add(batch, moment(now))
        for service, energy in beside.items():
            totals.outside(service, CPU, energy)
        shown = totals.accounts()
        let_go, gone = totals.released != gone, dict(totals.released)
        assert len(shown.rows) <= LIMIT + 1
        assert len({(service, owner) for service, owner, _ in shown.outside}) <= LIMIT + 1
        old = {(row.service, row.name): row for row in before.rows}
        for row in shown.rows:
            assert max(len(row.service), len(row.name)) <= 128
            earlier = old.get((row.service, row.name))
            if earlier and sum(earlier.energy.values()) and not let_go:
                assert grew(earlier, row)  # otherwise it may have been removed and returned at zero
        assert all(shown.outside[key] >= energy for key, energy in before.outside.items())
        before = shown


@given(turns)
def test_rows_are_the_sums_over_their_spans(turns: Turns) -> None:
    totals = SpanAggregator(1000)
    sums: dict[tuple[str, str], list[int]] = {}
    for batch in (batch for _, batch, _ in turns):
        totals.add(batch, moment(0))
        for span, exclusive, inclusive, outcome, *_ in batch:
            measured = outcome in (Outcome.JOINED, Outcome.PARTIAL, Outcome.LATE)
            if not measured and not any(exclusive.values()):
                continue
            key = shortened_name(span.service), shortened_name(span.name)
            row = sums.setdefault(key, [0] * 6)
            row[0] += exclusive.get(CPU, 0)
            row[1] += exclusive.get(GPU, 0)
            if measured:
                length = span.end - span.start
                row[2] += 1
                row[3] += max(0, length if outcome is Outcome.JOINED else min(length, inclusive[2]))
                row[4] += max(0, min(10**7, span.tokens_in))
                row[5] += max(0, min(10**7, span.tokens_out))
    assert sums == {
        (row.service, row.name): [
            *(row.energy.get(kind, 0) for kind in (CPU, GPU)),
            row.count,
            row.time,
            *(row.tokens.get(way, 0) for way in ("input", "output")),
        ]
        for row in totals.accounts().rows
    }


def grew(earlier: SpanRow, later: SpanRow) -> bool:
    return (
        all(later.energy[kind] >= energy for kind, energy in earlier.energy.items())
        and later.count >= earlier.count
        and later.time >= earlier.time
        and all(later.tokens[way] >= tokens for way, tokens in earlier.tokens.items())
    )
