"""The sockets and the CPUs of a host are those of sysfs."""

import errno
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.util.cpu_topology import CpuTopology, number_packages, parse_cpu_list


def tree(root: Path, packages: dict[int, str], online: str) -> Path:
    cpus = root / "devices/system/cpu"
    for cpu, package in packages.items():
        (cpus / f"cpu{cpu}/topology").mkdir(parents=True, exist_ok=True)
        (cpus / f"cpu{cpu}/topology/physical_package_id").write_text(package + "\n")
    (cpus / "online").write_text(online + "\n")
    return root


def test_sockets_of_a_host_are_the_ranks_of_its_package_ids(tmp_path: Path) -> None:
    topology = CpuTopology(tree(tmp_path, {0: "0", 1: "0", 2: "3", 10: "3"}, "0-2,10"))
    assert topology.sockets == (0, 1)
    assert [topology.socket_of(cpu) for cpu in (0, 2, 10)] == [0, 1, 1]
    assert topology.capacity() == {0: 2, 1: 2}
    assert topology.sockets_of_packages([0, 3, 5]) == {0: 0, 3: 1, 5: None}
    assert topology.sockets_of_packages([7, 9]) == {7: 0, 9: 1}


def test_package_that_comes_online_while_the_agent_runs_is_a_socket(tmp_path: Path) -> None:
    topology = CpuTopology(tree(tmp_path, {0: "36", 1: "36"}, "0-1"))
    assert topology.sockets == (0,)
    tree(tmp_path, {2: "8"}, "0-2")
    assert topology.refresh()
    assert [topology.socket_of(cpu) for cpu in (0, 1, 2)] == [1, 1, 0]
    assert not topology.refresh()


@pytest.mark.parametrize("ending", ["", "physical_package_id"], ids=["all", "a package"])
def test_shortage_of_descriptors_changes_no_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    topology = CpuTopology(tree(tmp_path, {0: "0", 1: "0"}, "0-1"))
    tree(tmp_path, {2: "1"}, "0-2")
    whole = io.open

    def failing(path: Any, *rest: Any) -> Any:
        if str(path).endswith(ending):
            raise OSError(errno.EMFILE, "Too many open files")
        return whole(path, *rest)

    monkeypatch.setattr(io, "open", failing)
    with pytest.raises(OSError, match="Too many") if ending else nullcontext():
        assert not topology.refresh()
    assert topology.capacity() == {0: 2}
    monkeypatch.undo()
    assert topology.refresh()
    assert topology.capacity() == {0: 2, 1: 1}


@given(
    ids=st.sets(st.integers(0, 2**31), min_size=1, max_size=8),
    missing=st.integers(0, 8),
)
def test_sockets_are_distinct_numbers_in_the_order_of_the_ids(ids: set[int], missing: int) -> None:
    expected = len(ids) + missing
    numbers = number_packages(ids, expected)
    assert list(numbers) == sorted(ids)
    assert sorted(set(numbers.values())) == list(numbers.values())
    assert max(numbers.values()) < expected
    if not missing:
        assert list(numbers.values()) == [*range(len(ids))]


def test_cpu_that_goes_offline_lowers_the_capacity_and_keeps_its_socket(tmp_path: Path) -> None:
    topology = CpuTopology(tree(tmp_path, {0: "0", 1: "1"}, "0-1"))
    assert not topology.refresh()
    (tmp_path / "devices/system/cpu/online").write_text("0\n")
    (tmp_path / "devices/system/cpu/cpu1/topology/physical_package_id").unlink()
    assert topology.refresh()
    assert topology.capacity() == {0: 1, 1: 0}
    assert topology.socket_of(1) == 1


def test_host_without_topology_has_one_socket(tmp_path: Path) -> None:
    assert CpuTopology(tmp_path).sockets == (0,)
    assert CpuTopology(tree(tmp_path, {0: "-1"}, "0")).sockets == (0,)


def test_cpu_list_is_parsed() -> None:
    assert list(parse_cpu_list("0-2,7, 9-9")) == [0, 1, 2, 7, 9]
    assert list(parse_cpu_list("nonsense")) == []
