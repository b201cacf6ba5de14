"""Some attacks of the schedule, in short; `python -m benchmarks.hostile` runs all of them."""

from __future__ import annotations

import pytest
from testbed.fixtures import entered
from testbed.hostile import capping, intake
from testbed.hostile.schedule import Attack, Terms, judged
from testbed.hostile.stage import HostileStage

pytestmark = [pytest.mark.needs_root, pytest.mark.alone]

ATTACKS = [*intake.ATTACKS, *capping.ATTACKS]
SHORT = [
    "varints, HTTP",
    "fields in protobuf, gzip",
    "400 slow heads, metrics",
    "ceilings of the tuner's user",
]


stage = entered(HostileStage, "module")


@pytest.mark.parametrize(
    "attack", [one for one in ATTACKS if one.name in SHORT], ids=lambda one: one.name
)
def test_attack_is_withstood(stage: HostileStage, attack: Attack) -> None:
    assert list(judged(stage, attack, Terms(quick=True)).wrong) == []


def test_every_short_attack_is_in_the_schedule() -> None:
    assert set(SHORT) <= {one.name for one in ATTACKS}
