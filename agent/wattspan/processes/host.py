"""Puts the host's usage source together from what this kernel permits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

from wattspan.model import SECOND, NamePolicy
from wattspan.ports import Clock, SourceError
from wattspan.processes import capabilities
from wattspan.processes.cgroups import (
    CgroupClocks,
    CgroupHierarchy,
    TotalCpuClock,
    find_hierarchy,
    is_host_root,
)
from wattspan.processes.cpus import BusyClock, CpuacctBusyClock, CpuTopology, ProcStatBusyClock
from wattspan.processes.identity import HostProcesses
from wattspan.processes.kernel_events import ProcessConnector, TaskStats
from wattspan.processes.procfs import ProcFs
from wattspan.processes.source import CpuUsageSource
from wattspan.processes.table import ReadClock

SAFETY_SCAN = 10 * SECOND
"""How often the table is scanned where the kernel reports births anyway."""

_REAL_SYSFS = Path("/sys")
_T = TypeVar("_T")


class HostClock(Clock, Protocol):
    """A clock that reads the kernel's CPU clocks as well: ``wattspan.clock.SystemClock``."""

    @property
    def read_cpu_clock(self) -> ReadClock: ...


class HostUsage(NamedTuple):
    """Who used the CPUs of this host, and who is who."""

    usage: CpuUsageSource
    directory: HostProcesses


def open_processes(
    clock: HostClock,
    *,
    procfs: Path = Path("/proc"),
    sysfs: Path = _REAL_SYSFS,
    cgroup: Path = Path("/sys/fs/cgroup"),
    events: Literal["auto"] | bool = "auto",
    names: NamePolicy = NamePolicy.COMMAND,
) -> HostUsage:
    """The usage source and the process directory of this host.

    ``sysfs`` tells only which CPU sits in which socket, so an emulated host may bring its own.
    ``events``: ``"auto"`` uses the kernel's
    reports where they are permitted, True insists (SourceError), False does without.
    """
    births, births_error = _try_open(ProcessConnector.open, events)
    possible = CpuTopology(_REAL_SYSFS).possible
    finals, finals_error = _try_open(lambda: TaskStats.open(possible), events)
    if events is True and (births_error or finals_error):
        for channel in (births, finals):
            if channel is not None:
                channel.close()
        raise SourceError(
            f"Cannot have process events: {births_error or finals_error}. "
            "Grant CAP_NET_ADMIN in the initial user and pid namespaces, or set events to auto."
        )
    hierarchy = find_hierarchy(cgroup)
    clocks = CgroupClocks(hierarchy) if hierarchy is not None else None
    whole = hierarchy is not None and is_host_root(hierarchy)
    total = TotalCpuClock(hierarchy) if hierarchy is not None and whole else None
    busy = _busy_clock(procfs, hierarchy)
    processes = ProcFs(procfs)
    source = CpuUsageSource(
        clock,
        processes,
        clock.read_cpu_clock,
        CpuTopology(sysfs),
        busy=busy,
        births=births,
        finals=finals,
        cgroups=clocks,
        total=total,
        capabilities=(
            capabilities.visible(processes.stat(1) is not None),
            capabilities.births(births_error),
            capabilities.finals(finals_error, fallback=clocks is not None),
            capabilities.cgroups(clocks.name if clocks is not None else None),
            capabilities.busy(busy.name if busy else None, busy.step if busy else 0),
        ),
        scan_every=SECOND if births is None else SAFETY_SCAN,
        names=names,
    )
    return HostUsage(source, HostProcesses(ProcFs(procfs), names))


def _try_open(
    opener: Callable[[], _T], events: Literal["auto"] | bool
) -> tuple[_T | None, str | None]:
    if events is False:
        return None, "turned off"
    try:
        return opener(), None
    except OSError as error:
        return None, error.strerror or str(error)


def _busy_clock(procfs: Path, hierarchy: CgroupHierarchy | None) -> BusyClock | None:
    try:
        if hierarchy is not None and not hierarchy.unified and is_host_root(hierarchy):
            return CpuacctBusyClock(hierarchy.root)
    except OSError:
        pass
    try:
        return ProcStatBusyClock(procfs)
    except OSError:
        return None
