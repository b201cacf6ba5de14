"""The whole agent, while counters and GPUs fail: no spike, no fall, and well again in time.

Each fault is one of `python -m benchmarks.faults`, in short; docs/faults.md has the whole course.
"""

from __future__ import annotations

import pytest
from testbed.faults.hardware import AT_ONCE, COUNTERS, GPUS
from testbed.faults.schedule import Fault
from testbed.faults.short_run import of, stands
from testbed.faults.stage import Stage
from testbed.fixtures import entered

pytestmark = pytest.mark.exhaustive

HANG_LOSS_RESET = [fault for fault in GPUS if "driver" not in fault.name]


stage = entered(Stage, "module")


@pytest.mark.parametrize("fault", [*AT_ONCE, COUNTERS[-1], *HANG_LOSS_RESET], ids=of)
def test_agent_survives_fault(stage: Stage, fault: Fault) -> None:
    stands(stage, fault)


def test_killed_agent_loses_no_published_energy(stage: Stage) -> None:
    fault = next(one for one in COUNTERS if "backwards" in one.name)
    stands(stage, fault, restart=True)
