"""Numbers of instances that share the load of a tracked server."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.tuned import TRACKED

from wattspan.model import LoadFigures
from wattspan.tuning.decisions.load import bin_bound, load_bin
from wattspan.tuning.decisions.report import best_range, instance_ranges

assert TRACKED.load is not None
LOAD = TRACKED.load  # 11.3 requests in flight
PRESENT = 4


def test_ranges_are_those_of_the_loads_that_were_met() -> None:
    found = instance_ranges(LOAD, PRESENT)
    assert [(one.least, one.most) for one in found] == [(1, 1), (2, 2), (3, 5), (6, 11), (12, 22)]
    assert [one.change for one in found] == pytest.approx([-0.375, -0.25, 0.0, 0.375, 1.0])


def test_range_of_the_lowest_bin_has_no_end() -> None:
    lowest = replace(LOAD.bins[0], bin=0, bin_bound=1.0)
    (found,) = instance_ranges(replace(LOAD, bins=(lowest,)), 2)
    assert (found.least, found.most) == (23, None)


def test_bin_between_two_numbers_of_instances_is_left_out() -> None:
    highest = replace(LOAD.bins[0], bin=9, bin_bound=512.0)
    assert instance_ranges(replace(LOAD, bins=(highest,)), PRESENT) == []


def test_best_range_keeps_the_limits_certainly() -> None:
    found = instance_ranges(LOAD, PRESENT)
    best = best_range(found)
    assert (best.least, best.bin.bin) == (2, 5)  # one instance needs less, and misses the limits
    uncertain = [one._replace(bin=replace(one.bin, kept=None)) for one in found]
    assert best_range(uncertain) is None


def test_change_is_unknown_without_the_energy_of_the_present_load() -> None:
    bins = [replace(one, joules_per_token=None) if one.bin == 4 else one for one in LOAD.bins]
    found = instance_ranges(replace(LOAD, bins=tuple(bins)), PRESENT)
    assert {one.change for one in found} == {None}
    assert best_range(found) is None


def test_server_without_a_load_has_no_ranges() -> None:
    assert instance_ranges(LoadFigures(0.0, 0, 1.0, bins=LOAD.bins), 3) == []


@given(st.integers(1, 1600), st.integers(1, 500))
def test_each_number_of_instances_is_in_the_range_of_its_bin(eighths: int, instances: int) -> None:
    load = eighths / 8
    bins = tuple(replace(LOAD.bins[0], bin=n, bin_bound=2.0**n) for n in range(18))
    present = LoadFigures(load, load_bin(load), bin_bound(load_bin(load)), bins=bins)
    found = instance_ranges(present, instances)
    for number in (*range(1, 40), instances):
        (one,) = [
            one for one in found if one.least <= number and (one.most is None or number <= one.most)
        ]
        assert one.bin.bin == load_bin(load * instances / number)
