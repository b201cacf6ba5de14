"""The sources of GPUs on the emulated libraries of both vendors: boards whose truth is known."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from testbed.amd_boards import AmdFaults
from testbed.emulated_faults import GpuFaults
from testbed.gpu_boards import A40
from testbed.gpu_sessions import amdsmi_session, nvml_session
from testbed.sampled_boards import SERVE, TRAIN, SampledBoards

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.emulation.amdsmi import EmulatedAmdSmi
from wattspan.emulation.boards import H100, MI300X, PICOJOULES, EmulatedBoard
from wattspan.emulation.gpu_engine import ProcessKind
from wattspan.emulation.gpu_file import ENERGY_UNIT
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import DECODE, SteadyLoad
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    Domain,
    HwType,
    Milliwatts,
    Payer,
    PayerInfo,
    Provenance,
    Tick,
    Trouble,
)
from wattspan.ports import CounterSource, SourceContext
from wattspan.sources.amdsmi.device import AmdSmiSettings
from wattspan.sources.amdsmi.source import open_amdsmi
from wattspan.sources.gpu.session import GpuSession
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory


class Host(SampledBoards):
    """Two boards of a vendor. ``losses`` are the library's codes for a board that is gone.

    ``counter_error`` is the relative error of its counter, ``power_error`` that of its power.
    """

    boards: Sequence[EmulatedBoard]
    faults: GpuFaults
    addresses: tuple[str, str]
    losses: tuple[int, ...]
    not_loaded: int
    counter_error: float
    power_error: float

    def __init__(self, path: Path) -> None:
        super().__init__(path, self.boards)
        self.session = self.opened(self.context)

    @abstractmethod
    def opened(self, context: SourceContext) -> GpuSession: ...

    def share(self, gpu: int, consumer: Consumer) -> float:
        """The part of the use of a GPU that the consumer has."""
        used = self.used(gpu)
        return sum(u.spent.get(consumer, 0) for u in used) / sum(u.busy for u in used)


class NvidiaHost(Host):
    boards, losses, not_loaded = (H100, A40), (15,), 9
    addresses = ("0000:10:00.0", "0000:11:00.0")
    counter_error, power_error = 0.01, 0.05

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.faults = GpuFaults(self.gpus)

    def opened(self, context: SourceContext) -> GpuSession:
        nvml = EmulatedNvml(self.gpus.path, self.clock)
        return nvml_session(nvml, NvmlSettings(), context)


class AmdHost(Host):
    boards, not_loaded = (MI300X, MI300X), 34
    losses = (2, 31)  # a board without files "does not support" anything
    addresses = ("0000:60:00.0", "0000:61:00.0")
    counter_error, power_error = 0.0001, 0.02

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.faults: AmdFaults = AmdFaults(self.gpus)

    def opened(self, context: SourceContext) -> GpuSession:
        amdsmi = EmulatedAmdSmi(self.gpus.path, self.clock)
        return amdsmi_session(amdsmi, AmdSmiSettings(), context)

    def id(self, gpu: int) -> str:
        return f"gpu:{self.addresses[gpu]}"


VENDORS = (NvidiaHost, AmdHost)


@pytest.fixture(params=VENDORS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    host: Host = request.param(tmp_path / "gpus")
    yield host
    host.close()


@pytest.fixture
def nvidia(tmp_path: Path) -> Iterator[NvidiaHost]:
    host = NvidiaHost(tmp_path / "gpus")
    yield host
    host.close()


@pytest.fixture
def amd(tmp_path: Path) -> Iterator[AmdHost]:
    host = AmdHost(tmp_path / "gpus")
    yield host
    host.close()


# --------------------------------------------------------------------------------- both vendors


def test_every_board_is_a_domain_labelled_emulated(host: Host) -> None:
    host.run(0.1)
    domains = host.batch.domains
    assert [domain.id for domain in domains] == [host.id(0), host.id(1)]
    assert [domain.name for domain in domains] == [
        f"Emulated {board.name} {index}" for index, board in enumerate(host.boards)
    ]
    assert {domain.provenance for domain in domains} == {Provenance.EMULATED}
    assert tuple(domain.pci for domain in domains) == host.addresses
    assert host.batch.failures == ()


def test_emulated_library_in_place_of_the_real_one_is_labelled_emulated(host: Host) -> None:
    """With the emulated library preloaded, the agent has no information that it is emulated."""
    session = host.opened(SourceContext(host.clock, FakeDirectory(), emulated=False))
    assert {d.provenance for d in session.sample().domains} == {Provenance.EMULATED}
    session.close()


INTERVALS = pytest.mark.parametrize("interval", [0.1, 1.0])
"""Seconds between samples: while somebody needs the resolution, and at rest."""


@INTERVALS
def test_energy_is_the_truth_within_one_step_of_the_counter(host: Host, interval: float) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(0.1)
    before = host.gpus.truth(0)
    host.run(20, interval)
    after = host.gpus.truth(0)
    spent = host.of(0)[-1].counter - host.of(0)[0].counter
    assert spent == pytest.approx(after.energy - before.energy, rel=host.counter_error)


def test_counter_and_integrated_power_agree(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(15)
    status = host.status(0)
    assert status.counter_energy is not None
    assert status.integrated_energy == pytest.approx(status.counter_energy, rel=host.power_error)


@INTERVALS
def test_two_processes_are_charged_their_use(host: Host, interval: float) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    host.gpus.attach(0, SERVE.pid, SteadyLoad(0.25))
    host.run(12, interval)
    assert host.share(0, TRAIN) == pytest.approx(2 / 3, abs=0.03)
    assert host.share(0, SERVE) == pytest.approx(1 / 3, abs=0.03)
    used = host.used(0)
    busy = sum(usage.busy for usage in used)
    assert busy == pytest.approx(0.75 * (used[-1].end.mono - used[0].start.mono), rel=0.05)
    assert sum(usage.unclaimed for usage in used) < 0.05 * busy


def run_until_compared(host: Host) -> None:
    """Judge the counters of both boards, for which each works; the first one still does."""
    for gpu in (0, 1):
        host.gpus.attach(gpu, TRAIN.pid, SteadyLoad(1.0))
    host.run(65, 1.0)
    host.gpus.detach(1, TRAIN.pid)
    assert [host.status(gpu).energy_disagrees for gpu in (0, 1)] == [False, False]


def test_use_in_phase_with_the_samples_at_rest_is_that_of_all_time(host: Host) -> None:
    """Bursts of 0.25 s in each half a second, which a sample a second meets always or never."""
    run_until_compared(host)
    for phase in range(0, 10, 4):
        host.usages.clear()
        for step in range(1, 201):
            host.gpus.set_load(0, TRAIN.pid, float((step + phase) % 10 < 5))
            host.gpus.run(0.05, every=0.05)
            if step % 20:
                host.session.read_between(host.clock.monotonic())
            else:
                host.usages += host.session.sample(SECOND).usages
        used = host.used(0)
        duration = used[-1].end.mono - used[0].start.mono
        assert sum(usage.busy for usage in used) == pytest.approx(duration / 2, rel=0.25)


def test_resident_is_present_and_free(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.0))
    host.run(5)
    assert host.used(0)[-1].present == {TRAIN}
    assert host.used(0)[-1].spent == {}


def test_records_of_each_gpu_tile_time(host: Host) -> None:
    host.gpus.attach(1, SERVE.pid, SteadyLoad(0.9))
    host.run(10)
    for gpu in (0, 1):
        used = host.used(gpu)
        assert len(used) > 10
        assert all(a.end == b.start for a, b in itertools.pairwise(used))


@pytest.mark.parametrize(
    ("vendor", "code"), [(vendor, code) for vendor in VENDORS for code in vendor.losses]
)
def test_returning_board_starts_a_new_epoch_without_affecting_the_other(
    tmp_path: Path, vendor: Any, code: int
) -> None:
    host: Host = vendor(tmp_path / "gpus")
    host.run(1)
    host.faults.error(0, code)
    host.run(5)
    assert [r.domain_id for r in host.batch.readings] == [host.id(1)]
    assert host.id(0) in {failure.domain_id for failure in host.batch.failures}
    host.faults.error(0, 0)
    host.run(10)
    assert list(dict.fromkeys(r.epoch for r in host.of(0))) == [0, 1]
    assert {r.epoch for r in host.of(1)} == {0}
    assert host.batch.failures == ()
    host.close()


def test_unloaded_driver_is_retried(host: Host) -> None:
    host.run(1)
    host.faults.driver_error(host.not_loaded)
    host.run(3)
    assert host.batch.readings == ()
    assert Trouble.ABSENT in {failure.trouble for failure in host.batch.failures}
    host.faults.driver_error(0)
    host.run(5)
    assert len(host.batch.readings) == 2
    assert host.batch.failures == ()


def test_board_missing_after_a_reload_does_not_affect_the_other(host: Host) -> None:
    host.run(1)
    host.faults.driver_error(host.not_loaded)
    host.run(3)
    host.faults.error(0, host.losses[-1])
    host.faults.driver_error(0)
    host.run(20)
    assert [reading.domain_id for reading in host.batch.readings] == [host.id(1)]
    (failure,) = host.batch.failures
    assert (failure.domain_id, failure.trouble) == (host.id(0), Trouble.RETRY)
    host.faults.error(0, 0)
    host.run(10)
    assert len(host.batch.readings) == 2
    assert host.batch.failures == ()


@INTERVALS
def test_board_without_counter_is_integrated(host: Host, interval: float) -> None:
    host.faults.no_energy_counter(0)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(3)
    before, first = host.gpus.truth(0), host.of(0)[-1]
    host.run(12, interval)
    spent = host.of(0)[-1].counter - first.counter
    truth = host.gpus.truth(0).energy - before.energy
    assert spent == pytest.approx(truth, rel=host.power_error)


def test_power_of_short_work_is_integrated_at_a_sample_a_second(host: Host) -> None:
    """Work of 0.3 s in each second, which samples alone would always or never see."""
    host.faults.no_energy_counter(0)
    host.run(3)
    before, first = host.gpus.truth(0), host.of(0)[-1]
    for _ in range(20):
        host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
        for tenth in range(10):
            if tenth == 3:
                host.gpus.detach(0, TRAIN.pid)
            host.gpus.run(0.1, every=0.05)
            host.session.read_between(host.clock.monotonic())
        host.readings += host.session.sample(SECOND).readings
    host.run(1)
    spent = host.of(0)[-1].counter - first.counter
    assert spent == pytest.approx(host.gpus.truth(0).energy - before.energy, rel=0.05)


def test_interval_that_changes_loses_no_energy_and_no_usage(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.6))
    host.run(2)
    before, first = host.gpus.truth(0), host.of(0)[-1]
    for interval in (1.0, 0.1, 0.5, 0.1, 0.9, 0.3, 1.0, 0.2):
        host.run(3 * interval, interval)
    spent = host.of(0)[-1].counter - first.counter
    step = 0.1 * 700 * 1_000_000  # microjoules in a step of the counter
    assert spent == pytest.approx(host.gpus.truth(0).energy - before.energy, abs=step)
    used = host.used(0)
    assert all(a.end == b.start for a, b in itertools.pairwise(used))
    assert {reading.epoch for reading in host.of(0)} == {0}


def test_calls_of_the_library_are_few_and_counted(host: Host) -> None:
    """Calls a second for each board, of which one works and one rests."""
    run_until_compared(host)
    for interval, most in ((0.1, 60), (1.0, 25)):
        before = host.run(5, interval).calls or 0
        made = (host.run(30, interval).calls or 0) - before
        assert 0 < made <= 30 * most * len(host.boards)


def test_counter_is_compared_with_frequent_power_until_it_is_judged(host: Host) -> None:
    host.run(2, 1.0)
    now = host.clock.monotonic()
    assert host.session.next_read(now) == pytest.approx(now + 200 * MILLISECOND, abs=MILLISECOND)
    run_until_compared(host)
    host.gpus.detach(0, TRAIN.pid)
    host.run(2, 1.0)
    assert host.session.next_read(host.clock.monotonic()) is None


def test_refused_process_list_leaves_energy_unattributed(host: Host) -> None:
    host.faults.no_processes(0)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(5)
    assert all(usage.spent == {} for usage in host.used(0))
    assert host.batch.domains[0].method == "none"
    assert any("unattributed" in failure.remedy for failure in host.batch.failures)


# --------------------------------------------------------------------------------------- NVIDIA


def test_status_has_limits_and_throttling(nvidia: NvidiaHost) -> None:
    nvidia.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    nvidia.faults.foreign_limit(0, 300_000)
    nvidia.run(10)
    status = nvidia.status(0)
    assert status.limits.requested == status.limits.enforced == 300_000
    assert status.throttled["power_cap"] > 0
    assert "power_cap" in status.throttling
    assert None not in {status.sm_clock_hz, status.temperature_celsius, status.memory_used}


# ------------------------------------------------------------------------------------------ AMD


def test_accumulator_of_32_bits_wraps_without_loss(amd: AmdHost) -> None:
    amd.faults.short_counter(0)
    amd.faults.reset_counter(0, ((1 << 32) - 200_000_000) * ENERGY_UNIT)  # 3 kJ before its end
    amd.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    amd.run(1)
    before, first = amd.gpus.truth(0), amd.of(0)[-1]
    amd.run(8)
    spent = amd.of(0)[-1].counter - first.counter
    assert amd.of(0)[-1].counter > (1 << 32) * ENERGY_UNIT // PICOJOULES
    assert spent == pytest.approx(amd.gpus.truth(0).energy - before.energy, rel=0.0001)
    assert {reading.epoch for reading in amd.of(0)} == {0}


@pytest.mark.parametrize("kind", [ProcessKind.COMPUTE, ProcessKind.GRAPHICS])
def test_energy_of_processes_is_the_truth_within_one_percent(
    amd: AmdHost, kind: ProcessKind
) -> None:
    ledger = Ledger(LedgerSettings(idle_powers={HwType.GPU: Milliwatts(140_000)}))
    births = [PayerInfo(TRAIN, "train"), PayerInfo(SERVE, "serve")]
    domains: dict[str, tuple[Domain, ...]] = {}
    charged: Counter[Payer] = Counter()

    def run(seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            batch = amd.run(0.1)
            changed = {"amdsmi": batch.domains}
            tick = Tick(
                amd.clock.now(),
                {} if changed == domains else changed,
                batch.readings,
                births,
                batch.usages,
            )
            domains.update(changed)
            births.clear()
            for settled in ledger.apply(tick):
                charged.update(dict(settled.shares))

    run(2)
    amd.gpus.attach(0, TRAIN.pid, SteadyLoad(0.6), kind=kind)
    amd.gpus.attach(0, SERVE.pid, SteadyLoad(0.25), kind=kind)
    run(30)
    amd.gpus.detach(0, TRAIN.pid)
    amd.gpus.detach(0, SERVE.pid)
    run(5)
    truth = amd.gpus.truth(0).processes
    for consumer in (TRAIN, SERVE):
        assert charged[consumer] == pytest.approx(truth[consumer.pid], rel=0.01)


def test_processes_on_the_graphics_engine_are_charged_their_time(amd: AmdHost) -> None:
    amd.gpus.attach(0, TRAIN.pid, SteadyLoad(0.6), kind=ProcessKind.GRAPHICS)
    amd.gpus.attach(0, SERVE.pid, SteadyLoad(0.2, DECODE), kind=ProcessKind.GRAPHICS)
    amd.run(8)
    used = amd.used(0)
    duration = used[-1].end.mono - used[0].start.mono
    spent = sum(usage.spent.get(TRAIN, 0) for usage in used)
    assert spent / duration == pytest.approx(0.6, rel=0.01)
    assert sum(usage.unclaimed for usage in used) < 0.01 * duration


def test_status_has_limits_clocks_and_memory(amd: AmdHost) -> None:
    amd.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    amd.run(2)
    status = amd.status(0)
    assert status.limits.minimum == 300_000
    assert status.limits.maximum == status.limits.default == 750_000
    assert status.limits.requested == status.limits.enforced == 750_000
    assert None not in {status.sm_clock_hz, status.temperature_celsius, status.memory_used}
    assert (status.model, status.driver, status.index) == (MI300X.name, "6.14.14", 0)


def test_board_that_appears_later_is_measured(amd: AmdHost) -> None:
    amd.faults.lost(1, 31)
    amd.run(1)
    assert [domain.id for domain in amd.batch.domains] == [amd.id(0)]
    amd.faults.lost(1, 0)
    amd.faults.lost(0, 31)  # the library is initialised again to find the first one
    amd.run(3)
    assert amd.of(1)


def test_divided_board_is_one_domain_with_the_processes_of_all_partitions(amd: AmdHost) -> None:
    amd.faults.divide(0, 8)
    amd.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    amd.gpus.attach(0, SERVE.pid, SteadyLoad(0.25))
    amd.run(5)
    assert [domain.id for domain in amd.batch.domains] == [amd.id(0), amd.id(1)]
    assert "8 partitions (CPX)" in amd.batch.domains[0].why
    assert amd.used(0)[-1].spent.keys() == {TRAIN, SERVE}
    assert amd.share(0, TRAIN) == pytest.approx(2 / 3, rel=0.01)


def test_board_divided_while_it_is_read_keeps_its_counter(amd: AmdHost) -> None:
    amd.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    amd.run(2)
    amd.faults.divide(0, 4)
    amd.gpus.attach(0, SERVE.pid, SteadyLoad(0.25))
    amd.run(5)
    assert "4 partitions (QPX)" in amd.batch.domains[0].why
    assert amd.status(0).partition_mode == "QPX"
    amd.faults.divide(0, 0)
    amd.run(5)
    assert amd.status(0).partition_mode == "SPX"
    assert "partitions" not in amd.batch.domains[0].why
    assert {reading.epoch for reading in amd.of(0)} == {0}
    assert {usage.unclaimed for usage in amd.used(0)[-3:]} == {0}
    assert amd.batch.failures == ()


def test_opened_source_obeys_the_port_and_reports_a_hang(tmp_path: Path) -> None:
    amd = AmdHost(tmp_path / "gpus")
    context = SourceContext(
        amd.clock,
        FakeDirectory(),
        emulated=True,
        amdsmi=EmulatedAmdSmi(tmp_path / "gpus", amd.clock),
    )
    source = open_amdsmi(AmdSmiSettings(enabled=False), context)
    assert source is None
    assert open_amdsmi(AmdSmiSettings(), SourceContext(amd.clock, FakeDirectory(), True)) is None
    source = open_amdsmi(AmdSmiSettings(), context)
    assert isinstance(source, CounterSource)
    source.close()
    amd.gpus.close()
