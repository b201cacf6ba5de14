"""The source of AMD GPUs on the emulated AMD SMI, with boards whose truth is known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.amd_boards import AmdFaults
from testbed.gpu_sessions import amdsmi_session
from testbed.sampled_boards import SERVE, TRAIN, SampledBoards

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.emulation.amdsmi import EmulatedAmdSmi
from wattspan.emulation.boards import MI300X, PICOJOULES
from wattspan.emulation.gpu_engine import ProcessKind
from wattspan.emulation.gpu_file import ENERGY_UNIT
from wattspan.emulation.workloads import DECODE, SteadyLoad
from wattspan.model import (
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
from wattspan.testing import FakeDirectory


class Host(SampledBoards):
    """Two MI300X."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, [MI300X, MI300X])
        self.faults = AmdFaults(self.gpus)
        smi = EmulatedAmdSmi(path, self.clock)
        self.session = amdsmi_session(smi, AmdSmiSettings(), self.context)

    def id(self, gpu: int) -> str:
        return f"gpu:0000:{0x60 + gpu:02x}:00.0"

    def share(self, gpu: int, consumer: Consumer) -> float:
        """The part of the use of a GPU that the consumer has."""
        used = self.used(gpu)
        return sum(u.spent.get(consumer, 0) for u in used) / sum(u.busy for u in used)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "gpus")
    yield host
    host.close()


def test_every_board_is_a_domain_labelled_emulated(host: Host) -> None:
    host.run(0.1)
    assert [domain.id for domain in host.batch.domains] == [host.id(0), host.id(1)]
    assert {domain.provenance for domain in host.batch.domains} == {Provenance.EMULATED}
    assert host.batch.domains[0].name == "Emulated AMD Instinct MI300X 0"
    assert host.batch.failures == ()


def test_emulated_library_in_place_of_the_real_one_is_labelled_emulated(host: Host) -> None:
    context = SourceContext(host.clock, FakeDirectory(), emulated=False)
    session = amdsmi_session(EmulatedAmdSmi(host.gpus.path, host.clock), AmdSmiSettings(), context)
    assert {d.provenance for d in session.sample().domains} == {Provenance.EMULATED}
    session.close()


def test_energy_is_the_truth_within_one_step_of_the_accumulator(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(0.1)
    before = host.gpus.truth(0)
    host.run(5)
    after = host.gpus.truth(0)
    spent = host.of(0)[-1].counter - host.of(0)[0].counter
    assert spent == pytest.approx(after.energy - before.energy, rel=0.0001)


def test_accumulator_of_32_bits_wraps_without_loss(host: Host) -> None:
    host.faults.short_counter(0)
    host.faults.reset_counter(0, ((1 << 32) - 200_000_000) * ENERGY_UNIT)  # 3 kJ before its end
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(1)
    before, first = host.gpus.truth(0), host.of(0)[-1]
    host.run(8)
    spent = host.of(0)[-1].counter - first.counter
    assert host.of(0)[-1].counter > (1 << 32) * ENERGY_UNIT // PICOJOULES
    assert spent == pytest.approx(host.gpus.truth(0).energy - before.energy, rel=0.0001)
    assert {reading.epoch for reading in host.of(0)} == {0}


def test_counter_and_integrated_power_agree(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(6)
    status = host.status(0)
    assert status.counter_energy is not None
    assert status.integrated_energy == pytest.approx(status.counter_energy, rel=0.02)


def test_processes_are_charged_by_occupied_compute_units(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    host.gpus.attach(0, SERVE.pid, SteadyLoad(0.25))
    host.run(8)
    truth = host.gpus.truth(0).processes
    expected = truth[TRAIN.pid] / sum(truth.values())
    assert host.share(0, TRAIN) == pytest.approx(expected, rel=0.01)
    assert host.share(0, SERVE) == pytest.approx(1 - expected, rel=0.01)


@pytest.mark.parametrize("kind", [ProcessKind.COMPUTE, ProcessKind.GRAPHICS])
def test_energy_of_processes_is_the_truth_within_one_percent(host: Host, kind: ProcessKind) -> None:
    ledger = Ledger(LedgerSettings(idle_powers={HwType.GPU: Milliwatts(140_000)}))
    births = [PayerInfo(TRAIN, "train"), PayerInfo(SERVE, "serve")]
    domains: dict[str, tuple[Domain, ...]] = {}
    charged: Counter[Payer] = Counter()

    def run(seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            batch = host.run(0.1)
            changed = {"amdsmi": batch.domains}
            tick = Tick(
                host.clock.now(),
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
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.6), kind=kind)
    host.gpus.attach(0, SERVE.pid, SteadyLoad(0.25), kind=kind)
    run(30)
    host.gpus.detach(0, TRAIN.pid)
    host.gpus.detach(0, SERVE.pid)
    run(5)
    truth = host.gpus.truth(0).processes
    for consumer in (TRAIN, SERVE):
        assert charged[consumer] == pytest.approx(truth[consumer.pid], rel=0.01)


def test_processes_on_the_graphics_engine_are_charged_their_time(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.6), kind=ProcessKind.GRAPHICS)
    host.gpus.attach(0, SERVE.pid, SteadyLoad(0.2, DECODE), kind=ProcessKind.GRAPHICS)
    host.run(8)
    used = host.used(0)
    duration = used[-1].end.mono - used[0].start.mono
    spent = sum(usage.spent.get(TRAIN, 0) for usage in used)
    assert spent / duration == pytest.approx(0.6, rel=0.01)
    assert sum(usage.unclaimed for usage in used) < 0.01 * duration


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


def test_status_has_limits_clocks_and_memory(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(2)
    status = host.status(0)
    assert status.limits.minimum == 300_000
    assert status.limits.maximum == status.limits.default == 750_000
    assert status.limits.requested == status.limits.enforced == 750_000
    assert None not in {status.sm_clock_hz, status.temperature_celsius, status.memory_used}
    assert (status.model, status.driver, status.index) == (MI300X.name, "6.14.14", 0)


@pytest.mark.parametrize("code", [2, 31])  # a board without files "does not support" anything
def test_returning_board_starts_a_new_epoch_without_affecting_the_other(
    host: Host, code: int
) -> None:
    host.run(1)
    host.faults.lost(0, code)
    host.run(5)
    assert [r.domain_id for r in host.batch.readings] == [host.id(1)]
    assert host.id(0) in {failure.domain_id for failure in host.batch.failures}
    host.faults.lost(0, 0)
    host.run(10)
    assert list(dict.fromkeys(r.epoch for r in host.of(0))) == [0, 1]
    assert {r.epoch for r in host.of(1)} == {0}
    assert host.batch.failures == ()


def test_board_that_appears_later_is_measured(host: Host) -> None:
    host.faults.lost(1, 31)
    host.run(1)
    assert [domain.id for domain in host.batch.domains] == [host.id(0)]
    host.faults.lost(1, 0)
    host.faults.lost(0, 31)  # the library is initialised again to find the first one
    host.run(3)
    assert host.of(1)


def test_unloaded_driver_is_retried(host: Host) -> None:
    host.run(1)
    host.faults.driver_error(34)
    host.run(3)
    assert host.batch.readings == ()
    assert Trouble.ABSENT in {failure.trouble for failure in host.batch.failures}
    host.faults.driver_error(0)
    host.run(5)
    assert len(host.batch.readings) == 2
    assert host.batch.failures == ()


def test_board_without_accumulator_is_integrated(host: Host) -> None:
    host.faults.no_energy_counter(0)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(3)
    before, first = host.gpus.truth(0), host.of(0)[-1]
    host.run(6)
    spent = host.of(0)[-1].counter - first.counter
    assert spent == pytest.approx(host.gpus.truth(0).energy - before.energy, rel=0.02)


def test_divided_board_is_one_domain_with_the_processes_of_all_partitions(host: Host) -> None:
    host.faults.divide(0, 8)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    host.gpus.attach(0, SERVE.pid, SteadyLoad(0.25))
    host.run(5)
    assert [domain.id for domain in host.batch.domains] == [host.id(0), host.id(1)]
    assert "8 partitions (CPX)" in host.batch.domains[0].why
    assert host.used(0)[-1].spent.keys() == {TRAIN, SERVE}
    assert host.share(0, TRAIN) == pytest.approx(2 / 3, rel=0.01)


def test_board_divided_while_it_is_read_keeps_its_counter(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    host.run(2)
    host.faults.divide(0, 4)
    host.gpus.attach(0, SERVE.pid, SteadyLoad(0.25))
    host.run(5)
    assert "4 partitions (QPX)" in host.batch.domains[0].why
    assert host.status(0).partition_mode == "QPX"
    host.faults.divide(0, 0)
    host.run(5)
    assert host.status(0).partition_mode == "SPX"
    assert "partitions" not in host.batch.domains[0].why
    assert {reading.epoch for reading in host.of(0)} == {0}
    assert {usage.unclaimed for usage in host.used(0)[-3:]} == {0}
    assert host.batch.failures == ()


def test_refused_process_list_leaves_energy_unattributed(host: Host) -> None:
    host.faults.no_processes(0)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(5)
    assert all(usage.spent == {} for usage in host.used(0))
    assert host.batch.domains[0].method == "none"
    assert any("unattributed" in failure.remedy for failure in host.batch.failures)


def test_opened_source_obeys_the_port_and_reports_a_hang(tmp_path: Path) -> None:
    host = Host(tmp_path / "gpus")
    context = SourceContext(
        host.clock,
        FakeDirectory(),
        emulated=True,
        amdsmi=EmulatedAmdSmi(tmp_path / "gpus", host.clock),
    )
    source = open_amdsmi(AmdSmiSettings(enabled=False), context)
    assert source is None
    assert open_amdsmi(AmdSmiSettings(), SourceContext(host.clock, FakeDirectory(), True)) is None
    source = open_amdsmi(AmdSmiSettings(), context)
    assert isinstance(source, CounterSource)
    source.close()
    host.gpus.close()
