"""GPU power limits on scripted boards: enforcement by boards, and responses of drivers and
boards."""

from __future__ import annotations

import pytest
from testbed.fake_actuators import ENFORCED, KnobNvml
from testbed.fake_nvml import FakeGpu

from wattspan.capper.actuators import READ_INTERVAL, SETTLE_TIMEOUT
from wattspan.capper.actuators.gpu import REINITIALIZE_AFTER, GpuBoards, GpuPower
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError
from wattspan.sources.nvml.device import NvmlVendor
from wattspan.testing import ManualClock

A, B = "gpu:GPU-a", "gpu:GPU-b"


class Host:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.a, self.b = FakeGpu("GPU-a"), FakeGpu("GPU-b", name="")
        self.a.limits[ENFORCED] = self.b.limits[ENFORCED] = 700_000
        self.nvml = KnobNvml(self.clock, self.a, self.b)
        self.power = GpuPower(GpuBoards(NvmlVendor(self.nvml, self.clock)), self.clock)

    def refused(self, device: str, value: int) -> ActuatorError:
        with pytest.raises(ActuatorError) as caught:
            self.power.write(device, value)
        return caught.value


@pytest.fixture
def host() -> Host:
    return Host()


def test_board_reports_every_supported_field(host: Host) -> None:
    assert host.power.read(A) == KnobState(
        CapKey(Knob.GPU_POWER, A),
        "NVIDIA H100 80GB HBM3 0",
        minimum=200_000,
        default=700_000,
        maximum=700_000,
        requested=700_000,
        enforced=700_000,
        aliases=("GPU-a", "0"),
    )


def test_unnamed_board_is_identified_by_uuid(host: Host) -> None:
    assert host.power.read(B).name == "GPU 1"


def test_write_after_a_read_reads_the_board_once(host: Host) -> None:
    host.power.read(A)
    host.nvml.calls.clear()
    host.power.write(A, 300_000)
    assert host.nvml.calls.count("nvmlDeviceGetPowerManagementLimit") == 1


def test_only_the_first_setter_is_called(host: Host) -> None:
    host.power.write(A, 300_000)
    setters = [call for call in host.nvml.calls if call.startswith("nvmlDeviceSet")]
    assert setters == ["nvmlDeviceSetPowerManagementLimit"]


def test_externally_enforced_limit_is_reported_with_the_requested_one(host: Host) -> None:
    host.nvml.ceiling = 500_000
    host.a.limits[ENFORCED] = 500_000
    state = host.power.write(A, 600_000)
    assert (state.requested, state.enforced) == (600_000, 500_000)
    assert host.clock.monotonic() == ManualClock().monotonic()  # the client did not wait


def test_board_that_takes_its_time_is_waited_for(host: Host) -> None:
    host.nvml.ceiling = 700_000  # the limit enforced before the new one takes effect
    host.nvml.deaf.add("GPU-a")

    def later(_mono: int) -> None:
        host.nvml.deaf.clear()
        host.nvml.set_limit(host.a, 300_000)

    host.clock.on_sleep = later
    assert host.power.write(A, 300_000).enforced == 300_000
    assert host.clock.monotonic() - ManualClock().monotonic() == READ_INTERVAL


def test_slow_board_is_reported_as_not_yet_enforcing(host: Host) -> None:
    host.a.limits[192] = 300_000  # asked for before, and not obeyed

    state = host.power.write(A, 300_000)
    assert (state.requested, state.enforced) == (300_000, 300_000)
    host.nvml.deaf.add("GPU-a")
    host.a.limits[ENFORCED] = 700_000
    state = host.power.write(A, 300_000)
    assert (state.requested, state.enforced) == (300_000, 700_000)
    assert host.clock.monotonic() - ManualClock().monotonic() == SETTLE_TIMEOUT


def test_write_without_effect_is_detected(host: Host) -> None:
    host.nvml.deaf.add("GPU-a")
    error = host.refused(A, 300_000)
    assert error.trouble is Trouble.MALFORMED
    assert "to 300 W: it was taken without an error, and reads back as 700 W" in str(error)


def test_what_is_out_of_range_is_refused_with_the_range(host: Host) -> None:
    for value in (199_999, 700_001):
        assert "the range is 200 W to 700 W" in str(host.refused(A, value))
    assert "nvmlDeviceSetPowerManagementLimit" not in host.nvml.calls


def test_range_limits_are_inclusive(host: Host) -> None:
    assert host.power.write(A, 200_000).requested == 200_000
    assert host.power.write(A, 700_000).requested == 700_000


def test_unknown_range_leaves_validation_to_the_driver(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetPowerManagementLimitConstraints"] = 3
    state = host.power.read(A)
    assert (state.minimum, state.maximum) == (None, None)
    assert host.refused(A, 100_000).trouble is Trouble.MALFORMED
    assert host.power.write(A, 300_000).requested == 300_000


def test_limit_in_watts_instead_of_milliwatts_is_unknown(host: Host) -> None:
    host.a.limits |= {187: 200, 188: 700}
    state = host.power.read(A)
    assert (state.minimum, state.maximum, state.requested) == (None, None, 700_000)
    host.b.limits[192] = 700
    with pytest.raises(ActuatorError, match="does not support"):
        host.power.read(B)


def test_unsupported_board_field_is_unknown(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetEnforcedPowerLimit"] = 3
    host.nvml.errors["nvmlDeviceGetPowerManagementDefaultLimit"] = 13
    state = host.power.write(A, 300_000)
    assert (state.requested, state.enforced, state.default) == (300_000, None, None)


def test_board_whose_limit_cannot_be_read_is_not_listed(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetPowerManagementLimit", "GPU-a"] = 3
    assert [state.key.device for state in host.power.devices()] == [B]
    assert host.refused(A, 300_000).trouble is Trouble.ABSENT


@pytest.mark.parametrize(
    ("code", "trouble", "words"),
    [
        (2, Trouble.MALFORMED, "rejects the value"),
        (3, Trouble.ABSENT, "does not support it"),
        (4, Trouble.DENIED, "CAP_SYS_ADMIN"),
        (13, Trouble.ABSENT, "too old"),
        (15, Trouble.RETRY, "fallen off the bus"),
        (16, Trouble.RETRY, "needs a reset"),
        (18, Trouble.RETRY, "differ in version"),
        (999, Trouble.RETRY, "unknown error"),
        (77, Trouble.RETRY, "error 77"),
    ],
)
def test_every_refusal_of_the_setter_has_its_sentence(
    host: Host, code: int, trouble: Trouble, words: str
) -> None:
    host.nvml.errors["nvmlDeviceSetPowerManagementLimit"] = code
    error = host.refused(A, 300_000)
    assert error.trouble is trouble
    assert words in str(error)
    assert "NVIDIA H100 80GB HBM3 0" in str(error)
    assert not error.locked


def test_divided_board_is_listed_for_an_operator_to_cap(host: Host) -> None:
    host.a.mig = 1
    assert len(host.power.devices()) == 2


# ----------------------------------------------------------------------------------- drivers


def test_board_list_is_empty_until_the_driver_is_loaded(host: Host) -> None:
    host.nvml.errors["nvmlInit"] = 9
    assert host.power.devices() == ()
    assert "driver is not loaded" in str(host.refused(A, 300_000))
    host.nvml.errors.clear()
    assert len(host.power.devices()) == 2


def test_driver_that_was_loaded_anew_is_met_anew(host: Host) -> None:
    host.power.write(A, 300_000)
    host.nvml.reload_driver()
    assert host.power.read(A).requested == 700_000
    assert host.power.write(A, 300_000).requested == 300_000


def test_listing_reopens_a_reloaded_driver(host: Host) -> None:
    host.power.devices()
    host.nvml.reload_driver()
    assert len(host.power.devices()) == 2


def test_invalid_handle_is_requested_again(host: Host) -> None:
    host.power.devices()
    host.nvml.generation += 1  # every handle is invalid, the session is valid
    assert host.power.read(A).requested == 700_000
    assert host.nvml.initialised == 1


def test_board_keeps_its_identity_at_another_index(host: Host) -> None:
    host.power.devices()
    host.nvml.gpus.reverse()
    host.nvml.generation += 1
    state = host.power.write(B, 300_000)
    assert (state.name, state.aliases) == ("GPU 0", ("GPU-b", "0"))
    assert (host.a.limits[192], host.b.limits[192]) == (700_000, 300_000)


def test_lost_board_reinitialises_the_library_at_a_limited_rate(host: Host) -> None:
    host.power.devices()
    host.nvml.errors["GPU-a"] = 15
    for begun in (1, 2, 3):
        for _ in range(20):
            host.refused(A, 300_000)
        assert host.nvml.calls.count("nvmlInit") == begun
        host.clock.advance(ns=REINITIALIZE_AFTER)


def test_board_lost_twice_resets_the_reinitialisation_backoff(host: Host) -> None:
    host.power.devices()
    host.nvml.errors["GPU-a"] = 15
    host.refused(A, 300_000)
    host.nvml.errors.clear()
    host.power.write(A, 300_000)
    host.clock.advance(ns=REINITIALIZE_AFTER)
    host.nvml.errors["GPU-a"] = 15
    host.refused(A, 300_000)
    assert host.nvml.calls.count("nvmlInit") == 1


def test_board_bound_again_is_seen_by_a_library_begun_anew(host: Host) -> None:
    host.power.devices()
    host.nvml.errors["nvmlDeviceGetHandleByUUID"] = 6
    host.nvml.generation += 1
    assert "no longer knows the GPU" in str(host.refused(A, 300_000))
    host.clock.advance(ns=REINITIALIZE_AFTER)
    assert host.power.write(A, 300_000).requested == 300_000


def test_device_that_never_was_does_not_disturb_the_driver(host: Host) -> None:
    host.power.devices()
    for _ in range(3):
        assert host.refused("gpu:GPU-z", 300_000).trouble is Trouble.ABSENT
    assert host.nvml.calls.count("nvmlInit") == 1


def test_closing_lets_the_driver_go(host: Host) -> None:
    host.power.devices()
    host.power.close()
    assert host.nvml.initialised == 0


def test_board_that_was_plugged_in_later_is_found(host: Host) -> None:
    host.power.devices()
    host.nvml.gpus.append(FakeGpu("GPU-c"))
    assert host.power.read("gpu:GPU-c").name == "NVIDIA H100 80GB HBM3 2"


def test_driver_failing_during_listing_is_reopened(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetHandleByIndex"] = 9
    assert host.power.devices() == ()
    with pytest.raises(ActuatorError, match="Cannot list the GPUs"):
        host.power.id_at(0)
    host.nvml.errors.clear()
    assert host.power.write(A, 300_000).requested == 300_000


def test_slots_identify_each_board(host: Host) -> None:
    assert [host.power.id_at(slot) for slot in range(host.power.slots())] == [A, B]
    host.nvml.errors["GPU-a"] = 15
    assert [host.power.id_at(slot) for slot in range(host.power.slots())] == [None, B]


def test_slots_of_a_driver_that_fails_are_an_error(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetCount"] = 9
    with pytest.raises(ActuatorError, match="Cannot list the GPUs"):
        host.power.slots()


def test_first_read_of_a_board_asks_no_other_board(host: Host) -> None:
    host.nvml.errors["GPU-a"] = 999
    host.power.read(B)
    assert "nvmlDeviceGetHandleByIndex" not in host.nvml.calls


def test_first_read_without_a_driver_names_the_driver(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetHandleByUUID"] = 9
    assert "driver is not loaded" in str(host.refused(A, 300_000))


def test_driver_unloaded_with_a_lost_board_is_reopened(host: Host) -> None:
    host.power.devices()
    host.nvml.errors["GPU-a"] = 15
    host.refused(A, 300_000)
    host.nvml.errors.clear()
    host.nvml.reload_driver()
    assert host.power.write(A, 300_000).requested == 300_000


def test_missing_binding_function_is_reported_as_unsupported(host: Host) -> None:
    host.nvml.missing.add("nvmlDeviceGetEnforcedPowerLimit")
    assert host.power.read(A).enforced is None
    host.nvml.missing.add("nvmlDeviceSetPowerManagementLimit")
    assert host.refused(A, 300_000).trouble is Trouble.ABSENT


def test_emulated_board_is_called_emulated() -> None:
    clock = ManualClock()
    nvml = KnobNvml(clock, FakeGpu("GPU-e0e0e0e0-0000-4000-8000-000000000000", name="NVIDIA A40"))
    (state,) = GpuPower(GpuBoards(NvmlVendor(nvml, clock)), clock).devices()
    assert state.name == "Emulated NVIDIA A40 0"
