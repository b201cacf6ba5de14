"""Acceptance of learned idle powers beside equal devices, an earlier run and the possible range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.baseline import LearnedIdle, accept_idle
from wattspan.model import Milliwatts


def learned(
    watts: float, error: float = 2.0, *, observed: bool = False, load: float = 180.0
) -> LearnedIdle:
    power = Milliwatts(round(watts * 1000))
    return LearnedIdle(power, error * 1000, observed, load * 1000, load * 900)


LEARNED = st.builds(
    learned,
    st.floats(0, 300),
    st.floats(0, 50),
    observed=st.booleans(),
    load=st.floats(1, 400),
)


@pytest.mark.parametrize(
    ("own", "equals", "earlier", "firm", "above"),
    [
        (learned(62), [learned(60)], None, True, 0),
        (learned(62), [learned(50)], None, True, 0),
        (learned(25), [learned(62)], None, False, 39),
        (learned(0), [learned(62)], None, False, 162),
        (learned(0), [], None, False, 162),
        (learned(62), [learned(25)], None, False, 0),
        (learned(25), [], Milliwatts(62_000), False, 37),
        (learned(55), [], Milliwatts(62_000), True, 0),
        (learned(25, observed=True), [learned(62)], Milliwatts(62_000), True, 0),
        (learned(0.6, 0.1, load=20), [], None, True, 0),
    ],
    ids=[
        "equal",
        "somewhat less",
        "25 W beside 62 W",
        "0 W beside 62 W",
        "0 W alone",
        "62 W beside 25 W",
        "25 W after 62 W",
        "firmware",
        "at rest",
        "laptop",
    ],
)
def test_idle_power_that_contradicts_is_doubtful(
    own: LearnedIdle,
    equals: list[LearnedIdle],
    earlier: Milliwatts | None,
    firm: bool,
    above: int,
) -> None:
    accepted = accept_idle(own, equals, earlier)
    assert (accepted.firm, accepted.above) == (firm, above * 1000)
    assert accepted.error >= own.error


@given(LEARNED, st.lists(LEARNED, max_size=4), st.none() | st.integers(0, 300_000))
def test_range_includes_all_that_contradicts_and_is_never_narrower(
    own: LearnedIdle, equals: list[LearnedIdle], earlier: int | None
) -> None:
    known = None if earlier is None else Milliwatts(earlier)
    accepted = accept_idle(own, equals, known)
    assert accepted.error >= own.error
    assert 0 <= accepted.above <= accepted.error + 1
    if accepted.firm:
        assert accepted.above == 0
        others = [one.power for one in equals] + ([] if known is None else [known])
        slack = own.error + max((one.error for one in equals), default=0)
        for power in others if not own.observed else ():
            assert abs(power - own.power) <= slack + 0.25 * max(power, own.power) + 1
