"""Boards whose counter and power disagree, that measure nothing, or that are suspended.

``[board]`` names the vendor and model, the highest ``limit`` in watts, and functions and fields of
the driver that it ``refuses``; each ``[[phase]]`` lasts ``seconds``, in which the power
sensor shows ``shown`` watts, the counter counts ``counted`` watts, and the board is ``busy``
(percent). ``status`` is the kernel's ``power/runtime_status``. The other keys hold at the end of
the phase: the ``basis`` of the energy, whether both ``disagree`` ("yes", "no", "unknown"), a part
of the ``finding`` ("" for none), ``readings`` and ``calls`` of the driver ("some" or "none").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.amd_boards import ScriptedAmdSmi
from testbed.fake_nvml import FakeGpu, FakeNvml
from testbed.field import FieldCase, build_tree, field_cases
from testbed.gpu_sessions import amdsmi_session, nvml_session

from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.model import GpuStatus, Reading
from wattspan.ports import Batch, SourceContext
from wattspan.sources.amdsmi.device import AmdSmiSettings
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock

STEP = 15.300000190734863  # microjoules of an accumulator's step, as a C float


class TwoSensors(FakeNvml):
    """FakeNvml with a power of its own; the board's power is that of the counter."""

    def __init__(self, clock: ManualClock, gpu: FakeGpu, *, average: bool, counter: bool) -> None:
        super().__init__(clock, gpu)
        self.shown: float | None = 0.0
        if not average:
            self.errors |= {185: 3, 186: 3}
        if not counter:
            self.errors["nvmlDeviceGetTotalEnergyConsumption"] = 3

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetPciInfo":
            return lambda handle: SimpleNamespace(busId="00000000:17:00.0")
        if name == "nvmlDeviceGetFieldValues":
            return lambda handle, numbers: self.fields(self._enter(name, handle), numbers)
        if name == "nvmlDeviceGetPowerUsage" and self.shown is not None:
            return lambda handle: self._shown_power(name, handle)
        return super().__getattr__(name)

    def _shown_power(self, name: str, handle: Any) -> int:
        self._enter(name, handle)
        return round((self.shown or 0.0) * 1000)

    def fields(self, gpu: FakeGpu, numbers: list[int]) -> list[SimpleNamespace]:
        counted, gpu.watts = gpu.watts, self.shown or 0.0
        try:
            return super().fields(gpu, numbers)
        finally:
            gpu.watts = counted


class Board(ABC):
    """One board and the session that reads it."""

    driver: str
    address: str

    def __init__(self, root: Path) -> None:
        self.clock, self.root = ManualClock(), root
        self.readings: list[Reading] = []
        self.status: GpuStatus | None = None
        self.batch = Batch(())
        self.power("active")

    def power(self, status: str) -> None:
        path = f"bus/pci/drivers/{self.driver}/{self.address}/power/runtime_status"
        build_tree({"files": {path: f"{status}\n"}}, self.root)

    def context(self) -> SourceContext:
        return SourceContext(self.clock, FakeDirectory(), sysfs=self.root)

    @abstractmethod
    def set(self, phase: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def sample(self) -> Batch: ...

    @property
    @abstractmethod
    def calls(self) -> int: ...

    @abstractmethod
    def close(self) -> None: ...

    def run(self, seconds: float) -> None:
        self.readings.clear()
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.batch = self.sample()
            self.readings += self.batch.readings
            self.status = next(iter(self.batch.gpus), self.status)


class NvidiaBoard(Board):
    driver, address = "nvidia", "0000:17:00.0"

    def __init__(self, root: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(root)
        self.gpu = FakeGpu("GPU-a", name=facts["model"], architecture=facts.get("architecture", 8))
        self.nvml = TwoSensors(
            self.clock, self.gpu,
            average=facts.get("average", True), counter=facts.get("counter", True),
        )  # fmt: skip
        if "limit" in facts:
            self.gpu.limits |= dict.fromkeys((188, 189, 190, 192), 1000 * facts["limit"])
        self.nvml.errors |= dict.fromkeys(facts.get("refuses", ()), 3)
        self.gpu.joules = facts.get("joules", 1000.0)
        settings = NvmlSettings(energy=facts.get("energy", "auto"))
        self.session = nvml_session(self.nvml, settings, self.context(), nested=False)

    def set(self, phase: Mapping[str, Any]) -> None:
        self.nvml.shown = phase["shown"]
        self.nvml.draw(self.gpu, phase["counted"])
        self.gpu.utilisation = (phase.get("busy", 0), 0)

    def sample(self) -> Batch:
        return self.session.sample()

    @property
    def calls(self) -> int:
        return len(self.nvml.calls)

    def close(self) -> None:
        self.session.close()


class AmdBoard(Board):
    driver, address = "amdgpu", "0000:60:00.0"

    def __init__(self, root: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(root)
        self.gpus = EmulatedGpus(root / "gpus", [MI300X], self.clock)
        self.smi = ScriptedAmdSmi(root / "gpus", self.clock)
        self.phase: Mapping[str, Any] = {}
        self.microjoules = round(float(facts.get("joules", 1000.0)) * 1e6)
        self.at = self.asked = 0
        average = facts.get("average", True)
        self.smi.replies = {
            "amdsmi_get_power_info": lambda told: {
                **told,
                "average_socket_power": self._shown() if average else 0xFFFF,
                "current_socket_power": 0xFFFF if average else self._shown(),
                "socket_power": 0xFFFF,
            },
            "amdsmi_get_energy_count": lambda told: {
                **told,
                "energy_accumulator": round(self._counted() / STEP),
                "counter_resolution": STEP,
            },
            "amdsmi_get_gpu_activity": lambda told: {**told, "gfx_activity": self.phase["busy"]},
        }
        settings = AmdSmiSettings(energy=facts.get("energy", "auto"))
        self.session = amdsmi_session(self.smi, settings, self.context())

    def _shown(self) -> int:
        self.asked += 1
        return round(float(self.phase["shown"]))

    def _counted(self) -> int:
        self.asked += 1
        now = self.clock.monotonic()
        self.microjoules += round(float(self.phase["counted"]) * (now - self.at) / 1000)
        self.at = now
        return self.microjoules

    def set(self, phase: Mapping[str, Any]) -> None:
        if self.phase:
            self._counted()
        self.phase, self.at = {"busy": 0, **phase}, self.clock.monotonic()

    def sample(self) -> Batch:
        self.gpus.step()
        return self.session.sample()

    @property
    def calls(self) -> int:
        return self.asked

    def close(self) -> None:
        self.session.close()
        self.gpus.close()


BOARDS: Mapping[str, Callable[[Path, Mapping[str, Any]], Board]] = {
    "nvidia": NvidiaBoard, "amd": AmdBoard,
}  # fmt: skip


@contextmanager
def opened(case: FieldCase, root: Path) -> Iterator[Board]:
    with closing(BOARDS[case["board"]["vendor"]](root, case["board"])) as board:
        yield board


@pytest.mark.slow
@pytest.mark.parametrize("case", field_cases("gpus"))
def test_energy_of_a_board_is_judged_by_both_sensors(case: FieldCase, tmp_path: Path) -> None:
    with opened(case, tmp_path) as board:
        for number, phase in enumerate(case["phase"], start=1):
            board.set(phase)
            board.power(phase.get("status", "active"))
            calls = board.calls
            board.run(phase["seconds"])
            status = board.status
            disagree = None if status is None else status.energy_disagrees
            causes = [one.cause for one in board.batch.failures if "process" not in one.cause]
            facts = {
                "basis": "" if status is None else status.energy_basis,
                "disagree": {None: "unknown", True: "yes", False: "no"}[disagree],
                "readings": "some" if board.readings else "none",
                "calls": "some" if board.calls > calls else "none",
            }
            for name in facts.keys() & phase.keys():
                assert facts[name] == phase[name], f"{name} after phase {number}: {facts} {causes}"
            if phase.get("finding"):
                assert any(phase["finding"] in cause for cause in causes), causes
            elif "finding" in phase:
                assert causes == []
            if "spent" in phase:
                first, last = board.readings[0], board.readings[-1]
                assert first.epoch == last.epoch
                assert (last.counter - first.counter) / 1e6 == pytest.approx(
                    phase["spent"], rel=0.02
                )
