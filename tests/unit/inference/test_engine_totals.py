"""Energy between readings of a page, and totals that continue from an earlier run."""

from __future__ import annotations

from dataclasses import replace

from wattspan.inference.engine_metrics import PAGES, Figure, Progress
from wattspan.inference.engine_totals import (
    MAX_ROWS,
    UNUSED_INTERVALS,
    CounterEnergy,
    EngineTotals,
    ModelTotals,
    ProcessStep,
)
from wattspan.model import EngineRow, HostRequests

STEPS = [ProcessStep(0, 10, 101, 4.0), ProcessStep(10, 20, 50), ProcessStep(30, 40, 7, known=False)]
DONE = Progress(PAGES[0], {Figure.INPUT: 30.0, Figure.OUTPUT: 7.0, Figure.REQUESTS: 2.0})


def _counter() -> CounterEnergy:
    counter = CounterEnergy()
    counter.add(STEPS)
    return counter


def test_step_with_a_reading_is_divided_by_time() -> None:
    counter = _counter()
    assert counter.between(0, 5) == (50, 2.0, 0)
    assert counter.between(5, 15) == (51 + 25, 2.0, 0)
    assert counter.between(15, 25) == (25, 5 * 50 / 10, 5)


def test_time_without_a_step_is_part_of_the_uncertainty() -> None:
    counter = CounterEnergy()
    counter.add([ProcessStep(0, 100, 1000, 5.0), ProcessStep(110, 200, 1800)])
    assert counter.between(0, 200) == (2800, 5 + 10 * 20, 10)


def test_step_with_an_unknown_part_counts_as_missing() -> None:
    assert _counter().between(30, 40) == (7, 7.0, 10)


def test_step_of_a_time_is_found() -> None:
    counter = _counter()
    assert counter.at(10) == STEPS[1]
    assert counter.at(25) is None


def test_counter_is_used_once_it_has_energy() -> None:
    counter = CounterEnergy()
    counter.add([ProcessStep(0, 10, 0)])
    assert not counter.used
    counter.add(STEPS[1:])
    assert counter.used
    assert counter.until == 40


def test_steps_before_the_last_reading_are_forgotten() -> None:
    counter = _counter()
    counter.trim(20)
    assert [*counter.steps] == STEPS[1:]


def test_totals_count_known_energy_of_the_host_apart() -> None:
    totals = EngineTotals(EngineRow("chat", "m", "ann"))
    totals.add(100, DONE, {"gpu": 100, "cpu": 20})
    totals.add(50, DONE, None)
    row = totals.row()
    assert row.key == ("chat", "m", "ann")
    assert (row.energy, row.tokens, row.requests) == (150, {"input": 60, "output": 14}, 4)
    assert row.host == HostRequests(
        {"gpu": 100, "cpu": 20},
        {"input": 30, "output": 7},
        2,
        counts={"gpu": (2, 7), "cpu": (2, 7)},
    )


def test_totals_continue_from_an_earlier_row() -> None:
    first, whole = (EngineTotals(EngineRow("chat", "m", "ann")) for _ in range(2))
    first.add(100, DONE, {"gpu": 100, "cpu": 20})
    later = EngineTotals(replace(first.row(), idle=0.5))
    assert later.row() == first.row()
    for one in (later, whole):
        one.add(7, DONE, {"gpu": 7, "cpu": 1})
    whole.add(100, DONE, {"gpu": 100, "cpu": 20})
    assert later.row() == whole.row()


def test_each_part_counts_the_requests_that_have_it() -> None:
    totals = EngineTotals(EngineRow("chat", "m", "ann"))
    totals.add(1, DONE, {"gpu": 1, "cpu": 1})
    totals.add(1, DONE, {"gpu": 1, "cpu": 1, "memory": 0})
    assert totals.row().host.counts == {"gpu": (4, 14), "cpu": (4, 14), "memory": (2, 7)}


def test_requests_that_an_engine_does_not_count_are_unknown() -> None:
    totals = EngineTotals(EngineRow("chat", "m", "ann"))
    totals.add(100, Progress(PAGES[0], {Figure.OUTPUT: 7.0}), {"gpu": 100, "cpu": 20})
    row = totals.row()
    assert row.requests is None
    assert (row.host.requests, row.host.tokens) == (0, {"output": 7})


# ------------------------------------------------------------------------- several models


def _done(**output: int) -> Progress:
    """The work of some models of one page."""
    parts = [
        Progress(PAGES[0], {Figure.OUTPUT: float(count), Figure.REQUESTS: 1.0}, model=name)
        for name, count in output.items()
    ]
    if len(parts) == 1:
        return parts[0]
    figures = {Figure.OUTPUT: float(sum(output.values())), Figure.REQUESTS: float(len(parts))}
    return Progress(PAGES[0], figures, models=tuple(parts))


def test_models_of_one_page_have_tokens_and_one_row_has_their_energy() -> None:
    totals = ModelTotals("chat")
    assert totals.add("ann", 100, _done(a=30, b=50), {"gpu": 100, "cpu": 20}) == ("", "ann")
    assert totals.add("ann", 10, _done(a=7), None) == ("", "ann")
    rows = totals.rows()
    whole, first, second = (rows[name, "ann"] for name in ("", "a", "b"))
    assert (whole.energy, whole.tokens, whole.requests) == (110, {}, None)
    none = {"gpu": (0, 0), "cpu": (0, 0)}
    assert whole.host == HostRequests({"gpu": 100, "cpu": 20}, {}, 0, counts=none)
    assert (first.energy, first.tokens, first.requests) == (None, {"output": 37}, 2)
    assert first.host == HostRequests({}, {"output": 30}, 1)
    assert (second.energy, second.tokens, second.requests) == (None, {"output": 50}, 1)


def test_model_that_was_alone_keeps_its_tokens_beside_others() -> None:
    totals = ModelTotals("chat")
    assert totals.add("ann", 100, _done(a=30), {"gpu": 100, "cpu": 20}) == ("a", "ann")
    totals.add("ann", 10, _done(a=7, b=5), {"gpu": 10, "cpu": 2})
    later = ModelTotals("chat", [*totals.rows().values(), EngineRow("other", "a", "ann")])
    assert later.rows() == totals.rows()
    later.add("ann", 1, _done(a=1), None)
    rows = later.rows()
    assert rows["", "ann"].energy == 111
    assert rows["", "ann"].host.energy == {"gpu": 110, "cpu": 22}
    assert rows["a", "ann"].energy is None
    assert rows["a", "ann"].tokens == {"output": 38}


def test_part_without_a_model_is_in_the_row_of_the_energy() -> None:
    totals = ModelTotals("chat")
    totals.add("ann", 10, _done(**{"": 7, "b": 5}), None)
    row = totals.rows()["", "ann"]
    assert (row.energy, row.tokens) == (10, {"output": 7})


def test_models_of_one_page_are_bounded() -> None:
    totals = ModelTotals("chat")
    totals.add("ann", 10, _done(**{f"m{n}": 5 for n in range(2 * MAX_ROWS)}), None)
    rows = totals.rows()
    assert len(rows) == MAX_ROWS + 1
    assert rows["other", ""].tokens == {"output": 5 * (MAX_ROWS + 1)}
    assert rows["", "ann"].energy == 10


def test_row_of_several_models_takes_their_energy_once() -> None:
    totals = ModelTotals("chat", [EngineRow("chat", "other", "ann", 7)])
    totals.add("ann", 100, _done(a=30), {"gpu": 100, "cpu": 20})
    totals.add("ann", 50, _done(c=3), {"gpu": 50, "cpu": 5})
    totals.add("bob", 9, _done(a=1), None)
    totals.add("ann", 10, _done(a=7, b=5), None)
    rows = totals.rows()
    assert [rows[name, "ann"].energy for name in ("", "a", "b", "c")] == [160, None, None, None]
    assert rows["", "ann"].host.energy == {"gpu": 150, "cpu": 25}
    assert (rows["a", "bob"].energy, rows["other", "ann"].energy) == (9, 7)

    restored = [*rows.values(), EngineRow("chat", "z", "ann", 1000)]  # of a former version
    later = ModelTotals("chat", restored)
    for done in (_done(z=1), _done(z=1, a=1)):
        assert later.add("ann", 1, done, None) == ("", "ann")
    assert later.rows()["", "ann"].energy == 162
    assert later.rows()["z", "ann"].energy == 1000


def test_row_that_is_unused_longest_gives_its_place_to_a_new_model() -> None:
    totals = ModelTotals("chat", [EngineRow("chat", "old", "ann", 3, {"output": 2}, 1)])
    for number in range(MAX_ROWS - 1):
        totals.add("ann", 10, _done(**{f"m{number}": 5}), {"gpu": 10, "cpu": 1})
    assert totals.add("ann", 10, _done(new=5), {"gpu": 10, "cpu": 1}) == ("other", "")
    for _ in range(UNUSED_INTERVALS):
        totals.add("ann", 1, _done(m1=1), None)
    before = totals.rows()

    assert totals.add("ann", 0, _done(n1=0), None) == ("n1", "ann")
    assert totals.add("ann", 0, _done(n2=0), None) == ("n2", "ann")
    rows = totals.rows()
    assert before.keys() - rows.keys() == {("old", "ann"), ("m0", "ann")}
    assert ("m0", "ann") not in totals
    assert len(rows) == MAX_ROWS + 1
    for figure in ("energy", "requests"):
        own, former = (
            sum(getattr(row, figure) for row in each.values()) for each in (rows, before)
        )
        assert own == former + (2 if figure == "requests" else 0)
    other = rows["other", ""]
    assert other.tokens == {"output": 5 + 2 + 5}
    counts = {"gpu": (2, 10), "cpu": (2, 10)}
    assert other.host == HostRequests({"gpu": 20, "cpu": 2}, {"output": 10}, 2, counts=counts)


def test_row_without_energy_adds_none_to_the_others() -> None:
    models = [EngineRow("chat", f"m{n}", "ann", None, {"output": 1}) for n in range(MAX_ROWS)]
    totals = ModelTotals("chat", models)
    for _ in range(UNUSED_INTERVALS + 1):
        totals.add("ann", 1, _done(m1=1), None)
    row = totals.rows()["other", ""]
    assert (row.tokens, row.requests) == ({"output": 1}, None)
    assert totals.rows()["", "ann"].energy == 2
    assert row.energy == UNUSED_INTERVALS - 1
