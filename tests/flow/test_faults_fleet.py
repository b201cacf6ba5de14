"""The whole agent in a fleet, while its etcd is flooded, compacted, restarted, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testbed.faults.fleet import FAULTS, FleetStage
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_etcd]


@pytest.fixture(scope="module")
def stage() -> Iterator[FleetStage]:
    with FleetStage() as stage:
        yield stage


@pytest.mark.parametrize("fault", FAULTS, ids=of)
def test_agent_survives_fault(stage: FleetStage, fault: Fault) -> None:
    stands(stage, fault)
