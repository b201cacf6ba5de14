"""A third vendor of GPUs, as the guide to plugins describes it: read by the agent's own session.

The contract of actuators holds its limits (test_actuators.py).
"""

from __future__ import annotations

from types import ModuleType

import pytest
from testbed.lumen import Pylumen, load, sketch
from testbed.waiting import eventually

from wattspan.model import SECOND, Consumer, PayerInfo, Trouble
from wattspan.ports import Batch, CounterSource, SourceContext, SourceError
from wattspan.sources.gpu.session import GpuSession
from wattspan.testing import FakeDirectory, ManualClock

TRAIN, SERVE = Consumer(100, 5), Consumer(200, 7)
FIRST, SECOND_BOARD = "gpu:0000:0a:00.0", "gpu:0000:0b:00.0"
MAX_LINES = 300


class Host:
    """The guide's module on two boards, and the batches of its session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.binding = Pylumen(self.clock)
        self.module: ModuleType = load(monkeypatch, self.binding)
        directory = FakeDirectory([PayerInfo(TRAIN, "train"), PayerInfo(SERVE, "serve")])
        self.context = SourceContext(self.clock, directory)
        vendor = self.module.Lumen(self.binding, self.clock)
        self.session = GpuSession(vendor, self.module.Settings(), self.context)
        self.batches: list[Batch] = []

    def run(self, seconds: float) -> Batch:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            for pid in self.binding.first.processes:
                self.binding.first.processes[pid] += SECOND // 40
            self.batches.append(self.session.sample())
        return self.batches[-1]

    def joules(self, domain: str) -> float:
        of = [one for batch in self.batches for one in batch.readings if one.domain_id == domain]
        assert len({one.epoch for one in of}) == 1
        return (of[-1].counter - of[0].counter) / 1e6


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_vendor_is_at_most_as_long_as_the_guide_promises() -> None:
    assert len(sketch().splitlines()) <= MAX_LINES


def test_energy_and_status_of_every_board_are_read(host: Host) -> None:
    batch = host.run(5)
    assert [domain.name for domain in batch.domains] == ["Lumen L1 0", "Lumen L1 1"]
    assert host.joules(FIRST) == pytest.approx(300 * 4.9, rel=0.001)
    status = next(one for batch in reversed(host.batches) for one in batch.gpus)
    assert (status.limits.maximum, status.sm_clock_hz) == (500_000, 2_000_000_000)
    assert status.energy_basis == "counter"
    assert batch.failures == ()


def test_energy_is_charged_by_the_time_of_processes(host: Host) -> None:
    host.binding.first.busy = 50
    host.binding.first.processes = {TRAIN.pid: 0, SERVE.pid: 0}
    host.run(5)
    usage = [one for batch in host.batches for one in batch.usages if one.resource == FIRST][-1]
    assert usage.spent[TRAIN] == usage.spent[SERVE] == usage.capacity // 4
    assert usage.unclaimed == 0


def test_lost_board_returns_with_a_new_epoch_and_affects_no_other(host: Host) -> None:
    host.run(2)
    host.binding.first.status = 3
    batch = host.run(2)
    (failure,) = batch.failures
    assert (failure.domain_id, failure.trouble) == (FIRST, Trouble.RETRY)
    assert [reading.domain_id for reading in batch.readings] == [SECOND_BOARD]
    host.binding.first.status = 0
    batch = host.run(9)
    assert batch.failures == ()
    assert [(one.domain_id, one.epoch) for one in batch.readings] == [(SECOND_BOARD, 0), (FIRST, 1)]


def test_opened_source_has_a_thread_of_its_own(host: Host) -> None:
    assert host.module.source.open(host.module.Settings(enabled=False), host.context) is None
    source = host.module.source.open(host.module.Settings(), host.context)
    assert isinstance(source, CounterSource)
    eventually(lambda: source.read().readings, "a reading")
    source.close()
    assert host.binding.started == 0


def test_missing_binding_is_an_error_only_if_required(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pylumen", None)
    assert host.module.source.open(host.module.Settings(), host.context) is None
    with pytest.raises(SourceError, match="pylumen is not installed"):
        host.module.source.open(host.module.Settings(enabled=True), host.context)
