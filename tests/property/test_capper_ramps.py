"""Power limits change within the ramp in every period, for any cause of a change."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from testbed.capper_bench import Bench, W

from wattspan.capper.planner import ImposedLimits, OperatorLimits
from wattspan.model import SECOND, CapKey

BOARDS = 3
LIMITS = st.integers(200, 700).map(lambda watts: watts * W)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["impose", "lift", "hold"]),
        st.integers(0, BOARDS - 1),
        LIMITS,
        st.floats(0.05, 3),
        st.integers(1, 6),
    ),
    max_size=12,
)


@given(STEPS, st.integers(1, 300).map(lambda watts: watts * W))
def test_limits_rise_and_fall_within_the_ramp_in_any_period(
    steps: list[tuple[str, int, int, float, int]], ramp: int
) -> None:
    changes: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        limits = OperatorLimits(0.0, 0, 1.0, longest_lease=10**6 * SECOND, ramp=ramp)
        bench = Bench(Path(folder), boards=BOARDS, limits=limits)

        def note(key: CapKey, value: int | None) -> None:
            board = bench.actuator.boards[key.device]
            changes.append((bench.clock.monotonic(), (value or board.maximum) - board.stands))

        bench.actuator.watch = note
        imposed: dict[CapKey, int] = {}
        for what, number, value, seconds, turns in steps:
            key = bench.key(number)
            if what == "hold":
                bench.hold(value, number, job=f"job{number}")
            else:
                imposed = {k: v for k, v in imposed.items() if k != key}
                imposed |= {key: value} if what == "impose" else {}
                bench.manager.impose(ImposedLimits(fixed=imposed))
            for _ in range(turns):
                bench.turn(seconds)
    for first, (begin, _) in enumerate(changes):
        ups = downs = 0
        for at, change in changes[first:]:
            ups, downs = ups + max(change, 0), downs + max(-change, 0)
            assert max(ups, downs) * SECOND <= ramp * (at - begin + SECOND)
