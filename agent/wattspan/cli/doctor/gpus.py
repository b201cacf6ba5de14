"""GPUs that the kernel knows and no source reads: the missing part, and the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from wattspan.cli.doctor import Finding, declared, ok, warning
from wattspan.cli.doctor.host import file_text
from wattspan.model import Domain
from wattspan.sources.amdsmi.device import AMD
from wattspan.sources.amdsmi.source import BindingError
from wattspan.sources.amdsmi.source import load_binding as load_amdsmi
from wattspan.sources.nvml.source import LIBRARY
from wattspan.sources.nvml.source import load_binding as load_nvml

NVIDIA, INTEL = "0x10de", "0x8086"
"""Numbers of vendors of PCI devices, as the kernel writes them."""


class PciGpu(NamedTuple):
    """A display device of a vendor, as the kernel lists it. ``driver`` is "" without one."""

    address: str
    driver: str
    vendor: str = AMD
    integrated: bool = False  # in the processor: on the root bus


class GpuLibrary(NamedTuple):
    """The parts by which a vendor's GPUs are read: kernel driver, device file, library, source.

    ``missing`` returns the cause and the remedy if the library cannot be loaded.
    """

    vendor: str
    driver: str
    file: str
    missing: Callable[[], tuple[str, str] | None]
    source: str


def _without_nvml() -> tuple[str, str] | None:
    if load_nvml() is not None:
        return None
    return f"{LIBRARY} was not found", (
        "Install NVIDIA's driver with its libraries; in a container, use NVIDIA's container"
        " runtime with NVIDIA_DRIVER_CAPABILITIES=utility."
    )


def _without_amdsmi() -> tuple[str, str] | None:
    try:
        load_amdsmi()
    except BindingError as error:
        return error.cause, error.remedy
    return None


_LIBRARIES = {
    NVIDIA: GpuLibrary("NVIDIA", "nvidia", "dev/nvidiactl", _without_nvml, "nvml"),
    AMD: GpuLibrary("AMD", "amdgpu", "dev/kfd", _without_amdsmi, "amdsmi"),
}


def pci_gpus(root: Path = Path("/")) -> list[PciGpu]:
    """The GPUs of the three vendors under ``root``: display controllers and accelerators."""
    found = {}
    devices = [
        *(root / "sys/class/drm").glob("card*/device"),
        *(root / "sys/bus/pci/devices").glob("*"),
    ]
    for device in devices:
        place = device.resolve()
        vendor = file_text(place / "vendor")
        virtual = (place / "physfn").exists()  # a function for a virtual machine
        if vendor in {*_LIBRARIES, INTEL} and _is_gpu(place) and not virtual:
            driver = place / "driver"
            name = driver.resolve().name if driver.exists() else ""
            integrated = vendor == INTEL and ":00:02." in place.name
            found[place.name] = PciGpu(place.name, name, vendor, integrated)
    return [found[address] for address in sorted(found)]


def examine_gpus(
    root: Path,
    domains: Collection[Domain],
    *,
    emulated: bool = False,
    opens: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK),
) -> Iterator[Finding]:
    """Check that each GPU of the host under ``root`` is one of ``domains``, which are read.

    ``opens`` is true for a device file that this user may open.
    """
    if emulated:
        yield declared("gpus-not-examined")
        return
    boards = pci_gpus(root)
    if not boards:
        yield declared("gpus-none")
    readers = {domain.pci: domain.source for domain in domains if domain.pci}
    for board in boards:
        if board.address in readers:
            yield ok(_name(board), f"read by the source {readers[board.address]}")
    unread = [board for board in boards if board.address not in readers]
    for vendor, library in _LIBRARIES.items():
        own = [board for board in unread if board.vendor == vendor]
        if own:
            yield from _causes(root, own, library, opens)
    for board in unread:
        if board.vendor == INTEL:
            yield _intel(board)
    yield from _power_meters(root)


def _causes(
    root: Path, boards: Collection[PciGpu], library: GpuLibrary, opens: Callable[[Path], bool]
) -> Iterator[Finding]:
    """The reasons for which boards are not read, in the order in which they must be removed."""
    driver = library.driver
    if not (root / "sys/module" / driver).is_dir():
        yield declared(f"{library.source}-driver", gpus=_names(boards))
        return
    others = [board for board in boards if board.driver != driver]
    yield from (_other_driver(board, driver) for board in others)
    boards = [board for board in boards if board.driver == driver]
    if not boards:
        return
    what, file = _names(boards), root / library.file
    if not file.exists():
        yield declared(f"{library.source}-file", gpus=what, file=file)
    elif not opens(file):
        yield declared(f"{library.source}-rights", gpus=what, file=file)
    missing = library.missing()
    if missing is not None:
        cause, remedy = missing
        yield warning(what, f"not read: {cause}", remedy)
    elif file.exists() and opens(file):
        yield declared("gpu-unexplained", what=what, source=library.source, driver=driver)


def _other_driver(board: PciGpu, wanted: str) -> Finding:
    code = "gpu-of-nouveau" if board.driver == "nouveau" else "gpu-of-other-driver"
    code = code if board.driver else "gpu-unused-by-driver"
    return declared(code, gpu=_name(board), driver=board.driver, wanted=wanted)


def _intel(board: PciGpu) -> Finding:
    """An Intel GPU has no library here: its driver's sensor under hwmon is all there is.

    The driver i915 has it since Linux 6.2, by the kernel's Documentation/ABI/testing/
    sysfs-driver-intel-i915-hwmon. The file of xe names 6.5, but the driver came with Linux 6.8.
    """
    code = "gpu-of-intel-without-counter"
    if board.integrated:
        code = "gpu-in-processor"
    elif board.driver not in {"i915", "xe"}:
        code = "gpu-of-intel-with-other-driver" if board.driver else "gpu-of-intel-without-driver"
    return declared(code, gpu=_name(board), driver=board.driver)


def _power_meters(root: Path) -> Iterator[Finding]:
    """ACPI power meters of the firmware without a driver: those of Grace, for example."""
    meters = sorted(each.name for each in (root / "sys/bus/acpi/devices").glob("ACPI000D:*"))
    chips = (root / "sys/class/hwmon").glob("*/name")
    if meters and not any(file_text(chip) == "power_meter" for chip in chips):
        yield declared("power-meter-without-driver", meters=", ".join(meters))


def _name(board: PciGpu) -> str:
    return _names([board])


def _names(boards: Iterable[PciGpu]) -> str:
    known = list(boards)
    library = _LIBRARIES.get(known[0].vendor)
    vendor = "Intel" if library is None else library.vendor
    return f"{vendor} GPU {', '.join(board.address for board in known)}"


def _is_gpu(device: Path) -> bool:
    """True for display controllers and processing accelerators (PCI classes 03 and 12)."""
    return file_text(device / "class")[:4] in {"0x03", "0x12"}
