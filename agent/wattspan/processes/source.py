"""The usage source of a host: CPU time by process.

Each poll reads, in this order: the busy time of the CPUs, the kernel's events, the clocks of
cgroups if processes came or went, and the clock of every process. The error at each edge of a usage
is the delay of the kernel's accounting of running threads: at most one scheduler tick (1 to 10 ms)
for each thread. Time that is missing in one usage is in the next.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from wattspan.attribution.division import split
from wattspan.clock import OWN_THREAD_CLOCK
from wattspan.model import SECOND, Instant, NamePolicy, Payer, PayerInfo, Remainder
from wattspan.ports import Clock, UsageBatch
from wattspan.processes.cgroups import CgroupExcess, CgroupTimes
from wattspan.processes.cpu_socket_division import (
    ClockSample,
    PlacementSampler,
    ProcessSocketTimes,
    SocketAccounting,
    SocketTimesSample,
    cut,
)
from wattspan.processes.cpus import BusyClock
from wattspan.processes.kernel_events import EventChannel, ProcessEvents
from wattspan.processes.lifecycle import (
    CpuCharge,
    CpuDeltas,
    EndedCharge,
    LifecycleTracker,
    LifecycleUpdate,
    ProcessScanner,
    ScanResult,
    UsageResults,
)
from wattspan.processes.metadata import HostProcesses
from wattspan.processes.performance_counters import ProcessCounters, add_counts
from wattspan.processes.principals import PrincipalResolver
from wattspan.processes.procfs import ProcFs
from wattspan.processes.table import (
    GONE,
    IDLE_AFTER,
    ClockList,
    IdleScanner,
    ProcessTable,
    ReadClock,
    TrackedProcess,
)
from wattspan.util.cpu_topology import CpuTopology

RESCAN_INTERVAL = SECOND
"""A process is described again after this time: by then it has executed its program."""

AUDIT_BATCH = 20
"""Number of known processes that each scan describes again, in turn."""

_MAX_AUDITED = 4096

VIEW_INTERVAL = 10 * SECOND
"""Time between two checks of the visibility of processes, and of cgroups until they are found."""

CGROUP_COST_DIVISOR = 50
"""Reading the clocks of cgroups takes at most one part in this of the time of a CPU."""


class CpuUsageSource:
    """The usage source of one host. One thread polls it.

    Without ``fork_events`` or ``exit_events``, births and exits are inferred from pids, clocks and
    cgroups. ``cgroups`` opens the clocks of cgroups; while it finds none it is called again every
    `VIEW_INTERVAL`.
    """

    def __init__(
        self,
        clock: Clock,
        processes: ProcFs,
        read_clock: ReadClock,
        topology: CpuTopology,
        *,
        busy: BusyClock | None = None,
        fork_events: EventChannel | None = None,
        exit_events: EventChannel | None = None,
        cgroups: Callable[[], CgroupTimes] = CgroupTimes,
        times: ProcessSocketTimes | None = None,
        counters: ProcessCounters | None = None,
        scan_every: int = SECOND,
        names: NamePolicy = NamePolicy.COMMAND,
        principals: PrincipalResolver | None = None,
    ) -> None:
        self._clock = clock
        self._processes = processes
        self._topology = topology
        self._busy = busy
        self._fork_events, self._exit_events = fork_events, exit_events
        self._open_cgroups, (self._cgroups, total) = cgroups, cgroups()
        self._read_clock = read_clock
        self._table = ProcessTable(read_clock, self._in_sum)
        directory = HostProcesses(processes, names, principals)
        self._principals = directory.principals
        self._lifecycle = LifecycleTracker(processes, self._table, directory)
        self._scanner = ProcessScanner(processes, self._table, scan_every)
        self._times, self._counters = times, counters
        placement = PlacementSampler(processes, topology)
        self._accounts = SocketAccounting(topology, placement, busy, times)
        self._excess = CgroupExcess()
        self._idle_scanner = IdleScanner(total)
        self._new_cgroups: set[str] = set()
        self._remainders: set[str] = set()
        self._removed: list[Remainder] = []
        self._postponed: dict[str, int] = {}  # time of young processes, by the text of a cgroup
        # Charges to cgroups that others may have; True for those that are to be moved no more.
        self._placed: dict[tuple[str, bool], int] = {}
        self._recent: deque[tuple[int, TrackedProcess]] = deque()
        self._audited: deque[TrackedProcess] = deque(maxlen=_MAX_AUDITED)
        self._before: Instant | None = None
        self._samples: list[ClockSample] = []
        self._watched: list[TrackedProcess] | None = None  # those of the samples; None for all
        self._wanted: frozenset[Payer] = frozenset()  # the payers of whom these are tracked
        self._sums_others = None not in (busy, fork_events, exit_events)
        self._covered = False  # the kernel's sum had nearly all charges of the last settlement
        self._churn = False
        self._next_cgroup_read = 0
        self._next_topology = 0
        self._next_view = 0
        self._sees_all = True

    def poll(self, *, settle: bool = True, watched: frozenset[Payer] | None = None) -> UsageBatch:
        """Sample the clocks, and settle all samples.

        Without ``settle``, a sample waits for the next poll if it shows only the work of known
        processes. The usage of each sample is the same as if it were settled at once. With
        ``watched``, a sample has the clocks of these processes and the kernel's sum of CPU time,
        if that is known, and waits although others begin and end. Once all clocks are read, the
        others share what is left of the sum at each sample.
        """
        if self._before is None:
            return self._first_poll()
        result = UsageResults()
        if settle or not self._waits(watched):
            if self._watched is None:
                for sample in self._samples:
                    self._settle_sample(sample, result)
                self._samples.clear()
            self._settle(result)
        counters = self._counters.failures if self._counters else ()
        return result.batch(len(self._table), (*self._scanner.failures, *counters))

    def _waits(self, watched: frozenset[Payer] | None) -> bool:
        """Take a sample if it may wait for the next poll; all that wait are of one kind."""
        if not (self._sums_others and self._covered) or (self._samples and self._watched is None):
            watched = None
        sample: ClockSample | None = None
        if watched is not None:
            sample = self._sample_watched(watched)
        elif self._watched is None and self._can_wait():
            sample = self._sample()
        if sample is not None:
            self._samples.append(sample)
        return sample is not None

    def _can_wait(self) -> bool:
        """True if no process has been born or has ended since the last poll, as far as is known."""
        if self._churn or self._new_cgroups or self._fork_events is None:
            return False
        if self._lifecycle.has_young:
            return False
        exits = self._exit_events is not None and self._exit_events.pending()
        return not (
            exits or self._fork_events.pending() or self._scanner.due(self._clock.monotonic())
        )

    def _sample(self) -> ClockSample | None:
        """The clocks of the active processes; None if the others must be read too."""
        now = self._clock.now()
        busy = self._accounts.sample_busy()
        self._idle_scanner.read()
        active = self._table.active
        values = active.read()
        if GONE in values:
            return None
        spent = active.spent(values, kernel=self._idle_scanner.covers_kernel)
        last = self._samples[-1].now if self._samples else self._before
        capacity = self._capacity(last.mono if last is not None else now.mono, now.mono)
        if self._idle_scanner.sweep_due(now.mono):
            return None
        if self._idle_scanner.due(now.mono, capacity, spent):
            return None
        return ClockSample(now, busy, values, self._accounts.sample_times())

    def _sample_watched(self, watched: frozenset[Payer]) -> ClockSample | None:
        """The clocks of ``watched`` and the kernel's sum; None if the others must be read too.

        A process that is watched from now on may be new: it is found by a settlement. Events wait
        in the kernel for a second at most, as at rest.
        """
        now, before = self._clock.now(), self._idle_scanner.now
        if before is None or self._idle_scanner.sweep_due(now.mono) or self._scanner.due(now.mono):
            return None
        if self._lifecycle.any_young(watched) or (self._samples and watched != self._wanted):
            return None
        if not self._samples:  # the first one is of the last settlement
            self._wanted, self._watched = watched, self._table.watch(watched)
            charged = [row.charged for row in self._watched]
            self._samples.append(ClockSample(self._before or now, None, charged, total=before))
        last, total = self._samples[-1], self._idle_scanner.read()
        clocks = [self._table.clock(row.consumer.pid) for row in self._watched or ()]
        values = [GONE if value is None else value for value in clocks]
        ended = any(map(operator.lt, values, last.values))  # or its pid is used again
        if ended or total is None or now.mono <= last.now.mono:
            return None
        return ClockSample(now, None, values, total=total)

    def _settle_sample(self, sample: ClockSample, result: UsageResults) -> None:
        """Charge the work in a sample that waited."""
        update = LifecycleUpdate(ProcessEvents(), ScanResult(), self._before, sample.now)
        self._accounts.update_busy(sample.busy, sample.now.mono)
        self._lifecycle.process(update, self._table.active.moved(sample.values))
        self._add_charged(update)
        self._finish(update, result, sample.times, measured=False, complete=True)

    def _settle(self, result: UsageResults) -> None:
        """Sample, and settle with the events and cgroups of this moment."""
        samples, self._samples = self._samples, []
        watched, self._watched = self._watched or [], None
        if self._counters is not None:
            self._counters.request()
        now = self._clock.now()
        if now.mono >= self._next_topology:
            self._next_topology = now.mono + SECOND
            if self._topology.refresh() and self._times is not None:
                self._times.refresh()
        self._look(now.mono)
        self._accounts.update_busy(self._accounts.sample_busy(), now.mono)
        total = self._idle_scanner.read() or 0
        events, sees_all = self._read_events(), self._sees_all and not self._scanner.unsure
        found = self._scanner.scan(now.mono, events, events_complete=self._fork_events is not None)
        self._churn = self._churn or found.churn or bool(self._new_cgroups)
        measured = self._churn and self._measure_cgroups()
        self._wake_exited(events)
        if measured:
            self._add_events(events, found)
        update = LifecycleUpdate(events, found, self._before, now, sees_all=sees_all)
        self._lifecycle.begin(update)
        self._lifecycle.process(update, self._read_clocks(self._table.active, update))
        self._add_charged(update)
        began = self._before.mono if self._before is not None else now.mono
        postponed = sum(update.postponed.values())
        every = self._idle_scanner.due(now.mono, self._capacity(began, now.mono), postponed)
        if every or self._idle_scanner.sweep_due(now.mono):
            for clocks in (self._table.apart, *((self._table.idle,) if every else ())):
                self._lifecycle.process(update, self._read_clocks(clocks, update))
            self._table.sweep(IDLE_AFTER)
            self._idle_scanner.swept(now.mono, scanned=every)
        if update.exited and not measured:
            self._churn = True
            measured = self._measure_cgroups()
            if measured:
                # Work between the two reads is in the clocks of the cgroups only. Without this
                # second read it would be charged to the exited processes.
                self._add_events(events, found)
                self._lifecycle.process(update, self._read_clocks(self._table.active, update))
        times = self._accounts.sample_times()
        sums = self._counters.sample() if self._counters is not None else None
        if sums is not None and self._times is None and len(self._topology.sockets) > 1:
            # Time that could not be counted may all be of one socket.
            most = 10 * sum(sums.times.times) >= 9 * sum(one.amount for one in update.charges)
            times = sums.times if most else times
        complete = found.complete and not self._lifecycle.has_young
        self._finish(update, result, times, measured=measured, complete=complete)
        if len(samples) > 1:
            in_sum: dict[Payer, bool] = {row.consumer: self._in_sum(row) for row in watched}
            result.usages = cut(result.usages, samples, in_sum, total)
        if sums is not None:
            result.usages = add_counts(result.usages, sums, update.accounts)

    def _finish(
        self,
        update: LifecycleUpdate,
        result: UsageResults,
        times: SocketTimesSample,
        *,
        measured: bool,
        complete: bool,
    ) -> None:
        """Settle the cgroups and sockets of an update, and add its results."""
        self._redescribe(update)
        self._settle_cgroups(update, measured)
        before, self._before = self._before or update.now, update.now
        active = [(c.payer, c.amount, c.row) for c in update.charges if c.amount > 0]
        complete = complete and not self._churn
        by_process = times.by_process(update.accounts)
        result.usages += self._accounts.usages(
            before, update.now, active, by_process, complete, self._sees_all
        )
        result.infos += update.infos
        result.exited += update.exited

    def _look(self, mono: int) -> None:
        """Check now and then if all processes are visible: a mount's options may change."""
        if mono >= self._next_view:
            before, sees_all = self._processes.shortage, self._processes.shows_all()
            if self._processes.shortage is before:
                self._next_view, self._sees_all = mono + VIEW_INTERVAL, sees_all

    def _read_events(self) -> ProcessEvents:
        events = ProcessEvents()
        for channel in (self._fork_events, self._exit_events):
            if channel is not None:
                channel.drain(events)
        return events

    def _read_clocks(self, clocks: ClockList, update: LifecycleUpdate) -> CpuDeltas:
        moved = clocks.moved()
        if self._exit_events is not None and any(value == GONE for _, value in moved):
            # The kernel reports an exit before it frees the pid.
            self._add_events(update.events, update.found)
        return moved

    def _add_charged(self, update: LifecycleUpdate) -> None:
        charged = sum(
            one.amount
            for one in update.charges
            if self._sum_has(one.cgroup, kernel=one.row is not None and one.row.kernel)
        )
        self._idle_scanner.charged(charged)
        self._covered = 10 * charged >= 9 * sum(one.amount for one in update.charges)

    def _in_sum(self, row: TrackedProcess) -> bool:
        """True if the kernel's sum of CPU time includes the work of a process."""
        text = row.cgroup_text
        if not (text or self._idle_scanner.covers_kernel):
            text = self._processes.cgroup(row.consumer.pid) or ""
        return self._sum_has(text, kernel=row.kernel)

    def _sum_has(self, cgroup_text: str, *, kernel: bool) -> bool:
        """True if the sum includes work in a cgroup, or of a ``kernel`` thread."""
        total = self._idle_scanner.total
        return total is not None and (
            total.covers_kernel or not (kernel or total.omits(cgroup_text))
        )

    def _capacity(self, start: int, end: int) -> int:
        """The CPU time that was available between two monotonic times."""
        return sum(self._topology.capacity().values()) * (end - start)

    def _first_poll(self) -> UsageBatch:
        """Find the processes; work before the end of this poll is not charged."""
        events = self._read_events()
        now = self._clock.now()
        found = self._scanner.scan(now.mono, events, events_complete=self._fork_events is not None)
        self._lifecycle.process(LifecycleUpdate(events, found, None, now), ())
        # The scan took some time; all accounts begin now.
        now = self._before = self._clock.now()
        self._look(now.mono)
        self._accounts.update_busy(self._accounts.sample_busy(), now.mono)
        self._table.rebase()
        self._idle_scanner.read()
        self._idle_scanner.swept(now.mono, scanned=True)
        self._measure_cgroups()
        self._excess.settle()
        return UsageResults().batch(len(self._table), self._scanner.failures)

    def close(self) -> None:
        for part in (
            self._fork_events,
            self._exit_events,
            self._cgroups,
            self._idle_scanner.total,
            self._times,
            self._counters,
            self._busy,
            self._processes,
        ):
            if part is not None:
                part.close()

    def _add_events(self, events: ProcessEvents, found: ScanResult) -> None:
        """Add the events since the last read of them in this poll."""
        later = self._read_events()
        self._wake_exited(later)
        events.merge(later)
        found.born |= later.born.keys()

    def _wake_exited(self, events: ProcessEvents) -> None:
        """Read the clocks of exited processes in this poll, also those of idle ones."""
        self._table.wake(events.exits.keys() | events.exited)

    # ------------------------------------------------------------------------------ cgroups

    def _measure_cgroups(self) -> bool:
        """Read the clocks of the known cgroups, as far as the limit of cost permits."""
        cgroups = self._cgroups
        if cgroups is None:
            return False
        now = self._clock.monotonic()
        if now < self._next_cgroup_read:
            return False
        began = self._read_clock(OWN_THREAD_CLOCK)  # on a busy host, elapsed time would be more
        change, gone = cgroups.read()
        self._excess.measured(change)
        for cgroup, above in gone.items():
            self._excess.folded(cgroup, above)
            if cgroup in self._remainders:
                self._remainders.remove(cgroup)
                self._removed.append(Remainder(cgroup))
        cost = self._read_clock(OWN_THREAD_CLOCK) - began
        self._next_cgroup_read = now + CGROUP_COST_DIVISOR * cost
        return True

    def _settle_cgroups(self, update: LifecycleUpdate, measured: bool) -> None:
        cgroups = self._cgroups
        if cgroups is None:
            self._churn = False
            if update.now.mono >= self._next_cgroup_read:  # clocks count from their opening
                self._cgroups, self._idle_scanner.total = self._open_cgroups()
                self._next_cgroup_read = 0 if self._cgroups else update.now.mono + VIEW_INTERVAL
            return
        update.exited.extend(self._removed)
        self._removed.clear()
        ended: dict[str, list[EndedCharge]] = {}
        for text, some in update.ended.items():
            covering = self._covering(text)
            if covering is not None:
                ended.setdefault(covering, []).extend(some)
        for text, amount in _sum_by_cgroup(update.charges).items():
            covering = self._covering(text)
            if covering is not None:
                self._excess.charged(covering, amount)
        self._settle_postponed(update)
        self._settle_placed(update, measured)
        if measured:
            self._churn = False
            for cgroup, excess in self._due_excess(update).items():
                self._charge_excess(update, cgroup, excess, ended.get(cgroup, ()))
            for path in self._new_cgroups:
                cgroups.add(path)
            self._new_cgroups.clear()

    def _due_excess(self, update: LifecycleUpdate) -> dict[str, int]:
        """The excess of each cgroup that is charged now: no more than time that nobody has.

        An excess may be of a time that was unclaimed. With hidden processes it is theirs, and
        nobody is charged for it.
        """
        due = self._excess.settle()
        if not self._sees_all:
            return {}
        uncharged = self._accounts.uncharged
        if uncharged is None or not due:
            return due
        room = max(0, uncharged - sum(charge.amount for charge in update.charges))
        if sum(due.values()) <= room:
            return due
        parts = dict(zip(due, split(room, list(due.values())), strict=True))
        for cgroup, part in parts.items():
            self._excess.charged(cgroup, part - due[cgroup])  # it waits
        return {cgroup: part for cgroup, part in parts.items() if part}

    def _settle_postponed(self, update: LifecycleUpdate) -> None:
        """Exclude the time of young processes, which will be charged, from the excess."""
        for sign, postponed in ((-1, self._postponed), (1, update.postponed)):
            for text, amount in postponed.items():
                if (covering := self._covering(text)) is not None:
                    self._excess.charged(covering, sign * amount)
        self._postponed = update.postponed

    def _settle_placed(self, update: LifecycleUpdate, measured: bool) -> None:
        """Charge unseen processes, as of exec probes, to the cgroups whose clocks have the work.

        Work that no known clock has at the next read was in a cgroup that is gone: its deficit
        would hide as much work of others.
        """
        if measured:
            for (cgroup, final), amount in self._placed.items():
                moved = {} if final else self._excess.misplaced(cgroup, amount)
                self._excess.forgiven(cgroup, amount - sum(moved.values()))
            self._placed.clear()
        charges = enumerate(update.charges if update.placed else ())
        placed = [one for one in charges if one[1].payer in update.placed]
        placed.sort(key=lambda one: update.placed[one[1].payer][0])  # runtimes work in their own
        homes: dict[Payer, str] = {}
        for at, charge in placed:
            if (covering := self._covering(charge.cgroup)) is None:
                continue
            new = update.placed[charge.payer][0] == 2  # a cgroup that no known clock has
            moves = measured and not new
            parts = dict(self._excess.misplaced(covering, charge.amount) if moves else {})
            nameless = parts.pop("/", 0)  # of cgroups that are gone, in version 1
            left = charge.amount - sum(parts.values())
            key = covering, measured or new
            self._placed[key] = self._placed.get(key, 0) + left - nameless
            home = max(parts, key=parts.__getitem__, default="")
            if parts and 10 * parts[home] >= 9 * charge.amount:
                left += parts.pop(home)
                homes[charge.payer] = home
            update.charges[at] = charge._replace(amount=left)
            for cgroup, part in parts.items():
                self._charge_remainder(update, cgroup, part)
        self._describe_in(update, homes)

    def _describe_in(self, update: LifecycleUpdate, homes: Mapping[Payer, str]) -> None:
        """Give the unseen processes of new accounts the groups of known cgroups."""
        for at, info in enumerate(update.infos):
            if self._cgroups is not None and info.payer in homes:
                text = self._cgroups.text_of(homes[info.payer])
                groups, principal = self._principals.describe(text, update.placed[info.payer][1])
                update.infos[at] = replace(info, groups=groups, principal=principal)

    def _charge_excess(
        self, update: LifecycleUpdate, cgroup: str, excess: int, ended: Sequence[EndedCharge]
    ) -> None:
        """Charge the excess to exited processes by their memory, as the cost of their exits.

        If an unreported process may have run, charge it to the cgroup's remainder.
        """
        unreported = self._exit_events is None or update.events.lost or update.tails_unknown
        if ended and not unreported:
            parts = split(excess, [one.weight for one in ended])
            for (charge, _), part in zip(ended, parts, strict=True):
                if part:
                    update.charges.append(CpuCharge(charge.payer, part, cgroup, charge.row))
            return
        self._charge_remainder(update, cgroup, excess)

    def _charge_remainder(self, update: LifecycleUpdate, cgroup: str, amount: int) -> None:
        """Charge the work of unseen processes in a cgroup."""
        payer = Remainder(cgroup)
        if cgroup not in self._remainders:
            self._remainders.add(cgroup)
            text = "" if self._cgroups is None else self._cgroups.text_of(cgroup)
            groups, _ = self._principals.describe(text, None)
            update.infos.append(PayerInfo(payer, "(unseen)", groups))
        update.charges.append(CpuCharge(payer, amount, cgroup))

    def _covering(self, text: str) -> str | None:
        """The known cgroup whose clock includes processes with this cgroup text.

        Processes without a known cgroup count with the root, or with "" if it has no clock.
        """
        if self._cgroups is None:
            return None
        if not text:
            return self._cgroups.covering("/") or ""
        path = self._cgroups.path_in(text)
        covering = self._cgroups.covering(path)
        if path is not None and self._cgroups.wanted(path):
            self._new_cgroups.add(path)
        return covering

    # --------------------------------------------------------------------------- descriptions

    def _redescribe(self, update: LifecycleUpdate) -> None:
        """Describe processes again: after an exec, after `RESCAN_INTERVAL`, and in turn."""
        # The processes that this poll has found were described after these events.
        again = set(self._table.rows(update.events.execed - update.tracked))
        while self._recent and self._recent[0][0] <= update.now.mono:
            row = self._recent.popleft()[1]
            again.add(row)
            self._audited.append(row)
        if update.found.scanned:
            for _ in range(min(AUDIT_BATCH, len(self._audited))):
                row = self._audited.popleft()
                if row.clock_list is not None:
                    again.add(row)
                    self._audited.append(row)
        for row in again:
            if row.clock_list is not None and row.info is not None:
                before = row.cgroup_text
                self._lifecycle.describe(update, row)
                self._note_move(before, row.cgroup_text)
        for charge in update.charges:
            if charge.row is not None and not charge.row.reviewed:
                charge.row.reviewed = True
                self._recent.append((update.now.mono + RESCAN_INTERVAL, charge.row))

    def _note_move(self, old: str, new: str) -> None:
        """Correct the charges of the former cgroup of a process that has moved."""
        if old != new:
            was, now = self._covering(old), self._covering(new)
            if was is not None and now is not None:
                self._excess.moved(was, now)


def _sum_by_cgroup(charges: Iterable[CpuCharge]) -> dict[str, int]:
    """The nanoseconds of each cgroup text."""
    total: dict[str, int] = {}
    for charge in charges:
        total[charge.cgroup] = total.get(charge.cgroup, 0) + charge.amount
    return total
