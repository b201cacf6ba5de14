"""Max-min fair parts: nothing is lost, and no part is smaller for the sake of a larger one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.division import fair_parts


@given(wanted=st.lists(st.integers(0, 50), max_size=20), total=st.integers(0, 300))
def test_fair_parts_are_conserved_and_max_min_fair(wanted: list[int], total: int) -> None:
    parts = fair_parts(wanted, total)

    assert sum(parts) == min(total, sum(wanted))
    assert all(0 <= part <= most for part, most in zip(parts, wanted, strict=True))
    unsatisfied = [part for part, most in zip(parts, wanted, strict=True) if part < most]
    assert all(part >= max(parts) - 1 for part in unsatisfied)
