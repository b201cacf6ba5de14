"""Spans and their energies by column."""

from __future__ import annotations

from testbed.joined_spans import CPU, GPU, joined

from wattspan.spans.values import (
    Outcome,
    RequestEnergies,
    Span,
    SpanColumns,
    SpanEnergy,
    SpanEnergyColumns,
    TokenRole,
)

SPANS = [
    Span(bytes(16), ident.to_bytes(8), b"", "shop", f"n{ident}", ident, 2 * ident)
    for ident in range(4)
]


def test_columns_return_their_rows() -> None:
    columns = SpanColumns.of(SPANS)
    assert list(columns) == SPANS
    assert columns[-1] == SPANS[-1]
    assert list(columns[1:3]) == SPANS[1:3]
    assert list(columns.end) == [0, 2, 4, 6]
    assert len(SpanColumns.of([])) == 0
    assert columns.replaced(end=columns.start)[1].end == 1


def test_columns_of_columns_are_the_same_object() -> None:
    columns = SpanColumns.of(SPANS)
    assert SpanColumns.of(columns) is columns
    energies = SpanEnergyColumns.of([joined("a", {CPU: 1})])
    assert SpanEnergyColumns.of(energies) is energies
    request = RequestEnergies.of([None, energies[0]])
    assert RequestEnergies.of(request) is request
    assert [request[0], request[1]] == [None, energies[0]]


def test_joined_columns_are_in_the_order_of_their_parts() -> None:
    parts = [SpanColumns.of(SPANS[:1]), SpanColumns.of([]), SpanColumns.of(SPANS[1:])]
    assert list(SpanColumns.joined(parts)) == SPANS
    assert SpanColumns.joined(parts[:1]) is parts[0]


def rows(*energies: dict[object, int]) -> list[SpanEnergy]:
    return [joined("a", each) for each in energies]  # type: ignore[arg-type]


def test_energies_return_their_rows() -> None:
    for case in (
        rows({CPU: 1, GPU: 2}, {CPU: 3, GPU: 4}),
        rows({CPU: 1}, {GPU: 2}, {}),
        rows({}, {}),
        [],
    ):
        columns = SpanEnergyColumns.of(case)
        assert list(columns) == case
        assert [columns[i] for i in range(len(columns))] == case
        assert list(columns[:1]) == case[:1]


def test_unknown_energies_are_zero_in_their_column() -> None:
    columns = SpanEnergyColumns.of(rows({CPU: 1}, {GPU: 2}))
    assert {kind: list(column) for kind, column in columns.exclusive.items()} == {
        CPU: [1, 0],
        GPU: [0, 2],
    }
    assert columns.known == [(CPU,), (GPU,)]


def test_joined_energies_with_a_missing_part_are_partial() -> None:
    spans = [
        joined("before", {CPU: 1}, start=1, end=3),
        joined("after", {CPU: 1}, start=2, end=3),
        joined("nothing", {}, start=1, end=3, outcome=Outcome.NO_ENERGY),
    ]
    energies = SpanEnergyColumns.of(spans).missing_before(spans[1].span.start)
    assert energies.outcome == [Outcome.PARTIAL, Outcome.JOINED, Outcome.NO_ENERGY]
    assert [
        one._replace(outcome=two.outcome) for one, two in zip(energies, spans, strict=True)
    ] == spans


def test_only_engines_and_plain_applications_are_no_callers() -> None:
    assert [one for one in TokenRole if not one.is_call] == [TokenRole.ENGINE, TokenRole.PLAIN]
