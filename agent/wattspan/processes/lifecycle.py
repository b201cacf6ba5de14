"""Births, CPU time and exits of processes, turned into charges.

New processes are found in three ways: events of the kernel report every birth; without events, the
last pid of the kernel shows the range of new pids, in one read for each poll; an occasional scan of
the whole table finds the remaining ones.

The total charge of a process is the final value of its clock, less the value at discovery if the
process is older than the agent. A new process with a reused pid inherits nothing: its clock is
lower, or its birth is reported, and then its start time decides.

A build ends a thousand processes a second that no poll has seen alive. Those of one parent, command
and user in one poll share one account, which stands for them as a parent too. Two rules keep them
cheap, because a description costs ten times as much as an exit record: a short process that has
begun and ended since the last poll is charged from its exit record, zombie or not; and a reported
one that has hardly worked at its first poll is *young* and waits for the next: most end before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND, Consumer, Failure, Instant, Payer, PayerInfo, Usage
from wattspan.ports import UsageBatch
from wattspan.processes.kernel_events import ExitRecord, ProcessEvents
from wattspan.processes.metadata import HostProcesses
from wattspan.processes.procfs import NO_PROCESSES, TICK, ProcFs, Stat, shortage_failure
from wattspan.processes.table import GONE, ProcessTable, TrackedProcess

FIRST_PID = 300  # first pid after an overflow; lower ones are reserved
MAX_PID_RANGE = 4096  # a full scan is cheaper than trying a larger range of pids


@dataclass(slots=True)
class ScanResult:
    """The result of one scan.

    ``born`` are new since the previous scan; ``found`` may be older; ``suspects`` are tracked, but
    their pids may have been reused. ``churn``: pids were assigned; ``complete``: no visible process
    is missing.
    """

    born: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    churn: bool = False
    complete: bool = True
    scanned: bool = False

    def add_young(self, pids: Iterable[int]) -> None:
        """Treat the young processes of the last poll as born since then."""
        self.born |= set(pids)
        self.found -= self.born


class ProcessScanner:
    """Finds processes that are not in the table.

    The first scan in each period of ``every`` nanoseconds of monotonic time is a full one.
    """

    def __init__(self, processes: ProcFs, table: ProcessTable, every: int = SECOND) -> None:
        self._processes = processes
        self._table = table
        self._every = every
        self._last: int | None = None
        self._pid_max = processes.pid_max()
        self._period = -1
        self._too_wide = False
        self._shortage = processes.shortage  # the last one before the last full scan

    @property
    def unsure(self) -> bool:
        """True if a read has failed for want of descriptors or memory since that scan began."""
        return self._processes.shortage is not self._shortage

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Of the reads since that scan began, or an empty table."""
        if self.unsure and self._processes.shortage is not None:
            return (shortage_failure(self._processes.shortage),)
        return () if len(self._table) else (NO_PROCESSES,)

    def due(self, mono: int) -> bool:
        """True if the next scan will be a full one."""
        return self._too_wide or mono // self._every != self._period

    def scan(self, mono: int, events: ProcessEvents, events_complete: bool) -> ScanResult:
        """``events_complete``: ``events`` hold all births, unless some were lost."""
        result = ScanResult(born=set(events.born), churn=events.churn)
        if not events_complete:
            self._try_new_pids(result)
        if self.due(mono) or events.lost:
            self._too_wide = False
            self._period = mono // self._every
            unsure, self._shortage = self.unsure, self._processes.shortage
            shown = self._processes.pids()
            if self.unsure:
                return result  # the next one examines tracked processes too, as after lost events
            result.found = {pid for pid in shown if unsure or pid not in self._table} - result.born
            result.complete = result.scanned = True
            if events.lost:
                result.suspects.update(self._table)
        return result

    def _try_new_pids(self, result: ScanResult) -> None:
        last, before = self._processes.last_pid(), self._last
        self._last = last
        if last is None:
            result.complete, result.churn = False, True
            return
        if last == before:
            return
        result.churn = True
        if before is None:
            return
        new = [range(before + 1, last + 1)]
        if last < before:
            self._pid_max = self._processes.pid_max()
            new = [range(before + 1, self._pid_max + 1), range(min(FIRST_PID, last), last + 1)]
        if sum(map(len, new)) > MAX_PID_RANGE:
            self._too_wide = True
            result.suspects.update(pid for pid in self._table if any(pid in r for r in new))
            return
        for pids in new:
            # Pids of threads have no process clock.
            result.born.update(pid for pid in pids if self._table.clock(pid) is not None)


YOUNG_CPU_TIME = MILLISECOND
"""A reported process with less CPU time is young at its first poll, unless it has children.

Its work is charged at the next poll: this is the most that is charged late. A poll with a full scan
leaves no process to the next one.
"""

SHORT_CPU_TIME = 10 * MILLISECOND
"""The clock of an ended process with less CPU time is not read: that would cost a part of it."""

_MAX_EXIT_DELAY = 50 * MILLISECOND  # from an exit to the poll that reports it
_MAX_ANCESTORS = 16  # limit of the search for an ancestor with a known cgroup

CpuDeltas = Sequence[tuple[TrackedProcess, int]]


class CpuCharge(NamedTuple):
    """CPU time of one payer since the last poll."""

    payer: Payer
    amount: int
    cgroup: str
    row: TrackedProcess | None = None


_LEAST_EXIT, _CHEAP_MEMORY = 6 * 1024, 8 * 1024  # KiB


def exit_weight(memory: int) -> int:
    """The relative cost of an exit of a process with at most ``memory`` KiB resident.

    Measured on Linux 6.18 in a virtual machine: 0.6 ms up to 8 MiB, of which most are pages of
    files, and 0.1 ms for each MiB beyond that.
    """
    return _LEAST_EXIT + max(0, memory - _CHEAP_MEMORY)


class EndedCharge(NamedTuple):
    """The last charge of an exited process, and its weight for the costs of exits.

    The kernel releases the memory of a process after its exit record.
    """

    charge: CpuCharge
    weight: int


_RUNTIMES = re.compile(
    r"(?:systemd|containerd|dockerd|crio|podman|conmon(?:rs)?|runc|crun|youki|lxc(?=-)|nomad)"
    r"(?![a-z])"
)
"""Names, or their first words, of programs that start others in existing cgroups, as exec probes
(``containerd-shim``, ``runc:[2:INIT]``)."""

_MANAGERS = re.compile(r"(?:sshd|crond?|slurmstepd|pbs_mom|condor(?=_))(?![a-z])")
"""The same of programs that start others in new cgroups."""


_UnseenKey = tuple[int, str, int | None, str]  # parent, command, user, cgroup


class LifecycleUpdate:
    """The events and results of one poll."""

    def __init__(
        self,
        events: ProcessEvents,
        found: ScanResult,
        before: Instant | None,
        now: Instant,
        *,
        sees_all: bool = True,
    ) -> None:
        self.sees_all = sees_all  # else the earlier work of an unknown process is unattributed
        self.events, self.found, self.before, self.now = events, found, before, now
        self.charges: list[CpuCharge] = []
        self.infos: list[PayerInfo] = []
        self.exited: list[Payer] = []
        self.ended: dict[str, list[EndedCharge]] = {}  # by cgroup
        self.tails_unknown = False  # an exit without a record of its CPU time
        self.seen: set[int] = set()  # processed pids
        self.tracked: set[int] = set()  # pids whose tracking began in this poll
        self.young: dict[int, int] = {}  # those of the last poll, with their parents
        self.postponed: dict[str, int] = {}  # CPU time of those of this poll, by cgroup
        self.parents: set[int] = set()  # of the processes born since the last poll
        self.exits_of_pid: dict[int, int] = {}  # number of unseen processes
        self.unseen: dict[_UnseenKey, Consumer] = {}  # their accounts
        # Those that may be in another cgroup than their parents: 0 in an existing one, 1 for a
        # runtime itself, 2 in a new one; and the user.
        self.placed: dict[Payer, tuple[int, int | None]] = {}
        self.accounts: dict[int, int] = {}  # pids of unseen processes in the account of another
        self.texts: dict[int, str] = {}  # cgroups of exited processes, for their children


@dataclass(slots=True)
class UsageResults:
    """The results of the settled samples, in order of time."""

    usages: list[Usage] = field(default_factory=list)
    infos: list[PayerInfo] = field(default_factory=list)
    exited: list[Payer] = field(default_factory=list)

    def batch(self, processes: int, failures: tuple[Failure, ...]) -> UsageBatch:
        return UsageBatch(
            usages=tuple(self.usages),
            infos=tuple(self.infos),
            exited=tuple(self.exited),
            failures=failures,
            processes=processes,
        )


_UnseenWork = dict[tuple[Consumer, str], tuple[int, int]]
"""CPU time and weight of the ended processes of an account in a cgroup."""


class LifecycleTracker:
    """Updates the table from events, scans and clocks."""

    def __init__(self, processes: ProcFs, table: ProcessTable, directory: HostProcesses) -> None:
        self._processes, self._table, self._directory = processes, table, directory
        self._scanned: int | None = None  # time since boot of the last full scan or shortage
        self._shortage = processes.shortage
        self._young: dict[int, int] = {}  # with their parents
        self._settled: set[int] = set()  # pids of charged processes, which may be zombies

    @property
    def has_young(self) -> bool:
        """True if the next poll must read a process again that hardly worked until the last one."""
        return bool(self._young)

    def any_young(self, payers: Iterable[Payer]) -> bool:
        """True if one of these processes waits for the next poll in this way."""
        return any(isinstance(one, Consumer) and one.pid in self._young for one in payers)

    def begin(self, update: LifecycleUpdate) -> None:
        """Begin a poll: add the young processes of the last one, leave out charged zombies."""
        update.young, self._young = self._young, {}
        update.found.add_young(update.young)
        # Older ones come first: a parent's account is known before its children's.
        update.events.born = {**update.young, **update.events.born}
        update.parents |= set(update.events.born.values())
        self._settled -= update.events.born.keys()
        if update.found.scanned:
            self._settled = {pid for pid in self._settled & update.found.found if self._ended(pid)}
        update.found.found -= self._settled

    def process(self, update: LifecycleUpdate, moved: CpuDeltas) -> None:
        """Process one poll: exits and work first, then new processes, then unseen exits.

        May be called again for the same poll, with further clocks and events.
        """
        new = (update.found.born | update.found.found) - update.seen
        update.seen |= new
        replaced = self._replace_reused(update, new | update.found.suspects)
        update.found.suspects.clear()
        ended = self._charge_work(update, moved)
        ended_soon = self._short(update)
        tracked = {pid for pid in (new | replaced | ended) - ended_soon if self._track(update, pid)}
        self._apply_exit_records(update, tracked)
        update.tracked |= tracked
        before, self._shortage = self._shortage, self._processes.shortage
        if update.found.scanned or before is not self._shortage:
            # The work of processes that could not be read, also in this tick, is unattributed.
            self._scanned = update.now.since_boot + (TICK if before is not self._shortage else 0)

    def _charge_work(self, update: LifecycleUpdate, moved: CpuDeltas) -> set[int]:
        """Charge the CPU time of processes; returns the pids of ended ones."""
        ended = set()
        for row, value in moved:
            if row.clock_list is None:
                continue  # replaced already
            if value >= row.charged:
                self._work(update, row, value - row.charged)
                self._table.worked(row, value)
            elif value == GONE or self._processes.has_ended(row.consumer):
                ended.add(row.consumer.pid)
                self._end(update, row)
        return ended

    def describe(
        self, update: LifecycleUpdate, row: TrackedProcess, stat: Stat | None = None
    ) -> None:
        """Describe a process if its description changed; its earlier charges are not affected.

        ``stat`` is the one of this moment, if it is known. An ended process keeps its description:
        procfs shows its arguments no more, and not always its cgroups. A part that could not be
        read changes nothing.
        """
        pid, before = row.consumer.pid, self._processes.shortage
        stat = stat or self._processes.stat(pid)
        if stat is not None and stat.started == row.consumer.started:
            if stat.exiting and row.info is not None:
                return
            text = self._processes.cgroup(pid) or row.cgroup_text
            row.cgroup_text = text or self._text_of(update, row.parent)
            known = row.info if row.command == stat.comm else None
            row.command, stat = stat.comm, stat._replace(parent=row.parent)
            info = self._directory.describe_running(stat, row.cgroup_text, known)
        else:
            text = row.cgroup_text or self._text_of(update, row.parent)
            gone = self._directory.describe_ended(row.consumer, row.command, text, None, row.parent)
            info = row.info or gone
        if info != row.info and (row.info is None or self._processes.shortage is before):
            row.info = info
            update.infos.append(info)

    def _replace_reused(self, update: LifecycleUpdate, suspects: set[int]) -> set[int]:
        """End every tracked process with a reused pid; returns those pids."""
        reborn = set()
        for row in self._table.rows(suspects):
            if self._processes.has_ended(row.consumer):
                self._end(update, row)
                reborn.add(row.consumer.pid)
        return reborn

    def _work(
        self,
        update: LifecycleUpdate,
        row: TrackedProcess,
        amount: int,
        stat: Stat | None = None,
    ) -> CpuCharge:
        if row.info is None and amount > 0:
            self.describe(update, row, stat)
        charge = CpuCharge(row.consumer, amount, row.cgroup_text, row)
        if amount > 0:
            update.charges.append(charge)
        return charge

    def _end(self, update: LifecycleUpdate, row: TrackedProcess) -> None:
        pid = row.consumer.pid
        records = update.events.exits.get(pid)
        record = records.pop(0) if records else None
        total = record.cpu if record is not None else row.exit_cpu
        memory = record.memory if record is not None else row.exit_memory
        if total is None:
            update.tails_unknown = True
        # A clock that was read after the exit record includes the cost of the exit.
        tail_charged = total is not None and row.charged > total
        if row.info is None and record is not None and record.cpu > row.charged:
            self._describe_exited(update, row, record)
        charge = self._work(update, row, max(0, (total or 0) - row.charged))
        self._table.remove(row)
        update.exited.append(row.consumer)
        update.texts[pid] = row.cgroup_text
        if total is not None and row.info is not None and not tail_charged:
            ended = EndedCharge(charge, exit_weight(memory))
            update.ended.setdefault(row.cgroup_text, []).append(ended)

    def _describe_exited(
        self, update: LifecycleUpdate, row: TrackedProcess, record: ExitRecord
    ) -> None:
        """Describe a process without work before its exit record."""
        row.cgroup_text = row.cgroup_text or self._text_of(update, record.parent)
        row.info = self._directory.describe_ended(
            row.consumer, record.command, row.cgroup_text, record.user_id, record.parent
        )
        update.infos.append(row.info)

    def _track(self, update: LifecycleUpdate, pid: int) -> bool:
        """Track a new process. Its CPU time counts from an observed birth, else from now."""
        if pid in self._table:
            return False
        born = pid not in update.found.found
        value = self._table.clock(pid)  # first, as it fails faster if the process has ended
        if value is not None and self._is_postponed(update, pid, value):
            return False
        stat = self._processes.stat(pid) if value is not None else None
        if stat is None or value is None:
            return False
        parent = self._parent(update, stat)
        row = TrackedProcess(
            Consumer(pid, stat.started), value, stat.comm, parent, kernel=stat.kernel
        )
        row.next_placement = update.now.mono
        records = update.events.exits.get(pid)
        if stat.exiting and records:
            record = records.pop()
            row.exit_cpu, row.exit_memory = record.cpu, record.memory
        self._table.add(row)
        if update.before is not None and (born or self._since_scan(stat)):
            self._work(update, row, value, stat)
        return True

    def _parent(self, update: LifecycleUpdate, stat: Stat) -> int:
        """The parent of a new process; if that has ended already, the nearest known one above it.

        The kernel gives an orphan, such as a daemon, to another process at once.
        """
        first = update.events.born.get(stat.pid, stat.parent)
        near = (one for one in _upwards(update, first) if one in self._table or one in update.texts)
        return stat.parent if first == stat.parent else next(near, stat.parent)

    def _short(self, update: LifecycleUpdate) -> set[int]:
        """The short processes that were born since the last poll and have their exit record.

        Their clocks are not read. That of a zombie would also have the cost of the exit, which is
        charged by the clock of its cgroup.
        """
        events = update.events
        if update.before is None:
            return set()
        ended = (events.exits.keys() & events.born.keys()) - events.reborn - update.young.keys()
        last = ((pid, events.exits[pid][-1]) for pid in ended if events.exits[pid])
        return {pid for pid, record in last if record.certain and record.cpu < SHORT_CPU_TIME}

    def _ended(self, pid: int) -> bool:
        """True for a zombie, or for a process that cannot be read."""
        stat = self._processes.stat(pid)
        return stat is None or stat.exiting

    def _is_postponed(self, update: LifecycleUpdate, pid: int, value: int) -> bool:
        """Leave a reported process to the next poll, if it has hardly worked and has no child."""
        events = update.events
        if value >= YOUNG_CPU_TIME or pid not in events.born or pid in update.parents:
            return False
        if update.before is None or update.found.scanned or pid in update.young:
            return False
        if events.exits.get(pid):  # it has ended already
            return False
        self._young[pid] = events.born[pid]
        text = self._text_of(update, events.born[pid])
        update.postponed[text] = update.postponed.get(text, 0) + value
        return True

    def _since_scan(self, stat: Stat) -> bool:
        """True if a process is newer than the last full scan, and than the last shortage."""
        return self._scanned is not None and (stat.started + 1) * TICK > self._scanned

    def _apply_exit_records(self, update: LifecycleUpdate, tracked: set[int]) -> None:
        """Charge exited processes that were never tracked; keep records of unreaped ones.

        The records of pids whose tracking has just begun, ``tracked``, are of earlier processes.
        """
        exits, born = update.events.exits, update.events.born
        young = self._young.keys() & exits.keys()  # ended during this poll
        if young:
            short = self._short(update)
            for pid in young:
                del self._young[pid]
                if pid not in short and self._track(update, pid):
                    tracked.add(pid)
        # In the order of births: a parent's account is known before its children's.
        pids = [pid for pid in born if pid in exits]
        pids += [pid for pid in exits if pid not in born]
        unseen: _UnseenWork = {}
        for pid in pids:
            records, row = exits[pid], self._table.get(pid)
            if row is not None and pid not in tracked:
                if records:
                    row.exit_cpu = max(row.exit_cpu or 0, records[-1].cpu)
                    row.exit_memory = max(row.exit_memory, records[-1].memory)
            elif update.before is not None:
                if records:
                    self._settled.add(pid)
                for final in records:
                    if (final.certain and update.sees_all) or pid in born:
                        self._add_unseen(update, final, update.before, unseen)
        exits.clear()
        for (consumer, text), (cpu, weight) in unseen.items():
            charge = CpuCharge(consumer, cpu, text)
            update.charges.append(charge)
            update.ended.setdefault(text, []).append(EndedCharge(charge, weight))

    def _add_unseen(
        self, update: LifecycleUpdate, record: ExitRecord, before: Instant, unseen: _UnseenWork
    ) -> None:
        """Find the account of a process that no poll has seen."""
        pid, parent, _, elapsed = record[:4]
        now = update.now
        if elapsed > now.mono - before.mono + _MAX_EXIT_DELAY and pid not in update.young:
            return  # it was hidden until now: its work is unattributed already
        parent = update.events.born.get(pid, parent)
        parent = update.accounts.get(parent, parent)
        text = update.texts[pid] = self._text_of(update, parent)
        key = parent, record.command, record.user_id, text
        consumer = update.unseen.get(key)
        if consumer is None:
            # Its start time is unknown; derived ones must differ for each process of a pid.
            earlier = update.exits_of_pid.get(pid, 0)
            update.exits_of_pid[pid] = earlier + 1
            consumer = Consumer(pid, (now.since_boot - elapsed) // TICK + earlier)
            update.unseen[key] = consumer
            launcher = self._launcher(update, parent)
            if _RUNTIMES.match(launcher):
                runtime = _RUNTIMES.match(record.command)
                update.placed[consumer] = int(runtime is not None), record.user_id
            elif _MANAGERS.match(launcher):
                update.placed[consumer] = 2, record.user_id
            update.infos.append(
                self._directory.describe_ended(
                    consumer, record.command, text, record.user_id, parent
                )
            )
            update.exited.append(consumer)
        else:
            update.accounts[pid] = consumer.pid
        cpu, weight = unseen.get((consumer, text), (0, 0))
        unseen[consumer, text] = cpu + record.cpu, weight + exit_weight(record.memory)

    def _launcher(self, update: LifecycleUpdate, pid: int) -> str:
        """The name of the nearest known process from ``pid`` up; "" for none."""
        rows = map(self._table.get, _upwards(update, pid))
        return next((row.command for row in rows if row is not None), "")

    def _text_of(self, update: LifecycleUpdate, pid: int) -> str:
        """The cgroups of a process or of its nearest known ancestor."""
        for one in _upwards(update, pid):
            row = self._table.get(one)
            if row is not None:
                row.cgroup_text = row.cgroup_text or self._processes.cgroup(one) or ""
                return row.cgroup_text
            if update.texts.get(one):
                return update.texts[one]
        return ""


def _upwards(update: LifecycleUpdate, pid: int) -> Iterator[int]:
    """A process and its ancestors, as far as they were born since the last poll, and one more."""
    for _ in range(_MAX_ANCESTORS):
        yield pid
        if pid not in update.events.born:
            return
        pid = update.events.born[pid]
