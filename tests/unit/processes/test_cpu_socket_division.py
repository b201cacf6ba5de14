"""Work is divided over the sockets without losing any, and in line with how busy they were."""

import os
from itertools import cycle, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.synthetic_kernel import SyntheticKernel

from wattspan.model import Consumer
from wattspan.ports import UsageBatch
from wattspan.processes.cpu_socket_division import (
    SAMPLES_PER_SECOND,
    PlacementSampler,
    SocketTimesSample,
    apportion,
    weights_of,
)
from wattspan.processes.procfs import ProcFs, Stat
from wattspan.processes.source import CpuUsageSource
from wattspan.processes.table import ClockList, TrackedProcess

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
    st.tuples(st.integers(0, 10**10), st.integers(0, 10**10)),
    st.lists(
        st.tuples(st.sampled_from([0, 1, None]), st.integers(10**5, 10**9), st.floats(0, 1)),
        min_size=1,
        max_size=9,
    ),
)
def test_free_processes_fill_what_bound_ones_leave(bound: tuple[int, int], free: list) -> None:
    """The bound processes may have most of the work, and the free ones may have moved."""
    room = dict(enumerate(bound))
    for _, amount, part in free:
        room[0] += int(amount * part)
        room[1] += amount - int(amount * part)
    weights = [weights_of(seen, [0, 1], BOTH, 1) for seen, *_ in free]
    spent = [*bound, *(amount for _, amount, _ in free)]
    parts = apportion(spent, [{0: 1.0}, {1: 1.0}, *weights], room)
    for socket in BOTH:
        charged = sum(part.get(socket, 0) for part in parts)
        assert abs(charged - room[socket]) <= 0.005 * sum(spent)


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


class Times:
    """Counted times of the next poll."""

    def __init__(self) -> None:
        self.next: dict[int, dict[int, int]] = {}
        self.refreshed = self.closed = 0

    def sample(self) -> SocketTimesSample:
        found, self.next = self.next, {}
        pairs = {
            pid << 32 | socket: t for pid, times in found.items() for socket, t in times.items()
        }
        return SocketTimesSample(list(pairs), list(pairs.values()))

    def refresh(self) -> None:
        self.refreshed += 1

    def close(self) -> None:
        self.closed += 1


class TwoSockets:
    """Two sockets of one CPU each."""

    sockets = (0, 1)
    changed = False

    def socket_of(self, cpu: int) -> int:
        return cpu

    def capacity(self) -> dict[int, int]:
        return {0: 1, 1: 1}

    def refresh(self) -> bool:
        return self.changed


MS = 1_000_000


def spent(batch: UsageBatch) -> dict[int, dict[str, int]]:
    """The nanoseconds of each pid by resource."""
    found: dict[int, dict[str, int]] = {}
    for usage in batch.usages:
        for payer, amount in usage.spent.items():
            found.setdefault(payer.pid, {})[usage.resource] = amount
    return found


def watched() -> tuple[SyntheticKernel, Times, CpuUsageSource]:
    kernel, times = SyntheticKernel(), Times()
    source = kernel.source(topology=TwoSockets(), times=times)
    source.poll()
    return kernel, times, source


def polled(kernel: SyntheticKernel, source: CpuUsageSource) -> dict[int, dict[str, int]]:
    kernel.clock.advance(0.1)
    return spent(source.poll())


def test_counted_process_is_divided_by_the_count() -> None:
    kernel, times, source = watched()
    life = kernel.spawn()
    kernel.run(life, 30 * MS)
    times.next = {life.pid: {0: 7_000, 1: 14_000}}
    assert polled(kernel, source)[life.pid] == {
        "cpu": 30 * MS,
        "cpu:0": 10 * MS,
        "cpu:1": 20 * MS,
    }


def test_counted_process_that_ended_is_divided_by_the_count() -> None:
    kernel, times, source = watched()
    life = kernel.spawn()
    kernel.run(life, 4 * MS)
    kernel.exit(life)
    times.next = {life.pid: {1: 5}}
    assert polled(kernel, source)[life.pid] == {"cpu": 4 * MS, "cpu:1": 4 * MS}


def test_account_of_short_processes_is_divided_by_the_count_of_all() -> None:
    """A thousand processes begin and end between two polls that are a second apart."""
    kernel, times = SyntheticKernel(pid_max=5000), Times()
    source = kernel.source(topology=TwoSockets(), times=times, envelope=True)
    source.poll()
    for number in range(1000):
        life = kernel.spawn()
        kernel.run(life, 500_000)
        kernel.exit(life, tail=100_000)
        times.next[life.pid] = {int(number % 4 == 0): 500_000}
    batch = source.poll()
    (divided,) = spent(batch).values()
    assert divided == {"cpu": 600 * MS, "cpu:0": 450 * MS, "cpu:1": 150 * MS}
    assert len(batch.infos) == len(batch.exited) == 1


def test_uncounted_process_is_divided_by_its_last_count() -> None:
    kernel, times, source = watched()
    life = kernel.spawn()
    kernel.run(life, 3 * MS)
    times.next = {life.pid: {1: 14_000}}
    polled(kernel, source)
    kernel.run(life, 5 * MS)
    assert polled(kernel, source)[life.pid] == {"cpu": 5 * MS, "cpu:1": 5 * MS}


def test_waiting_sample_is_divided_by_its_own_count() -> None:
    kernel, times = SyntheticKernel(), Times()
    life = kernel.spawn()
    source = kernel.source(topology=TwoSockets(), times=times, vigil=True)
    source.poll()
    kernel.run(life, MS)
    polled(kernel, source)
    kernel.run(life, 10 * MS)
    times.next = {life.pid: {0: 5}}
    kernel.clock.advance(0.1)
    assert source.poll(settle=False).usages == ()
    kernel.run(life, 6 * MS)
    times.next = {life.pid: {1: 5}}
    kernel.clock.advance(0.1)
    divided = [usage for usage in source.poll().usages if usage.resource != "cpu"]
    assert [(usage.resource, usage.spent) for usage in divided if usage.spent] == [
        ("cpu:0", {life.consumer: 10 * MS}),
        ("cpu:1", {life.consumer: 6 * MS}),
    ]


def test_waiting_samples_of_watched_processes_are_divided_by_the_count_of_the_settlement() -> None:
    kernel, times = SyntheticKernel(cpus=2), Times()
    lives = [kernel.spawn() for _ in range(3)]
    lives[1].processor, lives[1].allowed = 1, frozenset({1})
    source = kernel.source(topology=TwoSockets(), times=times, vigil=True)
    source.poll()
    for life in lives:
        kernel.run(life, MS)
    polled(kernel, source)
    mine = lives[0].consumer
    times.next = {mine.pid: {0: 5, 1: 10}}
    for number in range(3):
        for work, life in enumerate(lives, number + 1):
            kernel.run(life, work * MS)
        kernel.clock.advance(0.1)
        batch = source.poll(settle=number == 2, watched=frozenset({mine}))
    periods = [batch.usages[at : at + 3] for at in range(0, len(batch.usages), 3)]
    assert [host.spent[mine] for host, *_ in periods] == [MS, 2 * MS, 3 * MS]
    for socket, amount in enumerate((2 * MS, 4 * MS), 1):
        assert sum(period[socket].spent[mine] for period in periods) == amount
    for host, *sockets in periods:
        for payer, amount in host.spent.items():
            assert abs(amount - sum(one.spent.get(payer, 0) for one in sockets)) <= 1


def test_count_on_an_unknown_socket_is_ignored() -> None:
    kernel, times, source = watched()
    life = kernel.spawn()
    kernel.run(life, 3 * MS)
    times.next = {life.pid: {7: 14_000}}
    found = polled(kernel, source)[life.pid]
    assert found == {"cpu": 3 * MS, "cpu:0": 3 * MS}  # the socket that was busy


def test_changed_sockets_are_told_to_the_count_which_the_source_closes() -> None:
    kernel, times, source = watched()
    polled(kernel, source)
    assert times.refreshed == 0
    source._topology.changed = True  # type: ignore[attr-defined]
    kernel.clock.advance(1.0)
    source.poll()
    source.close()
    assert (times.refreshed, times.closed) == (1, 1)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 10**12),
            st.dictionaries(st.integers(0, 1), st.integers(1, 10**11), max_size=2),
        ),
        max_size=12,
    )
)
def test_divided_work_adds_up_with_and_without_counts(work: list) -> None:
    kernel, times, source = watched()
    for amount, counted in work:
        life = kernel.spawn()
        kernel.run(life, amount)
        if counted:
            times.next[life.pid] = counted
    for found in polled(kernel, source).values():
        assert found["cpu"] == found.get("cpu:0", 0) + found.get("cpu:1", 0)


def test_sixty_bound_processes_at_one_poll_a_second_are_charged_to_their_sockets() -> None:
    kernel = SyntheticKernel(pid_max=5000, cpus=2)
    lives = [kernel.spawn() for _ in range(60)]
    for life in lives:
        life.processor = life.pid % 2
        life.allowed = frozenset({life.processor})
    source = kernel.source(topology=TwoSockets(), events=False)
    source.poll()
    for _ in range(2):
        for life in lives:
            kernel.run(life, life.pid % 7 * MS + MS)
        kernel.clock.advance(1.0)
        found = spent(source.poll())
    for life in lives:
        amount = life.pid % 7 * MS + MS
        assert found[life.pid] == {"cpu": amount, f"cpu:{life.processor}": amount}


class Places:
    """Processes of which one of three is bound to each socket and the third one roams."""

    def __init__(self) -> None:
        self.now = 0
        self.sampled: dict[int, list[int]] = {}
        self.teams: dict[int, list[int]] = {}

    def threads(self, pid: int) -> list[int]:
        return self.teams.get(pid, [pid])

    def affinity(self, pid: int) -> frozenset[int] | None:
        self.sampled.setdefault(pid, [0]).append(self.now)
        return (frozenset({0}), frozenset({1}), frozenset({0, 1}))[pid % 3]

    def stat(self, pid: int) -> Stat | None:
        return Stat(pid, "work", 1, 0, 1, pid % 2)

    def born(self, pid: int) -> TrackedProcess:
        row = TrackedProcess(Consumer(pid, 0), 0, "work", 1, next_placement=self.now)
        ClockList(lambda _: 0).add(row)
        return row


def test_main_thread_of_a_team_does_not_bind_its_process() -> None:
    """OpenMP with OMP_PROC_BIND, and guests with virtual CPUs that libvirt pins."""
    places = Places()
    places.teams[3] = [3, 4, 7, 10]
    sampler, active = PlacementSampler(places, TwoSockets()), [(places.born(3), MS)]
    assert sampler.weights(active, 0, 100 * MS) == [{0: 1.0, 1: 3.0}]
    places.teams[3] = [3, *range(4, 604, 3)]
    assert sampler.weights([(places.born(3), MS)], 0, 100 * MS) == [{0: 1.0, 1: 7.0}]
    places.teams[3] = [3 * number + 1 - number % 2 for number in range(1, 17)]  # scattered
    assert sampler.weights([(places.born(3), MS)], 0, 100 * MS) == [{0: 3.0, 1: 3.0}]


def test_threads_of_a_process_are_listed(tmp_path: Path) -> None:
    assert os.getpid() in ProcFs().threads(os.getpid())
    assert ProcFs().threads(2**22 + 1) == []
    for number in range(600):
        (tmp_path / "7/task" / str(number)).mkdir(parents=True)
    assert len(ProcFs(tmp_path).threads(7)) == 512  # reading thousands takes long


@pytest.mark.parametrize("newcomers", [0, 300])
@pytest.mark.parametrize("intervals", [[1000], [100], [10, 1000, 100, 2000]])
def test_every_working_process_is_sampled_soon(intervals: list[int], newcomers: int) -> None:
    """Newcomers work more than all but ten processes, and end before the next poll."""
    places, polls = Places(), 0
    sampler = PlacementSampler(places, TwoSockets())
    known = [places.born(pid) for pid in range(300)]
    for interval in cycle(intervals):
        start, polls = places.now, polls + 1
        places.now += interval * MS
        short = [places.born(300 + polls * newcomers + number) for number in range(newcomers)]
        work = {pid: 9 * MS if pid < 10 else MS // (pid % 7 + 1) for pid in range(300)}
        active = [(row, work.get(row.consumer.pid, 5 * MS)) for row in known + short]
        weights = sampler.weights(active, start, places.now)
        if places.now >= 8000 * MS:
            break
    assert [len(weight) for weight in weights[:300]] == [1, 1, 2] * 100
    total = sum(len(times) - 1 for times in places.sampled.values())
    assert total <= SAMPLES_PER_SECOND * places.now / (1000 * MS) + polls
    waits = [
        max(after - before for before, after in pairwise([*places.sampled[pid], places.now]))
        for pid in range(300)
    ]
    late = 1000 + max(intervals)
    assert max(waits[:10]) <= late * MS
    assert max(waits) <= (late + 1000 * 300 / (SAMPLES_PER_SECOND / 2) + max(intervals)) * MS
