"""Engines on common boards: whose work is known, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest
from testbed.engine_pages import VLLM, page

from wattspan.inference.engine_metrics import EngineReading, Figure, read_page
from wattspan.model import SECOND, Consumer
from wattspan.service.engine_neighbours import GONE, EngineNeighbours

OWN, OTHER = frozenset({Consumer(1, 1)}), frozenset({Consumer(2, 2)})
BOARDS = frozenset({"g0"})


def _page(tokens: int) -> EngineReading:
    return read_page(page(VLLM, "m", generated=tokens))


def _pair(**other: Any) -> EngineNeighbours:
    neighbours = EngineNeighbours()
    for label, place in (
        ("a", ("alice", OWN, BOARDS)),
        (
            "b",
            (
                other.get("owner", "alice"),
                other.get("members", OTHER),
                other.get("boards", BOARDS),
            ),
        ),
    ):
        neighbours.place(label, *place)
        for second in (0, 5):
            neighbours.add(label, second * SECOND, _page(10 * second))
    return neighbours


def test_work_of_an_engine_beside_is_that_between_readings_of_the_same_moments() -> None:
    neighbours = _pair()
    assert neighbours.members("a") == OTHER
    ((label, done),) = neighbours.work("a", SECOND // 4, 5 * SECOND)
    assert (label, done.figures[Figure.OUTPUT]) == ("b", 50)
    assert neighbours.work("a", 2 * SECOND, 5 * SECOND) == ()


@pytest.mark.parametrize(
    "other",
    [{"owner": "bob"}, {"boards": frozenset({"g0", "g1"})}, {"members": OWN}, {"boards": ()}],
)
def test_engine_of_another_owner_or_on_other_boards_is_none(other: dict[str, Any]) -> None:
    neighbours = _pair(**other)
    assert neighbours.members("a") == frozenset()
    assert neighbours.work("a", 0, 5 * SECOND) == ()
    assert not neighbours.late("a", 100 * SECOND)


def test_engine_without_a_reading_of_the_moment_is_waited_for() -> None:
    neighbours = _pair()
    assert not neighbours.late("a", 5 * SECOND)
    assert neighbours.late("a", 10 * SECOND)


def test_engine_without_readings_for_a_while_is_no_neighbour() -> None:
    neighbours = _pair()
    neighbours.add("a", 5 * SECOND + GONE, _page(0))
    assert neighbours.members("a") == frozenset()


def test_counters_that_fell_are_no_work() -> None:
    neighbours = _pair()
    neighbours.add("b", 10 * SECOND, _page(0))
    assert neighbours.work("a", 5 * SECOND, 10 * SECOND) == ()


def test_removed_or_unknown_engine_is_no_neighbour() -> None:
    neighbours = _pair()
    neighbours.remove("b")
    neighbours.remove("b")
    assert neighbours.members("a") == neighbours.members("c") == frozenset()
