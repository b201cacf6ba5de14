"""Limits that are in force, and devices that were reset."""

from __future__ import annotations

import pytest

from wattspan.model import CapKey, CapRow, DevicePresence, Knob, KnobState


@pytest.mark.parametrize(
    ("wanted", "ceiling", "requested", "reached"),
    [
        (None, None, 400_000, False),
        (500_000, None, 400_000, False),
        (400_000, None, None, True),
        (400_000, None, 500_000, False),
        (400_000, None, 400_000, True),
        (400_000, 300_000, 400_000, False),
        (400_000, 300_000, 300_000, True),
    ],
)
def test_row_reaches_a_limit_once_it_is_requested(
    wanted: int | None, ceiling: int | None, requested: int | None, reached: bool
) -> None:
    state = KnobState(CapKey(Knob.GPU_POWER, "gpu:0"), "GPU 0", requested=requested)
    assert CapRow(state, wanted=wanted, ceiling=ceiling).reaches(400_000) is reached


def test_device_was_reset_if_its_session_is_another_one() -> None:
    now = DevicePresence("a", 1, 7)
    assert not any(now.was_reset(one, same_process=True) for one in (now, DevicePresence("", 1)))
    for before in (now._replace(load="b"), now._replace(odometer=8)):
        assert now.was_reset(before, same_process=False)
    assert now.was_reset(now._replace(session=2), same_process=True)
    assert not now.was_reset(now._replace(session=2), same_process=False)
