"""The whole agent in a fleet, while its etcd is flooded, compacted, restarted, or refuses it."""

from __future__ import annotations

import pytest
from testbed.faults.fleet import FAULTS, FleetStage
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.fixtures import entered

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_etcd]


stage = entered(FleetStage, "module")


@pytest.mark.parametrize("fault", FAULTS, ids=of)
def test_agent_survives_fault(stage: FleetStage, fault: Fault) -> None:
    stands(stage, fault)
