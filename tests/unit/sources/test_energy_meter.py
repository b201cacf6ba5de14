"""A GPU's joules: from its counter, from its power, and when neither can be trusted."""

from __future__ import annotations

import pytest
from testbed.fake_nvml import FakeGpu
from testbed.nvml_bench import Bench

from wattspan.model import MILLISECOND, SECOND, HwType, Instant, Provenance, Trouble
from wattspan.sources.energy_meter import CounterPeriod, PowerIntegral

NO_COUNTER = {"nvmlDeviceGetTotalEnergyConsumption": 3}


def at(seconds: float) -> Instant:
    return Instant(round(seconds * 1e9), round(seconds * 1e9))


def test_counter_is_read_in_microjoules() -> None:
    bench = Bench(FakeGpu("GPU-a", joules=1234.567, watts=300))
    (reading,) = bench.turn().readings
    assert reading.counter == 1_234_567_000
    bench.run(2)
    assert bench.joules() == pytest.approx(600)


def test_gpu_is_identified_by_uuid_and_named_by_model_and_index() -> None:
    bench = Bench(FakeGpu("GPU-a"), FakeGpu("GPU-b", name="NVIDIA L40S"))
    bench.turn()
    second = bench.domain("GPU-b")
    assert (second.id, second.resource) == ("gpu:GPU-b", "gpu:GPU-b")
    assert second.name == "NVIDIA L40S 1"
    assert second.hw_type is HwType.GPU
    assert second.modulus is None
    assert second.provenance is Provenance.MEASURED


def test_board_transients_are_within_plausible_power() -> None:
    bench = Bench()
    bench.turn()
    assert bench.domain().max_power == 2 * 700_000


def test_readings_are_stamped_half_way_through_the_call() -> None:
    bench = Bench()
    bench.turn()
    began = bench.clock.now()

    def slow(name: str) -> None:
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            bench.clock.advance(0.010)

    bench.nvml.before = slow
    (reading,) = bench.turn().readings
    assert reading.at.mono - began.mono == 5 * MILLISECOND
    assert reading.at.wall - began.wall == 5 * MILLISECOND


@pytest.mark.parametrize(("code", "joules", "found"), [(3, 5000, []), (10, 2500, [Trouble.RETRY])])
def test_power_is_integrated_without_an_energy_counter(
    code: int, joules: float, found: list[Trouble]
) -> None:
    """A counter that always times out is awaited for ten seconds."""
    bench = Bench(FakeGpu("GPU-a", watts=250))
    bench.nvml.errors["nvmlDeviceGetTotalEnergyConsumption"] = code
    bench.turn()
    bench.run(20)
    assert bench.joules() == pytest.approx(joules)
    assert bench.domain().provenance is Provenance.DERIVED
    assert [failure.trouble for failure in bench.batch.failures] == found


def test_step_is_not_taken_for_the_interval_of_seldom_reads() -> None:
    """A counter that moves each 100 ms, read at each fifth of its moves and then at each second."""
    step = CounterPeriod()
    for read in range(40):
        step.observe(at(read / 20).mono, read // 2)
    assert step.resolution == 100 * MILLISECOND
    for second in range(3, 60):
        step.observe(at(second).mono, 10 * second)
    assert step.resolution == 100 * MILLISECOND


def test_step_longer_than_seldom_reads_is_observed() -> None:
    step = CounterPeriod()
    for second in range(60):
        step.observe(at(second).mono, second // 3)
    assert step.resolution == 3000 * MILLISECOND


def test_ramp_is_integrated_as_a_trapezoid() -> None:
    integral = PowerIntegral()
    integral.feed(at(0), 100_000, None)
    integral.feed(at(1), 300_000, None)
    assert integral.energy == 200_000_000


@pytest.mark.slow
def test_power_integration_has_no_rounding_loss() -> None:
    integral = PowerIntegral()
    for step in range(1_000_001):
        integral.feed(Instant(step, step), 3, None)  # 3e-6 uJ each
    assert integral.energy == 3


def test_smaller_value_of_a_counter_for_a_moment_is_not_compared() -> None:
    integral = PowerIntegral()
    for tick in range(11):
        counter = 0 if tick == 5 else 10**15 + 30_000_000 * tick
        integral.feed(at(tick / 10), 300_000, counter)
    assert integral.compared == (240_000_000, 240_000_000)


def test_jump_of_a_counter_is_compared_only_if_it_repeats() -> None:
    once, always = PowerIntegral(), PowerIntegral()
    for tick in range(11):
        once.feed(at(tick / 10), 300_000, 30_000_000 * tick + (tick > 5) * 10**10)
        always.feed(at(tick / 10), 300_000, 10**10 * tick)
    assert once.compared == (270_000_000, 270_000_000)
    assert always.compared == (270_000_000, 9 * 10**10)


def test_counter_that_catches_up_counts_on() -> None:
    bench = Bench(FakeGpu("GPU-a", name="NVIDIA L40S", watts=300))
    bench.turn()
    bench.gpu.frozen_at = 1000
    bench.run(10)
    assert bench.domain().provenance is Provenance.DERIVED
    bench.gpu.frozen_at = None
    bench.run(30)
    assert bench.domain().provenance is Provenance.MEASURED
    assert bench.batch.failures == ()


def test_long_pause_of_a_gpu_without_counter_is_a_gap() -> None:
    bench = Bench()
    bench.nvml.errors |= NO_COUNTER
    bench.turn()
    bench.run(1)
    bench.clock.advance(60)
    bench.run(1)
    assert bench.epochs() == [0, 1]


def test_status_has_counted_and_integrated_energy() -> None:
    bench = Bench(FakeGpu("GPU-a", watts=100))
    bench.turn()
    bench.run(5)
    bench.nvml.draw(bench.gpu, 400)
    bench.run(5)
    status = bench.statuses[-1]
    assert status.counter_energy == pytest.approx(2_500_000_000)
    assert status.integrated_energy == pytest.approx(2_500_000_000, rel=0.04)
    assert status.integrated_energy != status.counter_energy  # the jump falls between samples


def test_counter_that_appears_is_preferred_from_then_on() -> None:
    bench = Bench()
    bench.nvml.errors |= NO_COUNTER
    bench.turn()
    bench.run(1)
    bench.nvml.errors.clear()
    bench.run(70)
    assert bench.domain().provenance is Provenance.MEASURED
    assert bench.epochs() == [0, 1]
    assert bench.readings[-1].counter > 1_000_000_000


def test_single_counter_failure_is_retried() -> None:
    bench = Bench()
    bench.turn()
    bench.nvml.errors["nvmlDeviceGetTotalEnergyConsumption"] = 10  # timeout
    bench.run(0.1)
    assert bench.batch.readings == ()
    assert bench.failure("energy counter").trouble is Trouble.RETRY
    bench.nvml.errors.clear()
    bench.run(0.1)
    assert bench.epochs() == [0]
    assert bench.batch.failures == ()


def test_frozen_counter_is_replaced_by_integration() -> None:
    bench = Bench(FakeGpu("GPU-a", watts=70))
    bench.gpu.frozen_at = 0
    bench.turn()
    bench.run(6)
    assert bench.failure("energy counter").trouble is Trouble.MALFORMED
    assert bench.domain().provenance is Provenance.DERIVED
    bench.readings.clear()
    bench.run(10)
    assert bench.joules() == pytest.approx(70 * 9.9)
    bench.gpu.frozen_at = None
    bench.run(0.2)
    assert bench.domain().provenance is Provenance.MEASURED


def test_value_that_repeats_is_no_reading_and_the_next_one_covers_the_time() -> None:
    bench = Bench(FakeGpu("GPU-a", watts=70))
    bench.turn()
    bench.gpu.frozen_at = 1000
    bench.run(4)
    assert bench.readings[-1].at.mono - bench.readings[0].at.mono < SECOND
    bench.gpu.frozen_at = None
    bench.run(0.1)
    assert bench.joules() == pytest.approx(70 * 4.1)
    assert bench.epochs() == [0]


def test_counter_of_a_gpu_without_power_is_not_frozen() -> None:
    bench = Bench(FakeGpu("GPU-a", watts=0))
    bench.turn()
    bench.run(10)
    assert bench.batch.failures == ()
    assert bench.joules() == 0


def test_gpu_with_neither_counter_nor_power_yields_only_a_failure() -> None:
    bench = Bench(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    bench.nvml.errors = {
        ("nvmlDeviceGetTotalEnergyConsumption", "GPU-a"): 3,
        ("nvmlDeviceGetFieldValues", "GPU-a"): 3,
        ("nvmlDeviceGetPowerUsage", "GPU-a"): 3,
    }
    bench.turn()
    failure = bench.failure("energy and power")
    assert (failure.trouble, failure.domain_id) == (Trouble.ABSENT, "gpu:GPU-a")
    assert [reading.domain_id for reading in bench.batch.readings] == ["gpu:GPU-b"]
    assert [status.temperature_celsius for status in bench.statuses] == [41, 41]


def test_resolution_is_conservative_before_the_first_counter_step() -> None:
    bench = Bench()
    bench.turn()
    assert bench.domain().resolution == 100 * MILLISECOND


def test_coarse_counter_gets_its_resolution() -> None:
    bench = Bench(FakeGpu("GPU-a", step_ns=500 * MILLISECOND))
    bench.turn()
    bench.run(10)
    assert bench.domain().resolution == 500 * MILLISECOND


def test_fine_counter_gets_the_interval_as_resolution() -> None:
    bench = Bench(FakeGpu("GPU-a", step_ns=5 * MILLISECOND))
    bench.turn()
    bench.run(2, every=0.02)
    assert bench.domain().resolution == 20 * MILLISECOND


def test_late_poll_or_two_do_not_change_the_resolution() -> None:
    step = CounterPeriod()
    mono = 0
    for count in range(60):
        mono += 300 * MILLISECOND if count % 10 == 3 else 100 * MILLISECOND
        step.observe(mono, mono)
    assert step.resolution == 100 * MILLISECOND


def test_unchanged_domains_are_the_same_object() -> None:
    bench = Bench()
    bench.turn()
    bench.run(3)
    before = bench.batch.domains
    bench.run(3)
    assert bench.batch.domains is before
