"""AMD GPUs that the kernel knows and the agent does not read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wattspan.cli.doctor.findings import Finding, Severity
from wattspan.cli.doctor.gpus import PciGpu, amd_gpus, examine_gpus
from wattspan.model import Domain, HwType, Provenance


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


def test_gpus_are_displays_and_accelerators_of_amd(root: Path) -> None:
    add_device(root, "0000:0d:00.0", kind="0x030000", driver="")
    add_device(root, "0000:0e:00.0", vendor="0x10de", kind="0x030200")
    add_device(root, "0000:0f:00.0", kind="0x040300")  # its audio
    assert amd_gpus(root) == [PciGpu("0000:0c:00.0", "amdgpu"), PciGpu("0000:0d:00.0", "")]


def test_host_without_amd_gpu_says_so(tmp_path: Path) -> None:
    assert [found.detail for found in examine_gpus(tmp_path, ())] == ["the kernel lists none"]


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
