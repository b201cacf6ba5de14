"""The CPU sockets of a host, numbered as the meters of its processors name them.

``physical_package_id`` is no number of a socket: on ARM it is an offset in a table of the firmware,
such as 36, elsewhere it may skip numbers. Meters, labels and resources say "socket 0", so sockets
are numbered by the rank of their id among the present packages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from wattspan.util.files import file_text, shortage_remedy

_MAX_CPUS = 1 << 16  # eight times the limit of Linux


def number_packages(ids: Iterable[int], expected: int = 0) -> dict[int, int]:
    """The number of the socket of each package id, in order.

    ``expected`` is the number of packages of the host, those included whose CPUs are all offline
    and whose ids are unknown. While some are missing, ids that may be numbers keep their value.
    """
    ordered = sorted(set(ids))
    if len(ordered) < expected and ordered and ordered[-1] < expected:
        return {package: package for package in ordered}
    return {package: number for number, package in enumerate(ordered)}


class CpuTopology:
    """The sockets of a host. An offline CPU, which sysfs does not describe, keeps its socket."""

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._cpus = sysfs / "devices/system/cpu"
        self._online = ""
        self._packages: dict[int, int] = {}  # by CPU
        self._numbers: dict[int, int] = {}  # by package id
        self.online: frozenset[int] = frozenset()
        self._hidden: frozenset[int] = frozenset()  # CPUs that lxcfs may hide
        self.sockets: tuple[int, ...] = (0,)
        """The numbers of the sockets, in order; socket 0 if none is known."""
        self.refresh()

    @property
    def known(self) -> bool:
        """True if sysfs names the package of a CPU."""
        return bool(self._numbers)

    @property
    def nameless(self) -> bool:
        """True if CPUs are listed and the firmware names no package: all are in socket 0."""
        return bool(self._packages) and not self._numbers

    @property
    def possible(self) -> str:
        """All possible CPUs, as a list of the kernel."""
        return self._text("possible") or self._text("present") or "0"

    def socket_of(self, cpu: int) -> int:
        """The socket of a CPU; the last one for a CPU that is not in sysfs."""
        package = self._packages.get(cpu)
        return self.sockets[-1] if package is None else self._numbers.get(package, self.sockets[0])

    def socket_near(self, device: Path) -> int | None:
        """The only socket whose CPUs are local to a PCI device; None if it is not known."""
        cpus = parse_cpu_list(file_text(device / "local_cpulist"))
        near = {self.socket_of(cpu) for cpu in cpus if cpu in self._packages}
        return near.pop() if self.known and len(near) == 1 else None

    def sockets_of_packages(self, packages: Collection[int]) -> Mapping[int, int | None]:
        """The socket of each package that meters name by id; None of one without CPUs.

        If sysfs has as many packages with other ids, such as those of a virtual machine, both are
        in the same order. Without any package in sysfs, the ids are the numbers.
        """
        ordered = sorted(set(packages))
        if not self._numbers:
            return {package: package for package in ordered}
        if len(ordered) == len(self.sockets) and self._numbers.keys().isdisjoint(ordered):
            return dict(zip(ordered, self.sockets, strict=True))
        return {package: self._numbers.get(package) for package in ordered}

    def capacity(self, *, offline: bool = False) -> Mapping[int, int]:
        """The number of online CPUs of each socket, or of all that may be online.

        lxcfs mounts files over those of a container: its online CPUs are those of its cpuset.
        """
        count = dict.fromkeys(self.sockets, 0)
        for cpu in self.online | self._hidden if offline else self.online:
            count[self.socket_of(cpu)] += 1
        return count

    def refresh(self) -> bool:
        """Read the topology again if the set of online CPUs has changed; True if it has changed."""
        online, before = self._text("online"), (self._numbers, self.online)
        if online in ("", self._online) and self._packages:  # "" without descriptors too
            return False
        seen: set[int] = set()
        for path in self._cpus.glob("cpu[0-9]*/topology/physical_package_id"):
            cpu = int(re.sub(r"\D", "", path.parent.parent.name))
            try:
                self._packages[cpu] = int(path.read_text())
            except (OSError, ValueError) as error:
                if shortage_remedy(error):
                    raise
                continue
            seen.add(cpu)
        self._online = online
        named = Counter(package for package in self._packages.values() if package >= 0)
        self._numbers = number_packages(named, self._expected_packages(named))
        self.sockets = tuple(self._numbers.values()) or (0,)
        self.online = frozenset(parse_cpu_list(online)) if online else frozenset(seen)
        with suppress(OSError):  # lxcfs mounts the file or its directory
            if (self._cpus / "online").stat().st_dev != self._cpus.parent.stat().st_dev:
                self._hidden = frozenset(parse_cpu_list(self._text("present")))
        return (self._numbers, self.online) != before

    def _expected_packages(self, named: Mapping[int, int]) -> int:
        """The number of packages if the CPUs that sysfs does not describe are in others."""
        undescribed = len(set(parse_cpu_list(self._text("present"))) - self._packages.keys())
        largest = max(named.values(), default=1)
        return len(named) + -(-undescribed // largest)

    def _text(self, name: str) -> str:
        return file_text(self._cpus / name)


def parse_cpu_list(text: str) -> Iterable[int]:
    """The numbers in a list such as ``0-3,8``, without invalid parts and too large numbers."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is not None:
            numbers.update(range(int(match[1]), min(int(match[2] or match[1]) + 1, _MAX_CPUS)))
    return sorted(numbers)
