"""CPU attribution on a kernel with known truth."""

import errno
import sys
from functools import partial
from typing import Any

import pytest
from testbed.synthetic_kernel import Envelope, Life, SyntheticKernel

from wattspan.attribution.division import split
from wattspan.model import NamePolicy, Remainder, Trouble
from wattspan.ports import UsageBatch, UsageSource
from wattspan.processes.cgroups import CgroupTimes
from wattspan.processes.lifecycle import exit_weight
from wattspan.processes.source import VIEW_INTERVAL, CpuUsageSource

MS = 1_000_000


def spent(batch: UsageBatch) -> dict:
    return dict(batch.usages[0].spent)


def polled(**options: Any) -> tuple[SyntheticKernel, CpuUsageSource]:
    """A host, and its source after the first poll."""
    kernel = SyntheticKernel()
    source = kernel.source(**options)
    source.poll()
    return kernel, source


def tick(kernel: SyntheticKernel, source: CpuUsageSource) -> UsageBatch:
    kernel.clock.advance(0.1)
    return source.poll()


def test_source_is_a_usage_source() -> None:
    assert isinstance(SyntheticKernel().source(), UsageSource)


def test_work_before_the_first_poll_is_not_charged() -> None:
    kernel = SyntheticKernel()
    old = kernel.spawn()
    kernel.run(old, 500 * MS)
    source = kernel.source()
    assert source.poll().usages == ()
    kernel.run(old, 3 * MS)
    assert spent(tick(kernel, source)) == {old.consumer: 3 * MS}


def test_process_is_described_at_its_first_work_and_exits_after_its_last_usage() -> None:
    kernel, source = polled()
    life = kernel.spawn()
    assert tick(kernel, source).infos == ()
    kernel.run(life, MS)
    assert [info.payer for info in tick(kernel, source).infos] == [life.consumer]
    kernel.run(life, 2 * MS)
    kernel.exit(life)
    last = tick(kernel, source)
    assert spent(last) == {life.consumer: 2 * MS}
    assert last.exited == (life.consumer,)


def test_process_shorter_than_a_tick_is_charged_by_name() -> None:
    kernel, source = polled()
    life = kernel.spawn()
    kernel.run(life, 2 * MS)
    kernel.exit(life)
    batch = tick(kernel, source)
    (payer,) = spent(batch)
    assert (payer.pid, spent(batch)[payer]) == (life.pid, 2 * MS)
    assert [info.command for info in batch.infos] == ["dead"]
    assert batch.exited == (payer,)


def test_exit_cost_is_charged_to_exited_processes() -> None:
    kernel, source = polled(envelope=True)
    life, bystander = kernel.spawn(), kernel.spawn()
    kernel.run(life, 2 * MS)
    kernel.run(bystander, 5 * MS)
    kernel.exit(life, tail=MS)
    charged = {payer.pid: amount for payer, amount in spent(tick(kernel, source)).items()}
    assert charged == {life.pid: 3 * MS, bystander.pid: 5 * MS}


@pytest.mark.parametrize("seen", [True, False], ids=["seen alive", "between two polls"])
def test_exit_costs_are_charged_by_memory(seen: bool) -> None:
    kernel, source = polled(envelope=True)
    large, small = kernel.spawn(), kernel.spawn()
    for life in (large, small):
        kernel.run(life, MS)
    if seen:
        tick(kernel, source)
    for life, tail, memory in ((large, 35 * MS, 350 << 10), (small, MS, 4 << 10)):
        kernel.run(life, MS)
        kernel.exit(life, tail=tail, memory=memory)
    charged = sorted(spent(tick(kernel, source)).values())
    if not seen:  # processes of one parent and command share an account
        assert charged == [40 * MS]
        return
    weights = exit_weight(4 << 10), exit_weight(350 << 10)
    assert charged == [MS + part for part in split(36 * MS, weights)]
    assert charged[0] == pytest.approx(2 * MS, abs=MS)


class Cgroups(Envelope):
    """The clocks of two cgroups; processes may work in others too."""

    def __init__(self, kernel: SyntheticKernel) -> None:
        super().__init__(kernel)
        self._before = dict.fromkeys(("/runtime", "/pod"), 0)

    def path_in(self, text: str) -> str | None:
        return text.strip().removeprefix("0::")

    def covering(self, path: str | None) -> str | None:
        return path if path in self._before else None

    def read(self) -> tuple[dict[str, int], dict[str, str | None]]:
        self._kernel.own_cpu_time += self._kernel.cgroup_cost
        before, self._before = self._before, dict.fromkeys(self._before, 0)
        for life in self._kernel.lives:
            if (path := self.covering(self.path_in(life.cgroup))) is not None:
                self._before[path] += life.cpu
        return {path: now - before[path] for path, now in self._before.items()}, {}


def launched(command: str) -> tuple[SyntheticKernel, CpuUsageSource, Life, Life]:
    """A host with a launcher of this name in one cgroup and a server in another."""
    kernel = SyntheticKernel(pid_max=1000)
    kernel.envelope = Cgroups(kernel)
    source = kernel.source(envelope=True)
    source.poll()
    launcher, server = kernel.spawn(cgroup="0::/runtime\n"), kernel.spawn(cgroup="0::/pod\n")
    launcher.comm = command
    for life in (launcher, server):
        kernel.run(life, 5 * MS)
    tick(kernel, source)
    return kernel, source, launcher, server


@pytest.mark.parametrize(
    ("command", "cgroup"),
    [("containerd-shim", "0::/pod\n"), ("podman4.9", "0::/pod\n"), ("bash", "0::/runtime\n")],
)
def test_exec_probe_is_charged_to_its_container(command: str, cgroup: str) -> None:
    """A runtime starts it in the container's cgroup, and it ends before a poll sees it there."""
    kernel, source, shim, _ = launched(command)
    for _ in range(3):
        probe = kernel.spawn(shim.pid, cgroup)
        kernel.run(probe, 30 * MS)
        kernel.exit(probe)
        batch = tick(kernel, source)
        ((payer, amount),) = spent(batch).items()
        assert (payer.pid, amount) == (probe.pid, 30 * MS)
        (info,) = batch.infos
        assert (info.command, f"0::{info.group}\n", info.user) == ("dead", cgroup, "root")
    kernel.exit(kernel.spawn(shim.pid, cgroup))  # without any work
    assert spent(tick(kernel, source)) == {}


@pytest.mark.parametrize("command", ["runcommand", "systemdlike", "lxcfs", "cronolog"])
def test_child_of_a_program_whose_name_begins_as_a_runtimes_stays_in_its_cgroup(
    command: str,
) -> None:
    kernel, source, launcher, _ = launched(command)
    child = kernel.spawn(launcher.pid, "0::/pod\n")
    kernel.run(child, 30 * MS)
    kernel.exit(child)
    assert [info.group for info in tick(kernel, source).infos] == ["/runtime"]


@pytest.mark.parametrize("cgroup", ["/pod", "/runtime"])
def test_probes_of_many_names_take_steps_in_proportion_to_their_number(cgroup: str) -> None:
    """A user may give a program the name of a runtime, and a name to each of its children."""

    def steps(probes: int) -> int:
        kernel, source, runtime, _ = launched("crun")
        if cgroup == "/runtime":  # without a deficit, the other cgroups do not matter
            source._excess.measured({f"/idle{at}": 0 for at in range(probes)})
        for at in range(probes):
            probe = kernel.spawn(runtime.pid, f"0::{cgroup}\n")
            probe.last_comm = f"probe{at}"
            kernel.run(probe, 3 * MS)
            kernel.exit(probe)
        lines = 0

        def trace(*_: object) -> Any:
            nonlocal lines
            lines += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            batch = tick(kernel, source)
        finally:
            sys.settrace(before)
        assert [info.group for info in batch.infos] == [cgroup] * probes
        return lines

    assert steps(400) < 5 * steps(100)


@pytest.mark.parametrize(("command", "cost"), [("systemd", 0), ("sshd", 10 * MS)])
def test_unit_that_ends_unseen_hides_no_work_of_others(command: str, cost: int) -> None:
    """The clock of its cgroup was never known: its work is no deficit of the manager's cgroup.

    Costly clocks are read every 500 ms, and no work of others is that of a new session.
    """
    kernel, source, manager, server = launched(command)
    kernel.cgroup_cost = cost
    for _ in range(5):
        unit = kernel.spawn(manager.pid, "0::/gone\n")
        kernel.run(unit, 50 * MS)
        kernel.exit(unit)
        assert sum(spent(tick(kernel, source)).values()) == 50 * MS
    kernel.run(server, 5 * MS)
    kernel.exit(server, tail=3 * MS)
    assert spent(tick(kernel, source)) == {server.consumer: 8 * MS}


def test_exit_cost_is_not_charged_to_a_process_whose_clock_includes_its_own() -> None:
    kernel, source = polled(envelope=True)
    zombie, other = kernel.spawn(), kernel.spawn()
    kernel.run(zombie, MS)
    tick(kernel, source)
    kernel.run(zombie, MS)
    kernel.exit(zombie, reap=False, tail=MS)
    tick(kernel, source)
    kernel.run(other, 2 * MS)
    kernel.exit(other, tail=MS)
    kernel.exit(zombie)
    batch = tick(kernel, source)
    assert {payer.pid for payer in batch.exited} == {zombie.pid, other.pid}
    assert {payer.pid: amount for payer, amount in spent(batch).items()} == {other.pid: 3 * MS}


def test_work_between_reads_of_clocks_is_not_charged_to_exited_processes() -> None:
    kernel, source = polled(envelope=True)
    life, bystander = kernel.spawn(), kernel.spawn()
    kernel.run(life, MS)
    tick(kernel, source)
    kernel.run(life, 2 * MS)
    kernel.run(bystander, MS)
    kernel.exit(life, reap=False)
    first = spent(tick(kernel, source))
    kernel.run(bystander, MS)
    kernel.exit(life)  # the clock of its pid is the first evidence of the reaping
    kernel.work_before_cgroup_read = [(bystander, 4 * MS)]
    second = spent(tick(kernel, source))
    assert (first, second) == (
        {life.consumer: 2 * MS, bystander.consumer: MS},
        {bystander.consumer: 5 * MS},
    )


def test_cgroup_reads_use_a_fiftieth_of_a_cpu() -> None:
    kernel = SyntheticKernel()
    source = kernel.source(envelope=True)
    kernel.cgroup_cost = 10 * MS
    for _ in range(100):
        kernel.spawn()
        tick(kernel, source)
    assert kernel.envelope.reads == 20


def test_short_work_without_kernel_events_is_charged_to_its_cgroup() -> None:
    kernel, source = polled(events=False, envelope=True)
    survivor, brief = kernel.spawn(), kernel.spawn()
    kernel.run(survivor, 5 * MS)
    kernel.run(brief, 2 * MS)
    kernel.exit(brief)
    batch = tick(kernel, source)
    assert spent(batch) == {survivor.consumer: 5 * MS, Remainder("/"): 2 * MS}
    assert Remainder("/") in {info.payer for info in batch.infos}


def test_short_work_without_cgroups_is_unclaimed() -> None:
    kernel, source = polled(events=False)
    brief = kernel.spawn()
    kernel.run(brief, 2 * MS)
    kernel.exit(brief)
    assert tick(kernel, source).usages[0].unclaimed == 2 * MS


@pytest.mark.parametrize("whole", [True, False])
def test_cgroups_that_are_mounted_later_have_the_work_of_unseen_processes(whole: bool) -> None:
    kernel, mounted = SyntheticKernel(), list[str]()
    source = kernel.source(
        events=False,
        cgroups=lambda: (
            CgroupTimes(Envelope(kernel), kernel if whole else None) if mounted else CgroupTimes()
        ),
    )
    source.poll()

    def brief() -> UsageBatch:
        life = kernel.spawn()
        kernel.run(life, 2 * MS)
        kernel.exit(life)
        return tick(kernel, source)

    assert brief().usages[0].unclaimed == 2 * MS
    mounted.append("/sys/fs/cgroup")
    assert brief().usages[0].unclaimed == 2 * MS
    kernel.clock.advance(ns=VIEW_INTERVAL)
    source.poll()
    assert spent(brief()) == {Remainder("/"): 2 * MS}


def test_hidden_process_is_unclaimed_and_never_charged_in_arrears() -> None:
    kernel = SyntheticKernel()
    shy = kernel.spawn()
    kernel.hidden.add(shy.pid)
    source = kernel.source(events=False)
    source.poll()
    kernel.run(shy, 9 * MS)
    assert tick(kernel, source).usages[0].unclaimed == 9 * MS
    kernel.hidden.clear()
    kernel.clock.advance(2.0)
    source.poll()
    kernel.run(shy, MS)
    assert spent(tick(kernel, source)) == {shy.consumer: MS}


def test_reused_pid_does_not_inherit_even_if_its_clock_has_overtaken() -> None:
    for events in (True, False):
        kernel = SyntheticKernel(pid_max=302)
        first, _ = kernel.spawn(), kernel.spawn()
        source = kernel.source(events=events)
        source.poll()
        kernel.run(first, MS)
        tick(kernel, source)
        kernel.exit(first)
        kernel.spawn()
        second = kernel.spawn()
        assert second.pid == first.pid
        kernel.run(second, 50 * MS)
        batch = tick(kernel, source)
        assert spent(batch) == {second.consumer: 50 * MS}
        assert batch.exited == (first.consumer,)


def test_reaped_zombie_is_not_charged_twice() -> None:
    kernel, source = polled()
    life = kernel.spawn()
    kernel.run(life, MS)
    tick(kernel, source)
    kernel.run(life, 4 * MS)
    kernel.exit(life, reap=False)
    assert spent(tick(kernel, source)) == {life.consumer: 4 * MS}
    kernel.exit(life)
    assert spent(tick(kernel, source)) == {}


def test_zombie_cpu_time_is_charged_to_it() -> None:
    kernel, source = polled(envelope=True)
    life = kernel.spawn()
    tick(kernel, source)
    kernel.run(life, 4 * MS)
    kernel.exit(life, reap=False)
    tick(kernel, source)
    kernel.run(life, MS)
    kernel.exit(life)
    assert spent(tick(kernel, source)) == {life.consumer: MS}


def test_work_is_not_unclaimed_before_the_table_is_complete() -> None:
    kernel = SyntheticKernel()
    kernel.tells_last_pid = False
    source = kernel.source(events=False)
    source.poll()
    life = kernel.spawn()
    kernel.run(life, 5 * MS)
    unclaimed, charged = 0, 0
    for _ in range(12):  # a scan is due each second
        usage = tick(kernel, source).usages[0]
        unclaimed += usage.unclaimed
        charged += usage.spent.get(life.consumer, 0)
    assert (unclaimed, charged) == (0, 5 * MS)


def test_usages_tile_time_and_name_the_host_and_the_socket() -> None:
    kernel, source = polled()
    start = kernel.clock.now()
    first, second = tick(kernel, source), tick(kernel, source)
    assert [usage.resource for usage in first.usages] == ["cpu", "cpu:0"]
    assert first.usages[0].start == start
    assert second.usages[0].start == first.usages[0].end
    assert second.usages[0].capacity == 100 * MS
    assert first.usages[0].spent is first.usages[1].spent


def test_exec_updates_process_metadata() -> None:
    kernel, source = polled()
    life = kernel.spawn()
    kernel.run(life, MS)
    tick(kernel, source)
    life.cgroup = "0::/system.slice/new.service\n"
    kernel.clock.advance(1.0)
    (info,) = source.poll().infos
    assert (info.payer, info.group) == (life.consumer, "new.service")


@pytest.mark.parametrize(
    ("names", "living", "dead"),
    [(NamePolicy.SCRIPT, "work", "dead"), (NamePolicy.NONE, "process", "process")],
)
def test_running_and_exited_processes_are_named_by_policy(
    names: NamePolicy, living: str, dead: str
) -> None:
    kernel, source = polled(names=names)
    kernel.run(kernel.spawn(), MS)
    assert [info.command for info in tick(kernel, source).infos] == [living]
    short = kernel.spawn()
    kernel.run(short, MS)
    kernel.exit(short)
    assert [info.command for info in tick(kernel, source).infos] == [dead]


def test_idle_clocks_are_not_read_and_new_work_is_charged_at_once() -> None:
    kernel = SyntheticKernel()
    asked: list[int] = []
    sleeper = kernel.spawn()
    source = kernel.source(vigil=True)
    source.poll()
    for _ in range(150):
        tick(kernel, source)
    reading = source._table.idle._read
    source._table.idle._read = lambda clock: asked.append(clock) or reading(clock)  # type: ignore[func-returns-value]
    for _ in range(5):
        tick(kernel, source)
    assert len(asked) <= 1
    kernel.run(sleeper, 2 * MS)
    assert spent(tick(kernel, source)) == {sleeper.consumer: 2 * MS}


@pytest.mark.parametrize(("cgroup", "every"), [("0::/\n", 1), ("0::/apart\n", 5)])
def test_idle_clocks_in_the_kernels_sum_are_read_less_often(cgroup: str, every: int) -> None:
    kernel = SyntheticKernel()
    kernel.covers_kernel = False
    kernel.omits = lambda text: text == "0::/\n"  # type: ignore[attr-defined]
    sleeper = kernel.spawn(cgroup=cgroup)
    source = kernel.source(vigil=True)
    reads: list[int] = []
    for clocks in (source._table.idle, source._table.apart):
        reading = clocks._read
        clocks._read = lambda one, read=reading: reads.append(one) or read(one)  # type: ignore[misc, func-returns-value]

    def second() -> int:
        kernel.clock.advance(1.0)
        return sum(usage.spent.get(sleeper.consumer, 0) for usage in source.poll().usages[:1])

    for _ in range(20):
        second()
    reads.clear()
    for _ in range(10):
        second()
    assert len(reads) == 10 // every
    kernel.run(sleeper, MS // 10)  # less than is missed in the sum
    assert sum(second() for _ in range(every)) == MS // 10


def test_empty_process_table_is_a_failure_with_a_remedy() -> None:
    batch = SyntheticKernel().source(events=False).poll()
    assert batch.processes == 0
    assert "hidepid" in batch.failures[0].remedy


def test_shortage_is_a_failure_with_its_remedy_and_no_empty_table() -> None:
    kernel = SyntheticKernel()
    life, source = kernel.spawn(), kernel.source()
    kernel.lacks = lambda: True
    (failure,) = source.poll().failures
    assert (failure.trouble, failure.cause) == (Trouble.RETRY, "Too many open files")
    assert "LimitNOFILE" in failure.remedy
    kernel.lacks = lambda: False
    kernel.clock.advance(1.0)
    assert source.poll().failures == ()  # and the process is found
    kernel.run(life, MS)
    assert spent(tick(kernel, source)) == {life.consumer: MS}


@pytest.mark.parametrize("events", [True, False])
def test_living_process_goes_on_after_lost_events_in_a_shortage(events: bool) -> None:
    kernel = SyntheticKernel()
    lives, source = [kernel.spawn() for _ in range(3)], kernel.source(events=events)
    source.poll()
    kernel.lacks = lambda: True
    for _ in range(25):
        for life in lives:
            kernel.run(life, MS)
        kernel.births.losing = kernel.finals.losing = True
        kernel.births.send(0)
        batch = tick(kernel, source)
        assert spent(batch) == {life.consumer: MS for life in lives}
        assert batch.exited == ()
        assert batch.processes == 3


def test_pid_used_again_in_a_shortage_is_noticed_after_it() -> None:
    kernel = SyntheticKernel(pid_max=300)
    source = kernel.source()
    old = kernel.spawn()
    source.poll()
    kernel.births.losing = kernel.finals.losing = True
    kernel.lacks = lambda: True
    kernel.exit(old)
    new = kernel.spawn()
    kernel.run(new, 2 * MS)
    tick(kernel, source)  # nothing tells of the new process
    kernel.births.losing = kernel.finals.losing = False
    kernel.lacks = lambda: False
    kernel.clock.advance(1.0)
    assert source.poll().exited == (old.consumer,)
    kernel.run(new, MS)
    assert spent(tick(kernel, source)) == {new.consumer: MS}


def test_work_of_a_process_that_could_not_be_read_is_unattributed() -> None:
    kernel, source = polled()
    kernel.lacks = lambda: True
    life = kernel.spawn()
    for _ in range(30):
        kernel.run(life, 5 * MS)
        (usage, _) = tick(kernel, source).usages
        assert (usage.spent, usage.unclaimed) == ({}, 5 * MS)
    kernel.lacks = lambda: False
    kernel.clock.advance(1.0)
    assert spent(source.poll()) == {}
    kernel.run(life, 5 * MS)
    assert spent(tick(kernel, source)) == {life.consumer: 5 * MS}


def test_work_in_the_tick_of_a_failed_read_is_not_charged_again() -> None:
    kernel, source = polled(envelope=True)
    kernel.lacks = lambda: True
    life = kernel.spawn()
    kernel.run(life, 5 * MS)
    kernel.clock.advance(0.001)  # start times are in ticks of 10 ms
    assert spent(source.poll()) == {Remainder("/"): 5 * MS}
    kernel.lacks = lambda: False
    kernel.clock.advance(1.0)
    assert spent(source.poll()) == {}


@pytest.mark.parametrize("fails", [[True] * 9, [False, *[True] * 9], [False, True]])
def test_zombie_is_charged_once_if_it_cannot_be_read(fails: list[bool]) -> None:
    """``fails`` are the reads of a scan: of the list of processes, of the zombie, and others."""
    kernel, source = polled()
    life = kernel.spawn()
    kernel.run(life, 5 * MS)
    kernel.exit(life, reap=False)
    batches = [tick(kernel, source)]
    for reads in (iter(fails), iter(()), iter(())):
        kernel.lacks = partial(next, reads, False)
        kernel.clock.advance(1.0)
        batches.append(source.poll())
    assert [sum(spent(one).values()) for one in batches] == [5 * MS, 0, 0, 0]
    assert [one.processes for one in batches] == [0] * 4  # the zombie is none


def test_failed_read_changes_no_description() -> None:
    kernel, source = polled()
    life = kernel.spawn()

    def no_memory(_: int) -> None:
        kernel.shortage = OSError(errno.ENOMEM, "Cannot allocate memory")

    infos = []
    for user_id in (kernel.user_id, no_memory, kernel.user_id):
        kernel.user_id = user_id  # type: ignore[method-assign, assignment]
        kernel.run(life, MS)
        kernel.clock.advance(1.0)
        infos.append([one.user for one in source.poll().infos])
    assert infos == [["root"], [], []]


def test_view_stays_what_it_was_in_a_shortage() -> None:
    kernel, source = polled(busy=False)
    kernel.lacks = lambda: True
    kernel.clock.advance(11.0)
    assert source.poll().usages[0].unclaimed == 0  # else all time may be that of hidden ones


def test_process_with_little_work_is_charged_at_its_second_poll() -> None:
    kernel, source = polled(envelope=True)
    life = kernel.spawn()
    kernel.run(life, MS // 2)
    first = tick(kernel, source)
    kernel.run(life, MS)
    second = tick(kernel, source)
    assert (spent(first), first.usages[0].unclaimed) == ({}, 0)
    assert spent(second) == {life.consumer: MS // 2 + MS}


def test_young_process_that_ends_is_charged_from_its_exit_record() -> None:
    kernel, source = polled()
    life = kernel.spawn()
    kernel.run(life, MS // 2)
    tick(kernel, source)
    kernel.exit(life)
    batch = tick(kernel, source)
    assert [info.command for info in batch.infos] == ["dead"]
    assert list(spent(batch).values()) == [MS // 2]


@pytest.mark.parametrize("reap", [True, False], ids=["reaped", "zombie"])
@pytest.mark.parametrize("work", [MS // 2, 3 * MS], ids=["young", "tracked"])
def test_new_process_that_ends_during_its_first_poll_is_charged_once(work: int, reap: bool) -> None:
    kernel, source = polled()
    idle = kernel.spawn()
    for _ in range(13):
        tick(kernel, source)
    life = kernel.spawn()
    kernel.run(life, work)
    kernel.exit(idle)
    kernel.finals.waiting.clear()  # its clock shows its end, after the first read of events
    kernel.births.waiting[:] = [(life.pid, 1)]
    kernel.after_read[life.pid] = lambda: kernel.exit(life, reap=reap)
    amounts = [sum(spent(tick(kernel, source)).values()) for _ in range(3)]
    assert amounts == [work, 0, 0]


def test_daemon_is_a_descendant_of_the_process_that_started_it() -> None:
    kernel, source = polled()
    shell = kernel.spawn()
    kernel.run(shell, MS)
    tick(kernel, source)
    helper = kernel.spawn(shell.pid)
    daemon = kernel.spawn(helper.pid)
    kernel.exit(helper)
    kernel.run(daemon, 5 * MS)
    infos = {info.payer: info for info in tick(kernel, source).infos}
    assert (infos[daemon.consumer].parent, daemon.parent) == (shell.pid, 1)
    kernel.clock.advance(1.0)
    assert source.poll().infos == ()


def test_parent_of_a_new_process_is_not_left_to_the_next_poll() -> None:
    kernel, source = polled()
    parent = kernel.spawn()
    kernel.spawn(parent=parent.pid)
    kernel.run(parent, MS // 2)
    assert spent(tick(kernel, source)) == {parent.consumer: MS // 2}


def test_full_scan_leaves_no_process_to_the_next_poll() -> None:
    kernel, source = polled()
    life = kernel.spawn()
    kernel.run(life, MS // 2)
    kernel.clock.advance(1.0)
    assert spent(source.poll()) == {life.consumer: MS // 2}


def test_zombie_with_an_exit_record_is_charged_once() -> None:
    kernel, source = polled()
    life = kernel.spawn()
    kernel.run(life, 3 * MS)
    kernel.exit(life, reap=False)
    amounts = [sum(spent(tick(kernel, source)).values()) for _ in range(25)]
    kernel.exit(life)
    amounts += [sum(spent(tick(kernel, source)).values()) for _ in range(25)]
    assert amounts == [3 * MS, *[0] * 49]


def test_pid_of_a_zombie_is_tracked_when_it_is_used_again() -> None:
    kernel = SyntheticKernel(pid_max=300)
    source = kernel.source()
    source.poll()
    first = kernel.spawn()
    kernel.run(first, 3 * MS)
    kernel.exit(first, reap=False)
    tick(kernel, source)
    kernel.exit(first)
    second = kernel.spawn()
    assert second.pid == first.pid
    kernel.run(second, 2 * MS)
    assert spent(tick(kernel, source)) == {second.consumer: 2 * MS}


def test_ended_process_keeps_its_groups() -> None:
    kernel, source = polled()
    life = kernel.spawn(cgroup="5:cpuacct:/slurm/uid_1/job_7/step_0\n")
    kernel.run(life, MS)
    (info,) = tick(kernel, source).infos
    assert info.group == "7"
    kernel.exit(life, reap=False)
    life.cgroup = "5:cpuacct:/\n"  # as Linux shows it from now on
    kernel.clock.advance(1.0)
    assert source.poll().infos == ()


def test_process_found_after_its_end_has_the_groups_of_its_parent() -> None:
    kernel, source = polled()
    parent = kernel.spawn(cgroup="5:cpuacct:/slurm/uid_1/job_7/step_0\n")
    tick(kernel, source)
    life = kernel.spawn(parent.pid, cgroup="")
    kernel.run(life, 20 * MS)
    kernel.exit(life, reap=False)
    (info,) = tick(kernel, source).infos
    assert (info.payer, info.group) == (life.consumer, "7")


class CountingKernel(SyntheticKernel):
    """Counts the reads of CPU clocks."""

    reads = 0

    def read_clock(self, clock_id: int) -> int:
        self.reads += 1
        return super().read_clock(clock_id)


def sampled(kernel: SyntheticKernel, *, vigil: bool = True) -> tuple[CpuUsageSource, list[Life]]:
    """A source after its first settlement, by which five processes have worked."""
    lives = [kernel.spawn() for _ in range(5)]
    source = kernel.source(vigil=vigil)
    source.poll()
    for life in lives:
        kernel.run(life, 5 * MS)
    tick(kernel, source)
    return source, lives


def wait(kernel: SyntheticKernel, source: CpuUsageSource, *watched: Life) -> UsageBatch:
    """The batch of a poll that need not settle, 100 ms after the last one."""
    kernel.clock.advance(0.1)
    return source.poll(settle=False, watched=frozenset(life.consumer for life in watched))


def test_only_clocks_of_watched_processes_are_read_before_the_settlement() -> None:
    kernel = CountingKernel()
    source, lives = sampled(kernel)
    kernel.reads = 0
    for _ in range(3):
        for life in lives:
            kernel.run(life, MS)
        assert wait(kernel, source, *lives[:2]).usages == ()
    assert kernel.reads == 6
    each = {life.consumer: MS for life in lives}
    assert [usage.spent for usage in tick(kernel, source).usages[::2]] == [each, each, each, {}]


def test_others_share_the_rest_of_the_kernels_sum_of_each_tick() -> None:
    kernel = SyntheticKernel()
    source, (watched, first, second, *_) = sampled(kernel)
    start = kernel.clock.monotonic()
    for works in ((10, 30, 0), (20, 10, 20), (0, 0, 10)):
        for life, work in zip((watched, first, second), works, strict=True):
            kernel.run(life, work * MS)
        kernel.clock.advance(0.1)
        settle = works == (0, 0, 10)
        batch = source.poll(settle=settle, watched=frozenset({watched.consumer}))
    hosts, rest = batch.usages[::2], [30 * MS, 30 * MS, 10 * MS]
    spent = [
        [usage.spent.get(life.consumer, 0) for usage in hosts] for life in (watched, first, second)
    ]
    assert spent == [[10 * MS, 20 * MS, 0], split(40 * MS, rest), split(30 * MS, rest)]
    assert [usage.metered for usage in hosts] == [40 * MS, 50 * MS, 10 * MS]
    assert [usage.end.mono - start for usage in hosts] == [100 * MS, 200 * MS, 300 * MS]
    assert [(usage.capacity, usage.unclaimed) for usage in hosts] == [(100 * MS, 0)] * 3


def test_births_and_exits_of_others_wait_for_the_settlement() -> None:
    kernel = SyntheticKernel()
    source, (watched, ending, *_) = sampled(kernel)
    kernel.run(ending, 2 * MS)
    kernel.exit(ending)
    born = kernel.spawn()
    kernel.run(born, 3 * MS)
    kernel.run(watched, MS)
    assert wait(kernel, source, watched).usages == wait(kernel, source, watched).usages == ()
    batch = tick(kernel, source)
    worked = {watched.consumer: MS, ending.consumer: 2 * MS, born.consumer: 3 * MS}
    assert [usage.spent for usage in batch.usages[::2]] == [worked, {}, {}]
    assert batch.exited == (ending.consumer,)


def test_exit_of_a_watched_process_is_settled_at_once() -> None:
    kernel = SyntheticKernel()
    source, (watched, *_) = sampled(kernel)
    kernel.run(watched, 2 * MS)
    assert wait(kernel, source, watched).usages == ()
    kernel.run(watched, MS)
    kernel.exit(watched)
    batch = wait(kernel, source, watched)
    works = [usage.spent for usage in batch.usages[::2]]
    assert works == [{watched.consumer: 2 * MS}, {watched.consumer: MS}]
    assert batch.exited == (watched.consumer,)


def test_watched_zombie_is_charged_by_its_record_without_the_cost_of_its_exit() -> None:
    kernel = SyntheticKernel()
    source, (watched, *_) = sampled(kernel)
    kernel.run(watched, 2 * MS)
    assert wait(kernel, source, watched).usages == ()
    kernel.exit(watched, reap=False, tail=MS)
    assert wait(kernel, source, watched).usages == ()
    kernel.exit(watched)
    hosts = wait(kernel, source, watched).usages[::2]
    assert len(hosts) == 3
    assert sum(usage.spent.get(watched.consumer, 0) for usage in hosts) == 2 * MS


def test_young_process_is_read_as_soon_as_it_is_watched() -> None:
    kernel = SyntheticKernel()
    source, _ = sampled(kernel)
    life = kernel.spawn()
    kernel.run(life, MS // 2)
    tick(kernel, source)
    assert wait(kernel, source).usages == ()
    hosts = wait(kernel, source, life).usages[::2]
    assert [usage.spent for usage in hosts] == [{life.consumer: MS // 4}] * 2


def test_process_that_is_watched_from_now_on_is_found_at_once() -> None:
    kernel = SyntheticKernel()
    source, (other, *_) = sampled(kernel)
    assert wait(kernel, source).usages == ()
    life = kernel.spawn()
    kernel.run(life, 2 * MS)
    found = wait(kernel, source, life).usages[::2]
    assert [usage.spent for usage in found] == [{}, {life.consumer: 2 * MS}]
    for one in (life, other):
        kernel.run(one, 3 * MS)
    assert wait(kernel, source, life).usages == ()
    kernel.run(life, MS)
    later = tick(kernel, source).usages[::2]
    both = {life.consumer: 3 * MS, other.consumer: 3 * MS}
    assert [usage.spent for usage in later] == [both, {life.consumer: MS}]


@pytest.mark.parametrize("vigil", [False, True], ids=["no sum", "work outside of the sum"])
def test_all_clocks_are_read_if_the_kernels_sum_does_not_show_the_work(vigil: bool) -> None:
    kernel = SyntheticKernel()
    kernel.covers_kernel = not vigil
    kernel.omits = lambda _: True  # type: ignore[attr-defined]
    source, (first, second, *_) = sampled(kernel, vigil=vigil)
    works: list[object] = []
    for life, work in ((first, MS), (second, 2 * MS)):
        kernel.run(life, work)
        works += [usage.spent for usage in wait(kernel, source).usages[::2]]
    works += [usage.spent for usage in tick(kernel, source).usages[::2]]
    assert works == [{first.consumer: MS}, {second.consumer: 2 * MS}, {}]
