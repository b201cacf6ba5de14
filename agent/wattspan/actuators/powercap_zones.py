"""CPU packages with a long-term power limit, found in sysfs by their names.

The kernel numbers zones in the order in which they register, psys among the packages, in
hexadecimal; and a constraint's number says nothing of which limit it is. So both are found by
name. Zones of a package's parts and of memory have limits of their own on some processors, and
psys is the whole board's: they are left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CLASS = "class/powercap"
LONG_TERM = "long_term"
_PACKAGE = re.compile(r"package-\d+(-die-\d+)?")
_DIRECTORY = re.compile(r"intel-rapl(-mmio)?:[0-9a-f]+")
_CONSTRAINT = re.compile(r"constraint_(\d+)_name")


@dataclass(frozen=True, slots=True)
class Limit:
    """One zone's long-term constraint."""

    directory: Path
    number: int

    def path(self, what: str) -> Path:
        return self.directory / f"constraint_{self.number}_{what}"

    @property
    def power(self) -> Path:
        return self.path("power_limit_uw")

    @property
    def enabled(self) -> Path:
        return self.directory / "enabled"


@dataclass(frozen=True, slots=True)
class Package:
    """A package, or a die with a zone of its own.

    ``mirrors`` are the same package's limits in other interfaces: separate registers, of which
    the processor obeys the lowest. They are looked at and never written.
    """

    name: str
    limit: Limit
    mirrors: tuple[Limit, ...] = ()

    @property
    def id(self) -> str:
        """The id of its energy's domain."""
        return f"rapl:{self.name}"

    @property
    def is_there(self) -> bool:
        """Whether its files are still its own: directories are numbered anew on hot-plug."""
        return (
            text_of(self.limit.directory / "name") == self.name
            and text_of(self.limit.path("name")) == LONG_TERM
        )


def find_packages(sysfs: Path) -> tuple[Package, ...]:
    """Every package that has a long-term limit, in the order of names.

    Two drivers (of MSR and of TPMI) may both register a package. Either limit holds, so the
    first is taken and the other counts as a mirror.
    """
    found: dict[str, list[Limit]] = {}
    for directory in _zones(sysfs):
        name = text_of(directory / "name") or ""
        number = _long_term(directory) if _PACKAGE.fullmatch(name) else None
        if number is not None:
            found.setdefault(name, []).append(Limit(directory, number))
    return tuple(
        Package(name, limits[0], tuple(limits[1:]))
        for name, limits in sorted(found.items(), key=lambda entry: _natural(entry[0]))
        if not limits[0].directory.name.startswith("intel-rapl-mmio")
    )


def text_of(path: Path) -> str | None:
    """The one line in ``path``; None if it cannot be read."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return None


def _zones(sysfs: Path) -> list[Path]:
    """Directories of zones at the top of their control type; those of MMIO come last."""
    entries = [entry for entry in _entries(sysfs / CLASS) if _DIRECTORY.fullmatch(entry.name)]
    return sorted(entries, key=lambda entry: ("mmio" in entry.name, _natural(entry.name)))


def _long_term(directory: Path) -> int | None:
    for entry in _entries(directory):
        match = _CONSTRAINT.fullmatch(entry.name)
        if match and text_of(entry) == LONG_TERM:
            return int(match[1])
    return None


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts package-2 before package-10, and intel-rapl:9 before intel-rapl:a."""
    parts = re.split(r"(?<=[-:])([0-9a-f]+)(?![0-9a-z])", text)
    return tuple(
        (int(part, 16), "") if place % 2 else (-1, part) for place, part in enumerate(parts)
    )
