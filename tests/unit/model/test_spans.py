"""Rows of spans and of requests."""

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import EngineRow, Microjoules, former_engines
from wattspan.model.spans import MAX_FORMER_ENGINES


def test_engines_of_one_name_differ_by_model_and_owner() -> None:
    keys = {EngineRow("chat", model, owner).key for model in ("a", "b") for owner in ("", "u")}
    assert len(keys) == 4
    assert EngineRow("chat", "a", "u").key == ("chat", "a", "u")


def test_all_rows_of_engines_that_are_not_configured_are_kept() -> None:
    rows = [EngineRow(name, model, "") for name in ("chat", "embed") for model in ("a", "b")]
    assert former_engines(rows, ["chat"]) == tuple(rows[2:])
    assert former_engines(rows, []) == tuple(rows)
    assert former_engines((), ["chat"]) == ()


def test_kept_engines_are_those_that_were_configured_last() -> None:
    rows: tuple[EngineRow, ...] = ()
    for number in range(MAX_FORMER_ENGINES + 9):
        name = f"engine-{number:03}"
        rows = (EngineRow(name, "a", ""), EngineRow(name, "b", ""), *former_engines(rows, [name]))
    kept = former_engines(rows, [])
    assert len(kept) == 2 * MAX_FORMER_ENGINES
    assert {row.engine for row in kept} == {f"engine-{n:03}" for n in range(9, 73)}


@given(st.lists(st.sets(st.sampled_from("abcde")), max_size=12))
def test_engine_that_is_configured_again_has_its_totals(runs: list[set[str]]) -> None:
    rows: tuple[EngineRow, ...] = ()
    expected = dict.fromkeys("abcde", 0)
    for configured in runs:
        own = {row.engine: row.energy or 0 for row in rows if row.engine in configured}
        former = former_engines(rows, configured)
        for name in configured:
            expected[name] += 1
            own[name] = own.get(name, 0) + 1
        rows = (*(EngineRow(name, "", "", Microjoules(one)) for name, one in own.items()), *former)
    assert {row.engine: row.energy for row in rows} == {k: n for k, n in expected.items() if n}
