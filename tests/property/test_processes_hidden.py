"""Hidden processes: their work is never spread over the visible ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from testbed.synthetic_kernel import Life, SyntheticKernel

from wattspan.model import Consumer, Remainder, Usage
from wattspan.processes.source import CpuUsageSource

MS = 1_000_000
works = st.integers(0, 50).map(lambda ms: ms * MS)
steps = st.lists(
    st.tuples(
        st.sampled_from(["work", "work", "spawn visible", "spawn hidden", "exit", "wait"]),
        works,
        works,
    ),
    max_size=40,
)


def tick(kernel: SyntheticKernel, source: CpuUsageSource) -> Usage:
    """The host's usage of a poll, 100 ms after the last one."""
    kernel.clock.advance(0.1)
    return source.poll().usages[0]


@given(steps, st.booleans(), st.booleans(), st.booleans())
def test_visible_processes_have_their_own_time_only(
    script: list[tuple[str, int, int]], events: bool, envelope: bool, busy: bool
) -> None:
    kernel = SyntheticKernel(pid_max=10_000)
    agent, shy = kernel.spawn(), [kernel.spawn()]
    kernel.hidden.add(shy[0].pid)
    source = kernel.source(events=events, envelope=envelope, busy=busy)
    source.poll()
    seen: list[Life] = [agent]
    own: dict[Consumer, int] = {}
    unclaimed = 0
    for what, visible, hidden in script:
        before = kernel.total
        match what:
            case "spawn visible":
                seen.append(kernel.spawn())
            case "spawn hidden":
                shy.append(kernel.spawn())
                kernel.hidden.add(shy[-1].pid)
            case "exit" if len(shy) > 1:
                kernel.exit(shy.pop())
            case "wait":
                kernel.clock.advance(1.0)
        kernel.run(seen[-1], visible)
        kernel.run(shy[-1], hidden)
        whole = tick(kernel, source)
        for payer, spent in whole.spent.items():
            assert isinstance(payer, Consumer), f"hidden work is charged to {payer}"
            own[payer] = own.get(payer, 0) + spent
        unclaimed += whole.unclaimed
        if busy:
            # A newborn is charged at its second poll, with less than a millisecond.
            assert sum(whole.spent.values()) + whole.unclaimed >= kernel.total - before - MS
        else:
            assert whole.unclaimed == max(0, whole.capacity - sum(whole.spent.values()))
    for life in seen:
        assert own.get(life.consumer, 0) <= life.cpu
    hidden_pids = {life.pid for life in kernel.lives} - {life.pid for life in seen}
    assert not {payer.pid for payer in own} & hidden_pids or events
    if busy and not events:
        assert unclaimed + sum(own.values()) == kernel.total


@given(st.lists(st.tuples(works, works), min_size=1, max_size=20))
def test_time_that_was_unclaimed_is_not_charged_to_a_cgroup_later(
    script: list[tuple[int, int]],
) -> None:
    """The clock of a cgroup has all work of its processes since it was last read."""
    kernel = SyntheticKernel(pid_max=10_000)
    agent, shy = kernel.spawn(), kernel.spawn()
    source = kernel.source(envelope=True)
    source.poll()
    for visible, unseen in script:
        kernel.run(agent, visible)
        kernel.busy[0] += unseen  # of no process that procfs has
        whole = tick(kernel, source)
        if not whole.spent.get(Remainder("/")):
            assert whole.unclaimed == unseen
    kernel.spawn()
    kernel.run(shy, MS)
    whole = tick(kernel, source)
    assert sum(whole.spent.values()) <= MS
