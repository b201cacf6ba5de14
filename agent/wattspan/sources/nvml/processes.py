"""Usage of a GPU by its processes, from utilisation samples and process lists.

A sample is the percentage of its period in which a process kept the GPU busy. It covers the time
back to the same process's sample before it; if that is further away than one and a half periods,
periods without use (which NVML omits) lie between, and it covers one period only. The period is
learned from the samples: the lower quartile of the distances between one process's samples. The
covered times are cut at the edges of each usage record.

Busy time of the device beyond the sum of its processes is unclaimed. The device's figure trails
the processes' by up to a second, so that it is short by as much when work begins as it is long
when work ends: a shortage is remembered, for at most one second's worth, and set off against a
later excess.

NVML knows processes by pid. Inside a pid namespace it translates the pids that it can and passes
on the rest unchanged: such a number may belong to another process here. In a namespace, only pids
that are in a list of running processes as well are accepted.

MPS: clients share the context of a server, which the driver lists as a process too. The use is
that of the clients: samples of the server are dropped where clients have samples, and otherwise
divided equally among the clients, which the usage marks as an assumption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.attribution.parts import REST
from wattspan.model import MILLISECOND, SECOND, Consumer, Instant, PartUsage, Payer, Usage
from wattspan.ports import Clock, ProcessDirectory
from wattspan.sources.gpu.calls import NOT_FOUND, GpuCalls

MAX_SAMPLE_PERIOD = SECOND
"""NVML's sample periods reach from a sixth of a second to a second, by product."""

INITIAL_SAMPLE_PERIOD = 500 * MILLISECOND
MIN_LAG = 200 * MILLISECOND
MIN_SLICE = 50 * MILLISECOND
"""Shortest period between samples with a record of its own."""

OBSERVATION_WINDOW = 2 * SECOND
"""Validity of one reading of the device's utilisation; afterwards its use is unknown."""


class ProcessSample(NamedTuple):
    """``percent`` of the GPU's time went to ``pid`` (``payer``, if it is known) until ``mono``."""

    mono: int
    pid: int
    payer: Payer | None
    percent: int


class UtilisationInterval(NamedTuple):
    """``percent`` of the time from ``begin`` to ``end``, on the monotonic clock."""

    begin: int
    end: int
    payer: Payer | None
    percent: int

    def within(self, begin: int, end: int) -> int:
        """The nanoseconds spent inside the given bounds."""
        inside = min(end, self.end) - max(begin, self.begin)
        return max(0, inside) * self.percent // 100


class UsageMeter:
    """The usage of one GPU as a row of records, each beginning where the one before it ended."""

    def __init__(self, resource: str, start: Instant) -> None:
        self._resource = resource
        self._end = start
        self._distances: deque[int] = deque(maxlen=64)  # between samples of one busy process
        self.step = INITIAL_SAMPLE_PERIOD
        """The distance between the samples of one process."""
        self._last_sample: dict[int, int] = {}
        self._intervals: list[UtilisationInterval] = []
        self._device: list[UtilisationInterval] = []
        self._observed_at = start.mono
        self._shortage = 0

    @property
    def lag(self) -> int:
        """The time after which all samples that cover a moment have arrived."""
        return min(max(2 * self.step, MIN_LAG), MAX_SAMPLE_PERIOD)

    def observe_device(self, mono: int, percent: int) -> None:
        """The device was ``percent`` busy since the last reading.

        After a longer pause its use is unknown: all of it may have been in use.
        """
        begin, self._observed_at = self._observed_at, mono
        if mono > begin:
            known = mono - begin <= OBSERVATION_WINDOW
            self._device.append(UtilisationInterval(begin, mono, None, percent if known else 100))

    def add_samples(self, samples: list[ProcessSample]) -> None:
        for sample in sorted(samples):
            last = self._last_sample.get(sample.pid)
            if last is not None and sample.mono <= last:
                continue
            self._last_sample[sample.pid] = sample.mono
            begin = sample.mono - self._covered_time(sample.mono, last)
            self._intervals.append(
                UtilisationInterval(begin, sample.mono, sample.payer, sample.percent)
            )

    def _covered_time(self, mono: int, last: int | None) -> int:
        if last is not None:
            distance = mono - last
            if distance <= MAX_SAMPLE_PERIOD * 3 // 2:
                self._distances.append(distance)
                quartile = sorted(self._distances)[len(self._distances) // 4]
                self.step = min(quartile, MAX_SAMPLE_PERIOD)
            if distance * 2 <= self.step * 3:
                return distance
        return self.step

    def usages(
        self,
        end: Instant,
        present: frozenset[Payer],
        *,
        named: bool,
        guessed: frozenset[Payer] = frozenset(),
    ) -> list[Usage]:
        """The records up to ``end``; none if that is not after the records before.

        ``guessed`` are MPS clients among which the use of their server was divided. ``named``:
        the driver distinguishes processes. Otherwise all busy time of the device is unclaimed.
        Between processes that share the GPU there is a record for each period of the samples: their
        shares differ from one to the next.
        """
        start = self._end
        if end.mono <= start.mono:
            return []
        spent, unclaimed = self._charge(start.mono, end.mono)
        busy = sum(interval.within(start.mono, end.mono) for interval in self._device)
        claimed = sum(spent.values()) + unclaimed
        if named:
            excess = busy - claimed - self._shortage
            self._shortage = min(max(0, -excess), MAX_SAMPLE_PERIOD)
            unclaimed += max(0, excess)
        else:
            unclaimed += max(0, busy - claimed)
        slices = [(end, spent)]
        if len(spent) > 1 and not unclaimed:
            slices = self._slices(start, end)
        self._end = end
        self._forget(end.mono)
        usages = []
        for until, part in slices:
            usage = Usage(
                resource=self._resource,
                start=start,
                end=until,
                spent=part,
                unclaimed=unclaimed,
                capacity=until.mono - start.mono,
                present=present,
            )
            usages.append(_with_guessed(usage, guessed))
            start = until
        return usages

    def restart(self, start: Instant) -> None:
        """Forget everything before ``start``, up to which other records have been made."""
        self._end, self._observed_at, self._shortage = start, start.mono, 0
        self._forget(start.mono)

    def _slices(self, start: Instant, end: Instant) -> list[tuple[Instant, dict[Payer, int]]]:
        """The ends of the periods of samples, and the busy time of each payer in them.

        A period without use is added to its neighbour, because the energy counter may lag.
        """
        stamps = {each.end for each in self._intervals if start.mono < each.end < end.mono}
        slices: list[tuple[Instant, dict[Payer, int]]] = []
        since = start.mono
        for stamp in (*sorted(stamps), end.mono):
            if stamp - since < MIN_SLICE and stamp != end.mono:
                continue
            spent, _ = self._charge(since, stamp)
            after = stamp - start.mono
            at = Instant(stamp, start.wall + after, start.asleep)
            if slices and not (spent and slices[-1][1]):
                slices[-1] = at, slices[-1][1] or spent
            else:
                slices.append((at, spent))
            since = stamp
        slices[-1] = end, slices[-1][1]
        return slices

    def _charge(self, begin: int, end: int) -> tuple[dict[Payer, int], int]:
        """The busy time of each payer between two times, and that of unknown processes."""
        spent: dict[Payer, int] = {}
        unnamed = 0
        for interval in self._intervals:
            part = interval.within(begin, end)
            if interval.payer is None:
                unnamed += part
            elif part:
                spent[interval.payer] = spent.get(interval.payer, 0) + part
        return spent, unnamed

    def _forget(self, before: int) -> None:
        self._intervals = [interval for interval in self._intervals if interval.end > before]
        self._device = [interval for interval in self._device if interval.end > before]
        horizon = before - 2 * MAX_SAMPLE_PERIOD
        self._last_sample = {pid: mono for pid, mono in self._last_sample.items() if mono > horizon}


def _with_guessed(usage: Usage, guessed: frozenset[Payer]) -> Usage:
    """The usage with a part of its own for payers whose shares among each other are a guess."""
    together = {payer: spent for payer, spent in usage.spent.items() if payer in guessed}
    if len(together) < 2:
        return usage
    others = {payer: spent for payer, spent in usage.spent.items() if payer not in guessed}
    return replace(
        usage,
        parts=(
            PartUsage(_MPS_PART, 0, together, users_guessed=True),
            PartUsage(REST, 1, others, usage.unclaimed, usage.present),
        ),
    )


_MPS_PART = "mps"
MPS_SERVER = "nvidia-cuda-mps"
"""The kernel's name of the server, up to 15 bytes."""

UTILISATION = "process utilisation"
_MPS_CALL = "nvmlDeviceGetMPSComputeRunningProcesses"
_LIST_CALLS = {
    "compute processes": "nvmlDeviceGetComputeRunningProcesses",
    "graphics processes": "nvmlDeviceGetGraphicsRunningProcesses",
    "MPS processes": _MPS_CALL,
}
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode for it
_TICK = SECOND // 100  # USER_HZ, the unit of start times in /proc
_CLOCK_STEP = 50 * MILLISECOND  # the wall clock moved against the monotonic one: it was set
_MICROSECOND = 1_000
_MAX_FUTURE = SECOND


def in_nested_pid_namespace(proc: Path = Path("/proc")) -> bool:
    """True if pids here are not the host's, or if that is unknown."""
    try:
        return (proc / "self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE
    except OSError:
        return True


class Holders(NamedTuple):
    """The processes with a context, and their number, which includes those without a payer."""

    payers: frozenset[Payer]
    number: int


def _pids_in(entries: Iterable[Any] | None) -> set[int]:
    return {int(entry.pid) for entry in entries or ()}


class GpuProcesses:
    """The processes of one GPU, as consumers."""

    def __init__(
        self, calls: GpuCalls, clock: Clock, directory: ProcessDirectory, *, nested: bool
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._directory = directory
        self.nested = nested
        now = clock.now()
        self._offset = now.wall - now.mono
        self._seen = now.wall // _MICROSECOND
        self._outdated = 0  # stamps up to here may be from before the clock was set back
        self._listed: frozenset[int] = frozenset()
        self._known: dict[int, Consumer] = {}
        self._servers: frozenset[int] = frozenset()  # of MPS, with clients
        self._clients: tuple[int, ...] = ()
        self._sampled: set[int] = set()  # clients with samples of their own
        self._turn = 0  # of the clients in the division of a server's sample
        self.misdated = 0  # samples of the last read with impossible stamps

    def list_holders(self) -> frozenset[Payer]:
        """The processes with a context on the GPU now, from all three process lists."""
        lists = {
            name: _pids_in(self._calls.ask_list(what, name)) for what, name in _LIST_CALLS.items()
        }
        self._keep_known(set().union(*lists.values()))
        holders, self._servers = self._holders(lists)
        clients = tuple(sorted(lists[_MPS_CALL] - self._servers)) if self._servers else ()
        self._clients = clients
        self._sampled.intersection_update(clients)
        return holders.payers

    def list_instances(self, devices: Mapping[int, Iterable[Any]]) -> dict[int, Holders]:
        """The processes of each MIG instance, by the handles of its devices.

        An instance whose processes the driver does not list is absent.
        """
        everything: dict[int, dict[str, set[int]]] = {}
        for instance, handles in devices.items():
            lists: dict[str, set[int]] = {}
            for name in _LIST_CALLS.values():
                for handle in handles:
                    entries, code = self._calls.try_call(name, handle=handle)
                    if code in {None, NOT_FOUND}:
                        lists.setdefault(name, set()).update(_pids_in(entries))
            if lists:
                everything[instance] = {
                    name: lists.get(name, set()) for name in _LIST_CALLS.values()
                }
        self._keep_known(set().union(*(s for lists in everything.values() for s in lists.values())))
        self._servers, self._clients = frozenset(), ()
        return {instance: self._holders(lists)[0] for instance, lists in everything.items()}

    def _keep_known(self, pids: set[int]) -> None:
        for pid in self._known.keys() - pids - self._listed:
            del self._known[pid]
        self._listed = frozenset(pids)

    def _holders(self, lists: Mapping[str, set[int]]) -> tuple[Holders, frozenset[int]]:
        """The processes of some lists, and the MPS servers, which are none of them."""
        found = {pid: self._directory.identify(pid) for pid in set().union(*lists.values())}
        self._known.update({pid: payer for pid, payer in found.items() if payer})
        servers = frozenset(pid for pid, payer in found.items() if self._serves(pid, payer))
        if not lists[_MPS_CALL] - servers:
            servers = frozenset()  # without clients it has the context for itself
        payers = frozenset(payer for pid, payer in found.items() if payer and pid not in servers)
        return Holders(payers, len(found) - len(servers)), servers

    def _serves(self, pid: int, payer: Consumer | None) -> bool:
        """True for an MPS server; a server that cannot be read remains one."""
        info = self._directory.describe(payer) if payer else None
        return pid in self._servers if info is None else info.command.startswith(MPS_SERVER)

    @property
    def any_listed(self) -> bool:
        """True if the newest lists have a process."""
        return bool(self._listed)

    @property
    def guessed(self) -> frozenset[Payer]:
        """The clients of an MPS server among which its samples are divided."""
        if self._sampled:
            return frozenset()
        return frozenset(self._known[pid] for pid in self._clients if pid in self._known)

    def samples(self) -> list[ProcessSample] | None:
        """The samples since the last call; None if this GPU does not distinguish its processes."""
        self._follow_wall_clock(self._clock.now())
        entries = self._calls.ask_list(UTILISATION, "nvmlDeviceGetProcessUtilization", self._seen)
        if entries is None:
            return None
        now = self._clock.now()
        samples = []
        self.misdated = 0
        newest = self._seen
        for entry in entries:
            stamp = int(entry.timeStamp)
            if stamp <= self._seen:
                continue
            if stamp * _MICROSECOND > now.wall + _MAX_FUTURE or entry.smUtil > 100:
                self.misdated += stamp > self._outdated
                continue
            newest = max(newest, stamp)
            samples.append(self._sample(entry, stamp * _MICROSECOND - self._offset, now.asleep))
        self._seen = newest
        return self._without_servers(samples)

    def _without_servers(self, samples: list[ProcessSample]) -> list[ProcessSample]:
        """The samples with those of MPS servers dropped, or divided among the clients."""
        if not self._clients:
            return samples
        self._sampled.update(sample.pid for sample in samples if sample.pid in self._clients)
        kept = [sample for sample in samples if sample.pid not in self._servers]
        if self._sampled:
            return kept
        for sample in samples:
            if sample.pid in self._servers:
                kept += self._divided(sample)
        return kept

    def _divided(self, sample: ProcessSample) -> list[ProcessSample]:
        """A server's sample in whole percents for each client; the rest goes to each in turn."""
        count = len(self._clients)
        part, rest = divmod(sample.percent, count)
        self._turn += 1
        return [
            ProcessSample(
                sample.mono, pid, self._known.get(pid), part + ((place + self._turn) % count < rest)
            )
            for place, pid in enumerate(self._clients)
        ]

    def _follow_wall_clock(self, now: Instant) -> None:
        """Follow a step of the wall clock, which stamps the samples.

        Otherwise a clock set back by an hour would hide an hour of samples.
        """
        offset = now.wall - now.mono
        moved = offset - self._offset
        if abs(moved) > _CLOCK_STEP:
            # The clock may be set again while the driver still has samples of the previous time.
            self._outdated = max(self._outdated, (now.wall - moved) // _MICROSECOND)
            self._seen += moved // _MICROSECOND
        self._offset = offset

    def _sample(self, entry: Any, mono: int, asleep: int) -> ProcessSample:
        pid = int(entry.pid)
        payer: Payer | None = None
        if not self.nested or pid in self._listed:
            payer = self._identify(pid, mono + asleep)
        return ProcessSample(mono, pid, payer, int(entry.smUtil))

    def _identify(self, pid: int, since_boot: int) -> Consumer | None:
        """The process that had ``pid`` at ``since_boot`` ns, even if it has ended since."""
        consumer = self._directory.identify(pid)
        if consumer is not None and consumer.started * _TICK <= since_boot + 2 * _TICK:
            self._known[pid] = consumer
            return consumer
        return self._known.get(pid)

    def retry(self) -> None:
        """Request refused fields again now: the mode of the GPU has changed."""
        self._calls.retry()

    @property
    def named(self) -> bool:
        """True unless the driver has refused to distinguish processes."""
        return self._calls.refused(UTILISATION) is None

    @property
    def refusal(self) -> int | None:
        """The code with which NVML refused to distinguish processes; None if it did not."""
        code = self._calls.refused(UTILISATION)
        return None if code == NOT_FOUND else code
