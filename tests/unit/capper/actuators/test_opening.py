"""Which actuators a host gets."""

from __future__ import annotations

from pathlib import Path

from testbed.fake_actuators import KnobNvml
from testbed.fake_nvml import FakeGpu

from wattspan.capper.devices import open_actuators
from wattspan.emulation.powercap_tree import LAYOUTS, PowercapTree
from wattspan.model import Knob
from wattspan.testing import ManualClock

CLOCK = ManualClock()


def test_requested_actuators_open_in_fixed_order(tmp_path: Path) -> None:
    PowercapTree(tmp_path, LAYOUTS["client"], cpus=1).close()
    nvml = KnobNvml(CLOCK, FakeGpu("GPU-a"))
    found = open_actuators(set(Knob), nvml=nvml, sysfs=tmp_path, clock=CLOCK)
    assert [actuator.knob for actuator in found] == list(Knob)
    assert nvml.calls == []  # no write happened


def test_unrequested_actuator_is_not_opened() -> None:
    nvml = KnobNvml(CLOCK, FakeGpu("GPU-a"))
    found = open_actuators([Knob.GPU_POWER], nvml=nvml, clock=CLOCK)
    assert [actuator.knob for actuator in found] == [Knob.GPU_POWER]


def test_family_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    assert open_actuators(list(Knob), sysfs=tmp_path, clock=CLOCK, emulated=True) == ()


def test_gpus_of_a_host_share_one_session() -> None:
    nvml = KnobNvml(CLOCK, FakeGpu("GPU-a"))
    power, clocks = open_actuators([Knob.GPU_CLOCK, Knob.GPU_POWER], nvml=nvml, clock=CLOCK)
    power.devices()
    clocks.devices()
    assert nvml.calls.count("nvmlInit") == 1
    power.close()
    clocks.close()
    assert nvml.initialised == 0
