"""MIG on the emulated NVML: energies of instances and processes against the boards' own truth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.dcgm_exporter import DcgmServer, series
from testbed.emulated_faults import GpuFaults
from testbed.gpu_sessions import nvml_session

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.emulation.boards import H100
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import DECODE, TRAIN, SteadyLoad
from wattspan.model import (
    Attribution,
    Consumer,
    Domain,
    DomainAccount,
    HwType,
    Milliwatts,
    PayerInfo,
    Provenance,
    Reading,
    Snapshot,
    Tick,
    Usage,
)
from wattspan.ports import Batch, SourceContext
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock

PROCESSES = [Consumer(pid, 5) for pid in (101, 102, 103, 104)]
IDLE = 70_000  # mW, of the emulated board
OLD_DRIVER = {
    "instances": ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"],
    "activity": ["nvmlGpmSampleAlloc", "nvmlGpmMigSampleGet", "c_nvmlGpmMetricsGet_t"],
}


class OlderNvml:
    """An NVML, or a binding, that does not have some functions."""

    def __init__(self, nvml: Any, *missing: str) -> None:
        self._nvml, self._missing = nvml, missing

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(name)
        return getattr(self._nvml, name)


class Host:
    """A divided board, the source on it, and a ledger, driven by one manual clock."""

    def __init__(self, path: Path, *missing: str, settings: NvmlSettings | None = None) -> None:
        self.clock = ManualClock()
        self.gpus = EmulatedGpus(path, [H100], self.clock)
        directory = FakeDirectory([PayerInfo(one, f"job-{one.pid}") for one in PROCESSES])
        context = SourceContext(self.clock, directory, emulated=True)
        nvml = OlderNvml(EmulatedNvml(path, self.clock), *missing)
        self.session = nvml_session(nvml, settings or NvmlSettings(), context)
        self.ledger = Ledger(LedgerSettings(idle_powers={HwType.GPU: Milliwatts(IDLE)}))
        self.batch = Batch(())
        self.usages: list[Usage] = []
        self.readings: list[Reading] = []
        self.attributions: list[Attribution] = []

    def run(self, seconds: float, *, stalled: bool = False) -> Snapshot:
        """Sample every 0.1 s; ``stalled``: the driver's figures are not renewed meanwhile."""
        for _ in range(round(seconds * 10)):
            if stalled:
                self.clock.advance(0.1)
            else:
                self.gpus.run(0.1, every=0.05)
            self.batch = batch = self.session.sample()
            self.usages += batch.usages
            self.readings += batch.readings
            tick = Tick(
                self.clock.now(), {"nvml": batch.domains}, batch.readings, usages=batch.usages
            )
            self.attributions += self.ledger.apply(tick)
        return self.ledger.snapshot(self.clock.now(), "host")

    def charged(self) -> dict[int, int]:
        """The microjoules charged to each process, by pid."""
        charged: dict[int, int] = {}
        for attribution in self.attributions:
            for payer, energy in attribution.shares:
                assert isinstance(payer, Consumer)
                charged[payer.pid] = charged.get(payer.pid, 0) + energy
        return charged

    def doubts(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for attribution in self.attributions:
            for (payer, _), doubt in zip(attribution.shares, attribution.doubts, strict=False):
                assert isinstance(payer, Consumer)
                found[payer.pid] = found.get(payer.pid, 0) + doubt
        return found

    def settled_truth(self) -> dict[int, int]:
        """The true microjoules of each process over the settled intervals."""
        first = self.attributions[0].interval.start.mono
        last = self.attributions[-1].interval.end.mono
        before, after = self.gpus.spent_at(0, (first, last))
        return {pid: one - before.processes.get(pid, 0) for pid, one in after.processes.items()}

    @property
    def board(self) -> Domain:
        return self.batch.domains[0]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "gpus")
    yield host
    host.session.close()
    host.gpus.close()


def older(tmp_path: Path, *missing: str, settings: NvmlSettings | None = None) -> Host:
    return Host(tmp_path / "older", *missing, settings=settings)


def occupied(host: Host, *loads: float) -> None:
    """Instances of 3, 2, 1 and 1 slices, with a process of the same kernel in each."""
    host.gpus.divide(0, (3, 2, 1, 1))
    for number, (one, load) in enumerate(zip(PROCESSES, loads, strict=False), start=1):
        host.gpus.attach(0, one.pid, SteadyLoad(load, TRAIN), instance=number)


def instances(snapshot: Snapshot) -> list[DomainAccount]:
    return [one for one in snapshot.domains if one.domain.parent is not None]


def test_each_instance_is_a_part_of_its_board(host: Host) -> None:
    occupied(host, 1.0)
    snapshot = host.run(3)
    found = [one.domain for one in instances(snapshot)]
    assert [domain.id for domain in found] == [
        f"gpu:MIG-e0e0e0e0-0000-4000-8000-{number:012x}" for number in (1, 2, 3, 4)
    ]
    assert found[0].name == "Emulated NVIDIA H100 80GB HBM3 0, 3g.40gb 1"
    assert {domain.parent for domain in found} == {host.board.id}
    assert {domain.method for domain in found} == {"mig-gpm"} == {host.board.method}
    assert {domain.provenance for domain in found} == {Provenance.EMULATED}
    assert not any(domain.in_cover for domain in found)
    assert host.batch.failures == ()


def test_processes_are_charged_within_one_per_cent_of_the_truth(host: Host) -> None:
    occupied(host, 0.9, 0.3, 0.6, 0.1)
    host.run(10)
    host.gpus.set_load(0, PROCESSES[0].pid, 0.2)
    host.gpus.set_load(0, PROCESSES[3].pid, 1.0)
    host.run(20)
    charged, truth = host.charged(), host.settled_truth()
    for one in PROCESSES:
        assert charged[one.pid] == pytest.approx(truth[one.pid], rel=0.01)


def test_work_of_different_power_is_within_the_stated_doubt(host: Host) -> None:
    """Activity is time, not power: decoding draws half of what training does."""
    host.gpus.divide(0, (4, 3))
    host.gpus.attach(0, PROCESSES[0].pid, SteadyLoad(0.9, TRAIN), instance=1)
    host.gpus.attach(0, PROCESSES[1].pid, SteadyLoad(0.9, DECODE), instance=2)
    host.run(8)
    charged, truth, doubts = host.charged(), host.settled_truth(), host.doubts()
    for pid in (101, 102):
        error = abs(charged[pid] - truth[pid])
        assert 0.1 * truth[pid] < error <= doubts[pid]


def test_power_of_work_is_learned_where_its_load_varies(host: Host) -> None:
    host.gpus.divide(0, (4, 3))
    kernels = TRAIN, DECODE
    for number, (one, kernel) in enumerate(zip(PROCESSES, kernels, strict=False), start=1):
        host.gpus.attach(0, one.pid, SteadyLoad(0.5, kernel), instance=number)
    host.run(4)
    for second in range(50):
        if second == 30:
            host.attributions.clear()
        host.gpus.set_load(0, PROCESSES[0].pid, (0.9, 0.2, 0.5)[second % 3])
        host.gpus.set_load(0, PROCESSES[1].pid, (0.8, 0.3)[second // 2 % 2])
        host.run(1)
    charged, truth, doubts = host.charged(), host.settled_truth(), host.doubts()
    powers = host.ledger._domains[host.board.id].part_powers
    assert powers.power(host.usages[-1].parts[0]) is not None
    for one in PROCESSES[:2]:
        error = abs(charged[one.pid] - truth[one.pid])
        assert error <= 0.03 * truth[one.pid]
        assert error <= doubts[one.pid] < 0.5 * truth[one.pid]


def test_instances_have_the_energy_of_the_board_together(host: Host) -> None:
    occupied(host, 0.9, 0.3, 0.6, 0.1)
    snapshot = host.run(10)
    board = snapshot.domains[0]
    parts = instances(snapshot)
    rest = [part for a in host.attributions for part in a.parts if not part.domain_id]
    assert sum(one.energy for one in parts) + sum(one.energy for one in rest) == board.energy
    assert sum(one.idle for one in parts) == board.idle
    assert all(one.energy == one.consumers + one.idle + one.unattributed for one in parts)
    assert parts[0].idle / parts[2].idle == pytest.approx(3, rel=1e-3)


def test_slices_without_an_instance_have_idle_energy_only(host: Host) -> None:
    host.gpus.divide(0, (3, 1))
    host.gpus.attach(0, PROCESSES[0].pid, SteadyLoad(1.0), instance=1)
    snapshot = host.run(10)
    rest = [part for a in host.attributions for part in a.parts if not part.domain_id]
    idle = sum(part.idle for part in rest)
    assert idle == pytest.approx(snapshot.domains[0].idle * 3 / 7, rel=0.2)
    assert sum(part.consumers for part in rest) == 0


def test_users_of_one_instance_share_it_equally_within_the_stated_doubt(host: Host) -> None:
    host.gpus.divide(0, (3, 4))
    for one, load in zip(PROCESSES, (0.7, 0.2, 0.5), strict=False):
        host.gpus.attach(0, one.pid, SteadyLoad(load), instance=1 + (one is PROCESSES[2]))
    host.run(15)
    charged, truth, doubts = host.charged(), host.settled_truth(), host.doubts()
    first, second, third = (one.pid for one in PROCESSES[:3])
    assert charged[first] == pytest.approx(charged[second], abs=len(host.attributions))
    assert charged[first] + charged[second] == pytest.approx(truth[first] + truth[second], rel=0.02)
    assert charged[third] == pytest.approx(truth[third], rel=0.02)
    for pid in (first, second):
        assert abs(charged[pid] - truth[pid]) <= doubts[pid]


@pytest.mark.parametrize(
    "missing", [OLD_DRIVER["activity"], ["c_nvmlGpmMetricsGet_t"], ["nvmlGpmMigSampleGet"]]
)
def test_board_without_activity_is_divided_equally_by_slices(
    tmp_path: Path, missing: list[str]
) -> None:
    host = older(tmp_path, *missing)
    occupied(host, 0.9, 0.0, 0.5)
    snapshot = host.run(12)
    assert host.board.method == "mig-equal"
    (failure,) = host.batch.failures
    assert "activity of the MIG instances" in failure.thing
    assert "dcgm" in failure.remedy
    charged, truth, doubts = host.charged(), host.settled_truth(), host.doubts()
    first, resident, third = (one.pid for one in PROCESSES[:3])
    assert charged[first] / charged[third] == pytest.approx(3, rel=0.01)
    for pid in (first, resident, third):
        assert abs(charged[pid] - truth[pid]) <= doubts[pid]
    assert instances(snapshot)[3].consumers == 0  # no process holds it
    host.session.close()
    host.gpus.close()


@pytest.mark.slow
def test_refused_activity_falls_back_and_returns(host: Host) -> None:
    occupied(host, 0.9, 0.2)
    host.run(5)
    GpuFaults(host.gpus).no_activity(0)
    host.run(5)
    assert host.board.method == "mig-equal"
    GpuFaults(host.gpus).no_activity(0, on=False)
    host.run(61)
    assert host.board.method == "mig-gpm"
    assert host.batch.failures == ()
    assert all(a.end == b.start for a, b in itertools.pairwise(host.usages))


def test_idle_instance_is_not_charged_while_activity_is_late(host: Host) -> None:
    occupied(host, 0.9, 0.0, 0.5)
    host.run(5)
    host.run(1, stalled=True)  # GPM samples without time between them are refused
    host.run(5)
    charged, truth = host.charged(), host.settled_truth()
    busy, resident, other = (one.pid for one in PROCESSES[:3])
    assert charged.get(resident, 0) == 0
    for pid in (busy, other):
        assert charged[pid] == pytest.approx(truth[pid], rel=0.01)
    assert all(a.end == b.start for a, b in itertools.pairwise(host.usages))
    assert max(one.end.mono - one.start.mono for one in host.usages) >= 10**9


def test_activity_that_stays_away_is_taken_to_be_equal(host: Host) -> None:
    occupied(host, 0.9, 0.0, 0.5)
    host.run(5)
    host.run(4, stalled=True)
    host.run(5)
    assert host.charged()[PROCESSES[1].pid] > 0
    assert all(a.end == b.start for a, b in itertools.pairwise(host.usages))


def test_activity_from_dcgm_divides_a_board_without_gpm(tmp_path: Path) -> None:
    server = DcgmServer()
    host = older(tmp_path, *OLD_DRIVER["activity"], settings=NvmlSettings(dcgm=server.url))
    occupied(host, 0.8, 0.2)
    board, dcgm = host.gpus.uuid(0), getattr(host.session.vendor, "dcgm", None)
    assert dcgm is not None
    try:
        host.run(2)
        assert host.board.method == "mig-equal"
        names = zip("1234", ("0.8", "0.2", "0.0", "0"), strict=True)
        lines = [series("SM_ACTIVE", board, instance, value) for instance, value in names]
        server.body = "\n".join(lines[:1]).encode()
        dcgm.fetch()
        host.run(2)
        assert host.board.method == "mig-equal"  # three instances are missing
        server.body = "\n".join(lines).encode()
        dcgm.fetch()
        host.run(1)
        settled = len(host.attributions)
        host.run(20)
        assert host.board.method == "mig-dcgm"
        assert host.board.usage_step == 30_000_000_000
        powers = host.ledger._domains[host.board.id].part_powers
        assert powers.power(host.usages[-1].parts[0]) is None  # its activity is too slow for that
        assert host.batch.failures == ()
        del host.attributions[:settled]
        charged, truth = host.charged(), host.settled_truth()
        for one in PROCESSES[:2]:
            assert charged[one.pid] == pytest.approx(truth[one.pid], rel=0.01)
        dcgm.close()
        host.clock.advance(90)
        host.run(2)
        assert host.board.method == "mig-equal"  # the figures are too old
    finally:
        host.session.close()
        host.gpus.close()
        server.close()


@pytest.mark.parametrize("missing", OLD_DRIVER["instances"])
def test_driver_without_instances_leaves_the_board_unattributed(
    tmp_path: Path, missing: str
) -> None:
    host = older(tmp_path, missing)
    occupied(host, 0.9)
    snapshot = host.run(5)
    assert instances(snapshot) == []
    assert host.charged() == {}
    (failure,) = host.batch.failures
    assert "MIG is on, and the driver does not list them" in failure.cause
    host.session.close()
    host.gpus.close()


def test_divided_board_without_instances_is_reported(host: Host) -> None:
    host.gpus.file.record(0).mig = 1
    host.run(2)
    (failure,) = host.batch.failures
    assert failure.cause == "MIG is on, and no instance exists"


def test_mode_that_changes_while_running_is_followed(host: Host) -> None:
    host.gpus.attach(0, PROCESSES[0].pid, SteadyLoad(0.8))
    host.run(10)
    assert host.board.method == "gpu-sm-utilisation"
    host.gpus.divide(0, (4, 3))
    host.run(10)
    assert (host.board.method, len(host.batch.domains)) == ("mig-gpm", 3)
    host.gpus.divide(0, (1, 1, 1))
    host.run(10)
    assert len(host.batch.domains) == 4
    host.gpus.divide(0, ())
    host.run(10)
    assert (host.board.method, len(host.batch.domains)) == ("gpu-sm-utilisation", 1)
    assert host.batch.failures == ()
    truth = host.settled_truth()[PROCESSES[0].pid]
    assert host.charged()[PROCESSES[0].pid] == pytest.approx(truth, rel=0.15)
    assert len(host.readings) == len({reading.at for reading in host.readings})


def test_lost_board_takes_its_instances_with_it(host: Host) -> None:
    occupied(host, 0.9)
    host.run(3)
    GpuFaults(host.gpus).lost(0)
    snapshot = host.run(3)
    assert [one.present for one in instances(snapshot)] == [False] * 4
    GpuFaults(host.gpus).lost(0, on=False)
    snapshot = host.run(10)
    assert [one.present for one in instances(snapshot)] == [True] * 4
    assert all(one.energy > 0 for one in instances(snapshot))


def test_usage_of_a_lost_board_is_reported_once(host: Host) -> None:
    host.gpus.divide(0, (3, 1))
    host.gpus.attach(0, PROCESSES[0].pid, SteadyLoad(0.5), instance=1)
    host.run(6)
    GpuFaults(host.gpus).lost(0)
    host.run(1)
    assert host.batch.readings == ()
    assert all(a.end == b.start for a, b in itertools.pairwise(host.usages))
