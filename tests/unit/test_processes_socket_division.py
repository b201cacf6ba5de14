"""Work is divided over the sockets without losing any, and in line with how busy they were."""

from hypothesis import given
from hypothesis import strategies as st

from wattspan.processes.socket_division import apportion, weights_of

BOTH = {0: 4, 1: 4}


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
