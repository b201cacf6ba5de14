"""The agent's NVML source on emulated GPUs: its joules and shares against the known truth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.emulated_faults import GpuFaults
from testbed.gpu_boards import P100
from testbed.gpu_sessions import nvml_session

from wattspan.emulation.boards import H100, EmulatedBoard
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.workloads import RequestServing, SteadyLoad, Training
from wattspan.model import Consumer, PayerInfo, Provenance, Reading
from wattspan.ports import Batch, SourceContext
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock

TRAIN, SERVE, HOLD = Consumer(100, 1), Consumer(200, 1), Consumer(300, 1)


class Agent:
    """The source, turned ten times a second on emulated GPUs that are stepped in between."""

    def __init__(self, path: Path, *boards: EmulatedBoard) -> None:
        self.clock = ManualClock()
        self.gpus = EmulatedGpus(path, boards, self.clock)
        directory = FakeDirectory([PayerInfo(payer, "job") for payer in (TRAIN, SERVE, HOLD)])
        context = SourceContext(self.clock, directory, emulated=True)
        self.session = nvml_session(EmulatedNvml(path, self.clock), NvmlSettings(), context)
        self.readings: dict[str, list[Reading]] = defaultdict(list)
        self.spent: dict[tuple[str, Consumer], int] = defaultdict(int)
        self.batch = Batch(())

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.gpus.run(0.1)
            self.batch = self.session.sample()
            for reading in self.batch.readings:
                self.readings[reading.domain_id].append(reading)
            for usage in self.batch.usages:
                for payer, spent in usage.spent.items():
                    if isinstance(payer, Consumer):
                        self.spent[usage.resource, payer] += spent

    def energy(self, gpu: int) -> int:
        readings = self.readings[f"gpu:{self.gpus.uuid(gpu)}"]
        return readings[-1].counter - readings[0].counter


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "gpus", H100, P100)
    agent.gpus.attach(0, TRAIN.pid, Training(step=0.4, noise=0.03))
    agent.gpus.attach(0, SERVE.pid, RequestServing(rate=2, cost=0.03))
    agent.gpus.attach(0, HOLD.pid, SteadyLoad(0.0))
    yield agent
    agent.session.close()
    agent.gpus.close()


def test_counters_energy_is_the_truth_to_a_counter_step(agent: Agent) -> None:
    agent.run(0.2)
    first = agent.gpus.truth(0).energy
    agent.readings.clear()
    agent.run(0.1)
    agent.run(20)
    step = 629 * 100_000
    assert agent.energy(0) == pytest.approx(agent.gpus.truth(0).energy - first, abs=2 * step)
    assert {domain.provenance for domain in agent.batch.domains} == {Provenance.EMULATED}
    assert all(domain.name.startswith("Emulated ") for domain in agent.batch.domains)


def integration_error(agent: Agent, work: Training) -> float:
    """Deviation of integrated power from the truth on the board without a counter."""
    agent.gpus.attach(1, TRAIN.pid, work)
    agent.run(2)
    first = agent.gpus.truth(1).energy
    agent.readings.clear()
    agent.run(40)
    return agent.energy(1) / (agent.gpus.truth(1).energy - first) - 1


def test_board_without_a_counter_is_integrated_close_to_the_truth(agent: Agent) -> None:
    work = Training(step=0.6, noise=0.03, seed=1)
    assert integration_error(agent, work) == pytest.approx(0, abs=0.03)


def test_steps_in_time_with_the_polls_deceive_a_sensor_that_looks_for_10_ms(agent: Agent) -> None:
    """Steps of exactly six polls: the host's 60 ms of idling are never looked at."""
    assert integration_error(agent, Training(step=0.6)) > 0.05


def test_process_shares_are_proportional_to_use(agent: Agent) -> None:
    agent.run(30)
    resource = f"gpu:{agent.gpus.uuid(0)}"
    train, serve = agent.spent[resource, TRAIN], agent.spent[resource, SERVE]
    truth = agent.gpus.truth(0).processes
    assert truth[HOLD.pid] == 0 == agent.spent[resource, HOLD]
    assert train > 20 * 10**9
    # Serving is memory-bound and draws less than its share of time: shares cannot know.
    assert serve / (train + serve) > truth[SERVE.pid] / (truth[TRAIN.pid] + truth[SERVE.pid])


def test_lost_gpu_comes_back_and_is_read_again(agent: Agent) -> None:
    agent.run(2)
    GpuFaults(agent.gpus).lost(0)
    agent.run(1)
    assert any(failure.domain_id for failure in agent.batch.failures)
    GpuFaults(agent.gpus).lost(0, False)
    agent.readings.clear()
    agent.run(5)
    assert agent.energy(0) > 0
