"""The whole agent, while descriptors and memory run out."""

from __future__ import annotations

import pytest
from testbed.faults.limits import FAULTS, LimitStage
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.fixtures import entered

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_root]


stage = entered(LimitStage, "module")


@pytest.mark.parametrize("fault", FAULTS, ids=of)
def test_agent_survives_fault(stage: LimitStage, fault: Fault) -> None:
    stands(stage, fault)
