"""Devices that [autotune] gpus permits: the tuner and the capper agree."""

from __future__ import annotations

from itertools import product

import pytest
from testbed.tuned_host import Host

from wattspan.model import (
    CapKey,
    CapRow,
    Domain,
    GpuStatus,
    HwType,
    Instant,
    Knob,
    KnobState,
    Provenance,
    Snapshot,
)
from wattspan.tuning.host_view import HostView

NOW = Instant(0, 0)
BOARDS = {
    "nvml": (("gpu:GPU-a", ("GPU-a", "0")), ("gpu:GPU-b", ("GPU-b", "1"))),
    "amdsmi": (
        ("gpu:0000:0c:00.0", ("0000:0c:00.0", "amd:0")),
        ("gpu:0000:60:00.0", ("0000:60:00.0", "amd:1")),
    ),
}
"""Domain ids of two boards, with the names that the actuators of their vendor give them."""
NAMES = ["0", "1", "amd:0", "amd:1", "*", "GPU-b", "gpu:GPU-b", "0000:60:00.0", "None", ""]


@pytest.mark.parametrize(
    ("source", "answers", "silent"), list(product(BOARDS, [True, False], [None, 0, 1]))
)
def test_tuner_permits_the_gpus_that_the_capper_permits(
    source: str, answers: bool, silent: int | None
) -> None:
    """``silent`` is a board without a status."""
    states = [
        KnobState(CapKey(Knob.GPU_POWER, device), f"Board {index}", aliases=aliases)
        for index, (device, aliases) in enumerate(BOARDS[source])
    ]
    found = [one.key.device for one in states]
    domains = {one: Domain(one, HwType.GPU, one, source, Provenance.MEASURED) for one in found}
    statuses = [GpuStatus(device, NOW, index=index) for index, device in enumerate(found)]
    host = Host()
    view = HostView(
        NOW,
        Snapshot(NOW, 1, "test", gpus=tuple(s for n, s in enumerate(statuses) if n != silent)),
        domains,
        host,
        host,
        host.device_users,
        {state.key: CapRow(state) for state in states} if answers else {},
    )
    for index, state in enumerate(states):
        if index == silent and not answers:
            assert not view.allowed(state.key.device, [state.aliases[1]])  # not known to be it
            continue
        assert {name for name in NAMES if view.allowed(state.key.device, [name])} == {
            name for name in NAMES if state.is_named([name])
        }
        if index != silent:
            assert view.display_name(state.key.device).startswith(f"GPU {state.aliases[1]} (")


def test_instance_of_a_permitted_board_is_permitted() -> None:
    board = Domain("gpu:GPU-a", HwType.GPU, "a", "nvml", Provenance.MEASURED)
    part = Domain("gpu:MIG-1", HwType.GPU, "b", "nvml", Provenance.ESTIMATED, parent=board.id)
    host = Host()
    domains = {one.id: one for one in (board, part)}
    view = HostView(NOW, Snapshot(NOW, 1, "test"), domains, host, host, host.device_users)
    assert view.allowed(part.id, ["GPU-a"])
    assert not view.allowed(part.id, ["GPU-b"])
