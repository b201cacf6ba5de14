"""The whole agent, while clocks are set, the host sleeps, and programs are stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testbed.faults.clocks import STOPPED, WALL, clock_that_can_be_set
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.faults.stage import Stage

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_cc]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    environ = clock_that_can_be_set(tmp_path_factory.mktemp("clock"))
    with Stage(environ=environ) as stage:
        yield stage


@pytest.mark.parametrize("fault", [*STOPPED, *WALL], ids=of)
def test_agent_survives_fault(stage: Stage, fault: Fault) -> None:
    stands(stage, fault)
