"""The whole agent with slow, silent and missing destinations."""

from __future__ import annotations

import pytest
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.faults.targets import FAULTS, TargetStage
from testbed.fixtures import entered

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_root]

SHOWN = ("busy", "resets", "not known", "200 connections")
HERE = [fault for fault in FAULTS if any(word in fault.name for word in SHOWN)]


stage = entered(TargetStage, "module")


@pytest.mark.parametrize("fault", HERE, ids=of)
def test_agent_survives_fault(stage: TargetStage, fault: Fault) -> None:
    stands(stage, fault)
