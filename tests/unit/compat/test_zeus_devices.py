"""The boards behind CUDA's indices: CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, UUIDs, MIG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.metered_devices import gpu

from wattspan.compat.zeus.devices import (
    CudaEnvironment,
    DeviceMappingError,
    cuda_uuids,
    visible_boards,
)
from wattspan.sdk.client import Device

UUIDS = (
    "GPU-0aaa0000-1111-2222-3333-444444444444",
    "GPU-0aab0000-1111-2222-3333-444444444444",
    "GPU-7ccc0000-1111-2222-3333-444444444444",
    "GPU-9ddd0000-1111-2222-3333-444444444444",
)
BOARDS = tuple(gpu(i, uuid)._replace(provenance="measured") for i, uuid in enumerate(UUIDS))
MIXED = (gpu(0, UUIDS[0], "NVIDIA A40"), gpu(1, UUIDS[1], "NVIDIA H100"))


def boards_of(
    boards: Sequence[Device],
    visible: str | None = None,
    order: str | None = None,
    uuids: Sequence[str] = (),
    **rest: Any,
) -> tuple[Device, ...]:
    return visible_boards(boards, CudaEnvironment(visible, order, **rest), uuids)


def numbers(*arguments: Any, **rest: Any) -> list[int | None]:
    return [board.number for board in boards_of(*arguments, **rest)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        pytest.param(None, [0, 1, 2, 3], id="unset"),
        pytest.param("2,0", [2, 0], id="indices in their order"),
        pytest.param(" 3 , 1 ", [3, 1], id="blanks"),
        pytest.param("", [], id="empty"),
        pytest.param("-1", [], id="minus one"),
        pytest.param("1,-1,2", [1], id="negative index ends the list"),
        pytest.param("0,4,1", [0], id="missing index ends the list"),
        pytest.param("0,x,1", [0], id="text ends the list"),
        pytest.param("2x,1", [2, 1], id="number with a suffix"),
        pytest.param("1,1", [], id="repeated index leaves none"),
        pytest.param("NoDevFiles", [], id="text"),
        pytest.param(UUIDS[3], [3], id="uuid"),
        pytest.param(f"{UUIDS[2]},{UUIDS[0]}", [2, 0], id="uuids in their order"),
        pytest.param("GPU-7,GPU-9d", [2, 3], id="prefixes"),
        pytest.param("GPU-9,GPU-0aa,GPU-7", [3], id="ambiguous prefix ends the list"),
        pytest.param("GPU-9,GPU-ffff,GPU-7", [3], id="unknown uuid ends the list"),
        pytest.param("GPU-9,1", [3], id="index after a uuid ends the list"),
        pytest.param("GPU-9,GPU-9d", [], id="repeated board leaves none"),
        pytest.param(f"MIG-{UUIDS[2]}/1/0", [2], id="MIG instance of a board"),
        pytest.param(f"MIG-{UUIDS[2]}/1/0,MIG-{UUIDS[0]}/1/0", [2], id="first MIG instance"),
    ],
)
def test_visible_devices_are_those_of_cuda(visible: str | None, expected: list[int]) -> None:
    assert numbers(BOARDS, visible) == expected


def test_devices_are_numbered_by_the_driver_index_among_equal_boards() -> None:
    assert numbers(BOARDS[::-1]) == [0, 1, 2, 3]
    assert numbers(BOARDS[::-1], "1,0") == [1, 0]


def test_order_by_bus_is_that_of_the_driver() -> None:
    assert numbers(MIXED, "1", "PCI_BUS_ID") == [1]
    assert numbers(MIXED, None, "PCI_BUS_ID") == [0, 1]


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
@pytest.mark.parametrize("visible", [None, "0", "1,0"])
def test_order_by_speed_of_unequal_boards_is_refused(
    visible: str | None, order: str | None
) -> None:
    with pytest.raises(DeviceMappingError, match=r"NVIDIA A40, NVIDIA H100.*=PCI_BUS_ID"):
        boards_of(MIXED, visible, order)


def test_uuids_need_no_order() -> None:
    assert numbers(MIXED, UUIDS[1]) == [1]
    assert numbers(MIXED, "MIG-" + UUIDS[1] + "/0/0") == [1]


def test_uuids_of_cuda_overrule_the_variables() -> None:
    reported = [UUIDS[1].removeprefix("GPU-"), UUIDS[0].upper()]
    assert numbers(MIXED, "0", None, reported) == [1, 0]


def test_uuid_that_the_agent_does_not_measure_is_refused() -> None:
    with pytest.raises(DeviceMappingError, match=r"CUDA device 1 \(GPU-ffff\) is not among"):
        boards_of(BOARDS, None, None, [UUIDS[0], "GPU-ffff"])


def test_mig_uuid_is_that_of_the_only_board() -> None:
    instance = "MIG-12345678-1111-2222-3333-444444444444"
    assert numbers(BOARDS[:1], instance) == [0]
    assert numbers(BOARDS[:1], instance, None, [instance]) == [0]
    with pytest.raises(DeviceMappingError, match=r"board of MIG-1234.* 4 GPUs.*MIG-GPU-UUID/GI/CI"):
        boards_of(BOARDS, instance)


def test_unknown_driver_index_is_refused_among_several_boards() -> None:
    assert numbers((gpu(None),), gpu(None).uuid) == [None]
    with pytest.raises(DeviceMappingError, match=r"driver's index of .* is not known yet"):
        boards_of((gpu(0), gpu(None, "GPU-b")))


def test_missing_board_makes_the_order_unknown() -> None:
    with pytest.raises(DeviceMappingError, match=r"the GPUs 1, 2, 3 of the driver and not all"):
        boards_of(BOARDS[1:], "0")
    assert numbers(BOARDS[1:], UUIDS[2]) == [2]


@pytest.mark.parametrize(
    ("container", "visible", "expected"),
    [
        pytest.param("2,3", None, [2, 3], id="indices"),
        pytest.param("3,2", "1", [3], id="index inside the container"),
        pytest.param(f"{UUIDS[1]},{UUIDS[3]}", "0,1", [1, 3], id="uuids"),
        pytest.param("GPU-7,GPU-9", "2", [], id="index beyond the container"),
        pytest.param("all", "GPU-9", [3], id="uuids of CUDA"),
    ],
)
def test_indices_in_a_container_count_its_own_gpus(
    container: str, visible: str | None, expected: list[int]
) -> None:
    assert numbers(BOARDS, visible, container=container, nodes=2) == expected


@pytest.mark.parametrize("container", [None, "all", "void", "", "0", "0,1,2"])
def test_container_of_unknown_gpus_is_refused(container: str | None) -> None:
    sentence = (
        r"has 2 GPUs and the agent measures 4, as in a container.* not name them\. List UUIDs"
    )
    with pytest.raises(DeviceMappingError, match=sentence):
        boards_of(BOARDS, "0", container=container, nodes=2)
    assert numbers(BOARDS, None, None, [UUIDS[3]], container=container, nodes=2) == [3]


def test_gpus_that_the_agent_does_not_measure_make_numbers_unknown() -> None:
    for boards in (BOARDS, ()):
        with pytest.raises(DeviceMappingError, match=r"has 8 GPUs and .* names the faults of the"):
            boards_of(boards, nodes=8)
    emulated = [board._replace(provenance="emulated") for board in BOARDS[:1]]
    assert numbers(emulated, nodes=8) == [0]


def test_variable_of_a_container_means_nothing_outside_of_one() -> None:
    assert numbers(BOARDS, "1", container="2", nodes=4) == [1]
    assert numbers(BOARDS, "1", container="2") == [1]


@pytest.mark.parametrize(
    ("batch", "visible", "expected"),
    [("2,3", "2,3", [2, 3]), ("0,1", "0,1", [0, 1]), ("0,1,2,3", "1", [1]), ("3", "GPU-9", [3])],
)
def test_batch_job_without_other_numbers_has_those_of_the_host(
    batch: str, visible: str, expected: list[int]
) -> None:
    assert numbers(BOARDS, visible, batch=batch) == expected


@pytest.mark.parametrize(("batch", "visible"), [("3", "0"), ("1,3", "1"), ("2", None)])
def test_batch_job_with_two_meanings_of_numbers_is_refused(batch: str, visible: str | None) -> None:
    with pytest.raises(DeviceMappingError, match=rf"Slurm job has the GPUs {batch[0]}.* not known"):
        boards_of(BOARDS, visible, batch=batch)
    assert numbers(BOARDS[:1], "0", batch="0") == [0]


def test_environment_comes_from_variables_and_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    variables = {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "SLURM_JOB_GPUS": "4",
    }
    found = CudaEnvironment.of(variables, tmp_path)
    assert found == CudaEnvironment("1", "PCI_BUS_ID", "all", "4", 2)
    assert CudaEnvironment.of({**variables, "SLURM_STEP_GPUS": "5"}, tmp_path).batch == "5"
    assert CudaEnvironment.of({}, tmp_path / "none") == CudaEnvironment(nodes=0)
    (tmp_path / "dxg").touch()  # on WSL
    wsl = CudaEnvironment.of(variables, tmp_path)
    assert (wsl.container, wsl.nodes) == (None, None)


def test_host_without_gpus_has_no_index() -> None:
    assert boards_of((), None) == boards_of((), "0") == ()


class FakeCuda:
    """``torch.cuda`` with two devices; asking before the initialisation fails."""

    def __init__(self, *, initialised: bool, uuids: tuple[str, ...] = UUIDS[:2]) -> None:
        self.is_initialized = lambda: initialised
        self._uuids = uuids

    def device_count(self) -> int:
        return len(self._uuids)

    def get_device_properties(self, device: int) -> SimpleNamespace:
        assert self.is_initialized(), "this would initialise CUDA"
        uuid = self._uuids[device]
        return SimpleNamespace(uuid=uuid) if uuid else SimpleNamespace()


def test_cuda_reports_uuids_once_torch_has_initialised_it() -> None:
    assert cuda_uuids({}) == ()
    assert cuda_uuids({"torch": SimpleNamespace(cuda=FakeCuda(initialised=False))}) == ()
    torch = SimpleNamespace(cuda=FakeCuda(initialised=True))
    assert cuda_uuids({"torch": torch}) == UUIDS[:2]
    old = SimpleNamespace(cuda=FakeCuda(initialised=True, uuids=("", "")))
    assert cuda_uuids({"torch": old}) == ()
