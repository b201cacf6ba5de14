"""Limits that vanish with a device or a driver, and those that another program sets.

Each case is a device under a fixed cap and what happens to it, step by step: ``[device]`` has its
``vendor``, knob and cap; each ``[[step]]`` an event (``do``), the ``seconds`` after it, and the
facts that hold then: the ``limit`` in force in the device's own unit, ``resets``, ``foreign``, and
of a package ``enabled``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.amd_boards import AmdFaults, ScriptedAmdSmi
from testbed.capper_bench import BOOT
from testbed.fake_actuators import KnobNvml
from testbed.fake_nvml import FakeGpu
from testbed.field import FieldCase, build_tree, field_cases

from wattspan.capper.actuators.cpu import CpuPower
from wattspan.capper.actuators.gpu import GpuBoards, GpuClock, GpuPower
from wattspan.capper.audit import AuditEvent
from wattspan.capper.cap_manager import CapManager
from wattspan.capper.devices import ManagedDevices
from wattspan.capper.journal import Journal
from wattspan.capper.planner import ImposedLimits, OperatorLimits
from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.model import CapKey, Knob, KnobState
from wattspan.ports import SlottedActuator
from wattspan.sources.amdsmi.device import AmdSmiVendor
from wattspan.sources.nvml.device import NvmlVendor
from wattspan.testing import ManualClock

GONE, LOST, BUSY = 9, 15, 10  # NVML: driver not loaded, GPU is lost, timeout


class Host(ABC):
    """One device of one vendor, with the events that cases name."""

    device: str

    def __init__(self, root: Path, facts: Mapping[str, Any]) -> None:
        self.clock, self.root, self.facts = ManualClock(), root, facts

    @abstractmethod
    def actuator(self, knob: Knob) -> SlottedActuator:
        """A new actuator, as in a new process."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """The limit in force, in watts or megahertz; None for none."""

    def suspend(self) -> None:
        self.clock.suspend(600)

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Release what is open."""


class LocatedNvml(KnobNvml):
    """KnobNvml whose board has a place on the PCI bus."""

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetPciInfo":
            return lambda handle: SimpleNamespace(busId="00000000:17:00.0")
        return super().__getattr__(name)


class NvidiaHost(Host):
    device = "gpu:GPU-a"

    def __init__(self, root: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(root, facts)
        self.gpu = FakeGpu("GPU-a")
        self.gpu.limits[192] = self.gpu.limits[190] = facts.get("original", 700) * 1000
        self.nvml = LocatedNvml(self.clock, self.gpu)
        self.load_driver()

    def actuator(self, knob: Knob) -> SlottedActuator:
        boards = GpuBoards(NvmlVendor(self.nvml, self.clock), self.root)
        kind: Any = GpuPower if knob is Knob.GPU_POWER else GpuClock
        actuator: SlottedActuator = kind(boards, self.clock)
        return actuator

    @property
    def limit(self) -> int | None:
        if self.facts.get("knob") == "gpu_clock":
            return self.nvml.locks.get("GPU-a", (None, None))[1]
        return self.gpu.limits[192] // 1000

    def load_driver(self) -> None:
        """The kernel registers the module anew, under another number."""
        place, count = self.root / "module/nvidia", len(list(self.root.glob("module/*")))
        place.parent.mkdir(exist_ok=True)
        if place.exists():
            place.rename(self.root / f"module/unloaded{count}")
        place.mkdir()

    def driver_gone(self) -> None:
        self.nvml.errors["nvmlInit"] = GONE
        self.nvml.initialised = 0

    def driver_back(self) -> None:
        self.nvml.errors.clear()
        self.reload()

    def reload(self) -> None:
        self.load_driver()
        self.nvml.reload_driver()
        self.nvml.draw(self.gpu, self.gpu.watts)
        self.gpu.joules = 0.0

    def lost(self) -> None:
        self.nvml.errors["GPU-a"] = LOST

    def reset(self) -> None:
        """nvidia-smi --gpu-reset, or the unload of an idle board without persistence mode."""
        self.nvml.errors.clear()
        self.nvml.locks.clear()
        self.nvml.draw(self.gpu, self.gpu.watts)
        self.gpu.joules = 0.0
        self.gpu.limits[192] = self.gpu.limits[190] = self.gpu.limits[189]

    def back(self) -> None:
        """It answers again, and kept its settings."""
        self.nvml.errors.clear()

    def busy(self) -> None:
        self.nvml.errors["GPU-a"] = BUSY

    def toggle_mig(self) -> None:
        self.gpu.mig = 1 - self.gpu.mig
        self.gpu.limits[192] = self.gpu.limits[190] = self.gpu.limits[189]

    def runtime_suspend(self) -> None:
        """The kernel powers the idle board down, and its driver forgets the limit."""
        self._set_runtime_status("suspended")
        self.nvml.calls.clear()

    def runtime_resume(self) -> None:
        asked = [call for call in self.nvml.calls if call.startswith("nvmlDevice")]
        assert asked == [], "a call would have woken it"
        self._set_runtime_status("active")
        self.reset()

    def _set_runtime_status(self, status: str) -> None:
        place = "bus/pci/drivers/nvidia/0000:17:00.0/power/runtime_status"
        build_tree({"files": {place: f"{status}\n"}}, self.root)

    def resume_with_defaults(self) -> None:
        self.suspend()
        self.nvml.locks.clear()
        self.gpu.limits[192] = self.gpu.limits[190] = self.gpu.limits[189]

    def rival(self, watts: int = 0) -> None:
        self.nvml.set_limit(self.gpu, watts * 1000 or self.gpu.limits[189])


class AmdHost(Host):
    device = "gpu:0000:60:00.0"

    def __init__(self, root: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(root, facts)
        self.gpus = EmulatedGpus(root / "gpus", [MI300X], self.clock)
        self.faults = AmdFaults(self.gpus)
        self.smi = ScriptedAmdSmi(root / "gpus", self.clock)
        self.energy = 1 << 40
        self.smi.replies["amdsmi_get_energy_count"] = lambda told: {
            **told, "energy_accumulator": self.energy,
        }  # fmt: skip

    def actuator(self, knob: Knob) -> SlottedActuator:
        boards = GpuBoards(AmdSmiVendor(self.smi, self.clock))
        kind: Any = GpuPower if knob is Knob.GPU_POWER else GpuClock
        actuator: SlottedActuator = kind(boards, self.clock)
        return actuator

    @property
    def limit(self) -> int | None:
        record = self.gpus.file.record(0)
        if self.facts.get("knob") == "gpu_clock":
            return int(record.clock_request) & 0xFF_FFFF or None
        return (int(record.limit_request) & 0xFFFF_FFFF) // 1000

    def lost(self) -> None:
        self.faults.lost(0, 31)

    def reset(self) -> None:
        self.faults.lost(0, 0)
        self.energy = 1000
        self.gpus.file.record(0).clock_request = 0
        self.rival()

    def rival(self, watts: int = 750) -> None:
        self.gpus.file.record(0).request_limit(watts * 1000)

    def close(self) -> None:
        self.gpus.close()


ZONE = "class/powercap/intel-rapl:0"


class CpuHost(Host):
    device = "rapl:package-0"

    def __init__(self, root: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(root, facts)
        self.drivers = 0
        self.load()

    def actuator(self, knob: Knob) -> SlottedActuator:
        assert knob is Knob.CPU_POWER
        return CpuPower(self.root, self.clock)

    @property
    def power(self) -> Path:
        return self.root / ZONE / "constraint_0_power_limit_uw"

    @property
    def limit(self) -> int | None:
        return int(self.power.read_text()) // 1_000_000 if self.power.exists() else None

    def load(self) -> None:
        """The driver registers its zones, with the limits of the firmware."""
        (self.root / ZONE).parent.mkdir(parents=True, exist_ok=True)
        files = {
            "name": "package-0\n",
            "enabled": "1\n",
            "constraint_0_name": "long_term\n",
            "constraint_0_max_power_uw": f"{self.facts.get('specified', 205)}000000\n",
            "constraint_0_power_limit_uw": f"{self.facts.get('original', 205)}000000\n",
        }
        build_tree({"files": files}, self.root / ZONE)

    def unload(self) -> None:
        self.drivers += 1
        (self.root / ZONE).rename(self.root / f"unloaded{self.drivers}")

    def reload(self) -> None:
        self.unload()
        self.load()

    def reload_switched_off(self) -> None:
        """As Linux does: the limit keeps its value, and the zone is switched off."""
        limit = self.power.read_text()
        self.reload()
        self.power.write_text(limit)
        (self.root / ZONE / "enabled").write_text("0\n")

    def switch_off(self) -> None:
        """Somebody switches the limits of the zone off."""
        (self.root / ZONE / "enabled").write_text("0\n")

    @property
    def enabled(self) -> bool:
        return (self.root / ZONE / "enabled").read_text() == "1\n"

    def resume_with_defaults(self) -> None:
        self.suspend()
        self.rival(self.facts.get("original", 205))

    def rival(self, watts: int = 205) -> None:
        self.power.write_text(f"{watts}000000\n")


class Direct:
    """An actuator whose calls are made in this process."""

    unidentified = None

    def __init__(self, actuator: SlottedActuator) -> None:
        self.knob, self._actuator = actuator.knob, actuator

    def prefetch(self, devices: Iterable[str]) -> None:
        """They are read when they are asked for."""

    def devices(self) -> tuple[KnobState, ...]:
        return self._actuator.devices()

    def read(self, device: str) -> KnobState:
        return self._actuator.read(device)

    def write(self, device: str, value: int | None) -> KnobState:
        return self._actuator.write(device, value)

    def close(self) -> None:
        self._actuator.close()


class Capper:
    """The capper of a host, with one fixed cap that outlives each of its processes."""

    def __init__(self, host: Host, folder: Path, facts: Mapping[str, Any]) -> None:
        self.host, self._folder = host, folder
        self.knob = Knob(facts.get("knob", "gpu_power"))
        unit = 1 if self.knob is Knob.GPU_CLOCK else 1000
        self._cap = {CapKey(self.knob, host.device): facts["cap"] * unit}
        self.events: list[AuditEvent] = []
        self._former_resets = 0
        self.start()

    def start(self) -> None:
        clock, self._ended = self.host.clock, False
        devices = ManagedDevices([Direct(self.host.actuator(self.knob))], clock)
        journal = Journal(self._folder, BOOT)
        self.manager = CapManager(devices, journal, clock, self.events.append, OperatorLimits())
        self.manager.impose(ImposedLimits(fixed=self._cap))
        self.manager.start()
        self.manager.turn()

    @property
    def resets(self) -> int:
        """Those that this capper and the former ones have found."""
        return self._former_resets + self.manager.resets

    def stop(self) -> None:
        """The capper ends without a farewell; its fixed cap stays."""

    def end(self, how: str) -> None:
        """The capper ends, by a signal or by a kill, and time passes without it."""
        if how == "in order":
            self.manager.stop()
        self._former_resets, self._ended = self.resets, True

    def turns(self, seconds: int) -> None:
        for _ in range(seconds):
            self.host.clock.advance(1)
            if not self._ended:
                self.manager.turn()


HOSTS: Mapping[str, Callable[[Path, Mapping[str, Any]], Host]] = {
    "nvidia": NvidiaHost, "amd": AmdHost, "cpu": CpuHost,
}  # fmt: skip


@contextmanager
def capped(case: FieldCase, folder: Path) -> Iterator[tuple[Host, Capper]]:
    facts = case["device"]
    (folder / "sys").mkdir()
    (folder / "journal").mkdir()
    with closing(HOSTS[facts["vendor"]](folder / "sys", facts)) as host:
        yield host, Capper(host, folder / "journal", facts)


@pytest.mark.parametrize("case", field_cases("caps"))
def test_cap_survives_resets_and_yields_to_rivals(case: FieldCase, tmp_path: Path) -> None:
    with capped(case, tmp_path) as (host, capper):
        assert host.limit == case["device"]["cap"]
        for number, step in enumerate(case["step"], start=1):
            act = getattr(capper if step["do"] in {"start", "stop", "end"} else host, step["do"])
            act(*step.get("with", []))
            capper.turns(step.get("seconds", 1))
            (row,) = capper.manager.rows()
            facts = {
                "limit": host.limit,
                "resets": capper.resets,
                "foreign": row.foreign,
                "said": [event.deed.value for event in capper.events][-3:],
            }
            if "enabled" in step:
                assert isinstance(host, CpuHost)
                facts["enabled"] = host.enabled
            for name in ("limit", "resets", "foreign", "enabled"):
                if name in step:
                    assert facts[name] == step[name], f"{name} after step {number}: {facts}"
        told = [event.deed.value for event in capper.events]
        assert told.count("reset") == case["step"][-1]["resets"], "each reset is said once"
