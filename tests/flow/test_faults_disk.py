"""The whole agent, while its disks are full and its store is held by somebody else."""

from __future__ import annotations

import pytest
from testbed.faults.disk import FAULTS, DiskStage
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.fixtures import entered

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_root]

ELSEWHERE = ("files", "overwritten")  # see test_files_export and test_bad_input
HERE = [fault for fault in FAULTS if not any(word in fault.name for word in ELSEWHERE)]


stage = entered(DiskStage, "module")


@pytest.mark.parametrize("fault", HERE, ids=of)
def test_agent_survives_fault(stage: DiskStage, fault: Fault) -> None:
    stands(stage, fault)
