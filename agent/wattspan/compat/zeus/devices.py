"""The devices behind the indices of a program: GPUs as CUDA and HIP number them, CPU packages.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` lists: by index in the order of
``CUDA_DEVICE_ORDER``, by UUID, by a prefix of a UUID, or by MIG instance. The list ends at its
first invalid entry, and a repeated entry leaves no device (CUDA C++ Programming Guide, environment
variables; PyTorch parses alike). The driver numbers by PCI bus. CUDA's default order is by speed,
which is the same among boards of one model.

The agent lists all boards of the host. A container or a batch job may give a program a part of
them, which CUDA numbers from 0: then their indices are known from ``NVIDIA_VISIBLE_DEVICES`` (of
the NVIDIA Container Toolkit), from UUIDs, or not at all.

CUDA uses one MIG instance in a process, and no board beside it: the first that the list names, or
the first of the visible boards (NVIDIA MIG user guide). HIP numbers the boards that
``ROCR_VISIBLE_DEVICES`` lists, and of these those in ``HIP_VISIBLE_DEVICES``, for which it also
takes ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from time import monotonic_ns, sleep
from typing import Any, NamedTuple

from wattspan import sdk
from wattspan.sdk import AgentUnavailableError, MeasurementError
from wattspan.sdk.client import Device, DeviceReader

_NUMBER = re.compile(r"[+-]?\d+")
_MIG_OF_BOARD = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/\d+")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


_Devices = Sequence[Device]


class DeviceMappingError(MeasurementError):
    """The boards behind CUDA's device indices are not known."""


UUIDS_REMEDY = "List UUIDs in CUDA_VISIBLE_DEVICES, or initialise torch.cuda before reading."


@dataclass(frozen=True, slots=True)
class CudaEnvironment:
    """All that decides about the numbers of a program's CUDA devices.

    ``visible`` and ``order`` are CUDA's variables, ``container`` and ``batch`` the GPUs that a
    container and a Slurm job were given; None if unset. ``nodes`` is the number of device files,
    None where it tells nothing (WSL, an emulated host). ``rocr`` and ``hip`` are the variables of
    AMD's runtimes, and ``kfd`` is true where their device file exists.
    """

    visible: str | None = None
    order: str | None = None
    container: str | None = None
    batch: str | None = None
    nodes: int | None = None
    rocr: str | None = None
    hip: str | None = None
    kfd: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str], devices: Path = Path("/dev")) -> CudaEnvironment:
        """The environment of a process with the variables ``environ``."""
        # WSL has no device file for each GPU, and CDI sets "void" in containers that have GPUs.
        wsl = (devices / "dxg").exists()
        return cls(
            environ.get("CUDA_VISIBLE_DEVICES"),
            environ.get("CUDA_DEVICE_ORDER"),
            None if wsl else environ.get("NVIDIA_VISIBLE_DEVICES"),
            environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS"),
            None if wsl else sum(one.name[6:].isdecimal() for one in devices.glob("nvidia[0-9]*")),
            environ.get("ROCR_VISIBLE_DEVICES"),
            environ.get("HIP_VISIBLE_DEVICES"),
            (devices / "kfd").exists(),
        )

    @property
    def uses_hip(self) -> bool:
        """True if a variable of AMD's runtimes is set."""
        return self.rocr is not None or self.hip is not None

    @property
    def hip_lists(self) -> list[list[str]]:
        """The entries of the variables that select HIP's devices, in the order of selection."""
        inner = self.visible if self.hip is None else self.hip
        return [_entries(listed) for listed in (self.rocr, inner) if listed is not None]

    def needs_amd(self, *, nvidia: bool) -> bool:
        """True if HIP has devices here; ``nvidia``: there are boards of NVIDIA too.

        Batch systems set AMD's variables on hosts of NVIDIA, and any graphics of AMD has a device
        file, so both are needed there.
        """
        if not all(_numbers(one) or one[0].startswith("GPU-") for one in self.hip_lists):
            return False
        if nvidia or self.nodes:
            return self.kfd and self.uses_hip and self.visible is None
        return self.kfd or self.uses_hip


def visible_boards(
    devices: Sequence[Device],
    environment: CudaEnvironment,
    uuids: Sequence[str] = (),
) -> tuple[Device, ...]:
    """The boards, or the MIG instance, behind the device indices 0, 1, ...

    ``devices`` are boards and their instances; ``uuids`` are those that CUDA reports itself, in its
    order; they overrule the environment. DeviceMappingError if the indices are ambiguous, or of
    boards that the agent does not measure.
    """
    boards = [one for one in devices if not _is_instance(one)]
    if any(board.provenance == "emulated" for board in boards):
        environment = replace(environment, nodes=None, kfd=False, container=None)  # of another host
    amd = [board for board in boards if _PCI_ADDRESS.fullmatch(board.uuid or "")]
    if amd and (environment.uses_hip or (len(amd) == len(boards) and not environment.nodes)):
        return _hip_boards(amd, environment)
    boards = [board for board in boards if board not in amd]
    instances = [one for one in devices if _is_instance(one)]
    visible = environment.visible
    if uuids:
        named = {_bare(one.uuid or ""): one for one in (*boards, *instances)}
        found = [named.get(_bare(uuid)) for uuid in uuids]
        if None not in found:
            return tuple(one for one in found if one is not None)
        texts = (visible or "", environment.container or "", *uuids)
        if not any("MIG" in text for text in texts):
            number = found.index(None)
            raise _unmeasured(f"CUDA device {number} ({uuids[number]})")
    if not amd and environment.needs_amd(nvidia=bool(boards)):
        raise DeviceMappingError(
            "This program may use GPUs of AMD and the agent measures none: `wattspan doctor` names "
            "the fault. A program that uses none sets HIP_VISIBLE_DEVICES=-1."
        )
    if environment.nodes == 0 and all((one.uuid or "").startswith("GPU-") for one in boards):
        return ()  # a container that was given no GPU, whatever its variables, on a host with some
    given = _entries(environment.container)
    if given[:1] and given[0].startswith("MIG-") and (visible is None or _numbers([visible])[:1]):
        inside = _numbers(_entries(visible)) if visible is not None else [0]
        shown = _of_mig(boards, instances, given[0], environment.nodes)
        return (shown,) if inside[:1] == [0] else ()
    if visible is None:
        return _divided(_in_cuda_order(boards, environment), instances)
    entries = _entries(visible)
    if entries[0].startswith("MIG-"):
        return (_of_mig(boards, instances, entries[0], environment.nodes),)
    if entries[0].startswith("GPU-"):
        return _divided(_distinct(_boards_by_uuid(boards, entries, environment)), instances)
    numbers = _numbers(entries)
    chosen = _numbered(_in_cuda_order(boards, environment), numbers) if numbers else ()
    return _divided(_distinct(chosen), instances)


def _unmeasured(device: str) -> DeviceMappingError:
    return DeviceMappingError(
        f"{device} is not among the GPUs that the agent measures. `wattspan doctor` lists them "
        "with their faults."
    )


def _divided(boards: _Devices, instances: _Devices) -> tuple[Device, ...]:
    """``boards`` as CUDA shows them: of divided ones, one MIG instance and no board."""
    ids = {board.id for board in boards}
    inside = [one for one in instances if one.parent in ids]
    if len(inside) > 1:
        raise DeviceMappingError(
            f"The GPUs of this program are divided into {len(inside)} MIG instances, of which CUDA "
            "shows one, and which one is not known. Name it in CUDA_VISIBLE_DEVICES (MIG-UUID), or "
            "initialise torch.cuda before reading."
        )
    return tuple(inside or boards)


def _entries(listed: str | None) -> list[str]:
    return [entry.strip() for entry in (listed or "").split(",")]


def _is_instance(device: Device) -> bool:
    return device.parent is not None or (device.uuid or "").startswith("MIG-")


def _hip_boards(boards: Sequence[Device], environment: CudaEnvironment) -> tuple[Device, ...]:
    """AMD's boards, by index in the driver's order; DeviceMappingError if they are ambiguous."""
    if any(board.number is None for board in boards):
        raise DeviceMappingError(
            "The driver's index of an AMD board is not known yet. Read again in a second; "
            "`wattspan doctor` names the fault if it stays unknown."
        )
    divided = [one for one in boards if one.partition_mode not in {None, "", "SPX", "N/A"}]
    if divided and len(boards) > 1:
        raise DeviceMappingError(
            f"{divided[0].name} is divided into partitions, which HIP numbers, and the agent "
            "measures whole boards. Measure with one board per program, or in mode SPX."
        )
    if divided:
        return tuple(boards)
    usable = sorted(boards, key=lambda board: board.number or 0)
    for entries in environment.hip_lists:
        if entries[0].startswith("GPU-"):
            raise DeviceMappingError(
                f"The board of {entries[0]} is not known: ROCm's UUIDs are not those of the "
                "driver. List indices in ROCR_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES."
            )
        usable = list(_distinct(_numbered(usable, _numbers(entries))))
    return tuple(usable)


def _boards_by_uuid(
    boards: _Devices, entries: Sequence[str], environment: CudaEnvironment
) -> list[Device]:
    """The boards up to the first entry that is invalid to CUDA, which may have unmeasured ones."""
    nodes = environment.nodes
    found = []
    for entry in entries:
        alike = [board for board in boards if (board.uuid or "").startswith(entry)]
        unmeasured = nodes and (nodes != len(boards) or environment.container is not None)
        if not alike and unmeasured and entry.startswith("GPU-"):
            raise _unmeasured(f"{entry} in CUDA_VISIBLE_DEVICES")
        if len(alike) != 1 or not entry.startswith("GPU-"):
            break
        found += alike
    return found


def _numbers(entries: Sequence[str]) -> list[int]:
    """The leading whole numbers of the entries, up to the first without one or below 0."""
    numbers = []
    for entry in entries:
        number = _NUMBER.match(entry)
        if number is None or int(number[0]) < 0:
            break
        numbers.append(int(number[0]))
    return numbers


def _numbered(boards: _Devices, numbers: Sequence[int]) -> list[Device]:
    """The boards with these numbers, up to the first that does not exist."""
    return [boards[number] for number in takewhile(lambda one: one < len(boards), numbers)]


def _distinct(boards: Sequence[Device]) -> tuple[Device, ...]:
    return tuple(boards) if len({board.id for board in boards}) == len(boards) else ()


def _in_cuda_order(boards: Sequence[Device], environment: CudaEnvironment) -> tuple[Device, ...]:
    """The boards that the program may use, in CUDA's order."""
    unknown = [board for board in boards if board.number is None]
    if unknown:
        raise DeviceMappingError(
            f"The driver's index of {unknown[0].name} is not known yet. Read again in a second; "
            "`wattspan doctor` names the fault if it stays unknown."
        )
    by_bus = sorted(boards, key=lambda board: board.number or 0)
    _check_batch(by_bus, environment)
    usable = _given_to_container(by_bus, environment)
    models = sorted({board.model for board in usable})
    if environment.order != "PCI_BUS_ID" and len(models) > 1:
        raise DeviceMappingError(
            f"The order of CUDA's devices is not known: this host has {', '.join(models)}, and "
            "CUDA orders by speed unless told otherwise. Set CUDA_DEVICE_ORDER=PCI_BUS_ID before "
            f"the program starts. {UUIDS_REMEDY}"
        )
    return tuple(usable)


def _given_to_container(boards: Sequence[Device], environment: CudaEnvironment) -> Sequence[Device]:
    """The boards with a device file here; all of them outside a container."""
    numbers, nodes = [board.number for board in boards], environment.nodes
    if nodes in (None, len(boards)):
        if numbers != list(range(len(boards))):
            raise DeviceMappingError(
                f"The agent measures the GPUs {_listed(numbers)} of the driver and not all before "
                "the last, so the numbers of CUDA's devices are not known. `wattspan doctor` names "
                f"the fault of the others. {UUIDS_REMEDY}"
            )
        return boards
    entries = [entry.strip() for entry in (environment.container or "").split(",")]
    prefixes = tuple(entry for entry in entries if entry.startswith("GPU-"))
    given = [
        board
        for board in boards
        if str(board.number) in entries or (prefixes and (board.uuid or "").startswith(prefixes))
    ]
    if len(given) != nodes:
        cause = (
            "as in a container, and NVIDIA_VISIBLE_DEVICES does not name them."
            if (nodes or 0) < len(boards)
            else "and `wattspan doctor` names the faults of the others."
        )
        raise DeviceMappingError(
            f"This program has {nodes} GPUs and the agent measures {len(boards)}, {cause} "
            f"{UUIDS_REMEDY}"
        )
    return given


def _check_batch(boards: Sequence[Device], environment: CudaEnvironment) -> None:
    """DeviceMappingError if a Slurm job has numbers that may count its own GPUs or the host's."""
    if environment.batch is None or len(boards) < 2:
        return
    given = _numbers(environment.batch.split(","))
    listed = _numbers((environment.visible or "").split(","))
    if given != listed and given != list(range(len(boards))):
        raise DeviceMappingError(
            f"The Slurm job has the GPUs {_listed(given)} of the host and the program is shown "
            f"CUDA_VISIBLE_DEVICES={environment.visible or ''}: it is not known which of them "
            f"these numbers mean. {UUIDS_REMEDY}"
        )


def _listed(numbers: Sequence[int | None]) -> str:
    return ", ".join(map(str, numbers))


def _of_mig(boards: _Devices, instances: _Devices, entry: str, nodes: int | None) -> Device:
    """The MIG instance that ``entry`` names, in full, shortened, or by board, GI and CI.

    Where the agent lists no instance, the whole board if it is known.
    """
    place = _MIG_OF_BOARD.fullmatch(entry)
    if place is not None:
        owners = [one for one in boards if (one.uuid or "").lower() == place[1].lower()]
        ids = {owner.id for owner in owners}
        alike = [one for one in instances if one.parent in ids and one.number == int(place[2])]
    else:
        owners = list(boards) if (nodes or 0) <= len(boards) else []
        alike = [one for one in instances if (one.uuid or "").lower().startswith(entry.lower())]
    if len(alike) == 1:
        return alike[0]
    if len(owners) != 1 or len(alike) > 1:
        listed = ", ".join(one.uuid or one.name for one in instances) or "none"
        raise DeviceMappingError(
            f"The board of {entry} is not known: {len(alike)} of the MIG instances that the agent "
            f"measures have this name, on {len(boards)} GPUs. Instances: {listed}. Name one in "
            "full in CUDA_VISIBLE_DEVICES, or as MIG-GPU-UUID/GI/CI."
        )
    return owners[0]


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def cuda_uuids(modules: Mapping[str, Any]) -> tuple[str, ...]:
    """The UUIDs that CUDA reports through a loaded PyTorch; empty before its initialisation.

    Asking earlier would initialise CUDA, after which the program could not fork.
    """
    torch = modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    uuids = [getattr(one, "uuid", None) for one in properties]
    return () if None in uuids else tuple(map(str, uuids))


# ------------------------------------------------------------------ the devices of a monitor

STARTUP_PATIENCE = 2.0
"""Seconds after its start in which an agent has found all devices."""

_PAUSE = 0.1


class IndexedDevices(NamedTuple):
    """Ids of devices by Zeus's index; a package may have several domains of one kind.

    ``fault`` is the reason why those of GPUs are not known.
    """

    boards: Mapping[int, str]
    packages: Mapping[int, tuple[str, ...]]
    memory: Mapping[int, tuple[str, ...]]
    fault: DeviceMappingError | None = None

    @property
    def gpus(self) -> Mapping[int, str]:
        """The ids of GPUs; DeviceMappingError if they are not known."""
        if self.fault is not None:
            raise self.fault
        return self.boards


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
        sdk.registration.renew()  # the agent samples finely from now on, not from the first window
        deadline = monotonic_ns() + round(patience * 1e9)
        try:
            while True:
                try:
                    if (fault := self.resolve().fault) is not None:
                        raise fault
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
        """The devices; a MeasurementError if they are not known. Those of GPUs may have a fault.

        They are kept once GPUs were found: an agent that was started just now may not list them.
        """
        uuids = cuda_uuids(self._modules)
        found = self._found
        if found is None or found[0] != uuids or (not found[1].boards and self._asked_gpus != []):
            now = monotonic_ns()
            # With instances: only they tell whether a board is divided.
            listed = self._read(now, now, parts=True)
            found = self._found = uuids, self._indexed(listed, uuids)
        return found[1]

    @property
    def boards(self) -> Mapping[int, str]:
        """The ids of GPUs by index that are known already."""
        return {} if self._found is None else self._found[1].boards

    @property
    def gpu_indices(self) -> list[int]:
        """The indices of the GPUs; as asked, else empty while they are not known."""
        if self._asked_gpus is not None:
            return list(self._asked_gpus)
        return [] if self._found is None else list(self._found[1].boards)

    @property
    def cpu_indices(self) -> list[int]:
        """The indices of the CPU packages; as asked, else empty while they are not known."""
        if self._asked_cpus is not None:
            return list(self._asked_cpus)
        return [] if self._found is None else list(self._found[1].packages)

    def _indexed(self, devices: Sequence[Device], uuids: tuple[str, ...]) -> IndexedDevices:
        gpus: dict[int, str] = {}
        fault = None
        if self._asked_gpus != []:
            boards = [one for one in devices if one.kind == "gpu"]
            try:
                visible = visible_boards(boards, self._environment, uuids)
            except DeviceMappingError as error:
                fault = error  # packages are known nevertheless
            else:
                found = {i: board.id for i, board in enumerate(visible)}
                gpus = _asked("GPU", found, self._asked_gpus)
        return IndexedDevices(
            gpus,
            _asked("CPU package", _by_package(devices, "cpu"), self._asked_cpus),
            {
                i: ids
                for i, ids in _by_package(devices, "memory").items()
                if self._asked_cpus is None or i in self._asked_cpus
            },
            fault,
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
    """The domains of one kind by the number of their package, in its order.

    One without a number is a package of its own, with the next free number.
    """
    found: dict[int, tuple[str, ...]] = {}
    listed = [device for device in devices if device.kind == kind]
    for device in sorted(listed, key=lambda one: one.number is None):
        number = device.number
        if number is None:
            number = next(free for free in count() if free not in found)
        found[number] = (*found.get(number, ()), device.id)
    return dict(sorted(found.items()))
