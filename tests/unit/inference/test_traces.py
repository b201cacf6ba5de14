"""The spans of a trace whose tokens count: links, roles, owners and bounds."""

from __future__ import annotations

from itertools import permutations
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.inference.traces import MAX_SPANS, SpanPlace, TokenTraces
from wattspan.model import Principal
from wattspan.spans.values import InferenceDetails, Span, SpanColumns, TokenRole

ALICE, BOB = Principal(1000), Principal(1001)
TRACE = b"t" * 16


def _id(number: int) -> bytes:
    return number.to_bytes(8) if number else b""


def _span(
    number: int, parent: int = 0, tokens: int = 0, start: int = 0, end: int = 1, trace: int = 0
) -> Span:
    own = trace.to_bytes(16) if trace else TRACE
    return Span(own, _id(number), _id(parent), "s", "n", start, end, None, tokens, 0)


def _add(
    traces: TokenTraces, *spans: Span, owner: Principal = ALICE, role: TokenRole = TokenRole.CALL
) -> set[int]:
    found = traces.add(owner, SpanColumns.of([one._replace(role=role) for one in spans]))
    return {int.from_bytes(each.id) for each in found}


def _repeated(traces: TokenTraces, number: int, owner: Principal = ALICE) -> bool:
    return traces.is_repeated(owner, SpanPlace(TRACE, _id(number)))


def test_outer_span_is_repeated_whatever_the_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0], [0, 2, 1], [2, 0, 1]):
        traces = TokenTraces()
        spans = [_span(1, 0, 10), _span(2, 1), _span(3, 2, 10)]
        for at in order:
            _add(traces, spans[at])
        # A span without tokens is kept once its trace has a span with tokens.
        assert _repeated(traces, 1) == (order[0] != 1)
        assert not _repeated(traces, 3)


def test_received_spans_that_become_outer_are_returned() -> None:
    traces = TokenTraces()
    assert _add(traces, _span(1, 0, 10), _span(2, 1)) == set()
    assert _add(traces, _span(3, 2, 10)) == {1}
    assert _add(traces, _span(4, 2, 10)) == set()
    assert traces.has_inner(ALICE, SpanPlace(TRACE, _id(1)))
    assert traces.has_outer(ALICE, SpanPlace(TRACE, _id(3)))
    assert _add(traces, _span(9, 3, 10), _span(8, trace=7)) == {3}
    assert not traces.has_inner(ALICE, SpanPlace(b"u" * 16, _id(1)))


def test_call_in_a_tool_has_no_tokens_of_the_call_around_the_tool() -> None:
    agent, tool = _span(1, 0, 30), _span(3, 2)
    for order in permutations([agent, _span(2, 1, 20), tool, _span(4, 3), _span(5, 4, 10)]):
        traces, found = TokenTraces(), set[int]()
        _add(traces, _span(99, 0, 1))  # so that the trace is known
        for one in order:
            role = TokenRole.AGGREGATE if one in (agent, tool) else TokenRole.CALL
            found |= _add(traces, one, role=role)
        assert found <= {1}
        assert [number for number in range(1, 6) if _repeated(traces, number)] == [1, 3, 4]
        assert _add(traces, _span(6, 2, 20)) == {2}  # the client's span of the call
        assert _repeated(traces, 2)


def test_link_that_arrives_last_shows_the_outer_span() -> None:
    traces = TokenTraces()
    _add(traces, _span(3, 2, 10))
    _add(traces, _span(1, 0, 10))
    assert not _repeated(traces, 1)
    assert _add(traces, _span(2, 1)) == {1}


def test_span_that_is_its_own_ancestor_ends_nothing() -> None:
    traces = TokenTraces()
    _add(traces, _span(1, 1, 10))
    assert not _repeated(traces, 1)
    _add(traces, _span(2, 3, 10), _span(3, 2, 10))
    assert _repeated(traces, 2)


def test_spans_of_other_principals_change_nothing() -> None:
    traces = TokenTraces()
    _add(traces, _span(1, 0, 10))
    assert _add(traces, _span(2, 1, 10), owner=BOB) == set()
    assert not _repeated(traces, 1)
    assert not _repeated(traces, 9, BOB)
    container = Principal(1000, "c")
    assert _add(traces, _span(2, 1, 10), owner=container) == set()


def test_spans_without_tokens_are_not_kept() -> None:
    traces = TokenTraces()
    assert _add(traces, _span(1)) == set()
    _add(traces, _span(2, 0, 1))
    assert _add(traces, _span(3, trace=7)) == set()
    assert not _repeated(traces, 3)


def test_roles_decide_without_links() -> None:
    cases = [
        (TokenRole.AGGREGATE, TokenRole.CALL, True),
        (TokenRole.AGGREGATE, TokenRole.AGGREGATE, False),
        (TokenRole.CLIENT, TokenRole.ENGINE, True),
        (TokenRole.CLIENT, TokenRole.SERVER, True),
        (TokenRole.SERVER, TokenRole.ENGINE, True),
        (TokenRole.CLIENT, TokenRole.CLIENT, False),
        (TokenRole.ENGINE, TokenRole.CLIENT, False),
        (TokenRole.CALL, TokenRole.CLIENT, False),
    ]
    for outer, inner, repeated in cases:
        traces = TokenTraces()
        _add(traces, _span(1, 0, 10, 0, 100), role=outer)
        _add(traces, _span(2, 77, 10, 5, 100), role=inner)
        assert _repeated(traces, 1) == repeated, (outer, inner)
        assert not _repeated(traces, 2)


def test_known_ancestors_decide_before_roles() -> None:
    traces = TokenTraces()
    _add(traces, _span(1, 9, 10, 0, 100), role=TokenRole.AGGREGATE)
    _add(traces, _span(2, 3, 10, 5, 90), _span(3, 9), _span(9))
    assert not _repeated(traces, 1)
    assert not _repeated(traces, 1)  # the second answer is remembered


def test_chain_deeper_than_the_limit_counts_as_unknown() -> None:
    traces = TokenTraces()
    _add(traces, _span(1, 0, 10, 0, 100), role=TokenRole.AGGREGATE)
    _add(traces, *(_span(n, n + 1 if n < 200 else 0, 10 * (n == 2), 5, 90) for n in range(2, 201)))
    assert _repeated(traces, 1)


def test_memory_is_bounded_by_owner() -> None:
    traces = TokenTraces()
    _add(traces, _span(1, 0, 10), _span(2, 1, 10))
    assert _repeated(traces, 1)
    for trace in range(1, 4):
        _add(traces, *(_span(n, 0, 10, trace=trace) for n in range(1, MAX_SPANS // 2)))
    assert not _repeated(traces, 1)  # its trace was forgotten


@pytest.mark.exhaustive
def test_flood_of_an_owner_forgets_no_trace_of_another() -> None:
    flood = [_span(n, 0, 10, trace=n) for n in range(1, MAX_SPANS)]
    victim, greedy = Principal(1000, "victim"), Principal(1000, "greedy")
    for owner, other in ((BOB, ALICE), (greedy, victim)):
        traces = TokenTraces()
        _add(traces, _span(1, 0, 10), _span(2, 1, 10), owner=other)
        for _ in range(2):
            _add(traces, *flood, owner=owner)
        assert _repeated(traces, 1, other)


def test_trace_beyond_the_limit_is_forgotten_with_its_owner() -> None:
    traces = TokenTraces()
    _add(traces, _span(1, 0, 10), _span(2, 1, 10), owner=BOB)
    _add(traces, _span(1, 0, 10), _span(2, 1, 10), *(_span(n) for n in range(3, MAX_SPANS + 2)))
    assert not _repeated(traces, 1)
    assert _repeated(traces, 1, BOB)
    _add(traces, _span(1, 0, 10), _span(2, 1, 10))
    assert _repeated(traces, 1)


def test_many_owners_keep_their_traces() -> None:
    owners = [Principal(None, pod=str(number)) for number in range(200)]
    traces = TokenTraces()
    for owner in owners:
        _add(traces, _span(1, 0, 10), _span(2, 1, 10), owner=owner)
    assert all(_repeated(traces, 1, owner) for owner in owners)


def test_span_sent_with_ever_new_parents_has_one_outer_span() -> None:
    traces = TokenTraces()
    _add(traces, _span(1, 2, 10))
    for parent in range(3, 100):
        _add(traces, _span(1, parent, 10))
    repeated = [number for number in range(1, 100) if _repeated(traces, number)]
    assert repeated == [2]


OUTER = Span(
    TRACE, _id(1), b"", "s", "ChatOpenAI", 0, 10, None, 1200, 80,
    TokenRole.CALL, InferenceDetails("gpt-4o"), scope="langchain",
)  # fmt: skip
INNER = OUTER._replace(
    trace=b"u" * 16, id=_id(2), name="chat", start=1, end=9, scope="openai",
    inference=InferenceDetails("gpt-4o-2024-08-06"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("outer", "inner", "repeated"),
    [
        ({}, {}, True),
        ({}, {"trace": TRACE}, True),
        ({"parent": _id(7)}, {"trace": TRACE, "parent": _id(7)}, True),
        ({"parent": _id(7)}, {"trace": TRACE, "parent": _id(8)}, True),  # 8 may be above 7
        ({}, {"trace": TRACE, "parent": _id(8)}, False),
        ({}, {"parent": _id(8)}, False),
        ({}, {"role": TokenRole.CLIENT}, True),
        ({}, {"role": TokenRole.PLAIN}, False),
        ({"scope": ""}, {}, True),
        ({"scope": ""}, {"name": "ChatOpenAI"}, False),
        ({}, {"scope": "langchain"}, False),
        ({}, {"inference": None}, False),
        ({}, {"inference": InferenceDetails("gpt-4o-mini")}, False),
        ({}, {"inference": InferenceDetails("gpt-4o")}, True),
        ({}, {"inference": InferenceDetails("gpt-4")}, False),
        ({}, {"inference": InferenceDetails("o3")}, False),
        ({}, {"tokens_in": 1201}, False),
        ({}, {"start": 0}, False),
        ({}, {"end": 10}, False),
    ],
)
def test_call_repeats_an_equal_one_of_another_instrumentation(
    outer: dict[str, object], inner: dict[str, object], repeated: bool
) -> None:
    pair = [OUTER._replace(**outer), INNER._replace(**inner)]
    for order in (pair, pair[::-1]):
        traces = TokenTraces()
        found = {one.id for span in order for one in traces.add(ALICE, SpanColumns.of([span]), 1)}
        assert found == ({OUTER.id} if repeated else set())
        assert _repeated(traces, 1) == repeated
        traces = TokenTraces()
        for sender, span in enumerate(order):
            assert not traces.add(ALICE, SpanColumns.of([span]), sender)


@pytest.mark.parametrize("other", [(BOB, 1), (ALICE, 2)])
def test_calls_of_others_forget_no_call_of_a_process(other: tuple[Principal, int]) -> None:
    for first, second in ((OUTER, INNER), (INNER, OUTER)):
        traces, (owner, process) = TokenTraces(), other
        traces.add(ALICE, SpanColumns.of([first]), 1)
        flood = [
            INNER._replace(trace=n.to_bytes(16), id=_id(n), tokens_in=n) for n in range(100, 1000)
        ]
        traces.add(owner, SpanColumns.of(flood), process)
        assert {one.id for one in traces.add(ALICE, SpanColumns.of([second]), 1)} == {OUTER.id}


def test_call_whose_tokens_are_in_another_span_repeats_no_further_one() -> None:
    traces, inside = TokenTraces(), OUTER._replace(id=_id(3), parent=OUTER.id, start=2, end=3)
    assert traces.add(ALICE, SpanColumns.of([OUTER, inside]), 1)
    assert not traces.add(ALICE, SpanColumns.of([INNER]), 1)


@pytest.mark.parametrize(("innermost", "calls"), [("a", 2), ("c", 1)])
def test_span_between_two_of_one_instrumentation_repeats_one_of_them(
    innermost: str, calls: int
) -> None:
    within = [("a", 0, 9), ("b", 1, 8), (innermost, 2, 7)]
    spans = [
        OUTER._replace(trace=n.to_bytes(16), id=_id(n), scope=scope, start=start, end=end)
        for n, (scope, start, end) in enumerate(within, 1)
    ]
    for order in permutations(spans):
        traces = TokenTraces()
        repeated = [traces.add(ALICE, SpanColumns.of([span])) for span in order]
        assert len(spans) - sum(map(len, repeated)) == calls


def test_call_of_a_trace_that_was_forgotten_and_returned_is_recognised() -> None:
    traces = TokenTraces()
    traces.add(ALICE, SpanColumns.of([OUTER]), 1)
    others = [_span(n, tokens=1, trace=n) for n in range(10, MAX_SPANS + 20)]
    _add(traces, *others, role=TokenRole.PLAIN)
    found = traces.add(ALICE, SpanColumns.of([INNER._replace(trace=TRACE)]), 1)
    assert {one.id for one in found} == {OUTER.id}


def test_cost_of_calls_within_each_other_is_bounded() -> None:
    took = []
    for count in (2000, 8000):
        nested = [
            OUTER._replace(
                id=_id(n), scope=str(n), start=-n, end=n, inference=InferenceDetails(f"m{n}")
            )
            for n in range(1, count + 1)
        ]
        columns, times = SpanColumns.of(nested), list[float]()
        for _ in range(3):  # other programs slow a short one down, and never make it faster
            began = process_time()
            assert not TokenTraces().add(ALICE, columns)
            times.append(process_time() - began)
        took.append(min(times))
    assert took[1] < 3 * took[0]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 9)), max_size=12), st.data()
)
def test_each_call_is_repeated_at_most_once(
    calls: list[tuple[bool, int, int]], data: st.DataObject
) -> None:
    """Calls with equal tokens and random times; those of one instrumentation all count."""
    spans = [
        OUTER._replace(
            trace=n.to_bytes(16), id=_id(n), scope=str(scope), start=start, end=start + length
        )
        for n, (scope, start, length) in enumerate(calls, 1)
    ]
    traces, repeated = TokenTraces(), 0
    for span in [*data.draw(st.permutations(spans)), *spans]:  # and all again
        repeated += len(traces.add(ALICE, SpanColumns.of([span])))
    by_scope = [sum(scope is one for scope, _, _ in calls) for one in (False, True)]
    assert len(calls) - repeated >= max(by_scope)


@given(st.integers(1, 20), st.integers(1, 30))
def test_concurrent_calls_of_two_instrumentations_count_once(count: int, length: int) -> None:
    spans = [
        span._replace(
            trace=(2 * n + at).to_bytes(16),
            id=_id(2 * n + at),
            start=span.start + 2 * n,
            end=span.end + length + 2 * n,
        )
        for n in range(1, count + 1)
        for at, span in enumerate((OUTER, INNER))
    ]
    for order in (spans, spans[::-1]):
        traces = TokenTraces()
        found = [one.id for span in order for one in traces.add(ALICE, SpanColumns.of([span]))]
        assert sorted(found) == [_id(2 * n) for n in range(1, count + 1)]
    assert len(TokenTraces().add(ALICE, SpanColumns.of(spans))) == count


@given(st.data())
def test_linked_spans_with_tokens_count_unless_a_descendant_has_tokens(data: st.DataObject) -> None:
    """The truth walks a whole tree; the spans arrive in any order and any requests."""
    count = data.draw(st.integers(1, 12))
    parents = {n: data.draw(st.integers(0, n - 1)) for n in range(1, count + 1)}
    tokens = {n: data.draw(st.booleans()) for n in parents}
    traces = TokenTraces()
    # A first span with tokens, so that the trace is known.
    _add(traces, _span(99, 0, 1))
    left = data.draw(st.permutations(list(parents)))
    while left:
        size = data.draw(st.integers(1, len(left)))
        _add(traces, *(_span(n, parents[n], 5 * tokens[n], 0, 1) for n in left[:size]))
        left = left[size:]

    def has_tokens_below(number: int) -> bool:
        return any(
            tokens[child] or has_tokens_below(child)
            for child, parent in parents.items()
            if parent == number
        )

    for number in parents:
        assert _repeated(traces, number) == has_tokens_below(number)
