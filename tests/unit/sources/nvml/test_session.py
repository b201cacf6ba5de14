"""GPUs and drivers that go away and come back."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest
from testbed.fake_nvml import FakeGpu
from testbed.nvml_bench import COUNTER, STEP, Bench

from wattspan.model import MILLISECOND, SECOND, Trouble
from wattspan.sources.gpu.counter_edges import SEARCH_CALLS
from wattspan.sources.nvml.device import NvmlSettings

LOST = 15
NOT_LOADED = 9


def two() -> Bench:
    return Bench(FakeGpu("GPU-a"), FakeGpu("GPU-b"))


def test_lost_gpu_affects_only_itself() -> None:
    bench = two()
    bench.turn()
    bench.run(1)
    bench.nvml.errors["GPU-a"] = LOST
    bench.readings.clear()
    bench.run(20)
    assert {reading.domain_id for reading in bench.readings} == {"gpu:GPU-b"}
    assert len(bench.readings) == 200
    assert bench.epochs("GPU-b") == [0]
    assert bench.nvml.initialised == bench.nvml.generation == 1
    failure = bench.failure("0")
    assert (failure.domain_id, failure.trouble) == ("gpu:GPU-a", Trouble.RETRY)
    assert "Xid" in failure.remedy


def test_lost_gpu_stays_a_domain() -> None:
    bench = two()
    bench.turn()
    bench.nvml.errors["GPU-a"] = LOST
    bench.run(1)
    assert {domain.id for domain in bench.batch.domains} == {"gpu:GPU-a", "gpu:GPU-b"}


def test_usage_of_a_lost_gpu_is_reported_up_to_its_loss() -> None:
    bench = two()
    bench.turn()
    bench.run(3)
    bench.nvml.errors["GPU-a"] = LOST
    bench.run(1)
    assert (
        bench.usages_of("GPU-a")[-1].end.mono
        >= [r.at.mono for r in bench.readings if r.domain_id == "gpu:GPU-a"][-1]
    )


def test_lost_gpu_is_retried_with_growing_delays() -> None:
    bench = two()
    bench.turn()
    bench.nvml.errors["GPU-a"] = LOST
    bench.run(0.1)
    bench.nvml.calls.clear()
    bench.run(60)
    # after 1, 3, 7 and 15 s, and from then on every 8
    assert bench.nvml.calls.count("nvmlDeviceGetHandleByUUID") == 9


def test_returned_gpu_is_measured_within_ten_seconds() -> None:
    bench = two()
    bench.turn()
    bench.nvml.errors["GPU-a"] = LOST
    bench.run(101)
    bench.nvml.errors.clear()
    bench.run(9)
    assert bench.batch.failures == ()


def test_board_that_is_lost_for_good_costs_fewer_and_fewer_initialisations() -> None:
    """They may end the power limits of the other boards."""
    bench = two()
    bench.turn()
    bench.nvml.errors["GPU-a"] = LOST
    bench.run(3600, every=1.0)
    assert bench.nvml.generation == 1 + 5  # after 15, 30, 60, 120 and 240 failures


def test_reset_board_is_found_in_minutes_where_an_initialisation_ends_no_settings() -> None:
    bench = two()
    bench.nvml.answers["nvmlDeviceGetPersistenceMode"] = lambda _nvml, _gpu: 1
    bench.turn()
    bench.nvml.errors["GPU-a"] = LOST
    bench.run(3600, every=1.0)
    bench.nvml.errors = {("nvmlDeviceGetHandleByUUID", "GPU-a"): LOST}  # until the next one
    bench.run(121, every=1.0)
    assert (bench.batch.failures, len(bench.batch.readings)) == ((), 2)


def test_flapping_gpu_is_readmitted_with_backoff() -> None:
    """It gives a handle whose calls fail."""
    bench = two()
    bench.turn()
    bench.nvml.errors[("nvmlDeviceGetTotalEnergyConsumption", "GPU-a")] = LOST
    bench.run(60)
    assert bench.nvml.calls.count("nvmlDeviceGetHandleByUUID") == 9


@pytest.mark.parametrize("code", [15, 16, 28])
def test_loss_of_the_only_gpu_reinitialises_the_library(code: int) -> None:
    bench = Bench()
    bench.turn()
    bench.run(1)
    bench.nvml.errors["GPU-a"] = code
    bench.run(5)
    assert bench.batch.readings == ()
    bench.nvml.errors.clear()
    bench.run(10)
    assert bench.batch.failures == ()
    assert len(bench.batch.readings) == 1
    assert bench.epochs() == [0, bench.readings[-1].epoch]
    assert bench.nvml.initialised == 1


@pytest.mark.parametrize("code", [1, 9, 18])
def test_all_gpus_are_lost_with_the_driver_and_return_with_it(code: int) -> None:
    bench = two()
    bench.turn()
    bench.run(1)
    for name in ("nvmlInit", "nvmlDeviceGetTotalEnergyConsumption"):
        bench.nvml.errors[name] = code
    bench.run(3)
    assert bench.batch.readings == ()
    assert bench.failure("NVML").cause
    assert len(bench.batch.domains) == 2
    bench.nvml.errors.clear()
    bench.run(4)
    assert bench.batch.failures == ()
    assert bench.epochs("GPU-a") == bench.epochs("GPU-b") == [0, 1]


def test_initialisation_is_tried_after_a_second_then_two_then_four() -> None:
    bench = Bench()
    bench.nvml.errors["nvmlInit"] = NOT_LOADED
    tried: list[float] = []
    start = bench.clock.monotonic()

    def note(name: str) -> None:
        if name == "nvmlInit":
            tried.append((bench.clock.monotonic() - start) / 1e9)

    bench.nvml.before = note
    bench.turn()
    bench.run(100)
    assert tried == pytest.approx([0, 1, 3, 7, *range(15, 100, 8)])
    bench.nvml.errors.clear()
    bench.run(8)
    assert bench.batch.failures == ()


def test_host_without_gpus_reports_a_failure_and_retries() -> None:
    bench = Bench()
    gpus, bench.nvml.gpus = bench.nvml.gpus, []
    bench.turn()
    assert bench.failure("NVML").trouble is Trouble.ABSENT
    bench.nvml.gpus = gpus
    bench.run(2)
    assert bench.batch.failures == ()
    assert len(bench.batch.readings) == 1


def test_three_unknown_errors_in_a_row_are_a_lost_gpu() -> None:
    bench = two()
    bench.turn()
    bench.nvml.errors["GPU-a"] = 999
    bench.run(0.1)
    assert bench.failure("NVIDIA H100 80GB HBM3 0").cause == "the driver reports an unknown error"
    bench.nvml.errors.clear()
    bench.run(2)
    assert bench.epochs("GPU-a") == [0, 1]


def test_field_that_is_always_unknown_does_not_lose_the_gpu() -> None:
    bench = Bench()
    bench.nvml.errors |= {74: 999, 269: 999, 270: 999, 271: 999}
    bench.turn()
    bench.run(10)
    assert bench.epochs() == [0]
    assert len(bench.readings) == 101


def test_unavailable_gpu_does_not_affect_the_others() -> None:
    bench = two()
    bench.nvml.errors[("nvmlDeviceGetHandleByIndex", "GPU-a")] = pynvml.NVML_ERROR_NO_PERMISSION
    bench.turn()
    failure = bench.failure("GPU 0")
    assert failure.trouble is Trouble.DENIED
    assert "/dev/nvidia" in failure.remedy
    assert [reading.domain_id for reading in bench.batch.readings] == ["gpu:GPU-b"]
    bench.nvml.errors.clear()
    bench.run(2)
    assert {domain.id for domain in bench.batch.domains} == {"gpu:GPU-a", "gpu:GPU-b"}
    assert bench.batch.failures == ()


def test_gpu_keeps_its_identity_when_indices_move() -> None:
    bench = two()
    bench.turn()
    bench.run(1)
    before = bench.joules("GPU-b")
    bench.nvml.gpus.reverse()
    bench.nvml.errors["nvmlDeviceGetTotalEnergyConsumption"] = 1
    bench.run(0.1)
    bench.nvml.errors.clear()
    bench.run(3)
    assert before > 0
    assert {domain.id for domain in bench.batch.domains} == {"gpu:GPU-a", "gpu:GPU-b"}
    assert bench.epochs("GPU-b") == [0, 1]


def test_board_that_stays_has_the_index_of_the_new_initialisation() -> None:
    bench = two()
    bench.turn()
    bench.nvml.errors["GPU-a"] = LOST
    bench.nvml.gpus = [bench.gpus[1]]
    bench.run(200)
    assert (bench.nvml.generation, bench.nvml.initialised) == (2, 1)
    assert bench.statuses[-1].index == 0
    assert bench.domain("GPU-b").name == "NVIDIA H100 80GB HBM3 0"
    assert bench.epochs("GPU-b") == [0]
    assert len({r.at for r in bench.readings if r.domain_id == "gpu:GPU-b"}) == 2001


def test_gpu_with_a_name_that_is_no_utf8_is_measured() -> None:
    """As of driver 555 on WSL: https://github.com/XuehaiPan/nvitop/issues/127."""
    bench = Bench(FakeGpu("GPU-a"))
    bench.nvml.answers["nvmlDeviceGetName"] = lambda _n, _g: b"\xf8\x95\xa0 RTX 3090".decode()
    bench.turn()
    assert bench.domain().name.endswith("RTX 3090 0")
    assert bench.readings


def test_unexpected_error_loses_one_sample_of_one_gpu() -> None:
    bench = two()
    bench.turn()
    fresh = True

    def stumble(name: str) -> None:
        nonlocal fresh
        if name == "nvmlDeviceGetTotalEnergyConsumption" and fresh:
            fresh = False
            raise ZeroDivisionError("surprise")

    bench.nvml.before = stumble
    bench.run(0.1)
    (failure,) = bench.batch.failures
    assert (failure.trouble, failure.domain_id) == (Trouble.MALFORMED, "gpu:GPU-a")
    assert "ZeroDivisionError" in failure.cause
    assert [reading.domain_id for reading in bench.batch.readings] == ["gpu:GPU-b"]
    bench.run(0.1)
    assert len(bench.batch.readings) == 2
    assert bench.epochs("GPU-a") == [0]


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates"]
)
@pytest.mark.parametrize("error", [ZeroDivisionError("surprise"), pynvml.NVMLError(LOST)])
def test_error_between_samples_costs_reads_of_one_gpu(call: str, error: Exception) -> None:
    bench = two()
    bench.turn(1.0)
    asked: list[str] = []
    energy, usual = bench.nvml.energy, SimpleNamespace(gpu=0, memory=0)

    def answer(_nvml: object, gpu: FakeGpu) -> object:
        asked.append(gpu.uuid)
        if gpu is bench.gpu:
            raise error
        return energy(gpu) if call == "nvmlDeviceGetTotalEnergyConsumption" else usual

    bench.nvml.answers[call] = answer
    for _ in range(10):
        bench.clock.advance(0.1)
        bench.session.read_between(bench.clock.monotonic())
    assert asked.count("GPU-a") == 1
    assert asked.count("GPU-b") >= 4
    batch = bench.turn(1.0)
    assert [failure.domain_id for failure in batch.failures] == ["gpu:GPU-a"]
    assert [reading.domain_id for reading in batch.readings] == ["gpu:GPU-b"]


def test_unexpected_error_at_initialisation_is_retried() -> None:
    bench = Bench()

    def stumble(name: str) -> None:
        if name == "nvmlDeviceGetCount":
            raise OSError("surprise")

    bench.nvml.before = stumble
    bench.turn()
    assert bench.failure("NVML").trouble is Trouble.MALFORMED
    bench.nvml.before = lambda _name: None
    bench.run(2)
    assert bench.batch.failures == ()
    assert len(bench.batch.readings) == 1


def test_unexpected_error_of_a_recovery_does_not_affect_other_gpus() -> None:
    bench = two()
    bench.turn()
    bench.nvml.errors["GPU-a"] = LOST

    def stumble(name: str) -> None:
        if name == "nvmlDeviceGetHandleByUUID":
            raise ValueError("surprise")

    bench.nvml.before = stumble
    bench.readings.clear()
    bench.run(20)
    assert len([r for r in bench.readings if r.domain_id == "gpu:GPU-b"]) == 200


def test_close_releases_the_gpus() -> None:
    bench = Bench()
    bench.turn()
    bench.session.close()
    assert bench.nvml.initialised == 0
    bench.session.close()
    assert bench.nvml.initialised == 0


def test_static_power_of_no_board_is_named() -> None:
    settings = NvmlSettings(static_watts={"H100": 115.0, "A1OO": 85.0})
    bench = Bench(FakeGpu("GPU-a"), settings=settings)
    bench.turn()
    bench.run(1)
    (failure,) = bench.batch.failures
    assert failure.thing == 'static_watts of "A1OO"'
    assert failure.cause == "no GPU here has a model with this name"


def test_values_of_the_counter_have_their_time_again_after_a_rest() -> None:
    bench = Bench(FakeGpu("GPU-a", step_ns=STEP))
    assert 30 + 20 < bench.live(3) <= 30 + SEARCH_CALLS
    bench.live(5, SECOND)
    assert bench.live(1) <= 80
    bench.readings.clear()
    bench.live(5)
    late = [(one.at.mono - bench.gpu.since) % STEP for one in bench.readings]
    assert len(late) >= 40
    assert all(min(one, STEP - one) <= 8 * MILLISECOND for one in late)


@pytest.mark.parametrize("seconds", [0.05, 0.3, 3.0])
@pytest.mark.parametrize(
    "code", [value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")]
)
def test_failed_read_between_samples_is_not_made_again_before_the_next(
    seconds: float, code: int
) -> None:
    """While the step is searched, and while its edges are followed."""
    bench = Bench(FakeGpu("GPU-a", step_ns=STEP))
    bench.live(seconds)
    bench.nvml.errors[COUNTER] = code
    tries = 3 if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE else 1
    assert bench.live(2) <= tries * 2 * 2 * SECOND // STEP
    bench.nvml.errors.clear()
    assert bench.live(1) <= 170
