"""A measurement may be disturbed; a wrong one is wrong every time."""

from __future__ import annotations

import pytest
from testbed.repeated import TRIES, holds_once


def test_one_measurement_without_complaints_is_enough() -> None:
    told = iter([["late"], []])
    holds_once(lambda: next(told))
    assert next(told, None) is None


def test_persistent_failure_reports_every_message() -> None:
    told = iter([f"wrong {number}"] for number in range(TRIES))
    with pytest.raises(AssertionError, match=r"1: wrong 0\n.*2: wrong 1\n.*3: wrong 2"):
        holds_once(lambda: next(told))
    assert next(told, None) is None
