"""Boards whose MIG instances change while the agent runs.

Each ``[[phase]]`` divides the board into instances of so many ``slices`` (none: MIG is off) for ten
seconds; ``names`` are the ends of the names of the present instances, and ``vanished`` the number
of known ones that are gone. In every case the energy of the instances, with that of slices without
one, is the board's in the time of division, and no query has more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.field import FieldCase, field_cases
from testbed.gpu_sessions import nvml_session

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.emulation.boards import H100
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import TRAIN, SteadyLoad
from wattspan.model import SECOND, Consumer, HwType, Milliwatts, PayerInfo, Snapshot, Tick
from wattspan.ports import SourceContext
from wattspan.service.device_history import DeviceHistory
from wattspan.service.poller import TickMeter
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock

PROCESS = Consumer(101, 5)


class Host:
    """One board, the source on it, the ledger and the device history."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.gpus = EmulatedGpus(path, [H100], self.clock)
        directory = FakeDirectory([PayerInfo(PROCESS, "job")])
        context = SourceContext(self.clock, directory, emulated=True)
        self.session = nvml_session(EmulatedNvml(path, self.clock), NvmlSettings(), context)
        self.ledger = Ledger(LedgerSettings(idle_powers={HwType.GPU: Milliwatts(70_000)}))
        self.meter = TickMeter(self.ledger.meters)
        self.devices = DeviceHistory(SECOND // 10, 10 * SECOND)
        self.rest = self.divided = 0
        self.gpus.attach(0, PROCESS.pid, SteadyLoad(0.7, TRAIN))

    def run(self, seconds: int) -> Snapshot:
        for _ in range(10 * seconds):
            self.gpus.run(0.1, every=0.05)
            batch = self.session.sample()
            now = self.clock.now()
            tick = Tick(now, {"nvml": batch.domains}, batch.readings, usages=batch.usages)
            metered = self.meter.add(tick)
            self.devices.record(metered, batch.gpus)
            settled = self.ledger.apply(tick, metered.periods())
            self.devices.settle(tick, settled)
            for one in settled:
                self.divided += one.interval.energy if one.parts else 0
                self.rest += sum(part.energy for part in one.parts if not part.domain_id)
        return self.ledger.snapshot(self.clock.now(), "host")

    def close(self) -> None:
        self.session.close()
        self.gpus.close()


@pytest.mark.parametrize("case", field_cases("mig"))
def test_changing_instances_have_names_and_no_energy_twice(case: FieldCase, tmp_path: Path) -> None:
    host = Host(tmp_path / "gpus")
    began, snapshot = host.clock.monotonic(), host.run(0)
    for phase in case["phase"]:
        host.gpus.divide(0, phase["slices"])
        snapshot = host.run(10)
        parts = [one for one in snapshot.domains if one.domain.parent is not None]
        present = [one.domain.name.partition(", ")[2] for one in parts if one.present]
        assert present == phase["names"]
        assert len(parts) - len(present) == phase["vanished"]
    board, *parts = snapshot.domains
    assert sum(one.energy for one in parts) + host.rest == host.divided <= board.energy
    period = began, host.clock.monotonic()
    asked = {key: host.devices.device(key, *period) for key in host.devices.domains()}
    queried = [spent.energy[HwType.GPU] for key, spent in asked.items() if "MIG" in key]
    assert sum(queried) + host.rest == host.divided
    assert all(spent.covered <= period[1] - period[0] for spent in asked.values())
    host.close()
