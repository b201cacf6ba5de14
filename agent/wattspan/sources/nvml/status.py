"""Status of a GPU: power, limits, clocks, utilisation, throttling."""

from __future__ import annotations

from typing import Any

from wattspan.model import GpuStatus, Instant, Milliwatts, PowerLimits
from wattspan.sources.gpu_calls import GpuCalls
from wattspan.sources.gpu_sampling import PowerReading
from wattspan.sources.nvml import calls as fields

POWER = "power"
UTILISATION = "utilisation"
THROTTLE_REASONS = "throttle reasons"
MIG = "MIG mode"

_TURING = 6  # NVML_DEVICE_ARCH_TURING; the numbers ascend with the generations
_UNKNOWN_ARCHITECTURE = 0xFFFFFFFF
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_HERTZ_PER_MHZ = 1_000_000
_IMPLAUSIBLE_POWER = 100_000_000  # mW; 4294967 W is a blank, not a measurement

_REASON_BITS = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


def read_power(calls: GpuCalls, usage_is_instant: bool | None) -> PowerReading:
    """Power of a GPU, by the best means of its driver.

    For integration the average is better than the instant: the sensors of A100 and H100 measure a
    quarter of the time only, while the average covers all of it.
    """
    values = fields.read_fields(calls, (fields.POWER_AVERAGE, fields.POWER_INSTANT))
    average = _drawn_power(values.get(fields.POWER_AVERAGE))
    instant = _drawn_power(values.get(fields.POWER_INSTANT))
    if average is not None:
        return PowerReading(average, instant, average)
    usage = _drawn_power(calls.ask(POWER, "nvmlDeviceGetPowerUsage"))
    if usage is None:
        return PowerReading(None, instant, instant)
    if usage_is_instant is True:
        return PowerReading(None, usage if instant is None else instant, usage)
    return PowerReading(None if usage_is_instant is None else usage, instant, usage)


def read_module_power(calls: GpuCalls) -> Milliwatts | None:
    """Power of the superchip around a GPU; None of another GPU."""
    wanted = (fields.POWER_AVERAGE, fields.POWER_INSTANT)
    try:
        values = fields.read_fields(calls, wanted, fields.MODULE_SCOPE)
    except TypeError:  # an old binding, or an imitation of one, has no scopes
        return None
    average, instant = (_plausible_power(values.get(field)) for field in wanted)
    # A scope that the board lacks is refused, or it is 0.
    return (instant if average is None else average) or None


def usage_is_instant(architecture: int | None, model: str) -> bool | None:
    """True if nvmlDeviceGetPowerUsage is instantaneous; False if it is the mean of a second."""
    if architecture is None or architecture == _UNKNOWN_ARCHITECTURE:
        return None
    return architecture <= _TURING or any(name in model for name in ("A100", "A30", "A800"))


def _drawn_power(value: Any) -> Milliwatts | None:
    """None also for 0: a board that answers draws power."""
    return _plausible_power(value) or None


def _plausible_power(value: Any) -> Milliwatts | None:
    if value is None or not 0 <= value < _IMPLAUSIBLE_POWER:
        return None
    return Milliwatts(int(value))


def read_limits(calls: GpuCalls) -> PowerLimits:
    """All limits, in one call if the driver supports it, else one by one."""
    values = fields.read_fields(
        calls,
        (
            fields.LIMIT_MINIMUM,
            fields.LIMIT_MAXIMUM,
            fields.LIMIT_DEFAULT,
            fields.LIMIT_ENFORCED,
            fields.LIMIT_REQUESTED,
        ),
    )
    minimum = _plausible_power(values.get(fields.LIMIT_MINIMUM))
    maximum = _plausible_power(values.get(fields.LIMIT_MAXIMUM))
    if minimum is None or maximum is None:
        span = calls.ask("power limit range", "nvmlDeviceGetPowerManagementLimitConstraints")
        if span is not None:
            minimum, maximum = _plausible_power(span[0]), _plausible_power(span[1])

    def limit(number: int, name: str) -> Milliwatts | None:
        value = _plausible_power(values.get(number))
        if value is None:
            value = _plausible_power(calls.ask(f"{fields.FIELDS[number]} (own call)", name))
        return value

    return PowerLimits(
        minimum=minimum,
        maximum=maximum,
        default=limit(fields.LIMIT_DEFAULT, "nvmlDeviceGetPowerManagementDefaultLimit"),
        requested=limit(fields.LIMIT_REQUESTED, "nvmlDeviceGetPowerManagementLimit"),
        enforced=limit(fields.LIMIT_ENFORCED, "nvmlDeviceGetEnforcedPowerLimit"),
    )


def read_utilisation(calls: GpuCalls) -> tuple[int, int] | None:
    """Percent of the last sample period in which any kernel ran, and memory was accessed."""
    rates = calls.ask(UTILISATION, "nvmlDeviceGetUtilizationRates")
    if rates is None or not (0 <= rates.gpu <= 100 and 0 <= rates.memory <= 100):
        return None
    return int(rates.gpu), int(rates.memory)


def read_status(calls: GpuCalls, domain_id: str, at: Instant) -> GpuStatus:
    """The slowly changing part of a status, read once a second."""
    memory = calls.ask("memory", "nvmlDeviceGetMemoryInfo")
    throttled = fields.read_fields(calls, tuple(fields.THROTTLE_FIELDS))
    mig = calls.ask(MIG, "nvmlDeviceGetMigMode")
    return GpuStatus(
        domain_id,
        at,
        limits=read_limits(calls),
        sm_clock_hz=_clock(calls, "SM clock", _CLOCK_SM),
        memory_clock_hz=_clock(calls, "memory clock", _CLOCK_MEMORY),
        temperature_celsius=calls.ask("temperature", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        throttled={fields.THROTTLE_FIELDS[number]: value for number, value in throttled.items()},
        throttling=_throttle_reasons(calls),
        mig=None if mig is None else bool(mig[0]),
    )


def _clock(calls: GpuCalls, what: str, kind: int) -> int | None:
    megahertz = calls.ask(what, "nvmlDeviceGetClockInfo", kind)
    return None if megahertz is None else int(megahertz) * _HERTZ_PER_MHZ


def _throttle_reasons(calls: GpuCalls) -> tuple[str, ...] | None:
    """The present reasons of throttling. Older drivers know the call by its older name only."""
    mask = calls.ask(THROTTLE_REASONS, "nvmlDeviceGetCurrentClocksEventReasons")
    if mask is None:
        mask = calls.ask(f"{THROTTLE_REASONS} (old)", "nvmlDeviceGetCurrentClocksThrottleReasons")
    if mask is None:
        return None
    return tuple(name for bit, name in _REASON_BITS.items() if mask & bit)
