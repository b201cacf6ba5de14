"""Status of a GPU on new drivers, old drivers, and refusing drivers."""

from __future__ import annotations

import pytest
from testbed.fake_nvml import FakeGpu
from testbed.nvml_bench import TRAIN, Bench

from wattspan.model import PowerLimits, Trouble
from wattspan.model.settings import Duration
from wattspan.sources.nvml.device import NvmlSettings

NO_FIELDS = {"nvmlDeviceGetFieldValues": 13}


def test_status_contains_the_readings_of_the_gpu() -> None:
    bench = Bench(FakeGpu("GPU-a", watts=312.5, utilisation=(73, 41), reasons=0x4 | 0x20))
    bench.gpu.throttled[74] = 5_000_000_000
    bench.turn()
    (status,) = bench.statuses
    assert (status.power_average, status.power_instant) == (312_500, 312_500)
    assert status.limits == PowerLimits(200_000, 700_000, 700_000, 700_000, 500_000)
    assert (status.sm_clock_hz, status.memory_clock_hz) == (1_980_000_000, 2_619_000_000)
    assert (status.utilisation, status.memory_utilisation) == (0.73, 0.41)
    assert status.temperature_celsius == 41
    assert (status.memory_used, status.memory_total) == (5 << 30, 80 << 30)
    assert status.throttled == {
        "power_cap": 5_000_000_000, "sw_thermal": 0, "hw_thermal": 0, "power_brake": 0
    }  # fmt: skip
    assert status.throttling == ("power_cap", "sw_thermal")
    assert status.mig is False
    assert (status.model, status.driver) == ("NVIDIA H100 80GB HBM3", "570.86.15")


def test_unused_board_is_asked_for_details_and_processes_every_five_seconds() -> None:
    bench = Bench()
    bench.turn()
    bench.run(2)
    bench.nvml.calls.clear()
    bench.gpu.limits[192] = 300_000
    bench.run(1)
    assert bench.statuses[-1].limits.requested == 300_000
    bench.run(9)
    assert len(bench.statuses) == 13  # one a second
    names = ("GetMigMode", "GetComputeRunningProcesses", "GetMemoryInfo", "GetTemperature")
    assert [bench.nvml.calls.count(f"nvmlDevice{name}") for name in names] == [2, 2, 10, 10]
    bench.gpu.utilisation, bench.gpu.reasons = (50, 0), 0x4
    bench.run(1)
    assert bench.statuses[-1].throttling == ("power_cap",)


@pytest.mark.parametrize("status_interval", ["100ms", "1s", "5s"])
def test_process_without_work_is_known_soon(status_interval: str) -> None:
    bench = Bench(settings=NvmlSettings(status_interval=Duration.parse(status_interval)))
    bench.turn()
    bench.run(7.4)
    bench.gpu.running = [TRAIN.pid]
    bench.run(1.6)  # a list, and the next record of usage
    assert bench.usages[-1].present == {TRAIN}
    bench.nvml.calls.clear()
    bench.run(5)
    assert bench.nvml.calls.count("nvmlDeviceGetComputeRunningProcesses") == 5


def test_unexpected_error_of_a_status_costs_neither_energy_nor_usage() -> None:
    bench = Bench(settings=NvmlSettings(status_interval=Duration.parse("100ms")))
    bench.nvml.answers["nvmlDeviceGetTemperature"] = lambda *_: 1 / 0
    bench.turn()
    bench.run(10)
    assert "ZeroDivisionError" in bench.failure("H100").cause
    assert bench.statuses == []
    assert len(bench.readings) == 101
    assert bench.usages


def test_driver_without_field_values_is_read_call_by_call() -> None:
    bench = Bench()
    bench.nvml.errors |= NO_FIELDS
    bench.turn()
    (status,) = bench.statuses
    assert status.limits == PowerLimits(200_000, 700_000, 700_000, 700_000, 500_000)
    assert status.throttled == {}
    assert bench.batch.failures == ()


@pytest.mark.parametrize(
    ("architecture", "model", "average", "instant"),
    [
        (9, "NVIDIA H100 80GB HBM3", 100_000, None),
        (7, "NVIDIA RTX A5000", 100_000, None),
        (7, "NVIDIA A100-SXM4-80GB", None, 100_000),  # GA100 reports instant power
        (5, "Tesla V100-SXM2-32GB", None, 100_000),
        (0xFFFFFFFF, "NVIDIA B300", None, None),
    ],
)
def test_power_without_fields_is_average_or_instant_by_generation(
    architecture: int, model: str, average: int | None, instant: int | None
) -> None:
    bench = Bench(FakeGpu("GPU-a", name=model, architecture=architecture))
    bench.nvml.errors |= NO_FIELDS
    bench.turn()
    (status,) = bench.statuses
    assert (status.power_average, status.power_instant) == (average, instant)


def test_each_field_fails_for_itself() -> None:
    bench = Bench()
    bench.nvml.errors |= {185: 3, 74: 3, 190: 3, "nvmlDeviceGetEnforcedPowerLimit": 3}
    bench.turn()
    (status,) = bench.statuses
    assert status.power_average == 100_000  # by the older call
    assert status.power_instant == 100_000
    assert status.limits.enforced is None
    assert status.limits.requested == 700_000
    assert "power_cap" not in status.throttled
    assert "sw_thermal" in status.throttled


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nvmlDeviceGetTemperature", 3),
        ("nvmlDeviceGetMemoryInfo", 6),
        ("nvmlDeviceGetClockInfo", 13),
        ("nvmlDeviceGetMigMode", 25),
        ("nvmlDeviceGetUtilizationRates", 26),
        ("nvmlDeviceGetCurrentClocksEventReasons", 3),
    ],
)
def test_unsupported_reading_is_unknown_and_retried_once_a_minute(name: str, code: int) -> None:
    bench = Bench()
    bench.nvml.errors[name] = code
    bench.turn()
    asked = bench.nvml.calls.count(name)
    bench.run(59)
    assert bench.nvml.calls.count(name) == asked
    bench.run(2)
    assert bench.nvml.calls.count(name) == 2 * asked
    assert bench.batch.failures == ()
    assert len(bench.readings) == 611


def test_absent_field_is_not_requested_again() -> None:
    bench = Bench()
    bench.nvml.errors[270] = 3
    bench.turn()
    assert bench.nvml.fields_asked.count(270) == 1
    bench.run(10)
    assert bench.nvml.fields_asked.count(270) == 1
    assert bench.nvml.fields_asked.count(269) == 11


def test_permission_error_names_the_field_and_the_remedy() -> None:
    bench = Bench()
    bench.nvml.errors |= {"nvmlDeviceGetTemperature": 4, "nvmlDeviceGetMemoryInfo": 4}
    bench.turn()
    bench.run(1)
    failure = bench.failure("temperature")
    assert failure.trouble is Trouble.DENIED
    assert failure.thing == "memory, temperature of NVIDIA H100 80GB HBM3 0"
    assert "DeviceAllow" in failure.remedy
    assert failure.domain_id == "gpu:GPU-a"


def test_old_driver_uses_the_old_throttle_reasons_call() -> None:
    bench = Bench(FakeGpu("GPU-a", reasons=0x80))
    bench.nvml.errors["nvmlDeviceGetCurrentClocksEventReasons"] = 13
    bench.turn()
    assert bench.statuses[0].throttling == ("power_brake",)


def test_missing_throttle_reasons_are_unknown() -> None:
    bench = Bench(FakeGpu("GPU-a", reasons=0))
    bench.turn()
    assert bench.statuses[0].throttling == ()
    mute = Bench(FakeGpu("GPU-a", reasons=0x80))
    for name in ("Event", "Throttle"):
        mute.nvml.errors[f"nvmlDeviceGetCurrentClocks{name}Reasons"] = 3
    mute.turn()
    assert mute.statuses[0].throttling is None


def test_blank_is_not_a_measurement() -> None:
    bench = Bench()
    bench.nvml.answers["nvmlDeviceGetTemperature"] = lambda *_: 82505  # dcgm-exporter#312
    bench.gpu.throttled[74] = 0xFFFFFFFFFFFFFFFF
    bench.gpu.limits[187] = 0xFFFFFFFF
    bench.turn()
    (status,) = bench.statuses
    assert "power_cap" not in status.throttled
    assert status.temperature_celsius is None
    assert status.limits.minimum is None
    assert status.limits.default == 700_000


@pytest.mark.parametrize("maximum", [0, 700, 2_300, 65_535_000])
def test_limit_in_another_unit_is_unknown_and_the_energy_plausible(maximum: int) -> None:
    bench = Bench()
    bench.gpu.limits[188] = maximum
    bench.turn()
    bench.run(1)
    limits = bench.statuses[-1].limits
    assert (limits.minimum, limits.maximum, limits.requested) == (200_000, None, 700_000)
    assert bench.domain().max_power == 5_000_000


def test_field_of_an_unknown_type_is_unknown() -> None:
    bench = Bench()
    bench.nvml.kinds[189] = 99
    bench.nvml.errors["nvmlDeviceGetPowerManagementDefaultLimit"] = 3
    bench.turn()
    assert bench.statuses[0].limits.default is None
    assert bench.statuses[0].limits.maximum == 700_000


def test_power_beyond_each_limit_is_unknown_until_it_is_plausible() -> None:
    bench = Bench(FakeGpu("GPU-a", watts=1_401.0))
    bench.turn()
    bench.run(2)
    assert bench.statuses[-1].power_average is None
    assert bench.statuses[-1].energy_basis == "counter"
    assert any("reports 1401 W" in one.cause for one in bench.batch.failures)
    bench.nvml.draw(bench.gpu, 650.0)
    bench.run(2)
    assert bench.statuses[-1].power_average == 650_000
    assert not bench.batch.failures


@pytest.mark.parametrize("status_interval", ["1s", "5s"])
def test_power_below_a_limit_that_rose_counts_at_once(status_interval: str) -> None:
    bench = Bench(
        FakeGpu("GPU-a", watts=30.0, limits=dict.fromkeys((187, 188, 189, 190, 192), 35_000)),
        settings=NvmlSettings(status_interval=Duration.parse(status_interval)),
    )
    bench.nvml.errors["nvmlDeviceGetTotalEnergyConsumption"] = 3
    bench.turn()
    bench.run(7.3)
    bench.gpu.limits = dict.fromkeys(bench.gpu.limits, 150_000)  # from battery to mains
    bench.nvml.draw(bench.gpu, 120.0)
    bench.readings.clear()
    bench.run(3, each=lambda: None if not bench.batch.failures else pytest.fail("a finding"))
    assert bench.statuses[-1].power_average == 120_000
    assert {one.epoch for one in bench.readings} == {0}
    counted = bench.readings[-1].counter - bench.readings[0].counter
    assert counted == pytest.approx(2.9 * 120e6, rel=0.05)
