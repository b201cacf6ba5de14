"""The boards behind CUDA's device indices.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` lists: by index in the order of
``CUDA_DEVICE_ORDER``, by UUID, by a prefix of a UUID, or by MIG instance. The list ends at its
first invalid entry, and a repeated entry leaves no device (CUDA C++ Programming Guide, environment
variables; PyTorch parses alike). The driver numbers by PCI bus. CUDA's default order is by speed,
which is the same among boards of one model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device

_NUMBER = re.compile(r"[+-]?\d+")
_MIG_OF_BOARD = re.compile(r"MIG-(GPU-[^/]+)/")


class DeviceMappingError(MeasurementError):
    """The boards behind CUDA's device indices are not known."""


def visible_boards(
    boards: Sequence[Device],
    visible: str | None = None,
    order: str | None = None,
    uuids: Sequence[str] = (),
) -> tuple[Device, ...]:
    """The boards behind the CUDA indices 0, 1, ...; DeviceMappingError if they are ambiguous.

    ``visible`` and ``order`` are CUDA's variables, ``uuids`` those that CUDA reports itself, in its
    order; they overrule the variables.
    """
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
        return _in_cuda_order(boards, order)
    entries = [entry.strip() for entry in visible.split(",")]
    if entries[0].startswith("MIG-"):
        return (_board_of_mig(boards, entries[0]),)  # CUDA uses one instance per process
    if entries[0].startswith("GPU-"):
        return _distinct(_boards_by_uuid(boards, entries))
    numbers = _numbers(entries)
    return _distinct(_boards_by_number(boards, numbers, order)) if numbers else ()


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
    boards: Sequence[Device], numbers: Sequence[int], order: str | None
) -> list[Device]:
    ordered = _in_cuda_order(boards, order)
    found = []
    for number in numbers:
        if number >= len(ordered):
            break
        found.append(ordered[number])
    return found


def _distinct(boards: Sequence[Device]) -> tuple[Device, ...]:
    return tuple(boards) if len({board.id for board in boards}) == len(boards) else ()


def _in_cuda_order(boards: Sequence[Device], order: str | None) -> tuple[Device, ...]:
    unknown = [board for board in boards if board.number is None]
    if unknown:
        raise DeviceMappingError(
            f"The driver's index of {unknown[0].name} is not known yet. Read again in a second; "
            "`wattspan doctor` names the fault if it stays unknown."
        )
    numbers = sorted(board.number or 0 for board in boards)
    if numbers != list(range(len(boards))):
        listed = ", ".join(map(str, numbers))
        raise DeviceMappingError(
            f"The agent measures the GPUs {listed} of the driver and not all before the last, so "
            "the order of CUDA's devices is not known. `wattspan doctor` names the fault of the "
            "others; UUIDs in CUDA_VISIBLE_DEVICES need no order."
        )
    if order != "PCI_BUS_ID" and len({board.model for board in boards}) > 1:
        models = ", ".join(sorted({board.model for board in boards}))
        raise DeviceMappingError(
            f"The order of CUDA's devices is not known: this host has {models}, and CUDA orders by "
            "speed unless told otherwise. Set CUDA_DEVICE_ORDER=PCI_BUS_ID before the program "
            "starts, list UUIDs in CUDA_VISIBLE_DEVICES, or initialise torch.cuda first."
        )
    return tuple(sorted(boards, key=lambda board: board.number or 0))


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
