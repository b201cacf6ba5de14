"""The whole agent, while processes come and go faster than anybody can look."""

from __future__ import annotations

import pytest
from testbed.faults.processes import FAULTS, ROOM
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.faults.stage import Stage
from testbed.fixtures import entered

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_cc, pytest.mark.needs_root]


stage = entered(lambda: Stage(settings=ROOM), "module")


@pytest.mark.parametrize("fault", FAULTS, ids=of)
def test_agent_survives_fault(stage: Stage, fault: Fault) -> None:
    stands(stage, fault)
