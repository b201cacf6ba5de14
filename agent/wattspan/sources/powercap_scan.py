"""Finding powercap zones under a sysfs root, and reading what does not change about them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wattspan.model import Milliwatts
from wattspan.sources.zones import Zone

CLASS = "class/powercap"
ENERGY = "energy_uj"


@dataclass(frozen=True, slots=True)
class Scan:
    """What stands under the powercap class: zones by directory name, and links to nowhere.

    ``masked`` holds zones that are listed but whose directories are not there: a container
    runtime has covered ``/sys/devices/virtual/powercap``.
    """

    zones: dict[str, Path] = field(default_factory=dict)
    masked: tuple[str, ...] = ()


def scan(sysfs: Path) -> Scan:
    """Every zone that counts energy, of every control type. An unreadable root has none."""
    found = Scan()
    masked = []
    for entry in _entries(sysfs / CLASS):
        if not entry.is_dir():
            masked.append(entry.name)
        elif ":" in entry.name:
            _collect(entry, found.zones)
        else:
            # A control type. The class links every zone as well; a copied tree may not.
            for zone in _below(entry):
                _collect(zone, found.zones)
    return Scan(found.zones, tuple(name for name in sorted(masked) if name not in found.zones))


def _collect(zone: Path, into: dict[str, Path]) -> None:
    if zone.name in into or not zone.is_dir():
        return
    # Zones that only limit power (dtpm, idle injection) have no energy to read.
    if (zone / ENERGY).exists() or (zone / ENERGY).is_symlink():
        into[zone.name] = zone
    for child in _below(zone):
        _collect(child, into)


def _below(directory: Path) -> Iterator[Path]:
    prefix = f"{directory.name}:"
    return (entry for entry in _entries(directory) if entry.name.startswith(prefix))


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def describe(directory: Path) -> Zone:
    """The zone in ``directory``, without samples.

    OSError if its name cannot be read, ValueError if it is no name. Everything else may be
    missing: constraints often are, and a zone without a range still counts.
    """
    name = (directory / "name").read_bytes().strip()
    if not name or not name.isascii() or not name.decode().isprintable() or b"/" in name:
        raise ValueError(f"its name is {name[:40]!r}")
    limits = [
        _number(path)
        for pattern in ("constraint_*_max_power_uw", "constraint_*_power_limit_uw")
        for path in directory.glob(pattern)
    ]
    return Zone(
        directory=directory.name,
        name=name.decode(),
        max_range=_number(directory / "max_energy_range_uj"),
        max_power=Milliwatts(max((limit // 1000 for limit in limits if limit), default=0)) or None,
    )


def _number(path: Path) -> int | None:
    """The non-negative number in ``path``; None if it cannot be read or is none."""
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        return None
    return int(text) if text.isdigit() else None


def vendor(sysfs: Path) -> str | None:
    """Who made the processor, from its modalias; None where that does not tell."""
    try:
        modalias = (sysfs / "devices/system/cpu/modalias").read_text(errors="replace")
    except OSError:
        return None
    for number, name in (("ven0000", "intel"), ("ven0002", "amd"), ("ven0009", "amd")):
        if number in modalias:  # 9 is Hygon, whose registers are AMD's
            return name
    return None
