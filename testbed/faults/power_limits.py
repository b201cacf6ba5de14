"""Power limits of an agent's own emulated host, readable even after its end.

The host's files are removed at its end; open descriptors keep them readable.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from wattspan.emulation.control import Closeable
from wattspan.emulation.nvml import EmulatedNvml

FIXED = """
[[caps.fixed]]
device = "0"
watts = 600
[[caps.fixed]]
device = "intel-rapl:0"
knob = "cpu_power"
watts = 220
"""
"""Caps for a host with one board and one socket: in force once there is a capper."""
IMPOSED = {"intel-rapl:0": "220000000", "board 0": "600000"}
"""Limits that FIXED leaves in force when an agent and its capper have ended, as they stand."""


class _Limit(NamedTuple):
    """One that can be turned; ``place`` is the open file of a package, the handle of a board."""

    name: str
    default: int  # in the device's own unit, with the initial value
    place: Any


class Limits(Closeable):
    """Those of the emulated host in a directory; none without one.

    ``Limits.of_agent`` finds the host that an agent has started.
    """

    def __init__(self, directory: Path | None) -> None:
        self._packages: list[_Limit] = []
        self._boards: list[_Limit] = []
        self._nvml: Any = None
        if directory is not None:
            with suppress(OSError, ValueError):  # incomplete files have no foreign writes
                self._open_packages(directory / "sys" / "class" / "powercap")
            self._open_boards(directory / "gpus")

    @classmethod
    def of_agent(cls, pid: int) -> Self:
        """Those of the host of the agent ``pid``; none if it has not come as far as to have one."""
        return cls(_host_of(pid))

    def _open_packages(self, tree: Path) -> None:
        for most in sorted(tree.glob("*/constraint_0_max_power_uw")):
            default, zone = int(most.read_text()), most.parent
            place = os.open(zone / "constraint_0_power_limit_uw", os.O_RDONLY)
            self._packages.append(_Limit(zone.name, default, place))

    def _open_boards(self, gpus: Path) -> None:
        nvml: Any = EmulatedNvml(gpus)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        self._nvml = nvml
        with suppress(nvml.NVMLError):  # as above
            for index in range(nvml.nvmlDeviceGetCount()):
                board = nvml.nvmlDeviceGetHandleByIndex(index)
                default = nvml.nvmlDeviceGetPowerManagementDefaultLimit(board)
                self._boards.append(_Limit(f"board {index}", default, board))

    def watts(self, *, without: Collection[str] = ()) -> dict[str, float]:
        """Each limit in force, in watts, but of the devices ``without``: a hung one is not asked.

        For a board it is the enforced limit.
        """
        found = {
            one.name: int(os.pread(one.place, 32, 0)) / 1e6
            for one in self._packages
            if one.name not in without
        }
        for one in self._boards:
            if one.name not in without:
                found[one.name] = self._nvml.nvmlDeviceGetEnforcedPowerLimit(one.place) / 1e3
        return found

    def turned(
        self, *, without: Collection[str] = (), imposed: Mapping[str, str] = MappingProxyType({})
    ) -> list[str]:
        """Limits that are neither the initial ones nor ``imposed``, with their values."""
        packages = [one for one in self._packages if one.name not in without]
        stand = [(one, os.pread(one.place, 32, 0).strip().decode()) for one in packages]
        stand += [
            (one, str(self._nvml.nvmlDeviceGetPowerManagementLimit(one.place)))
            for one in self._boards
            if one.name not in without
        ]
        return [
            f"{one.name} at {now or 'nothing'}, not {one.default}"
            for one, now in stand
            if now not in (str(one.default), imposed.get(one.name))
        ]

    def stand(self) -> dict[str, int]:
        """Each limit in the device's own unit."""
        found = {one.name: int(os.pread(one.place, 32, 0)) for one in self._packages}
        for one in self._boards:
            found[one.name] = int(self._nvml.nvmlDeviceGetPowerManagementLimit(one.place))
        return found

    def put(self, limits: Mapping[str, int]) -> None:
        """Set limits in the device's own unit, as an external controller does."""
        for one in self._packages:
            if one.name in limits:
                Path(f"/proc/self/fd/{one.place}").write_text(str(limits[one.name]))
        for one in self._boards:
            if one.name in limits:
                self._nvml.nvmlDeviceSetPowerManagementLimit(one.place, limits[one.name])

    def close(self) -> None:
        while self._packages:
            os.close(self._packages.pop().place)
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


def _host_of(pid: int) -> Path | None:
    """Directory of the emulated host started by a process, if it exists."""
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"wattspan.emulation.engine" in words:
                return Path(words[words.index(b"wattspan.emulation.engine") + 2].decode())
    return None
