"""Agents ended at any moment, and the remaining files and processes."""

from __future__ import annotations

import pytest
from testbed.faults.ends import SHORT, STOP_LIMIT, end_after
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.faults.stage import Stage
from testbed.fixtures import entered

pytestmark = pytest.mark.exhaustive


stage = entered(Stage, "module")


@pytest.mark.parametrize("fault", SHORT, ids=of)
def test_agent_survives_fault(stage: Stage, fault: Fault) -> None:
    stands(stage, fault)


@pytest.mark.parametrize("after", [0.0, 0.15, 0.4, 0.8, 1.2, 1.8])
def test_agent_stopped_during_start_leaves_no_files(after: float) -> None:
    end = end_after(after)
    assert end.wrong == []
    assert end.took < STOP_LIMIT


def test_agent_stopped_while_capping_restores_every_limit() -> None:
    end = end_after(0.0, capping=True)
    assert end.capped
    assert end.wrong == []
    assert end.took < STOP_LIMIT
