"""The boards behind CUDA's device indices.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` lists: by index in the order of
``CUDA_DEVICE_ORDER``, by UUID, by a prefix of a UUID, or by MIG instance. The list ends at its
first invalid entry, and a repeated entry leaves no device (CUDA C++ Programming Guide, environment
variables; PyTorch parses alike). The driver numbers by PCI bus. CUDA's default order is by speed,
which is the same among boards of one model.

The agent lists all boards of the host. A container or a batch job may give a program a part of
them, which CUDA numbers from 0: then their indices are known from ``NVIDIA_VISIBLE_DEVICES`` (of
the NVIDIA Container Toolkit), from UUIDs, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device

_NUMBER = re.compile(r"[+-]?\d+")
_MIG_OF_BOARD = re.compile(r"MIG-(GPU-[^/]+)/")


class DeviceMappingError(MeasurementError):
    """The boards behind CUDA's device indices are not known."""


UUIDS_REMEDY = "List UUIDs in CUDA_VISIBLE_DEVICES, or initialise torch.cuda before reading."


@dataclass(frozen=True, slots=True)
class CudaEnvironment:
    """All that decides about the numbers of a program's CUDA devices.

    ``visible`` and ``order`` are CUDA's variables, ``container`` and ``batch`` the GPUs that a
    container and a Slurm job were given; None if unset. ``nodes`` is the number of device files, 0
    without any (an emulated host).
    """

    visible: str | None = None
    order: str | None = None
    container: str | None = None
    batch: str | None = None
    nodes: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str], devices: Path = Path("/dev")) -> CudaEnvironment:
        """The environment of a process with the variables ``environ``."""
        return cls(
            environ.get("CUDA_VISIBLE_DEVICES"),
            environ.get("CUDA_DEVICE_ORDER"),
            environ.get("NVIDIA_VISIBLE_DEVICES"),
            environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS"),
            sum(path.name[6:].isdecimal() for path in devices.glob("nvidia[0-9]*")),
        )


def visible_boards(
    boards: Sequence[Device],
    environment: CudaEnvironment,
    uuids: Sequence[str] = (),
) -> tuple[Device, ...]:
    """The boards behind the CUDA indices 0, 1, ...; DeviceMappingError if they are ambiguous.

    ``uuids`` are those that CUDA reports itself, in its order; they overrule the environment.
    """
    visible = environment.visible
    if uuids:
        named = {_bare(board.uuid or ""): board for board in boards}
        found = [named.get(_bare(uuid)) for uuid in uuids]
        if None not in found:
            return tuple(board for board in found if board is not None)
        if not any("MIG" in text for text in (visible or "", *uuids)):
            raise DeviceMappingError(
                f"CUDA device {found.index(None)} ({uuids[found.index(None)]}) is not among the "
                "GPUs that the agent measures. `wattspan doctor` lists them with their faults."
            )
    if visible is None:
        return _in_cuda_order(boards, environment)
    entries = [entry.strip() for entry in visible.split(",")]
    if entries[0].startswith("MIG-"):
        return (_board_of_mig(boards, entries[0]),)  # CUDA uses one instance per process
    if entries[0].startswith("GPU-"):
        return _distinct(_boards_by_uuid(boards, entries))
    numbers = _numbers(entries)
    return _distinct(_boards_by_number(boards, numbers, environment)) if numbers else ()


def _boards_by_uuid(boards: Sequence[Device], entries: Sequence[str]) -> list[Device]:
    found = []
    for entry in entries:
        alike = [board for board in boards if (board.uuid or "").startswith(entry)]
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


def _boards_by_number(
    boards: Sequence[Device], numbers: Sequence[int], environment: CudaEnvironment
) -> list[Device]:
    ordered = _in_cuda_order(boards, environment)
    found = []
    for number in numbers:
        if number >= len(ordered):
            break
        found.append(ordered[number])
    return found


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
    if nodes in (0, len(boards)) or any(board.provenance == "emulated" for board in boards):
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
            if nodes < len(boards)
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


def _board_of_mig(boards: Sequence[Device], entry: str) -> Device:
    """The whole board of a MIG instance: its energy is not measured apart."""
    named = _MIG_OF_BOARD.match(entry)
    alike = boards if named is None else [board for board in boards if board.uuid == named[1]]
    if len(alike) != 1:
        raise DeviceMappingError(
            f"The board of {entry} is not known: the name of the instance does not contain it, and "
            f"{len(boards)} GPUs are measured. Name the instance as MIG-GPU-UUID/GI/CI in "
            "CUDA_VISIBLE_DEVICES."
        )
    return alike[0]


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


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
