"""Requests to an emulated host that are no objects."""

from __future__ import annotations

import pytest

from wattspan.emulation.engine import HostEngine


@pytest.mark.parametrize("line", ["5", "null", '"truth"', "[]", "{}", '{"do": []}', "{"])
def test_request_that_is_no_question_is_answered_with_an_error(line: str) -> None:
    engine = HostEngine.__new__(HostEngine)
    engine._answers = {}
    assert engine.answer(1, line).keys() == {"error"}
