"""The devices behind the indices of CUDA and HIP, by the variables of a program's environment.

``devices`` are names of the listing below; ``expected`` are those behind the indices 0, 1, ...,
or ``refused`` is a part of the error. ``nodes`` and ``kfd`` are device files of the runtimes; by
default each board of NVIDIA has one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.field import FieldCase, field_cases

from wattspan.compat.zeus.devices import CudaEnvironment, DeviceMappingError, visible_boards
from wattspan.sdk.client import Device

A = "GPU-6a1f0c3e-1111-2222-3333-4444444444aa"
B = "GPU-6a1f9b7d-5555-6666-7777-8888888888bb"


def board(number: int, uuid: str, model: str = "NVIDIA H100 80GB HBM3", **rest: str) -> Device:
    return Device(
        f"gpu:{uuid}", "gpu", f"{model} {number}", None, None, 0.0, "measured",
        number=number, uuid=uuid, model=model, **rest,  # type: ignore[arg-type]
    )  # fmt: skip


def instance(number: int, uuid: str, parent: str) -> Device:
    name = f"NVIDIA H100 80GB HBM3 0, 1g.10gb {number}"
    return Device(
        f"gpu:{uuid}", "gpu", name, None, None, 0.0, "estimated",
        number=number, uuid=uuid, parent=f"gpu:{parent}",
    )  # fmt: skip


DEVICES = {
    "a": board(0, A),
    "b": board(1, B),
    "a3": instance(3, "MIG-11110000-aaaa-5555-8888-000000000003", A),
    "a4": instance(4, "MIG-11112222-aaaa-5555-8888-000000000004", A),
    "b3": instance(3, "MIG-99990000-bbbb-5555-8888-000000000003", B),
    "x": board(0, "0000:60:00.0", "AMD Instinct MI300X"),
    "y": board(1, "0000:61:00.0", "AMD Instinct MI300X"),
    "z": board(2, "0000:62:00.0", "AMD Instinct MI300X"),
    "x8": board(0, "0000:60:00.0", "AMD Instinct MI300X", partition_mode="CPX"),
}


@pytest.mark.parametrize("case", field_cases("visible_gpus"))
def test_indices_are_those_of_the_runtime(case: FieldCase, tmp_path: Path) -> None:
    for place, row in enumerate(case["row"]):
        files = tmp_path / str(place)
        files.mkdir()
        devices = [DEVICES[name] for name in row.get("devices", case.get("devices"))]
        nodes = row.get("nodes", sum((one.uuid or "").startswith("GPU-") for one in devices))
        for name in [f"nvidia{n}" for n in range(nodes)] + ["kfd"] * ("kfd" in row):
            (files / name).touch()
        environment = CudaEnvironment.of(row.get("environment", {}), files)
        if "refused" in row:
            with pytest.raises(DeviceMappingError, match=row["refused"]):
                visible_boards(devices, environment, row.get("reported", []))
            continue
        found = visible_boards(devices, environment, row.get("reported", []))
        assert [one.id for one in found] == [DEVICES[name].id for name in row["expected"]], row
