"""Units of work in the output of a command, and the steady window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.frontier.work import (
    MIN_UNITS,
    Completion,
    OutputPattern,
    UnitSpan,
    last_window,
    parse_unit,
    steady_window,
)
from wattspan.model import SECOND
from wattspan.ports import ConfigError


def steps(count: int, seconds: float = 1.0, work: float = 1.0) -> list[Completion]:
    return [Completion(round((n + 1) * seconds * SECOND), work) for n in range(count)]


def test_match_without_a_group_is_one_unit() -> None:
    pattern = OutputPattern(r"stdout:^step \d+")
    assert pattern.work("step 7: loss 0.3") == 1.0
    assert pattern.work("no step 7") == 0.0


@pytest.mark.parametrize(
    ("line", "work"),
    [("samples=12", 12.0), ("samples=1.5e3", 1500.0), ("samples=", 0.0), ("samples=x", 0.0),
     ("samples=-4", 0.0), ("samples=1e999", 0.0), ("samples=nan", 0.0)],
)  # fmt: skip
def test_group_is_the_work_of_a_line(line: str, work: float) -> None:
    assert OutputPattern(r"stdout:samples=(\S*)").work(line) == work


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("step", "write stdout:REGEX"),
        ("span:", "name of the span is missing"),
        ("span::samples", "name of the span is missing"),
        ("stdout:(", "the expression is invalid"),
        ("stdout:(a)(b)", "one group"),
    ],
)
def test_invalid_unit_is_explained(text: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        parse_unit(text)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("span:train_step", UnitSpan("train_step")),
        ("span:POST /chat:gen_ai.usage.output_tokens",
         UnitSpan("POST /chat", "gen_ai.usage.output_tokens")),
        ("span:db:query:", UnitSpan("db:query")),
    ],
)  # fmt: skip
def test_span_unit_has_a_name_and_perhaps_an_attribute(text: str, unit: UnitSpan) -> None:
    assert parse_unit(text) == unit


def test_output_unit_is_a_pattern() -> None:
    pattern = parse_unit("stdout:step")
    assert isinstance(pattern, OutputPattern)
    assert pattern.work("step 3") == 1.0


def test_window_begins_after_the_warm_up_with_a_completion() -> None:
    window = steady_window(steps(20), 0, 5 * SECOND, 10 * SECOND)
    assert (window.start, window.end, window.work) == (5 * SECOND, 15 * SECOND, 10.0)
    assert window.seconds == 10.0


def test_window_of_slow_units_is_longer() -> None:
    window = steady_window(steps(9, seconds=7.0), 0, 0, 10 * SECOND)
    assert window.work == MIN_UNITS
    assert window.seconds == 21.0


def test_incomplete_window_is_none() -> None:
    assert steady_window(steps(12), 0, 5 * SECOND, 10 * SECOND) is None
    assert steady_window([], 0, 0, SECOND) is None


def test_ended_command_has_what_it_completed() -> None:
    window = last_window(steps(12), 0, 5 * SECOND)
    assert (window.seconds, window.work) == (7.0, 7.0)
    assert last_window(steps(9), 0, 5 * SECOND) is None  # shorter than the shortest window
    assert last_window(steps(5, seconds=4.0), 0, 9 * SECOND) is None  # too few units


@given(
    gaps=st.lists(st.integers(1, 3 * SECOND), min_size=1, max_size=60),
    warm_up=st.integers(0, 10 * SECOND),
    length=st.integers(1, 20 * SECOND),
)
def test_window_has_whole_units_only(gaps: list[int], warm_up: int, length: int) -> None:
    completions, now = [], 0
    for number, gap in enumerate(gaps):
        now += gap
        completions.append(Completion(now, float(number + 1)))
    window = steady_window(completions, 0, warm_up, length)
    if window is not None:
        assert window.start >= warm_up
        assert window.end - window.start >= length
        inside = [one.work for one in completions if window.start < one.at <= window.end]
        assert window.work == sum(inside)
        assert len(inside) >= MIN_UNITS
