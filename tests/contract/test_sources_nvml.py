"""The GPU source on the emulated NVML: pynvml's own code over boards whose truth is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.emulated_faults import GpuFaults
from testbed.gpu_boards import A40
from testbed.gpu_sessions import nvml_session
from testbed.sampled_boards import SERVE, TRAIN, SampledBoards

from wattspan.emulation.boards import H100
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import DECODE, SteadyLoad
from wattspan.model import (
    Consumer,
    Provenance,
    Trouble,
)
from wattspan.ports import SourceContext
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory


class Host(SampledBoards):
    """An H100 and an A40."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, [H100, A40])
        self.session = nvml_session(EmulatedNvml(path, self.clock), NvmlSettings(), self.context)

    def share(self, gpu: int, consumer: Consumer) -> float:
        used = self.used(gpu)
        covered = used[-1].end.mono - used[0].start.mono
        return sum(usage.spent.get(consumer, 0) for usage in used) / covered


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "gpus")
    yield host
    host.close()


def test_every_board_is_a_domain_labelled_emulated(host: Host) -> None:
    host.run(0.1)
    assert [domain.id for domain in host.batch.domains] == [host.id(0), host.id(1)]
    assert {domain.provenance for domain in host.batch.domains} == {Provenance.EMULATED}
    assert all(domain.name.startswith("Emulated ") for domain in host.batch.domains)
    assert all(not d.name.startswith("Emulated Emulated") for d in host.batch.domains)
    assert host.batch.failures == ()


def test_emulated_library_in_place_of_the_real_one_is_labelled_emulated(host: Host) -> None:
    """With the emulated library preloaded, the agent has no information that it is emulated."""
    context = SourceContext(host.clock, FakeDirectory(), emulated=False)
    nvml = EmulatedNvml(host.gpus.path, host.clock)
    session = nvml_session(nvml, NvmlSettings(), context)
    assert {d.provenance for d in session.sample().domains} == {Provenance.EMULATED}
    session.close()


def test_energy_is_the_truth_within_one_step_of_the_counter(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(0.1)
    before = host.gpus.truth(0)
    host.run(20)
    after = host.gpus.truth(0)
    spent = host.of(0)[-1].counter - host.of(0)[0].counter
    assert spent == pytest.approx(after.energy - before.energy, rel=0.01)


def test_counter_and_integrated_power_agree(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(15)
    status = host.status(0)
    assert status.counter_energy is not None
    assert status.integrated_energy == pytest.approx(status.counter_energy, rel=0.05)


def test_two_processes_are_charged_their_use(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(0.5))
    host.gpus.attach(0, SERVE.pid, SteadyLoad(0.25, DECODE))
    host.run(12)
    assert host.share(0, TRAIN) == pytest.approx(0.5, abs=0.03)
    assert host.share(0, SERVE) == pytest.approx(0.25, abs=0.03)
    unclaimed = sum(usage.unclaimed for usage in host.used(0))
    assert unclaimed < 0.05 * sum(usage.busy for usage in host.used(0))


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


def test_status_has_limits_and_throttling(host: Host) -> None:
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    GpuFaults(host.gpus).foreign_limit(0, 300_000)
    host.run(10)
    status = host.status(0)
    assert status.limits.requested == status.limits.enforced == 300_000
    assert status.throttled["power_cap"] > 0
    assert "power_cap" in status.throttling
    assert None not in {status.sm_clock_hz, status.temperature_celsius, status.memory_used}


def test_returning_board_starts_a_new_epoch_without_affecting_the_other(host: Host) -> None:
    host.run(1)
    GpuFaults(host.gpus).lost(0)
    host.run(5)
    assert [r.domain_id for r in host.batch.readings] == [host.id(1)]
    GpuFaults(host.gpus).lost(0, on=False)
    host.run(10)
    assert list(dict.fromkeys(r.epoch for r in host.of(0))) == [0, 1]
    assert {r.epoch for r in host.of(1)} == {0}
    assert host.batch.failures == ()


def test_unloaded_driver_is_retried(host: Host) -> None:
    host.run(1)
    GpuFaults(host.gpus).driver_gone()
    host.run(3)
    assert host.batch.readings == ()
    assert Trouble.ABSENT in {failure.trouble for failure in host.batch.failures}
    GpuFaults(host.gpus).driver_gone(on=False)
    host.run(5)
    assert len(host.batch.readings) == 2
    assert host.batch.failures == ()


def test_board_without_counter_is_integrated(host: Host) -> None:
    GpuFaults(host.gpus).no_energy_counter(0)
    host.gpus.attach(0, TRAIN.pid, SteadyLoad(1.0))
    host.run(3)
    before, first = host.gpus.truth(0), host.of(0)[-1]
    host.run(12)
    spent = host.of(0)[-1].counter - first.counter
    assert spent == pytest.approx(host.gpus.truth(0).energy - before.energy, rel=0.05)


def test_domain_has_the_address_of_its_board_as_the_kernel_writes_it(host: Host) -> None:
    host.run(0.1)
    assert [domain.pci for domain in host.batch.domains] == ["0000:10:00.0", "0000:11:00.0"]
