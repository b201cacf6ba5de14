"""Knobs of AMD boards beyond the contract of actuators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.amd_boards import AmdFaults, ScriptedAmdSmi

from wattspan.capper.actuators.gpu import GpuBoards, GpuClock, GpuPower
from wattspan.emulation.amdsmi import AmdSmiLibraryException
from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.model import Knob, Trouble
from wattspan.ports import ActuatorError
from wattspan.sources.amdsmi.device import AmdSmiVendor
from wattspan.testing import ManualClock

DEVICE = "gpu:0000:60:00.0"


class Host:
    """Two boards, and both actuators on one session."""

    def __init__(self, path: Path, sysfs: Path | None = None) -> None:
        clock = ManualClock()
        self.gpus = EmulatedGpus(path, [MI300X, MI300X], clock)
        clock.on_sleep = lambda _: self.gpus.step()
        self.faults = AmdFaults(self.gpus)
        self.smi = ScriptedAmdSmi(path, clock)
        boards = GpuBoards(AmdSmiVendor(self.smi, clock), sysfs)
        self.power, self.clock = GpuPower(boards, clock), GpuClock(boards, clock)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "gpus")
    yield host
    host.power.close()
    host.gpus.close()


def test_board_is_named_by_address_uuid_and_index(host: Host) -> None:
    state = host.power.read(DEVICE)
    assert state.name == "Emulated AMD Instinct MI300X 0"
    assert state.aliases == (
        "0000:60:00.0", "e0e0e0e0-0000-1000-8000-000000000000", "amd:0",
    )  # fmt: skip


def test_limit_is_kept_in_whole_watts(host: Host) -> None:
    assert host.power.write(DEVICE, 512_900).requested == 512_000


def test_board_without_a_lowest_limit_has_an_unknown_one(host: Host) -> None:
    host.smi.replies["amdsmi_get_power_cap_info"] = lambda told: {**told, "min_power_cap": 0}
    assert host.power.read(DEVICE).minimum is None
    with pytest.raises(ActuatorError, match="the range is"):
        host.power.write(DEVICE, 0)


def test_board_without_a_limit_has_none(host: Host) -> None:
    host.smi.replies["amdsmi_get_power_cap_info"] = lambda told: {**told, "power_cap": 0}
    with pytest.raises(ActuatorError, match="does not support it") as caught:
        host.power.read(DEVICE)
    assert caught.value.trouble is Trouble.ABSENT


def test_level_of_another_program_is_left_alone(host: Host) -> None:
    host.smi.replies["amdsmi_get_gpu_perf_level"] = lambda _: "AMDSMI_DEV_PERF_LEVEL_MANUAL"
    with pytest.raises(ActuatorError, match="performance level to MANUAL") as caught:
        host.clock.write(DEVICE, 1500)
    assert caught.value.trouble is Trouble.DENIED
    assert host.gpus.file.record(0).clock_request == 0


def test_limit_that_another_program_removed_is_reported_as_gone(host: Host) -> None:
    assert host.clock.write(DEVICE, 1500).requested == 1500
    host.gpus.file.record(0).clock_request = 0
    assert host.clock.read(DEVICE).requested is None


def test_board_without_clocks_has_none(host: Host) -> None:
    host.smi.replies["amdsmi_get_clock_info"] = lambda told: {**told, "max_clk": "N/A"}
    with pytest.raises(ActuatorError, match="read the clocks of"):
        host.clock.read(DEVICE)


def test_board_that_returned_is_found_when_boards_are_counted(host: Host) -> None:
    assert host.power.slots() == 2
    host.faults.lost(0, 31)
    assert len(host.power.devices()) == 1
    assert host.power.slots() == 1
    assert [host.power.id_at(slot) for slot in (0, 1)] == ["gpu:0000:61:00.0", None]
    host.faults.lost(0, 0)
    assert host.power.slots() == 2


@pytest.mark.parametrize("code", [1, 31, 43])
def test_board_with_a_void_handle_is_found_by_an_initialisation(host: Host, code: int) -> None:
    host.power.read(DEVICE)
    other = host.power.read("gpu:0000:61:00.0").presence
    valid = host.smi.begun + 1

    def answer_new_handles(told: Any) -> Any:
        if host.smi.begun < valid:
            raise AmdSmiLibraryException(code)
        return told

    host.smi.replies["amdsmi_get_power_cap_info"] = answer_new_handles
    assert host.power.read(DEVICE).requested == 750_000
    assert host.power.read("gpu:0000:61:00.0").presence == other
    assert host.smi.begun == valid


def test_first_read_of_a_suspended_board_does_not_wake_it(tmp_path: Path) -> None:
    status = tmp_path / "bus/pci/drivers/amdgpu/0000:60:00.0/power/runtime_status"
    status.parent.mkdir(parents=True)
    status.write_text("suspended\n")
    host = Host(tmp_path / "gpus", tmp_path)
    with pytest.raises(ActuatorError, match="it is suspended"):
        host.power.read(DEVICE)
    assert host.smi.begun == 0
    status.write_text("active\n")
    assert host.power.read(DEVICE).requested == 750_000
    host.power.close()
    host.gpus.close()


def test_board_that_is_lost_while_it_is_identified_is_left_out(host: Host) -> None:
    def refused(_: object) -> object:
        raise AmdSmiLibraryException(31)

    host.smi.replies["amdsmi_get_gpu_asic_info"] = refused
    assert host.power.devices() == ()


def test_board_without_name_and_uuid_is_known_by_its_address(host: Host) -> None:
    host.smi.replies["amdsmi_get_gpu_asic_info"] = lambda told: {**told, "market_name": "N/A"}
    host.smi.replies["amdsmi_get_gpu_device_uuid"] = lambda _: "N/A"
    state = host.power.read(DEVICE)
    assert (state.name, state.aliases) == ("AMD GPU 0", ("0000:60:00.0", "amd:0"))


def test_board_that_appears_later_is_found_by_its_id(host: Host) -> None:
    host.gpus.file.header.gpus = 1
    assert len(host.power.devices()) == 1
    host.gpus.file.header.gpus = 2
    assert host.power.read("gpu:0000:61:00.0").name == "Emulated AMD Instinct MI300X 1"


def test_board_of_another_vendor_is_left_out(host: Host) -> None:
    host.smi.replies["amdsmi_get_gpu_asic_info"] = lambda told: {**told, "vendor_id": "0x10de"}
    assert host.power.devices() == ()


def test_driver_that_is_not_loaded_is_named_and_tried_again(host: Host) -> None:
    host.faults.driver_error(34)
    with pytest.raises(ActuatorError, match="modprobe amdgpu") as caught:
        host.power.read(DEVICE)
    assert caught.value.trouble is Trouble.RETRY
    assert host.power.devices() == ()
    host.faults.driver_error(0)
    assert host.power.read(DEVICE).key.knob is Knob.GPU_POWER


def test_divided_board_is_one_device(host: Host) -> None:
    host.faults.divide(0, 8)
    assert [state.key.device for state in host.power.devices()] == [DEVICE, "gpu:0000:61:00.0"]
    assert host.power.write(DEVICE, 500_000).requested == 500_000
    assert host.clock.write(DEVICE, 1500).requested == 1500
    host.faults.divide(0, 0)
    assert host.power.write(DEVICE, 600_000).requested == 600_000
