"""The whole agent, while the disk that its state is on, or its spool, does not answer."""

from __future__ import annotations

import pytest
from testbed.faults.hanging import FAULTS, HangingStage
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.fixtures import entered

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_loop]


stage = entered(HangingStage, "module")


@pytest.mark.parametrize("fault", FAULTS, ids=of)
def test_agent_survives_fault(stage: HangingStage, fault: Fault) -> None:
    stands(stage, fault)
    assert not stage.lost, "spans that were kept did not arrive"
