"""The devices behind Zeus's indices of GPUs and CPU packages."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic_ns, sleep
from typing import Any, NamedTuple

from wattspan.compat.zeus.cuda import (
    CudaEnvironment,
    DeviceMappingError,
    cuda_uuids,
    visible_boards,
)
from wattspan.sdk import AgentUnavailableError, MeasurementError
from wattspan.sdk.client import Device
from wattspan.sdk.devices import DeviceReader

STARTUP_PATIENCE = 2.0
"""Seconds after its start in which an agent has found all devices."""

_PAUSE = 0.1


class IndexedDevices(NamedTuple):
    """Ids of devices by Zeus's index; a package may have several domains of one kind."""

    gpus: Mapping[int, str]
    packages: Mapping[int, tuple[str, ...]]
    memory: Mapping[int, tuple[str, ...]]


class DeviceIndex:
    """The devices of a monitor: those asked for, or all that are visible to the program.

    ``gpu_indices`` and ``cpu_indices`` are as asked, None for all. CUDA's variables count as they
    are at construction.
    """

    def __init__(
        self,
        read: DeviceReader,
        gpu_indices: Sequence[int] | None,
        cpu_indices: Sequence[int] | None,
        environment: CudaEnvironment | None = None,
        modules: Mapping[str, Any] = sys.modules,
    ) -> None:
        self._read = read
        self._asked_gpus = None if gpu_indices is None else list(gpu_indices)
        self._asked_cpus = None if cpu_indices is None else list(cpu_indices)
        self._environment = environment or CudaEnvironment.of(os.environ)
        self._modules = modules
        self._found: tuple[tuple[str, ...], IndexedDevices] | None = None

    def check(self, monitor: str, patience: float = STARTUP_PATIENCE) -> None:
        """Look the devices up now. A warning without an agent; ValueError for a missing index.

        An agent that was started just now lists its devices within ``patience`` seconds.
        """
        deadline = monotonic_ns() + round(patience * 1e9)
        try:
            while True:
                try:
                    self.resolve()
                except MissingIndexError:
                    if monotonic_ns() >= deadline:
                        raise
                    sleep(_PAUSE)
                else:
                    return
        except AgentUnavailableError as error:
            warnings.warn(
                f"{monitor} measures nothing yet, and reading a value will fail. {error}",
                RuntimeWarning,
                stacklevel=3,
            )
        except MissingIndexError:
            raise
        except MeasurementError as error:
            warnings.warn(f"{monitor}: {error}", RuntimeWarning, stacklevel=3)

    def resolve(self) -> IndexedDevices:
        """The devices; a MeasurementError if they are not known.

        They are kept once GPUs were found: an agent that was started just now may not list them.
        """
        uuids = cuda_uuids(self._modules)
        found = self._found
        if found is None or found[0] != uuids or (not found[1].gpus and self._asked_gpus != []):
            now = monotonic_ns()
            listed = self._read(now, now)
            if self._environment.names_instances and not any(one.parent for one in listed):
                listed = self._read(now, now, parts=True)
            found = self._found = uuids, self._indexed(listed, uuids)
        return found[1]

    @property
    def gpu_indices(self) -> list[int]:
        """The indices of the GPUs; as asked, else empty while they are not known."""
        if self._asked_gpus is not None:
            return list(self._asked_gpus)
        return [] if self._found is None else list(self._found[1].gpus)

    @property
    def cpu_indices(self) -> list[int]:
        """The indices of the CPU packages; as asked, else empty while they are not known."""
        if self._asked_cpus is not None:
            return list(self._asked_cpus)
        return [] if self._found is None else list(self._found[1].packages)

    def _indexed(self, devices: Sequence[Device], uuids: tuple[str, ...]) -> IndexedDevices:
        gpus: dict[int, str] = {}
        if self._asked_gpus != []:
            boards = [one for one in devices if one.kind == "gpu"]
            visible = visible_boards(boards, self._environment, uuids)
            gpus = {i: board.id for i, board in enumerate(visible)}
        return IndexedDevices(
            _asked("GPU", gpus, self._asked_gpus),
            _asked("CPU package", _by_package(devices, "cpu"), self._asked_cpus),
            {
                i: ids
                for i, ids in _by_package(devices, "memory").items()
                if self._asked_cpus is None or i in self._asked_cpus
            },
        )


class MissingIndexError(DeviceMappingError, ValueError):
    """An asked index has no device."""


def _asked(what: str, known: dict[int, Any], indices: Iterable[int] | None) -> dict[int, Any]:
    """The devices of ``indices``, or all; MissingIndexError."""
    if indices is None:
        return known
    for i in indices:
        if i not in known:
            present = ", ".join(map(str, known)) or "none"
            raise MissingIndexError(
                f"{what} {i} does not exist here; known indices: {present}. Indices count the "
                "devices that are visible to this program, from 0."
            )
    return {i: known[i] for i in indices}


def _by_package(devices: Iterable[Device], kind: str) -> dict[int, tuple[str, ...]]:
    """The domains of one kind by the number of their package, in its order."""
    found: dict[int, tuple[str, ...]] = {}
    for device in devices:
        if device.kind == kind:
            number = device.number or 0
            found[number] = (*found.get(number, ()), device.id)
    return dict(sorted(found.items()))
