"""Which actuators a host gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.fake_actuators import KnobNvml
from testbed.fake_nvml import FakeGpu

from wattspan.capper.devices import open_actuators
from wattspan.emulation.powercap_tree import LAYOUTS, PowercapTree
from wattspan.model import Knob
from wattspan.ports import (
    ActuatorContext,
    ActuatorPlugin,
    ConfigError,
    SlottedActuator,
    SourceError,
)
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


def _crash(_: ActuatorContext) -> Iterator[SlottedActuator]:
    raise ZeroDivisionError("oops")


def _crash_at_the_first(_: ActuatorContext) -> Iterator[SlottedActuator]:
    yield from _crash(_)


def _refuse(_: ActuatorContext) -> Iterator[SlottedActuator]:
    raise SourceError("Cannot read it: it is not here.")


@pytest.mark.parametrize(
    ("opening", "cause"),
    [
        (_crash, "ZeroDivisionError: oops"),
        (_crash_at_the_first, "ZeroDivisionError: oops"),
        (_refuse, "SourceError: Cannot read it: it is not here"),
        (lambda _: None, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_plugin_that_does_not_open_is_an_error_of_the_configuration(
    tmp_path: Path, opening: Any, cause: str
) -> None:
    plugins = {"lumen": ActuatorPlugin(opening)}
    with pytest.raises(ConfigError) as caught:
        open_actuators(list(Knob), sysfs=tmp_path, clock=CLOCK, emulated=True, plugins=plugins)
    assert str(caught.value) == (
        f'Cannot open the actuators "lumen": {cause}. Report it to the authors of the plugin, or'
        " remove it from caps.actuators."
    )
