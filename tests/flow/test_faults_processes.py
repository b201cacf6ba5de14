"""The whole agent, while processes come and go faster than anybody can look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testbed.faults.processes import FAULTS, ROOM
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.faults.stage import Stage

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_cc, pytest.mark.needs_root]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(settings=ROOM) as stage:
        yield stage


@pytest.mark.parametrize("fault", FAULTS, ids=of)
def test_agent_survives_fault(stage: Stage, fault: Fault) -> None:
    stands(stage, fault)
