"""GPUs that the kernel knows and no source reads: the missing part, and the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wattspan.cli.doctor.findings import Finding, note, ok, warning
from wattspan.model import Domain
from wattspan.sources.amdsmi.calls import AMD, BindingError, load_binding

_INSTALL = "Load it (modprobe amdgpu), or install the driver of ROCm."


class PciGpu(NamedTuple):
    """A display device of a vendor, as the kernel lists it. ``driver`` is "" without one."""

    address: str
    driver: str


def amd_gpus(root: Path = Path("/")) -> list[PciGpu]:
    """AMD's GPUs under ``root``: cards of DRM and, without a driver, devices of the PCI bus."""
    found = {}
    devices = [
        *(root / "sys/class/drm").glob("card*/device"),
        *(root / "sys/bus/pci/devices").glob("*"),
    ]
    for device in devices:
        place = device.resolve()
        if _text(place / "vendor") == AMD and _is_gpu(place):
            driver = place / "driver"
            name = driver.resolve().name if driver.exists() else ""
            found[place.name] = PciGpu(place.name, name)
    return [found[address] for address in sorted(found)]


def examine_gpus(
    root: Path,
    domains: Collection[Domain],
    *,
    emulated: bool = False,
    opens: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK),
) -> Iterator[Finding]:
    """Check that each AMD GPU of the host under ``root`` is one of ``domains``, which are read.

    ``opens`` is true for a device file that this user may open.
    """
    if emulated:
        yield note("GPUs of this host", "not examined: an emulated host is used")
        return
    boards = amd_gpus(root)
    if not boards:
        yield note("AMD GPUs", "the kernel lists none")
        return
    read = {domain.pci for domain in domains}
    unread = [board for board in boards if board.address not in read]
    for board in boards:
        if board not in unread:
            yield ok(f"AMD GPU {board.address}", "read by the source amdsmi")
    if unread:
        names = ", ".join(board.address for board in unread)
        yield from _causes(root, unread, f"AMD GPU {names}", opens)


def _causes(
    root: Path, boards: Collection[PciGpu], what: str, opens: Callable[[Path], bool]
) -> Iterator[Finding]:
    """The reasons for which boards are not read, in the order in which they must be removed."""
    if not (root / "sys/module/amdgpu").is_dir():
        yield warning(what, "not read: the driver amdgpu is not loaded", _INSTALL)
        return
    if bound := next((board.driver for board in boards if board.driver != "amdgpu"), None):
        cause = f"not read: it belongs to the driver {bound}, as for a virtual machine"
        yield warning(what, cause, "Read its energy where the driver amdgpu has it.")
        return
    kfd = root / "dev/kfd"
    if not kfd.exists():
        remedy = "In a container, pass /dev/kfd and /dev/dri through: --device /dev/kfd."
        yield warning(what, f"not read: {kfd} is missing", remedy)
    elif not opens(kfd):
        remedy = "Add the agent's user to the groups render and video, or run it as root."
        yield warning(what, f"not read: this user may not open {kfd}", remedy)
    try:
        load_binding()
    except BindingError as error:
        yield warning(what, f"not read: {error.cause}", error.remedy)
    else:
        if kfd.exists() and opens(kfd):
            yield warning(
                what,
                "not read, although the package and the rights are there",
                "See the findings of Source amdsmi.",
            )


def _is_gpu(device: Path) -> bool:
    """True for display controllers and processing accelerators (PCI classes 03 and 12)."""
    return _text(device / "class")[:4] in {"0x03", "0x12"}


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
