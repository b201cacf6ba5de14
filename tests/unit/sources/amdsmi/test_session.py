"""The session with AMD SMI: faults of the library and of single boards."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from testbed.amd_boards import AmdFaults, ScriptedAmdSmi
from testbed.covers import cover_of, decided
from testbed.field import build_tree
from testbed.gpu_sessions import amdsmi_session
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.emulation.amdsmi import AmdSmiLibraryException
from wattspan.emulation.boards import MI300X
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import SteadyLoad
from wattspan.model import Domain, Failure, HwType, Provenance, Thing, ThingKind, Trouble
from wattspan.model.settings import Duration
from wattspan.ports import Batch, SourceContext
from wattspan.sources.amdsmi.device import AmdSmiSettings, board_address
from wattspan.sources.amdsmi.source import open_amdsmi
from wattspan.testing import FakeDirectory, ManualClock


class Host:
    """One board and the session on it."""

    def __init__(self, path: Path, boards: int = 1, sysfs: Path | None = None) -> None:
        self.clock = ManualClock()
        self.gpus = EmulatedGpus(path, [MI300X] * boards, self.clock)
        self.faults = AmdFaults(self.gpus)
        self.smi = ScriptedAmdSmi(path, self.clock)
        context = SourceContext(self.clock, FakeDirectory(), sysfs=sysfs)
        self.session = amdsmi_session(self.smi, AmdSmiSettings(), context)

    def run(self, seconds: float) -> Batch:
        batch = Batch(())
        for _ in range(round(seconds * 10)):
            self.gpus.run(0.1, every=0.1)
            batch = self.session.sample()
        return batch


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "gpus")
    yield host
    host.session.close()
    host.gpus.close()


def refuse(code: int) -> Any:
    def refused(_: Any) -> NoReturn:
        raise AmdSmiLibraryException(code)

    return refused


def only(batch: Batch) -> Failure:
    (failure,) = batch.failures
    return failure


def test_denied_call_names_the_rights_that_are_needed(host: Host) -> None:
    host.smi.replies["amdsmi_get_power_cap_info"] = refuse(10)
    failure = only(host.run(1))
    assert failure.trouble is Trouble.DENIED
    assert failure.thing == "power limits of Emulated AMD Instinct MI300X 0"
    assert "/dev/kfd" in failure.remedy


def test_busy_driver_costs_one_answer(host: Host) -> None:
    host.smi.replies["amdsmi_get_energy_count"] = refuse(30)
    batch = host.run(0.5)
    assert batch.readings == ()
    assert only(batch).trouble is Trouble.RETRY
    host.smi.replies.clear()
    batch = host.run(0.5)
    assert len(batch.readings) == 1
    assert batch.failures == ()


def test_unknown_errors_in_a_row_are_a_lost_board(host: Host) -> None:
    host.run(0.5)
    host.smi.replies["amdsmi_get_energy_count"] = refuse(0xFFFF_FFFF)
    batch = host.run(1)
    assert batch.readings == ()
    assert only(batch).domain_id == "gpu:0000:60:00.0"


def test_error_without_a_code_costs_one_answer(host: Host) -> None:
    def broken(_: Any) -> NoReturn:
        raise host.smi.AmdSmiException("parameter")

    host.smi.replies["amdsmi_get_temp_metric"] = broken
    batch = host.run(0.5)
    assert len(batch.readings) == 1
    assert "temperature" in only(batch).thing


def test_fault_of_the_package_costs_one_sample_of_the_board(host: Host) -> None:
    host.run(0.3)

    def broken(_: Any) -> NoReturn:
        raise TypeError("no")

    host.smi.replies["amdsmi_get_energy_count"] = broken
    failure = only(host.run(0.2))
    assert failure.trouble is Trouble.MALFORMED
    assert "TypeError" in failure.cause
    host.smi.replies.clear()
    assert host.run(0.1).failures == ()


def test_fault_of_the_package_at_the_start_is_retried(host: Host) -> None:
    def broken(_: Any) -> NoReturn:
        raise TypeError("no")

    host.smi.replies["amdsmi_get_gpu_device_bdf"] = broken
    assert "TypeError" in only(host.run(0.5)).cause
    host.smi.replies.clear()
    assert host.run(3).failures == ()


def test_text_that_the_package_cannot_parse_leaves_the_board_without_a_name(host: Host) -> None:
    def broken(_: Any) -> NoReturn:
        raise ValueError("serial")

    host.smi.replies["amdsmi_get_gpu_asic_info"] = broken
    batch = host.run(0.2)
    assert batch.domains[0].name == "Emulated AMD GPU 0"
    assert batch.failures == ()


def test_board_names_its_model_so_that_another_one_in_its_slot_learns_anew(host: Host) -> None:
    """The id of a board is its address, and an idle power is remembered by id and model."""
    model = {"market_name": "AMD Instinct MI210"}
    host.smi.replies["amdsmi_get_gpu_asic_info"] = lambda asic: {**asic, **model}
    assert host.run(0.2).domains[0].model == "AMD Instinct MI210"


@pytest.mark.parametrize("code", [1, 8, 9, 11, 17, 30, 43])
@pytest.mark.parametrize("what", ["asic_info", "device_uuid", "driver_info"])
def test_board_whose_identity_cannot_be_read_is_measured(host: Host, what: str, code: int) -> None:
    host.smi.replies[f"amdsmi_get_gpu_{what}"] = refuse(code)
    batch = host.run(0.2)
    assert [reading.domain_id for reading in batch.readings] == ["gpu:0000:60:00.0"]
    assert batch.failures == ()


@pytest.mark.parametrize("vendor", [0x1002, "0X1002", "1002", 0, "N/A", "", None])
def test_board_is_measured_unless_its_vendor_is_known_to_be_another(
    host: Host, vendor: object
) -> None:
    host.smi.replies["amdsmi_get_gpu_asic_info"] = lambda asic: {**asic, "vendor_id": vendor}
    assert host.run(0.2).readings


def test_board_of_another_vendor_is_left_to_its_own_library(host: Host) -> None:
    host.smi.replies["amdsmi_get_gpu_asic_info"] = lambda asic: {**asic, "vendor_id": "0x10de"}
    batch = host.run(0.2)
    assert batch.domains == ()
    assert "finds no GPU" in only(batch).cause


def test_board_that_cannot_be_opened_is_reported_by_its_address(host: Host) -> None:
    host.smi.replies["amdsmi_get_gpu_asic_info"] = refuse(31)
    failure = only(host.run(0.2))
    assert failure.thing == "AMD GPU 0000:60:00.0"
    host.smi.replies.clear()
    assert host.run(3).failures == ()


def test_board_that_never_opens_is_tried_less_and_less(tmp_path: Path) -> None:
    host = Host(tmp_path / "gpus", boards=2)
    asked = itertools.count()

    def first_refused(asic: dict[str, Any]) -> dict[str, Any]:
        if next(asked) % 2 == 0:  # an initialisation asks both boards
            raise AmdSmiLibraryException(31)
        return asic

    host.smi.replies["amdsmi_get_gpu_asic_info"] = first_refused
    failure = only(host.run(60))
    assert failure.thing == "AMD GPU 0000:60:00.0"
    assert next(asked) // 2 == 10  # at once, after 1, 3, 7 and 15 s, and from then on every 8
    host.smi.replies.clear()
    batch = host.run(8)
    assert batch.failures == ()
    assert [reading.epoch for reading in batch.readings] == [0, 0]
    host.session.close()
    host.gpus.close()


def test_lost_board_does_not_wake_the_suspended_ones(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/drivers/amdgpu/0000:61:00.0"
    status = device / "power/runtime_status"
    status.parent.mkdir(parents=True)
    status.write_text("active\n")
    host = Host(tmp_path / "gpus", boards=2, sysfs=tmp_path)
    host.run(1)
    host.faults.lost(0, 31)
    host.run(0.3)
    begun = host.smi.begun
    status.write_text("suspended\n")
    batch = host.run(30)
    assert host.smi.begun == begun
    assert "all GPUs are suspended" in batch.failures[0].cause
    assert [one.domain_id for one in batch.failures[1:]] == ["gpu:0000:60:00.0"]
    host.faults.lost(0, 0)
    status.write_text("active\n")
    batch = host.run(10)
    assert len(batch.readings) == 2
    assert batch.failures == ()
    host.session.close()
    host.gpus.close()


def test_board_that_was_unbound_is_awaited_without_initialisations(tmp_path: Path) -> None:
    """As for a virtual machine (vfio-pci); its return to the driver is seen in sysfs."""
    bound = tmp_path / "bus/pci/drivers/amdgpu"
    for address in ("0000:60:00.0", "0000:61:00.0"):
        (bound / address).mkdir(parents=True)
    host = Host(tmp_path / "gpus", boards=2, sysfs=tmp_path)
    host.run(1)
    (bound / "0000:60:00.0").rmdir()
    host.faults.lost(0, 31)
    host.run(6)
    begun = host.smi.begun
    batch = host.run(60)
    assert host.smi.begun == begun
    assert [one.domain_id for one in batch.failures] == ["gpu:0000:60:00.0"]
    host.faults.lost(0, 0)
    (bound / "0000:60:00.0").mkdir()
    batch = host.run(10)
    assert len(batch.readings) == 2
    assert batch.failures == ()
    host.session.close()
    host.gpus.close()


def test_library_without_any_board_says_so(host: Host) -> None:
    host.faults.lost(0, 31)
    assert "finds no GPU" in only(host.run(0.2)).cause


def test_function_that_the_package_lacks_is_a_missing_field(host: Host) -> None:
    host.smi.replies["amdsmi_get_power_cap_info"] = refuse(5)
    batch = host.run(1.2)
    assert batch.failures == ()
    assert len(batch.readings) == 1


def test_counter_that_does_not_fit_the_power_is_replaced_by_its_integral(host: Host) -> None:
    """As with the resolution of some software stacks: half of the energy."""
    host.smi.replies["amdsmi_get_energy_count"] = lambda told: {
        **told,
        "counter_resolution": told["counter_resolution"] / 2,
    }
    host.gpus.attach(0, 1, SteadyLoad(1.0))
    host.run(3)
    failure = only(host.run(6))
    assert failure.cause == "its energy differs from the power of the GPU"
    before = host.run(0.1).readings[0]
    truth = host.gpus.truth(0).energy
    after = host.run(2).readings[0]
    spent = host.gpus.truth(0).energy - truth
    assert after.counter - before.counter == pytest.approx(spent, rel=0.01)
    assert after.epoch == 1


def test_counter_of_a_board_that_overshoots_its_limit_does_not_disagree(host: Host) -> None:
    """Peaks above the limit may be in the time that the power sensor does not see."""
    host.smi.replies["amdsmi_get_energy_count"] = lambda told: {
        **told,
        "counter_resolution": told["counter_resolution"] * 1.25,
    }
    host.gpus.attach(0, 1, SteadyLoad(1.0))
    assert host.run(70).failures == ()


def test_resolution_that_is_none_is_reported_and_power_integrated(host: Host) -> None:
    host.smi.replies["amdsmi_get_energy_count"] = lambda told: {**told, "counter_resolution": 0.0}
    batch = host.run(1)
    assert "no valid accumulator" in only(batch).cause
    assert len(batch.readings) == 1


def test_accumulator_of_an_older_package_is_called_power(host: Host) -> None:
    host.smi.replies["amdsmi_get_energy_count"] = lambda told: {
        "power": told["energy_accumulator"],
        "counter_resolution": told["counter_resolution"],
    }
    batch = host.run(0.5)
    assert batch.readings[0].counter == pytest.approx(host.gpus.truth(0).energy, abs=200_000)
    assert batch.domains[0].provenance is Provenance.EMULATED


def test_mean_power_of_older_boards_is_read(host: Host) -> None:
    host.smi.replies["amdsmi_get_power_info"] = lambda _: {
        "current_socket_power": 14_000,  # milliwatts: Umio-Yasuno/amdgpu_top#30
        "average_socket_power": 140,
    }
    host.run(0.2)
    statuses = [gpu for _ in range(12) for gpu in host.run(0.1).gpus]
    assert (statuses[0].power_average, statuses[0].power_instant) == (140_000, None)


def test_power_under_its_common_name_is_integrated(host: Host) -> None:
    host.faults.no_energy_counter(0)
    host.smi.replies["amdsmi_get_power_info"] = lambda told: {
        "current_socket_power": "N/A",
        "average_socket_power": 0,
        "socket_power": told["socket_power"],
    }
    before = host.run(2).readings[0]
    after = host.run(2).readings[0]
    assert after.counter - before.counter == pytest.approx(2 * 140_000_000, rel=0.01)


def test_board_without_energy_and_power_says_so(host: Host) -> None:
    host.faults.no_energy_counter(0)
    host.faults.no_power(0)
    assert "neither" in only(host.run(1)).cause


def test_busy_board_without_listed_processes_names_the_rights_that_are_needed(host: Host) -> None:
    host.gpus.attach(0, 1, SteadyLoad(1.0))
    host.smi.replies["amdsmi_get_gpu_process_list"] = lambda _: []
    failure = only(host.run(5))
    assert failure.trouble is Trouble.DENIED
    assert "CAP_SYS_PTRACE" in failure.remedy


class _Engines(ctypes.Structure):
    _fields_ = (("gfx", ctypes.c_uint64),)


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint32), ("engine_usage", _Engines), ("cu_occupancy", ctypes.c_uint32),
    )  # fmt: skip


def test_program_with_a_name_that_is_no_utf8_hides_no_process(host: Host) -> None:
    """AMD SMI names a process by the link of its program, which its package decodes strictly."""
    true: list[dict[str, Any]] = []

    def decode(told: list[dict[str, Any]]) -> str:
        true[:] = told
        return b"/home/m\xfcller/train".decode()

    def fill(handle: Any, count: Any, into: Any) -> int:
        del handle
        count._obj.value = len(true)
        for one, told in zip(into, true, strict=False):
            one.pid, one.cu_occupancy = told["pid"], told["cu_occupancy"]
            one.engine_usage.gfx = told["engine_usage"]["gfx"]
        return 0

    host.smi.amdsmi_wrapper = SimpleNamespace(
        amdsmi_proc_info_t=_Process, amdsmi_get_gpu_process_list=fill
    )
    host.smi.replies["amdsmi_get_gpu_process_list"] = decode
    host.gpus.attach(0, 1, SteadyLoad(1.0))
    batches = [host.run(0.1) for _ in range(20)]
    assert any(one.usages for one in batches)
    assert not any(one.failures for one in batches)


@pytest.mark.parametrize("text", ["", "60:00.0", "0000:60:00.8", "gpu", None])
def test_address_that_is_none_is_refused(text: str | None) -> None:
    with pytest.raises(ValueError, match="PCI address"):
        board_address(text)


def test_address_of_a_partition_is_that_of_its_board() -> None:
    assert board_address("0000:0C:00.3") == ("0000:0c:00.0", 3)


def test_hanging_driver_is_reported_as_stuck_by_the_source(tmp_path: Path) -> None:
    clock = SystemClock()
    with EmulatedGpus(tmp_path / "gpus", [MI300X], clock) as gpus:
        faults = AmdFaults(gpus)
        smi = ScriptedAmdSmi(gpus.path, clock)
        context = SourceContext(clock, FakeDirectory(), emulated=True, amdsmi=smi)
        settings = AmdSmiSettings(interval=Duration.parse("10ms"), deadline=Duration.parse("30ms"))
        source = open_amdsmi(settings, context)
        assert source is not None
        eventually(lambda: source.read().readings, "the board is read")
        faults.hang(0)

        def stuck() -> list[Failure]:
            return [one for one in source.read().failures if one.trouble is Trouble.STUCK]

        (failure,) = eventually(stuck, "the hang is reported")
        assert "amdsmi_get_" in failure.cause
        faults.hang(0, on=False)
        eventually(lambda: source.read().readings and not stuck(), "the board is read again")
        source.close()
    assert not [t for t in threading.enumerate() if t.name == "wattspan-amdsmi"]


def test_library_is_called_by_one_thread_only(tmp_path: Path) -> None:
    """Below release 26.2 it is not safe across threads."""
    clock, callers = SystemClock(), set[int]()

    class Watched(ScriptedAmdSmi):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("amdsmi_"):
                callers.add(threading.get_ident())
            return super().__getattr__(name)

    with EmulatedGpus(tmp_path / "gpus", [MI300X], clock) as gpus:
        context = SourceContext(
            clock, FakeDirectory(), emulated=True, amdsmi=Watched(gpus.path, clock)
        )
        settings = AmdSmiSettings(interval=Duration.parse("10ms"))
        source = open_amdsmi(settings, context)
        assert source is not None
        eventually(lambda: source.read().readings, "the board is read")
        source.close()
    assert len(callers) == 1
    assert threading.get_ident() not in callers


@pytest.mark.parametrize("rail", ["vddnb\n", "vddci\n", None])
def test_graphics_of_an_apu_count_as_its_processor(tmp_path: Path, rail: str | None) -> None:
    chip = tmp_path / "sys/bus/pci/devices/0000:60:00.0/hwmon/hwmon2"
    chip.mkdir(parents=True)
    if rail is not None:
        (chip / "in1_label").write_text(rail)
    host = Host(tmp_path / "gpus", sysfs=tmp_path / "sys")
    host.smi.replies |= {
        "amdsmi_get_power_info": lambda told: {**told, "current_socket_power": 2400},
        # The limit of an MI355X; more than twice it would be unknown.
        "amdsmi_get_power_cap_info": lambda told: {**told, "max_power_cap": 1_400_000_000},
    }
    batch = host.run(0.1)
    (domain,), (status,) = batch.domains, batch.gpus
    assert status.power_instant == (None if rail == "vddnb\n" else 2_400_000)
    package = Domain(
        "rapl:package-0", HwType.CPU, "package-0", "rapl", Provenance.MEASURED,
        measures=Thing(ThingKind.SOCKET, 0),
    )  # fmt: skip
    cover = decided((domain, package))
    assert cover[package.id].in_cover
    assert cover[domain.id].in_cover is (rail != "vddnb\n")
    host.session.close()
    host.gpus.close()


def test_mi300a_counts_as_the_processor_of_its_socket(tmp_path: Path) -> None:
    sysfs, files = tmp_path / "sys", {"devices/system/cpu/online": "0-1"}
    for socket, address in enumerate(("0000:60:00.0", "0000:61:00.0")):
        gpu = f"bus/pci/devices/{address}"
        files |= {
            f"{gpu}/device": "0x74a0",
            f"{gpu}/local_cpulist": str(socket),
            f"{gpu}/hwmon/hwmon{socket}/name": "amdgpu",
            f"devices/system/cpu/cpu{socket}/topology/physical_package_id": str(socket),
        }
    root = build_tree({"files": files}, sysfs)
    for chip in root.glob("bus/pci/devices/*/hwmon/*"):
        (chip / "device").symlink_to("../..")
    host = Host(tmp_path / "gpus", boards=2, sysfs=root)
    domains = host.run(1).domains
    packages = [
        replace(one, id=f"rapl:package-{n}", source="rapl", measures=Thing(ThingKind.SOCKET, n))
        for n, one in enumerate(domains)
    ]
    memory = Domain(
        "estimate:dram", HwType.MEMORY, "dram", "estimate", Provenance.ESTIMATED,
        measures=Thing(ThingKind.MEMORY), modelled=True,
    )  # fmt: skip
    assert cover_of((*domains, memory)) == {one.id for one in domains}
    assert len(cover_of((*domains, *packages))) == 2
    host.session.close()
    host.gpus.close()
