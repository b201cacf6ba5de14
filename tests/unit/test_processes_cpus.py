"""Work is divided over the sockets without losing any, and in line with how busy they were."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from wattspan.processes.cpus import CpuTopology, apportion, parse_cpu_list, weights_of

BOTH = {0: 4, 1: 4}


def tree(root: Path, packages: dict[int, str], online: str) -> Path:
    cpus = root / "devices/system/cpu"
    for cpu, package in packages.items():
        (cpus / f"cpu{cpu}/topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}/topology/physical_package_id").write_text(package + "\n")
    (cpus / "online").write_text(online + "\n")
    return root


def test_sockets_of_a_host_are_its_package_ids(tmp_path: Path) -> None:
    topology = CpuTopology(tree(tmp_path, {0: "0", 1: "0", 2: "3", 10: "3"}, "0-2,10"))
    assert topology.sockets == (0, 3)
    assert [topology.socket_of(cpu) for cpu in (0, 2, 10)] == [0, 3, 3]
    assert topology.capacity() == {0: 2, 3: 2}


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


def test_bound_process_is_charged_to_its_socket() -> None:
    bound = weights_of(seen=1, allowed=[1], cpus=BOTH, threads=8)
    assert apportion([1000], [bound], {0: 1000, 1: 0}) == [{1: 1000}]


def test_sampled_placement_decides_if_socket_sums_agree() -> None:
    weights = [weights_of(socket, [0, 1], BOTH, 1) for socket in (0, 1)]
    first, second = apportion([1_000_000, 2_000_000], weights, {0: 1_000_000, 1: 2_000_000})
    assert first[0] > 850_000
    assert second[1] > 1_850_000


def test_placement_is_corrected_by_socket_sums() -> None:
    seen_on_0 = weights_of(0, [0, 1], BOTH, 1)
    (parts,) = apportion([1_000_000], [seen_on_0], {0: 200_000, 1: 800_000})
    assert abs(parts[1] - 800_000) < 10_000


def test_bound_processes_leave_the_rest_of_a_socket_to_the_others() -> None:
    bound, free = weights_of(0, [0], BOTH, 1), weights_of(0, [0, 1], BOTH, 4)
    _, parts = apportion([1_000_000, 1_000_000], [bound, free], {0: 1_000_000, 1: 1_000_000})
    assert parts.get(1, 0) > 900_000


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**12),
            st.sampled_from([{0: 1.0}, {1: 1.0}, {0: 1.0, 1: 1 / 16}, {0: 4.0, 1: 4.0}]),
        ),
        max_size=20,
    ),
    st.fixed_dictionaries({0: st.integers(-(10**9), 10**12), 1: st.integers(-(10**9), 10**12)}),
)
def test_parts_of_every_process_add_up(work: list, room: dict[int, int]) -> None:
    spent = [amount for amount, _ in work]
    parts = apportion(spent, [weight for _, weight in work], room)
    assert [sum(part.values()) for part in parts] == spent
    assert all(part > 0 for by_socket in parts for part in by_socket.values())
