"""Hosts on which several sources measure one thing, and counters that come and go.

A case has a listing of sysfs and procfs (``[tree]``), the ``sources`` that are opened in their
order, ``[roles]`` of sensors, ``[estimate]`` settings, and the ``[meters]``: energy counters of the
listing with their true watts. Each of ``[[scripted]]`` is a domain of a library or plugin. In each
of the ``[[phases]]`` files are ``unreadable`` and scripted sources ``silent`` for some ``seconds``;
at its end the ``cover`` has these members, and ``watts`` is the true power of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.field import FieldCase, build_tree, field_cases

from wattspan.api.energy import energy_response, selected_domains
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    SECOND,
    Domain,
    HwType,
    Microjoules,
    Provenance,
    Reading,
    Snapshot,
    Thing,
    ThingKind,
)
from wattspan.ports import Batch, CounterSource, SourceContext
from wattspan.service.device_history import DeviceHistory
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import LatestSnapshot, Poller, SnapshotProviders
from wattspan.service.sampling_demand import fixed
from wattspan.sources import estimate
from wattspan.sources.hwmon.source import HwmonSource
from wattspan.sources.rapl.powercap import PowercapSource
from wattspan.testing import FakeDirectory, ManualClock, ReplayUsage

STEP = 0.1  # seconds


class ScriptedSource:
    """Domains of steady power."""

    def __init__(self, name: str, rows: Iterable[Mapping[str, Any]], clock: ManualClock) -> None:
        self.name, self.silent, self._clock = name, False, clock
        self._rows = list(rows)
        self._domains = tuple(map(self._domain, self._rows))
        self._began = clock.monotonic()

    def _domain(self, row: Mapping[str, Any]) -> Domain:
        thing = row.get("thing")
        return Domain(
            row["id"],
            HwType(row["hw_type"]),
            row["id"],
            self.name,
            Provenance(row["provenance"]),
            resource=row.get("resource"),
            pci=row.get("pci", ""),
            measures=Thing(ThingKind(thing), row.get("socket")) if thing else None,
        )

    def read(self) -> Batch:
        if self.silent:
            return Batch(self._domains)
        at = self._clock.now()
        passed = at.mono - self._began
        counters = (Microjoules(row["watts"] * passed // 1000) for row in self._rows)
        readings = zip(self._domains, counters, strict=True)
        return Batch(self._domains, tuple(Reading(one.id, at, count) for one, count in readings))

    def close(self) -> None: ...


class Host:
    """The listing of a case, its counters and an agent that reads them."""

    def __init__(self, case: FieldCase, root: Path) -> None:
        self.root = build_tree(case["tree"], root)
        self.clock = ManualClock()
        self.case = case
        self._joules: dict[str, float] = {}
        self.scripted: dict[str, ScriptedSource] = {}
        self.sources: list[CounterSource] = [self._open(name) for name in case["sources"]]
        ledger = Ledger(LedgerSettings(), boot_id="b", now=self.clock.monotonic())
        self.devices = DeviceHistory(round(STEP * SECOND), 10 * SECOND)
        self.poller = Poller(
            self.clock,
            ledger,
            EnergyHistory(300 * SECOND, 10**6),
            self.sources,
            ReplayUsage(()),
            FakeDirectory(),
            LatestSnapshot(ledger.snapshot(self.clock.now(), "h")),
            demand=fixed(self.clock, round(STEP * SECOND)),
            providers=SnapshotProviders(),
            recorders={"devices": self.devices.record},
        )

    def _open(self, name: str) -> CounterSource:
        sysfs = self.root / "sys"
        if name == "rapl":
            return PowercapSource(sysfs, self.clock)
        if name == "hwmon":
            return HwmonSource(sysfs, self.clock, self.case.get("roles", {}))
        if name == "estimate":
            settings = estimate.EstimateSettings(
                enabled=True, procfs=str(self.root / "proc"), **self.case["estimate"]
            )
            context = SourceContext(self.clock, FakeDirectory(), sysfs=sysfs)
            source = estimate.plugin.open(settings, context)
            assert source is not None
            return source
        rows = [row for row in self.case["scripted"] if row["source"] == name]
        self.scripted[name] = ScriptedSource(name, rows, self.clock)
        return self.scripted[name]

    def begin(self, phase: Mapping[str, Any]) -> None:
        for name, source in self.scripted.items():
            source.silent = name in phase.get("silent", ())
        denied = set(phase.get("unreadable", ()))
        for meter in self.case.get("meters", {}):
            path = self.root / meter
            if meter in denied and not path.is_symlink():
                path.unlink()
                path.symlink_to(path.name)  # unreadable, for root too
            elif meter not in denied and path.is_symlink():
                path.unlink()
                self._write(meter)

    def _write(self, meter: str) -> None:
        path = self.root / meter
        if not path.is_symlink():
            path.write_text(f"{round((7 + self._joules.get(meter, 0)) * 1e6)}\n")

    def queried(self) -> dict[str, float]:
        """The mean watts of the devices that queries list, of three recent seconds."""
        end = self.clock.monotonic() - 2 * SECOND
        found = {}
        for domain in selected_domains(self.devices, None):
            energy = self.devices.device(domain.id, end - 3 * SECOND, end).energy
            found[domain.id] = sum(energy.values()) / 3e6
        return found

    def attributed(self) -> set[str]:
        """The devices that queries of processes list for the same time."""
        end = self.clock.monotonic() - 2 * SECOND
        response = energy_response(self.poller.history, self.devices, end - 3 * SECOND, end)
        return {device["hw_id"] for device in response["devices"]}

    def turn(self) -> Snapshot:
        self.clock.advance(STEP)
        for meter, watts in self.case.get("meters", {}).items():
            self._joules[meter] = self._joules.get(meter, 0) + watts * STEP
            self._write(meter)
        self.poller.turn()
        self.poller.publish()
        return self.poller.view()


def host_energy(snapshot: Snapshot) -> float:
    return sum(account.counted for account in snapshot.summed) / 1e6


@pytest.mark.parametrize("case", field_cases("cover"))
def test_host_counts_each_thing_once_and_never_steps(case: FieldCase, tmp_path: Path) -> None:
    host = Host(case, tmp_path)
    most = max(phase["watts"] for phase in case["phases"])
    true = booked = 0.0
    for phase in case["phases"]:
        host.begin(phase)
        for _ in range(round(phase["seconds"] / STEP)):
            after = host_energy(host.turn())
            true += phase["watts"] * STEP
            # An estimate is booked once a second.
            assert booked <= after <= booked + most * 1.01, "the host's counter has made a step"
            booked = after
        snapshot = host.poller.view()
        members = [one for one in snapshot.cover if one.present]
        assert sorted(one.domain.id for one in members) == sorted(phase["cover"])
        watts = sum(one.power or 0 for one in members) / 1000
        assert watts == pytest.approx(phase["watts"], rel=0.03)
        assert booked <= true * 1.001, "energy was counted twice"
        queried = host.queried()
        assert sorted(queried) == sorted(phase["cover"])
        assert sum(queried.values()) == pytest.approx(phase["watts"], rel=0.03)
        assert host.attributed() <= set(phase["cover"])
        outside = [one for one in snapshot.domains if not one.domain.in_cover]
        assert all(one.domain.why for one in outside), "the choice is not explained"
    assert booked >= true - most * case.get("lost_seconds", 1.5)


@pytest.mark.parametrize("case", field_cases("cover"))
def test_cover_is_the_same_in_any_order_of_sources(case: FieldCase, tmp_path: Path) -> None:
    reverse = replace(case, tables={**case.tables, "sources": list(reversed(case["sources"]))})
    for name, one in {"as listed": case, "reversed": reverse}.items():
        host, phase = Host(one, tmp_path / name), case["phases"][0]
        host.begin(phase)
        for _ in range(30):
            host.turn()
        assert sorted(one.domain.id for one in host.poller.view().cover) == sorted(phase["cover"])
