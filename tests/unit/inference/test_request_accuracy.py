"""Accuracy of the energy of requests, in virtual time."""

from __future__ import annotations

import statistics

import pytest
from testbed.serving_engines import errors, pair, quantile, run, single

from wattspan.inference.division import DivisionMethod


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "speed", "count"), [(1, 0.075, 200), (4, 0.28, 400), (16, 0.9, 900)]
)
def test_error_of_requests_is_small(slots: int, speed: float, count: int) -> None:
    result = run(single(slots, speed, count))

    learned = [o for o in result.outcomes if o.found.method is DivisionMethod.MODEL]
    assert len(learned) > count / 2
    assert quantile(errors(learned), 0.95) <= 0.10
    assert abs(statistics.fmean(errors(learned))) <= 0.02
    assert result.remainder == 0
    assert quantile(errors(learned, "whole"), 0.95) > quantile(errors(learned), 0.95)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_models_on_two_boards_are_kept_apart() -> None:
    result = run(pair(400, 0.9, ("gpu-0", "gpu-1")))

    assert max(map(abs, result.by_model.values())) < 0.001
    assert result.remainder == 0
