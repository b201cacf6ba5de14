"""Counters and sensors over time, beside the work of the CPUs: measurements and frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from testbed.field import FieldCase, build_tree, field_cases

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import MILLISECOND, SECOND, Consumer, GapReason, Payer, Snapshot, Usage
from wattspan.ports import CounterSource, UsageBatch
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import LatestSnapshot, Poller, SnapshotProviders
from wattspan.service.sampling_demand import fixed
from wattspan.sources.hwmon.source import HwmonSource
from wattspan.sources.rapl.powercap import PowercapSource
from wattspan.sources.rapl.sysfs import scan_zones
from wattspan.testing import FakeDirectory, ManualClock

TICK = 100 * MILLISECOND
WORKER = Consumer(1, 1)


class CpuWork:
    """A usage source: ``busy`` CPUs of each socket, each with ``CPUS``."""

    CPUS = 4

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self._last = clock, clock.now()
        self.busy: list[float] = [0.0]

    def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
        start, self._last = self._last, self._clock.now()
        elapsed = self._last.mono - start.mono
        spent = [round(one * elapsed) for one in self.busy]
        capacity = self.CPUS * elapsed
        usages = [
            Usage(f"cpu:{socket}", start, self._last, {WORKER: one}, capacity=capacity)
            for socket, one in enumerate(spent)
        ]
        whole: dict[Payer, int] = {WORKER: sum(spent)}
        usages.append(Usage("cpu", start, self._last, whole, capacity=capacity * len(self.busy)))
        return UsageBatch(tuple(usages))

    def close(self) -> None: ...


class Host:
    """A listing whose counters grow and whose sensors show power, with an agent that reads it."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, ManualClock()
        self.work = CpuWork(self.clock)
        sources: list[CounterSource] = [HwmonSource(root, self.clock, {})]
        if scan_zones(root).zones:
            sources.append(PowercapSource(root, self.clock))
        ledger = Ledger(LedgerSettings(), boot_id="b", now=self.clock.monotonic())
        self.poller = Poller(
            self.clock,
            ledger,
            EnergyHistory(60 * SECOND, 10**6),
            sources,
            self.work,
            FakeDirectory([]),
            LatestSnapshot(ledger.snapshot(self.clock.now(), "h")),
            demand=fixed(self.clock, TICK),
            providers=SnapshotProviders(),
        )

    def run(self, step: Mapping[str, Any]) -> Snapshot:
        """``seconds`` with the power of each file in watts, ``every`` so many seconds a move."""
        self.work.busy = [float(one) for one in step["busy"]]
        every = round(step.get("every", 0.1) * 10)
        for path, content in step.get("write", {}).items():
            (self.root / path).write_text(f"{content}\n")
        for tick in range(1, round(step["seconds"] * 10) + 1):
            self.clock.advance(ns=TICK)
            for path, watts in step.get("watts", {}).items():
                self._set(self.root / path, watts, every if tick % every == 0 else 0)
            self.poller.turn()
        self.poller.publish()
        return self.poller.view()

    def _set(self, file: Path, watts: float, ticks: int) -> None:
        if "power" in file.name and "uj" not in file.name:
            file.write_text(f"{round(watts * 1e6)}\n")
        elif ticks:
            file.write_text(f"{int(file.read_text()) + round(watts * ticks * 1e5)}\n")


@pytest.mark.parametrize("case", field_cases("frozen"))
def test_counter_that_stands_still_while_cpus_work_is_frozen(
    case: FieldCase, tmp_path: Path
) -> None:
    host, expected = Host(build_tree(case["tree"], tmp_path)), case["expected"]
    snapshot = [host.run(step) for step in case["steps"]][-1]
    frozen = {
        failure.domain_id
        for health in snapshot.health
        for failure in health.failures
        if "does not change while" in failure.cause
    }
    assert frozen == set(expected["frozen"])
    accounts = {account.domain.id: account for account in snapshot.domains}
    assert {key for key, one in accounts.items() if one.gaps.get(GapReason.FROZEN)} == set(
        expected["gaps"]
    )
    assert {key for key, one in accounts.items() if one.gaps.get(GapReason.SUSPEND)} == set(
        expected.get("suspends", ())
    )
    assert {key for key, one in accounts.items() if one.power is not None} == set(
        expected["powers"]
    )
    zero = {key for key, one in accounts.items() if one.power == 0}
    assert zero == set(expected.get("zero_powers", ()))
    for key, (least, most) in expected.get("joules", {}).items():
        assert least <= accounts[key].counted / 1e6 <= most
