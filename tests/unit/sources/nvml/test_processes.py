"""GPU attribution: from utilisation samples to nanoseconds for each process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from testbed.fake_nvml import FakeGpu
from testbed.nvml_bench import SERVE, TRAIN, Bench

from wattspan.model import Consumer, PayerInfo, Trouble
from wattspan.sources.nvml.processes import in_nested_pid_namespace

SAMPLES_REFUSED = {"nvmlDeviceGetProcessUtilization": 3}


def busy(bench: Bench, *users: tuple[Consumer, int], device: int | None = None) -> None:
    """Let each of ``users`` keep the GPU that many percent busy from now on."""
    total = sum(percent for _, percent in users)
    bench.gpu.utilisation = (total if device is None else device, 0)
    bench.gpu.running = [user.pid for user, _ in users]


def sampling(bench: Bench, *users: tuple[Consumer, int]) -> Callable[[], None]:
    def each() -> None:
        for user, percent in users:
            bench.nvml.sample(bench.gpu, user.pid, percent)

    return each


def test_process_is_charged_its_share_of_the_time() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 60), (SERVE, 20))
    bench.run(10, each=sampling(bench, (TRAIN, 60), (SERVE, 20)))
    covered = (bench.usages[-1].end.mono - bench.usages[0].start.mono) / 1e9
    assert covered > 8.5
    assert bench.spent(TRAIN) == pytest.approx(0.60 * covered)
    assert bench.spent(SERVE) == pytest.approx(0.20 * covered)
    assert bench.unclaimed() == pytest.approx(0, abs=0.001)


@pytest.mark.parametrize("period", [0.1, 0.2, 0.5, 1.0])
def test_share_does_not_depend_on_how_often_the_driver_samples(period: float) -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    every = round(period / 0.1)
    count = 0

    def each() -> None:
        nonlocal count
        count += 1
        if count % every == 0:
            bench.nvml.sample(bench.gpu, TRAIN.pid, 50)

    bench.run(30, each=each)
    start = len(bench.usages) // 2
    late = bench.usages[start:]
    covered = (late[-1].end.mono - late[0].start.mono) / 1e9
    assert sum(u.spent.get(TRAIN, 0) for u in late) / 1e9 == pytest.approx(covered / 2, rel=0.01)


def test_periods_without_use_are_not_charged() -> None:
    """NVML leaves out samples of zero: every second one is missing."""
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 80), device=40)
    sample = sampling(bench, (TRAIN, 80))
    bench.run(2, each=sample)  # with a continuous load the period is visible
    spent, end = bench.spent(TRAIN), bench.usages[-1].end.mono
    on = False

    def each() -> None:
        nonlocal on
        on = not on
        if on:
            sample()

    bench.run(2, each=each)
    covered = (bench.usages[-1].end.mono - end) / 1e9
    assert (bench.spent(TRAIN) - spent) < 0.75 * 0.80 * covered


def test_records_follow_each_other_without_gap_or_overlap() -> None:
    bench = Bench()
    bench.turn()
    begun = bench.readings[0].at
    bench.run(3)
    busy(bench, (TRAIN, 60))
    bench.run(3, every=0.13, each=sampling(bench, (TRAIN, 60)))
    bench.clock.advance(4.2)
    bench.run(3)
    assert bench.usages[0].start == begun
    pairs = list(zip(bench.usages, bench.usages[1:], strict=False))
    assert pairs
    assert all(earlier.end == later.start for earlier, later in pairs)
    assert all(u.capacity == u.end.mono - u.start.mono > 0 for u in bench.usages)


def test_usage_is_recorded_while_the_gpu_is_unused() -> None:
    bench = Bench()
    bench.turn()
    bench.run(5)
    assert bench.clock.now().mono - bench.usages[-1].end.mono <= 1.5e9
    assert all(usage.busy == 0 for usage in bench.usages)


def test_busy_time_beyond_all_processes_is_unclaimed() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 30), device=90)
    bench.run(10, each=sampling(bench, (TRAIN, 30)))
    covered = (bench.usages[-1].end.mono - bench.usages[0].start.mono) / 1e9
    assert bench.spent(TRAIN) == pytest.approx(0.30 * covered)
    assert bench.unclaimed() == pytest.approx(0.60 * covered)


def test_device_figure_that_trails_leaves_no_remainder() -> None:
    """The device's utilisation is smoothed: it rises late and falls late by as much."""
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 100), device=0)
    bench.run(0.8, each=sampling(bench, (TRAIN, 100)))
    busy(bench, (TRAIN, 100))
    bench.run(5, each=sampling(bench, (TRAIN, 100)))
    bench.run(0.8)
    bench.gpu.utilisation = (0, 0)
    bench.run(5)
    assert bench.unclaimed() < 0.25  # a look at the device every 0.2 s, and not 0.8 s
    assert bench.spent(TRAIN) == pytest.approx(5.8)


def test_power_is_read_every_other_sample_or_always_without_a_counter() -> None:
    bench = Bench()
    bench.turn()
    bench.run(10)
    power = bench.nvml.calls.count("nvmlDeviceGetUtilizationRates")
    assert power == 1 + 10 * 6  # after 0.2, 0.4, 0.5 (for the usage), 0.7, 0.9 and 1.0 s
    bench.nvml.errors["nvmlDeviceGetTotalEnergyConsumption"] = 3
    bench.run(10)
    assert bench.nvml.calls.count("nvmlDeviceGetUtilizationRates") == power + 100


def test_samples_beyond_the_whole_time_keep_their_proportions() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 90), (SERVE, 60), device=100)
    bench.run(5, each=sampling(bench, (TRAIN, 90), (SERVE, 60)))
    assert bench.spent(TRAIN) / bench.spent(SERVE) == pytest.approx(1.5)
    assert bench.unclaimed() == 0


def test_holders_of_a_context_are_present_without_being_charged() -> None:
    bench = Bench()
    bench.gpu.running = [TRAIN.pid, SERVE.pid, 4711]
    bench.turn()
    bench.run(5)
    assert bench.usages[-1].present == {TRAIN, SERVE}
    assert bench.usages[-1].spent == {}


def test_time_of_an_unknown_process_is_unclaimed() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (Consumer(4711, 0), 50))
    bench.run(5, each=sampling(bench, (Consumer(4711, 0), 50)))
    covered = (bench.usages[-1].end.mono - bench.usages[0].start.mono) / 1e9
    assert bench.unclaimed() == pytest.approx(covered / 2)


def test_process_that_has_just_ended_is_still_charged() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    bench.run(2, each=sampling(bench, (TRAIN, 50)))
    sampling(bench, (TRAIN, 50))()
    del bench.directory.infos[TRAIN]
    bench.gpu.utilisation, bench.gpu.running = (0, 0), []
    bench.run(4)
    assert bench.spent(TRAIN) == pytest.approx(1.0)
    assert bench.unclaimed() == pytest.approx(0)


def test_reused_pid_is_not_charged_for_its_predecessor() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    bench.run(2, each=sampling(bench, (TRAIN, 50)))
    sampling(bench, (TRAIN, 50))()
    successor = Consumer(TRAIN.pid, bench.clock.monotonic() // 10_000_000 + 10)
    bench.directory.infos = {successor: PayerInfo(successor, "next")}
    bench.gpu.utilisation, bench.gpu.running = (0, 0), []
    bench.run(4)
    assert bench.spent(successor) == 0
    assert bench.spent(TRAIN) == pytest.approx(1.0)


def test_each_sample_is_requested_once() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    bench.run(3, each=sampling(bench, (TRAIN, 50)))
    assert bench.nvml.seen[0] >= 1_700_000_000_000_000  # never the whole buffer
    assert bench.nvml.seen[2:] == sorted(set(bench.nvml.seen[2:]))


@pytest.mark.parametrize("step", [-3600, 3600])
def test_clock_that_is_set_hides_no_samples(step: int) -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    sample = sampling(bench, (TRAIN, 50))
    bench.run(5, each=sample)
    bench.clock.step_wall(step)
    bench.run(5, each=sample)
    assert bench.spent(TRAIN) == pytest.approx(4.9, abs=0.5)
    assert bench.batch.failures == ()


def test_clock_set_twice_misdates_no_sample() -> None:
    """Those of the first hour are still remembered by the driver when the second begins."""
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    sample = sampling(bench, (TRAIN, 50))
    for step in (3600, -3600, -3600, 3600):
        bench.clock.step_wall(step)
        bench.run(2, each=sample)
        assert bench.batch.failures == ()
    assert bench.spent(TRAIN) == pytest.approx(3.9, abs=0.5)


def test_impossible_samples_are_reported() -> None:
    bench = Bench()
    bench.turn()
    bench.gpu.samples.append((bench.clock.now().wall // 1000 + 60_000_000, TRAIN.pid, 50))
    bench.gpu.samples.append((bench.clock.now().wall // 1000 + 1, TRAIN.pid, 4_000_000))
    bench.run(0.5)
    assert bench.failure("process utilisation").trouble is Trouble.MALFORMED
    assert bench.spent(TRAIN) == 0


def test_usage_is_unclaimed_if_processes_are_indistinguishable() -> None:
    """Not even with a single process on the GPU: it need not be the one that works."""
    bench = Bench()
    bench.nvml.errors |= SAMPLES_REFUSED
    busy(bench, (TRAIN, 70))
    bench.turn()
    bench.run(5)
    covered = (bench.usages[-1].end.mono - bench.usages[0].start.mono) / 1e9
    assert bench.spent(TRAIN) == 0
    assert bench.unclaimed() == pytest.approx(0.7 * covered)
    assert bench.domain().method == "none"
    assert "does not support" in bench.failure("process utilisation").cause


def test_mig_gpu_is_unattributed_with_a_reason() -> None:
    bench = Bench(FakeGpu("GPU-a", mig=1))
    bench.nvml.errors |= SAMPLES_REFUSED | {"nvmlDeviceGetUtilizationRates": 3}
    bench.turn()
    bench.run(5)
    assert all(usage.unclaimed == usage.capacity for usage in bench.usages)
    assert "MIG is on" in bench.failure("MIG instances").cause
    assert bench.statuses[-1].mig is True
    assert bench.statuses[-1].utilisation is None


def test_gpu_is_attributed_within_a_minute_after_mig() -> None:
    bench = Bench()
    bench.nvml.errors |= SAMPLES_REFUSED
    bench.turn()
    bench.run(2)
    bench.nvml.errors.clear()
    bench.run(61)
    assert bench.domain().method == "gpu-sm-utilisation"
    assert bench.batch.failures == ()


def test_device_without_utilisation_has_no_remainder() -> None:
    bench = Bench()
    bench.nvml.errors["nvmlDeviceGetUtilizationRates"] = 3
    bench.turn()
    busy(bench, (TRAIN, 50))
    bench.run(5, each=sampling(bench, (TRAIN, 50)))
    assert bench.spent(TRAIN) > 1.5
    assert bench.unclaimed() == 0


@pytest.mark.parametrize("code", [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND])
def test_empty_sample_buffer_means_no_use(code: int) -> None:
    """The binding raises "success" for it; the driver answers "not found"."""
    bench = Bench()

    def empty(name: str) -> None:
        if name == "nvmlDeviceGetProcessUtilization":
            raise pynvml.NVMLError(code)

    bench.nvml.before = empty
    bench.turn()
    bench.run(3)
    assert bench.batch.failures == ()
    assert bench.usages[-1].busy == 0
    assert bench.domain().method == "gpu-sm-utilisation"


def test_process_list_that_grows_between_two_calls_is_read_again() -> None:
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    refused = 0

    def grow(name: str) -> None:
        nonlocal refused
        if name == "nvmlDeviceGetProcessUtilization":
            refused = (refused + 1) % 3
            bench.nvml.errors[name] = 7 if refused else 0

    bench.nvml.before = grow
    bench.run(5, each=sampling(bench, (TRAIN, 50)))
    assert bench.spent(TRAIN) > 1.5
    assert bench.batch.failures == ()


def test_only_listed_pids_count_in_a_pid_namespace() -> None:
    bench = Bench(nested=True)
    bench.turn()
    busy(bench, (TRAIN, 40))
    bench.gpu.utilisation = (80, 0)
    bench.run(1)  # SERVE's pid comes from the host, and is somebody else's here
    bench.run(5, each=sampling(bench, (TRAIN, 40), (SERVE, 40)))
    assert bench.spent(TRAIN) > 1.5
    assert bench.spent(SERVE) == 0
    assert bench.unclaimed() >= bench.spent(TRAIN)
    assert "hostPID" in bench.failure("all processes").remedy


def test_hosts_pid_namespace_is_recognised(tmp_path: Path) -> None:
    assert in_nested_pid_namespace(tmp_path)  # unknown: do not believe
    assert in_nested_pid_namespace() in {True, False}


def test_expensive_process_list_is_read_less_often() -> None:
    bench = Bench()

    def slow(name: str) -> None:
        if name.endswith("RunningProcesses"):
            bench.clock.advance(0.020)

    bench.nvml.before = slow
    bench.turn()
    bench.run(30)
    assert bench.nvml.calls.count("nvmlDeviceGetComputeRunningProcesses") <= 12


def test_expensive_power_is_read_less_often_between_samples() -> None:
    bench = Bench()

    def slow(name: str) -> None:
        if name == "nvmlDeviceGetUtilizationRates":
            bench.clock.advance(0.02)

    bench.nvml.before = slow
    for _ in range(20):
        bench.turn(1.0)
        for _ in range(9):
            bench.clock.advance(0.1)
            bench.session.read_between(bench.clock.monotonic())
    assert bench.nvml.calls.count("nvmlDeviceGetUtilizationRates") <= 30


def longest_wait(bench: Bench) -> float:
    """Seconds from one record of usage to the next, at most."""
    ends = [bench.usages[0].start.mono, *(usage.end.mono for usage in bench.usages)]
    return max(after - before for before, after in itertools.pairwise(ends)) / 1e9


def test_single_slow_utilisation_call_leaves_no_gap() -> None:
    """The machine is busy, and reads are delayed at times."""
    bench = Bench()
    bench.turn()
    busy(bench, (TRAIN, 50))
    asked = 0

    def held_up(name: str) -> None:
        nonlocal asked
        if name == "nvmlDeviceGetProcessUtilization":
            asked += 1
            if asked % 3 == 0:
                bench.clock.advance(0.2)

    bench.nvml.before = held_up
    bench.run(20, each=sampling(bench, (TRAIN, 50)))
    assert longest_wait(bench) < 1


def test_slow_process_list_does_not_delay_utilisation() -> None:
    bench = Bench()

    def slow(name: str) -> None:
        if name.endswith("RunningProcesses"):
            bench.clock.advance(0.050)

    bench.nvml.before = slow
    bench.turn()
    busy(bench, (TRAIN, 50))
    bench.run(20, each=sampling(bench, (TRAIN, 50)))
    assert longest_wait(bench) < 1


def test_expensive_utilisation_is_read_before_intervals_time_out() -> None:
    bench = Bench()

    def slow(name: str) -> None:
        if name == "nvmlDeviceGetProcessUtilization":
            bench.clock.advance(0.5)

    bench.nvml.before = slow
    bench.turn()
    busy(bench, (TRAIN, 50))
    bench.nvml.calls.clear()
    bench.run(30, each=sampling(bench, (TRAIN, 50)))
    assert 1 <= longest_wait(bench) <= 2.5


@pytest.mark.parametrize("cost", [0.001, 0.018, 0.022, 0.026, 0.032, 0.5])
def test_usage_is_read_in_each_sample_at_rest_however_expensive(cost: float) -> None:
    """Two samples are more than a reading of the utilisation holds for."""
    bench = Bench()

    def slow(name: str) -> None:
        if name == "nvmlDeviceGetProcessUtilization":
            bench.clock.advance(cost)

    bench.nvml.before = slow
    bench.turn()
    busy(bench, (TRAIN, 50))
    bench.run(30, every=1 - cost, each=sampling(bench, (TRAIN, 50)))
    assert longest_wait(bench) <= 1.1


def test_single_hung_call_does_not_delay_later_samples() -> None:
    bench = Bench()
    bench.turn()
    hung: list[str] = []

    def hang_once(name: str) -> None:
        if name == "nvmlDeviceGetMemoryInfo" and not hung:
            hung.append(name)
            bench.clock.advance(28)

    bench.nvml.before = hang_once
    bench.run(2)
    assert hung
    bench.nvml.calls.clear()
    bench.run(9)
    asked = bench.nvml.calls
    assert asked.count("nvmlDeviceGetMemoryInfo") > 0
    assert asked.count("nvmlDeviceGetProcessUtilization") > 0


SERVER = Consumer(300, 3)


class MpsBench(Bench):
    """A GPU with an MPS server and two clients; TRAIN has twice the use of SERVE."""

    def __init__(self) -> None:
        super().__init__()
        self.directory.infos[SERVER] = PayerInfo(SERVER, "nvidia-cuda-mps")
        self.gpu.running = [SERVER.pid]
        self.gpu.clients = [TRAIN.pid, SERVE.pid]
        self.gpu.utilisation = (90, 0)
        self.turn()

    @property
    def present(self) -> frozenset[object]:
        return frozenset(self.usages[-1].present)


def test_mps_clients_are_charged_and_their_server_is_not() -> None:
    bench = MpsBench()
    bench.run(10, each=sampling(bench, (TRAIN, 60), (SERVE, 30), (SERVER, 90)))
    covered = (bench.usages[-1].end.mono - bench.usages[0].start.mono) / 1e9
    assert bench.spent(TRAIN) == pytest.approx(0.60 * covered)
    assert bench.spent(SERVE) == pytest.approx(0.30 * covered)
    assert bench.spent(SERVER) == 0
    assert bench.unclaimed() == pytest.approx(0, abs=0.001)
    assert bench.present == {TRAIN, SERVE}
    assert all(not usage.parts for usage in bench.usages)


def test_mps_server_that_cannot_be_read_remains_one() -> None:
    bench = MpsBench()
    bench.run(3, each=sampling(bench, (SERVER, 90)))
    bench.directory.infos.clear()
    bench.run(5, each=sampling(bench, (SERVER, 90)))
    assert bench.spent(SERVER) == 0
    assert bench.spent(TRAIN) + bench.spent(SERVE) > 6


def test_use_of_an_mps_server_is_divided_among_clients_as_an_assumption() -> None:
    """Where the driver samples the server only, no figure tells its clients apart."""
    bench = MpsBench()
    bench.run(10, each=sampling(bench, (SERVER, 91)))
    covered = (bench.usages[-1].end.mono - bench.usages[0].start.mono) / 1e9
    assert bench.spent(SERVER) == 0
    assert bench.spent(TRAIN) == pytest.approx(bench.spent(SERVE), rel=0.01)
    assert bench.spent(TRAIN) + bench.spent(SERVE) == pytest.approx(0.91 * covered, rel=0.01)
    clients, others = bench.usages[-1].parts
    assert (clients.users_guessed, set(clients.spent)) == (True, {TRAIN, SERVE})
    assert (others.users_guessed, others.spent) == (False, {})


def test_mps_server_without_clients_is_charged() -> None:
    bench = MpsBench()
    bench.gpu.clients = []
    bench.run(5, each=sampling(bench, (SERVER, 40)))
    assert bench.spent(SERVER) > 1
    assert bench.present == {SERVER}


def test_process_beside_mps_is_charged_its_own_use() -> None:
    bench = MpsBench()
    bench.gpu.clients = [SERVE.pid]
    bench.gpu.running.append(TRAIN.pid)
    bench.run(10, each=sampling(bench, (TRAIN, 50), (SERVER, 40)))
    covered = (bench.usages[-1].end.mono - bench.usages[0].start.mono) / 1e9
    assert bench.spent(TRAIN) == pytest.approx(0.5 * covered, rel=0.02)
    assert bench.spent(SERVE) == pytest.approx(0.4 * covered, rel=0.1)  # known after a second
    assert all(not usage.parts for usage in bench.usages)  # one client: no assumption


def test_board_divided_among_virtual_machines_is_reported() -> None:
    bench = Bench(FakeGpu("GPU-a", virtualisation=3))
    bench.nvml.errors |= SAMPLES_REFUSED
    bench.turn()
    bench.run(2)
    assert "vGPU" in bench.failure("process utilisation").cause


def test_virtual_gpu_names_its_host_as_the_place_to_measure() -> None:
    bench = Bench(FakeGpu("GPU-a", virtualisation=2))
    unsupported = ("TotalEnergyConsumption", "PowerUsage", "FieldValues")
    bench.nvml.errors |= {f"nvmlDeviceGet{name}": 3 for name in unsupported}
    bench.turn()
    bench.run(2)
    failure = bench.failure("energy and power")
    assert "virtual GPU" in failure.cause
    assert "on that host" in failure.remedy
