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


@pytest.mark.parametrize(
    ("before", "same_process", "reset"),
    [
        (DevicePresence("a", 1, 7), True, False),
        (DevicePresence("", 1), True, False),
        (DevicePresence("b", 1, 7), True, True),
        (DevicePresence("a", 1, 8), True, True),
        (DevicePresence("a", 2, 7), True, True),
        (DevicePresence("a", 2, 7), False, False),
    ],
)
def test_device_was_reset_if_its_session_is_another_one(
    before: DevicePresence, same_process: bool, reset: bool
) -> None:
    now = DevicePresence("a", 1, 7)
    assert now.was_reset(before, same_process=same_process) is reset
