"""The whole agent, while the disk that its state is on, or its spool, does not answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testbed.faults.hanging import FAULTS, HangingStage
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_loop]


@pytest.fixture(scope="module")
def stage() -> Iterator[HangingStage]:
    with HangingStage() as stage:
        yield stage


@pytest.mark.parametrize("fault", FAULTS, ids=of)
def test_agent_survives_fault(stage: HangingStage, fault: Fault) -> None:
    stands(stage, fault)
    assert not stage.lost, "spans that were kept did not arrive"
