"""For any actions of processes, charges equal the CPU time used: no more, no less, never
negative."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.synthetic_kernel import Life, SyntheticKernel

from wattspan.model import SECOND, Consumer, Instant, Payer, PayerInfo, Usage
from wattspan.ports import UsageBatch
from wattspan.processes.lifecycle import YOUNG_CPU_TIME

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("spawn"), st.integers(0, 9)),
        st.tuples(st.just("run"), st.integers(0, 9), st.integers(0, 5_000_000)),
        st.tuples(st.just("exit"), st.integers(0, 9), st.booleans()),
        st.tuples(
            st.just("blink"), st.integers(0, 9), st.integers(1, 5_000_000), st.integers(1, 3)
        ),
        st.tuples(st.just("poll"), st.sampled_from([1, 100, 100, 100, 7_000])),
        st.tuples(st.just("lose"), st.booleans()),
    ),
    max_size=60,
)
SHORTAGES = st.lists(st.lists(st.booleans(), max_size=12).map(tuple), max_size=20)
"""The reads of each poll that fail; all after the last one fail as it did."""


class Books:
    """Sums the usage of a source and checks every usage."""

    def __init__(self) -> None:
        self.charged: Counter[int] = Counter()
        self.remainder = self.unclaimed = 0
        self.introduced: set[object] = set()
        self.infos: list[PayerInfo] = []
        self.gone: set[object] = set()
        self.end: Instant | None = None
        self.usages: list[Usage] = []

    def enter(self, batch: UsageBatch) -> None:
        self.introduced |= {info.payer for info in batch.infos}
        self.infos += batch.infos
        for usage in batch.usages:
            assert usage.unclaimed >= 0
            assert all(amount > 0 for amount in usage.spent.values())
            assert set(usage.spent) <= self.introduced
            assert not set(usage.spent) & self.gone
        self.usages += batch.usages
        for whole in (usage for usage in batch.usages if usage.resource == "cpu"):
            assert self.end is None or whole.start == self.end
            self.end = whole.end
            self.unclaimed += whole.unclaimed
            for payer, amount in whole.spent.items():
                if isinstance(payer, Consumer):
                    self.charged[payer.pid] += amount
                else:
                    self.remainder += amount
        self.gone |= set(batch.exited)

    @property
    def total(self) -> int:
        return sum(self.charged.values()) + self.remainder + self.unclaimed

    def check_all(self, kernel: SyntheticKernel) -> None:
        """Every process has its own time, and nothing else has any."""
        truth = kernel.truth()
        assert {pid: self.charged[pid] for pid in truth} == truth
        assert sum(self.charged.values()) == kernel.total
        assert self.remainder == self.unclaimed == 0


def watched_by(mask: int, kernel: SyntheticKernel) -> frozenset[Payer]:
    """The running processes of which ``mask`` has the bit of the pid."""
    return frozenset(one.consumer for one in kernel.alive.values() if mask >> one.pid % 4 & 1)


def play(
    kernel: SyntheticKernel,
    actions: list[tuple],
    *,
    lossy: bool,
    settled: Iterator[bool] = repeat(True),  # noqa: B008 - it has no state
    masks: Iterator[int | None] = repeat(None),  # noqa: B008
    shortages: Iterator[Sequence[bool]] = repeat(()),  # noqa: B008
    **how: bool,
) -> Books:
    books = Books()
    source = kernel.source(**how)
    books.enter(source.poll())

    def one_of(at: int):
        lives = [life for life in kernel.alive.values() if not life.zombie]
        return lives[at % len(lives)] if lives else kernel.spawn()

    for action, *rest in actions:
        if action == "spawn":
            mother = one_of(rest[0])
            kernel.spawn(parent=mother.pid)
            mother.has_children = mother.has_children or not kernel.births.losing
        elif action == "run":
            kernel.run(one_of(rest[0]), rest[1])
        elif action == "exit":
            kernel.exit(one_of(rest[0]), reap=rest[1])
        elif action == "blink":
            parents = [one_of(rest[0])]
            parents[0].has_children = parents[0].has_children or not kernel.births.losing
            for _ in range(rest[2]):
                parents.append(kernel.spawn(parent=parents[-1].pid))
            for life in reversed(parents[1:]):
                kernel.run(life, rest[1])
                kernel.exit(life)
        elif action == "poll":
            period = kernel.clock.monotonic() // SECOND
            kernel.clock.advance(ns=rest[0] * 1_000_000)
            scans = kernel.clock.monotonic() // SECOND != period
            for life in [life for life in kernel.alive.values() if life.zombie]:
                kernel.exit(life)
            mask = next(masks)
            watched = None if mask is None else watched_by(mask, kernel)
            fails = next(shortages)
            kernel.lacks = partial(next, chain(fails, repeat(bool(fails and fails[-1]))))
            batch = source.poll(settle=next(settled), watched=watched)
            books.enter(batch)
            assert not {one.consumer for one in kernel.alive.values()} & set(batch.exited)
            for life in kernel.alive.values() if batch.usages else ():  # else it waits
                young = life.cpu < YOUNG_CPU_TIME and not life.has_children and not life.polled
                life.seen = life.seen or scans or not young
                life.polled = True
        elif lossy:
            kernel.births.losing = kernel.finals.losing = rest[0]
    for life in kernel.alive.values():
        life.seen = life.seen or life.polled or not life.zombie
    kernel.lacks = lambda: False
    for _ in range(2):  # the final records, and processes that waited for a scan
        kernel.clock.advance(11.0)
        books.enter(source.poll())
    return books


@given(ACTIONS, st.booleans())
def test_every_pid_is_charged_its_own_time_with_kernel_events(
    actions: list[tuple], vigil: bool
) -> None:
    kernel = SyntheticKernel()
    books = play(kernel, actions, lossy=False, events=True, vigil=vigil)
    books.check_all(kernel)


@given(ACTIONS)
def test_unseen_processes_are_charged_below_the_ancestor_that_was_seen(
    actions: list[tuple],
) -> None:
    kernel = SyntheticKernel(pid_max=10_000)  # no pid is used twice
    books = play(kernel, actions, lossy=False, events=True)
    by_pid = {life.pid: life for life in kernel.lives}

    def account(life: Life) -> object:
        if life.seen:
            return life.pid
        ancestor = life.mother
        while ancestor is not None and not ancestor.seen:
            ancestor = ancestor.mother
        return "below", ancestor.pid if ancestor is not None else 0

    truth, charged = Counter[object](), Counter[object]()
    for life in kernel.lives:
        truth[account(life)] += life.cpu
    for pid, amount in books.charged.items():
        charged[account(by_pid[pid])] += amount
    assert charged == truth
    parents = {info.payer.pid: info.parent for info in books.infos}
    for pid in books.charged:  # each account has the ancestor above it
        above = parents[pid]
        while above in by_pid and not by_pid[above].seen:
            above = parents[above]
        seen = by_pid[above].pid if above in by_pid else 0
        assert by_pid[pid].seen or account(by_pid[pid]) == ("below", seen)


@given(ACTIONS, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_total_is_exact_with_lost_events_or_missing_permissions(
    actions: list[tuple], events: bool, envelope: bool, vigil: bool
) -> None:
    kernel = SyntheticKernel()
    books = play(kernel, actions, lossy=True, events=events, envelope=envelope, vigil=vigil)
    assert books.total == kernel.total
    assert all(books.charged[pid] <= amount for pid, amount in kernel.truth().items())


@pytest.mark.parametrize("events", [True, False])
@given(ACTIONS, SHORTAGES, st.booleans(), st.booleans())
@settings(max_examples=150)
def test_failed_reads_end_no_process_and_charge_no_time_twice(
    events: bool, actions: list[tuple], shortages: list[tuple[bool]], envelope: bool, vigil: bool
) -> None:
    kernel = SyntheticKernel()
    how = {"events": events, "envelope": envelope, "vigil": vigil}
    books = play(kernel, actions, lossy=True, shortages=chain(shortages, repeat(())), **how)
    # Work that was unclaimed may be charged when a process ends soon after its birth.
    assert books.total - books.unclaimed <= kernel.total <= books.total
    assert all(books.charged[pid] <= amount for pid, amount in kernel.truth().items())


@given(ACTIONS, st.lists(st.booleans()), st.booleans(), st.booleans())
def test_usage_is_equal_settled_at_each_tick_or_in_batches(
    actions: list[tuple], settled: list[bool], envelope: bool, vigil: bool
) -> None:
    how = {"events": True, "envelope": envelope, "vigil": vigil}
    each = play(SyntheticKernel(), actions, lossy=True, **how)
    batches = play(
        SyntheticKernel(), actions, lossy=True, settled=chain(settled, repeat(False)), **how
    )
    assert batches.usages == each.usages
    assert batches.gone == each.gone


def test_usage_of_known_processes_waits_until_it_is_settled() -> None:
    kernel = SyntheticKernel()
    source = kernel.source(envelope=True, vigil=True)
    life = kernel.spawn()
    for _ in range(2):
        source.poll()
        kernel.clock.advance(0.1)
    waited = []
    for settle in (False, False, True):
        kernel.run(life, 1_000_000)
        waited.append(len(source.poll(settle=settle).usages))
        kernel.clock.advance(0.1)
    assert waited == [0, 0, 6]


@given(ACTIONS, st.lists(st.booleans()), st.lists(st.integers(0, 15)))
def test_every_pid_is_charged_its_own_time_if_some_clocks_are_read_at_each_tick(
    actions: list[tuple], settled: list[bool], masks: list[int]
) -> None:
    kernel = SyntheticKernel(pid_max=10_000)  # no pid is used twice
    books = play(
        kernel,
        actions,
        lossy=False,
        settled=chain(settled, repeat(False)),
        masks=chain(masks, repeat(5)),
        events=True,
        vigil=True,
    )
    books.check_all(kernel)


def facts(usage: Usage) -> tuple[object, ...]:
    return usage.resource, usage.start, usage.end, usage.capacity, usage.metered


def totals(usages: list[Usage]) -> Counter[object]:
    """The CPU time of each payer and of nobody."""
    found: Counter[object] = Counter()
    for usage in usages[::2]:
        found.update({**usage.spent, "unclaimed": usage.unclaimed})
    return found


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3_000_000), min_size=5, max_size=5),
            st.integers(0, 15),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_watched_processes_have_their_time_of_each_tick_and_others_their_total(
    steps: list[tuple[list[int], int, bool]],
) -> None:
    kernels = SyntheticKernel(), SyntheticKernel()
    lives = [[kernel.spawn() for _ in range(4)] for kernel in kernels]
    each, few = (kernel.source(vigil=True) for kernel in kernels)
    assert not each.poll().usages + few.poll().usages
    exact: list[Usage] = []
    watched: frozenset[Payer] = frozenset()
    for works, mask, settle in [*steps, ([0] * 5, 0, True)]:
        for kernel, some in zip(kernels, lives, strict=True):
            for life, work in zip(some, works[:4], strict=True):
                kernel.run(life, work)
            kernel.busy[0] += works[4]  # of no process
            kernel.clock.advance(0.1)
        if not exact:  # none waits
            watched = watched_by(mask, kernels[1])
        exact += each.poll().usages
        found = [*few.poll(settle=settle, watched=watched).usages]
        if found:
            assert [facts(usage) for usage in found] == [facts(usage) for usage in exact]
            for mine, own in zip(found, exact, strict=True):
                assert all(mine.spent.get(one) == own.spent.get(one) for one in watched)
            assert totals(found) == totals(exact)
            exact = []
