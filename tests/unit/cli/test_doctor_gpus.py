"""GPUs and power meters that the kernel knows and the agent does not read, by vendor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wattspan.cli.doctor import Finding, Severity, sources
from wattspan.cli.doctor.sources import INTEL, NVIDIA, PciGpu, examine_gpus, pci_gpus
from wattspan.model import Domain, HwType, Provenance
from wattspan.sources.amdsmi.device import AMD
from wattspan.sources.nvml.source import LIBRARY

ROOT = Path(__file__).parents[3]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with one AMD GPU, its driver and its device file, and a package without library."""
    add_device(tmp_path, "0000:0c:00.0")
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    package = tmp_path / "package"
    package.mkdir()
    (package / "amdsmi.py").write_text("{}['libamd_smi.so']")
    monkeypatch.syspath_prepend(str(package))
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def add_device(
    root: Path, address: str, vendor: str = "0x1002", kind: str = "0x120000", driver: str = "amdgpu"
) -> None:
    device = root / "sys/devices/pci0000:00" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    for place in ("sys/bus/pci/devices", "sys/class/drm/card1"):
        (root / place).mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / address).symlink_to(device)
    link = root / "sys/class/drm/card1/device"
    if driver:
        bound = root / "sys/bus/pci/drivers" / driver
        bound.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(bound)
        if not link.exists():
            link.symlink_to(device)


def only(root: Path) -> Finding:
    (finding,) = examine_gpus(root, ())
    assert finding.what == "AMD GPU 0000:0c:00.0"
    assert finding.mark is Severity.WARN
    assert finding.remedy
    return finding


def test_gpus_are_displays_and_accelerators_of_three_vendors(root: Path) -> None:
    add_device(root, "0000:00:02.0", vendor=INTEL, kind="0x030000", driver="i915")
    add_device(root, "0000:0d:00.0", kind="0x030000", driver="")
    add_device(root, "0000:0e:00.0", vendor=NVIDIA, kind="0x030200", driver="nvidia")
    add_device(root, "0000:0f:00.0", kind="0x040300")  # its audio
    add_device(root, "0000:10:00.0", vendor="0x1a03", kind="0x030000", driver="ast")
    add_device(root, "0000:0e:00.4", vendor=NVIDIA, kind="0x030200", driver="nvidia")
    (root / "sys/devices/pci0000:00/0000:0e:00.4/physfn").mkdir()  # of a virtual machine
    assert pci_gpus(root) == [
        PciGpu("0000:00:02.0", "i915", INTEL, integrated=True),
        PciGpu("0000:0c:00.0", "amdgpu", AMD),
        PciGpu("0000:0d:00.0", "", AMD),
        PciGpu("0000:0e:00.0", "nvidia", NVIDIA),
    ]


def test_host_without_gpu_says_so(tmp_path: Path) -> None:
    (finding,) = examine_gpus(tmp_path, ())
    assert (finding.mark, finding.detail) == (
        Severity.NOTE,
        "the kernel lists none of NVIDIA, AMD or Intel",
    )


def test_gpu_that_is_read_is_fine(root: Path) -> None:
    domain = Domain("gpu:x", HwType.GPU, "x", "amdsmi", Provenance.MEASURED, pci="0000:0c:00.0")
    assert [found.mark for found in examine_gpus(root, [domain])] == [Severity.OK]


def test_missing_library_is_the_cause(root: Path) -> None:
    finding = only(root)
    assert finding.detail == "not read: libamd_smi.so was not found"
    assert "amd-smi-lib" in finding.remedy


def test_missing_driver_is_the_first_cause(root: Path) -> None:
    (root / "sys/module/amdgpu").rmdir()
    (root / "dev/kfd").unlink()
    assert "modprobe amdgpu" in only(root).remedy


def test_gpu_of_a_virtual_machine_is_told(root: Path, tmp_path: Path) -> None:
    driver = root / "sys/devices/pci0000:00/0000:0c:00.0/driver"
    driver.unlink()
    bound = root / "sys/bus/pci/drivers/vfio-pci"
    bound.mkdir()
    driver.symlink_to(bound)
    assert "vfio-pci" in only(root).detail


def test_missing_device_file_is_a_cause_beside_the_library(root: Path) -> None:
    (root / "dev/kfd").unlink()
    details = [found.detail for found in examine_gpus(root, ())]
    assert "dev/kfd is missing" in details[0]
    assert "libamd_smi.so" in details[1]


def test_device_file_that_may_not_be_opened_is_a_cause(root: Path) -> None:
    (root / "package/amdsmi.py").write_text("")
    (finding,) = examine_gpus(root, (), opens=lambda _: False)
    assert finding.detail == f"not read: this user may not open {root}/dev/kfd"
    assert "render and video" in finding.remedy
    sys.modules.pop("amdsmi", None)


def test_complete_host_refers_to_the_source(root: Path) -> None:
    (root / "package/amdsmi.py").write_text("")
    assert "Source amdsmi" in only(root).remedy
    sys.modules.pop("amdsmi", None)


def test_gpus_of_this_host_are_not_examined_on_an_emulated_one(root: Path) -> None:
    (finding,) = examine_gpus(root, (), emulated=True)
    assert finding.mark is Severity.NOTE


# ------------------------------------------------------------------------------- other vendors


def found(root: Path, *domains: Domain) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine_gpus(root, domains)}


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with one NVIDIA GPU, its driver and its device file, without the library."""
    add_device(tmp_path, "0000:17:00.0", vendor=NVIDIA, kind="0x030200", driver="nvidia")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    monkeypatch.setattr(sources, "load_nvml", lambda: None)
    return tmp_path


BOARD = "NVIDIA GPU 0000:17:00.0"


def test_nvidia_library_that_is_missing_is_the_cause(nvidia: Path) -> None:
    finding = found(nvidia)[BOARD]
    assert finding.detail == "not read: libnvidia-ml.so.1 was not found"
    assert "NVIDIA_DRIVER_CAPABILITIES" in finding.remedy


def test_nvidia_driver_that_is_not_loaded_is_the_cause(nvidia: Path) -> None:
    (nvidia / "sys/module/nvidia").rmdir()
    finding = found(nvidia)[BOARD]
    assert finding.detail == "not read: the driver nvidia is not loaded"
    assert "modprobe nvidia" in finding.remedy


@pytest.mark.parametrize(
    ("driver", "cause", "remedy"),
    [
        ("nouveau", "the driver nouveau, which has no library", "blacklist nouveau"),
        ("vfio-pci", "the driver vfio-pci, as for a virtual machine", "where the driver nvidia"),
        ("", "the driver nvidia is loaded and does not use it", "dmesg"),
    ],
)
def test_nvidia_gpu_of_another_driver_is_told(
    nvidia: Path, driver: str, cause: str, remedy: str
) -> None:
    add_device(nvidia, "0000:18:00.0", vendor=NVIDIA, kind="0x030200", driver=driver)
    findings = found(nvidia)
    assert cause in findings["NVIDIA GPU 0000:18:00.0"].detail
    assert remedy in findings["NVIDIA GPU 0000:18:00.0"].remedy
    assert "libnvidia-ml.so.1" in findings[BOARD].detail  # each board has a cause of its own


def test_nvidia_device_file_that_may_not_be_opened_is_a_cause(nvidia: Path) -> None:
    details = [one.detail for one in examine_gpus(nvidia, (), opens=lambda _: False)]
    assert details[0] == f"not read: this user may not open {nvidia}/dev/nvidiactl"
    (nvidia / "dev/nvidiactl").unlink()
    first, *_ = examine_gpus(nvidia, ())
    assert "dev/nvidiactl is missing" in first.detail
    assert "--gpus all" in first.remedy


def test_complete_nvidia_host_refers_to_the_source(
    nvidia: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "load_nvml", lambda: sources)
    assert "Source nvml" in found(nvidia)[BOARD].remedy


def test_each_board_names_the_source_that_reads_it(nvidia: Path) -> None:
    add_device(nvidia, "0000:03:00.0", vendor=INTEL, kind="0x030000", driver="xe")
    domains = [
        Domain(f"gpu:{address}", HwType.GPU, "x", source, Provenance.MEASURED, pci=address)
        for address, source in (("0000:17:00.0", "nvml"), ("0000:03:00.0", "hwmon"))
    ]
    assert {what: one.detail for what, one in found(nvidia, *domains).items()} == {
        "Intel GPU 0000:03:00.0": "read by the source hwmon",
        BOARD: "read by the source nvml",
    }


@pytest.mark.parametrize(
    ("driver", "cause", "remedy"),
    [
        ("xe", "the driver xe shows no energy counter", "Source hwmon"),
        ("vfio-pci", "the driver vfio-pci has it", "i915 or xe"),
        ("", "no driver", "i915 or xe"),
    ],
)
def test_intel_gpu_without_a_counter_is_told(
    tmp_path: Path, driver: str, cause: str, remedy: str
) -> None:
    add_device(tmp_path, "0000:03:00.0", vendor=INTEL, kind="0x038000", driver=driver)
    finding = found(tmp_path)["Intel GPU 0000:03:00.0"]
    assert (finding.mark, finding.detail) == (
        Severity.WARN,
        f"not read: {cause}" + (" under hwmon" if driver == "xe" else ""),
    )
    assert remedy in finding.remedy


def test_integrated_intel_gpu_is_part_of_its_package(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:00:02.0", vendor=INTEL, kind="0x030000", driver="i915")
    finding = found(tmp_path)["Intel GPU 0000:00:02.0"]
    assert finding.mark is Severity.NOTE
    assert "the CPU package includes its own" in finding.detail


def test_power_meter_without_a_driver_is_told(tmp_path: Path) -> None:
    """Grace's firmware lists its meters, whose driver is a module."""
    (tmp_path / "sys/bus/acpi/devices/ACPI000D:00").mkdir(parents=True)
    finding = found(tmp_path)["power meter ACPI000D:00"]
    assert finding.mark is Severity.WARN
    assert "modprobe acpi_power_meter" in finding.remedy
    chip = tmp_path / "sys/class/hwmon/hwmon0"
    chip.mkdir(parents=True)
    (chip / "name").write_text("power_meter\n")
    assert "power meter ACPI000D:00" not in found(tmp_path)


@pytest.mark.parametrize("library", sources._LIBRARIES.values(), ids=lambda one: one.vendor)
def test_documented_devices_are_those_of_the_code(library: sources.GpuLibrary) -> None:
    page = (ROOT / "docs/reference/hardware.md").read_text()
    table = page.partition("## Devices without figures")[2].partition("\n## ")[0]
    for part in (f"modprobe {library.driver}", f"`/{library.file}`", library.vendor):
        assert part in table
    for other in ("nouveau", "vfio-pci", LIBRARY, "i915", "xe", "acpi_power_meter"):
        assert f"`{other}`" in table
