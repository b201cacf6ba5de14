"""Which actuators a host gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from testbed.fake_actuators import KnobNvml
from testbed.fake_nvml import FakeGpu

from wattspan.capper.devices import isolate_actuators
from wattspan.capper.workers import open_actuators
from wattspan.clock import SystemClock
from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.powercap_tree import LAYOUTS, PowercapTree
from wattspan.model import SECOND, Knob, KnobState, Trouble
from wattspan.ports import (
    ActuatorContext,
    ActuatorError,
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


AMD_PACKAGE = """
from pathlib import Path
from wattspan.clock import SystemClock
from wattspan.emulation.amdsmi import EmulatedAmdSmi
smi = EmulatedAmdSmi(Path({gpus!r}), SystemClock())
def __getattr__(name):
    return getattr(smi, name)
"""


@pytest.mark.parametrize("family", ["amdgpu", "powercap"])
def test_driver_and_library_that_come_later_are_used_from_then_on(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, packages, sysfs = SystemClock(), tmp_path / "packages", tmp_path / "sys"
    packages.mkdir()
    (packages / "amdsmi.py").write_text("raise ModuleNotFoundError(name='amdsmi')")
    monkeypatch.syspath_prepend(str(packages))
    for loaded in [name for name in sys.modules if name.split(".")[0] == "amdsmi"]:
        monkeypatch.delitem(sys.modules, loaded)
    is_gpu = family == "amdgpu"
    knob, device = (
        (Knob.GPU_POWER, "gpu:0000:60:00.0") if is_gpu else (Knob.CPU_POWER, "rapl:package-0")
    )
    opened = open_actuators([knob], clock=clock, sysfs=sysfs, awaits=True)
    # A worker answers or ends: the deadline, in real time, bounds failures only.
    (actuator,) = isolate_actuators(opened, clock, 600 * SECOND)

    def read() -> KnobState | Trouble:
        with suppress(ActuatorError):
            actuator.devices()
        try:
            return actuator.read(device)
        except ActuatorError as error:
            return error.trouble

    with closing(actuator), ExitStack() as stack:
        assert read() is Trouble.ABSENT
        if is_gpu:
            (sysfs / "module" / family).mkdir(parents=True)
            assert read() is Trouble.ABSENT
            gpus = EmulatedGpus(tmp_path / "gpus", [MI300X], clock)
            stack.callback(gpus.close)
            package = AMD_PACKAGE.format(gpus=str(tmp_path / "gpus"))
            (packages / "amdsmi.py").write_text(package)
        else:
            stack.enter_context(closing(PowercapTree(sysfs, LAYOUTS["client"], cpus=1)))
        found = read()
        assert isinstance(found, KnobState), found
        assert found.requested is not None


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
