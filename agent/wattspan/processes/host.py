"""Assembly of the process sources of this host, and its capabilities with remedies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar
from uuid import UUID

from wattspan.clock import SystemClock
from wattspan.model import SECOND, NamePolicy
from wattspan.ports import SourceError
from wattspan.processes.cgroups import (
    CgroupHierarchy,
    find_hierarchy,
    is_host_root,
    open_cgroup_times,
)
from wattspan.processes.cpu_socket_times import SocketTimes
from wattspan.processes.cpus import (
    BusyClock,
    CpuacctBusyClock,
    IdleStateBusyClock,
    ProcStatBusyClock,
)
from wattspan.processes.kernel_events import open_process_connector, open_taskstats
from wattspan.processes.metadata import HostProcesses
from wattspan.processes.performance_counters import ProcessCounters
from wattspan.processes.principals import PrincipalResolver
from wattspan.processes.procfs import ProcFs
from wattspan.processes.source import CpuUsageSource
from wattspan.util.cpu_topology import CpuTopology
from wattspan.util.files import file_text


@dataclass(frozen=True, slots=True)
class Capability:
    """One means of observing processes; ``detail`` is the consequence of having it or not."""

    name: str
    active: bool
    detail: str
    remedy: str = ""


SAFETY_SCAN = 10 * SECOND
"""Interval of full scans of the process table if the kernel reports births."""

_PROCFS, _SYSFS, _CGROUPS = Path("/proc"), Path("/sys"), Path("/sys/fs/cgroup")
_T = TypeVar("_T")


class HostUsage(NamedTuple):
    """The usage source and the process directory of this host, and their capabilities."""

    usage: CpuUsageSource
    directory: HostProcesses
    capabilities: tuple[Capability, ...]


_IN_CONTAINERS = ("run/systemd/container", ".dockerenv", "run/.containerenv")
_MACHINE_IDS = ("etc/machine-id", "var/lib/dbus/machine-id")


def host_ids(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The `host.id` of this host: 32 digits of the machine, and a UUID of the board, for root only.

    A container may have a machine id of its own. Some clouds write the UUID in bytes of the
    other order.
    """
    inside = any((root / name).exists() for name in _IN_CONTAINERS)
    files = () if inside or "KUBERNETES_SERVICE_HOST" in environ else _MACHINE_IDS
    found = {file_text(root / name).lower() for name in files} - {""}
    with suppress(ValueError):
        board = UUID(file_text(root / "sys/class/dmi/id/product_uuid"))
        found |= {str(board), str(UUID(bytes=board.bytes_le))}
    return frozenset(found)


def open_processes(
    clock: SystemClock,
    *,
    sysfs: Path = _SYSFS,
    events: Literal["auto"] | bool = "auto",
    counters: ProcessCounters | None = None,
    names: NamePolicy = NamePolicy.COMMAND,
    principals: PrincipalResolver | None = None,
) -> HostUsage:
    """The usage source and the process directory of this host.

    ``sysfs`` shows the sockets of CPUs, those of an emulated host for example. ``events``:
    ``"auto"`` uses the reports of the kernel if permitted, True requires them (SourceError), False
    does not use them.
    """
    possible = CpuTopology(_SYSFS).possible
    exit_events, exit_error = _try_open(lambda: open_taskstats(possible), events)
    fork_events, fork_error = _try_open(
        lambda: open_process_connector(exits=exit_events is None), events
    )
    if events is True and (fork_error or exit_error):
        for channel in (fork_events, exit_events):
            if channel is not None:
                channel.close()
        raise SourceError(
            f"Cannot have process events: {fork_error or exit_error}. "
            "Grant CAP_NET_ADMIN in the initial user and pid namespaces, or set events to auto."
        )
    principals = principals or PrincipalResolver.of_host()
    topology = CpuTopology(sysfs)
    sockets = len(topology.sockets)
    times, times_error = (
        _try_open(lambda: SocketTimes(topology, possible), events) if sockets > 1 else (None, None)
    )
    hierarchy = find_hierarchy(_CGROUPS)
    busy = open_host_busy_clock(_PROCFS, _SYSFS, hierarchy)
    processes = ProcFs()
    source = CpuUsageSource(
        clock,
        processes,
        clock.read_cpu_clock,
        topology,
        busy=busy,
        fork_events=fork_events,
        exit_events=exit_events,
        cgroups=partial(open_cgroup_times, _CGROUPS, principals.owner_of),
        times=times,
        counters=counters,
        scan_every=SECOND if fork_events is None else SAFETY_SCAN,
        names=names,
        principals=principals,
    )
    capabilities: tuple[Capability, ...] = (
        _capability(
            "processes",
            "the processes of all users are visible" if processes.shows_all() else None,
            "other processes are hidden, so their work is unattributed",
            "Grant CAP_SYS_PTRACE, mount procfs with hidepid=0 (ProtectProc=default), or run the "
            "agent in the host's pid namespace.",
        ),
        _capability(
            "process events",
            "the kernel reports every fork, exec and exit" if fork_events else None,
            f"new processes are found by the pids given out ({fork_error})",
            _NETLINK_REMEDY,
        ),
        _capability(
            "exit accounting (taskstats)",
            "work shorter than a poll is charged to its process" if exit_events else None,
            "work shorter than a poll is charged to "
            f"{'its cgroup' if hierarchy else 'no process'} ({exit_error})",
            _NETLINK_REMEDY,
        ),
        _capability(
            "cgroup clocks",
            f"{hierarchy.name} bounds the work of each cgroup" if hierarchy else None,
            "work of processes never seen is unattributed",
            "Make /sys/fs/cgroup readable (v2, or v1 with the cpuacct controller): the agent looks "
            "for it every 10 s.",
        ),
        _capability(
            "busy time",
            f"from {busy.name}, in steps of {_step(busy.step)}" if busy else None,
            "the amount of unattributed work is unknown",
            "Make /proc/stat of the host readable (ProcSubset=all, and not that of lxcfs).",
        ),
    )
    socket_times = _capability(
        "socket times (eBPF)",
        "the scheduler counts the work of each process on each socket" if times else None,
        f"the socket of a process is sampled and fitted to busy times ({times_error})",
        "Grant CAP_BPF and CAP_PERFMON and allow bpf(2), on Linux 5.8 or newer.",
    )
    if sockets > 1:
        capabilities = (*capabilities, socket_times)
    return HostUsage(source, HostProcesses(ProcFs(), names, principals), capabilities)


_NETLINK_REMEDY = (
    "Grant CAP_NET_ADMIN and allow AF_NETLINK, in the initial user and pid namespaces."
)


def _capability(name: str, present: str | None, missing: str, remedy: str) -> Capability:
    """``present`` describes the capability; None if it is missing."""
    if present is None:
        return Capability(name, False, missing, remedy)
    return Capability(name, True, present)


def _step(nanoseconds: int) -> str:
    units = {1_000_000: "ms", 1000: "us", 1: "ns"}
    unit = next(length for length in units if nanoseconds >= length)
    return f"{nanoseconds // unit} {units[unit]}"


def _try_open(
    opener: Callable[[], _T], events: Literal["auto"] | bool
) -> tuple[_T | None, str | None]:
    if events is False:
        return None, "turned off"
    try:
        return opener(), None
    except OSError as error:
        return None, error.strerror or str(error)


def open_host_busy_clock(
    procfs: Path, sysfs: Path, hierarchy: CgroupHierarchy | None
) -> BusyClock | None:
    """The most precise busy time of all CPUs of the host; None without any.

    lxcfs mounts a file over the ``stat`` of a container: it has the CPUs of its cpuset only.
    """
    with suppress(OSError):  # a file that is missing is no file of lxcfs
        if (procfs / "stat").stat().st_dev != procfs.stat().st_dev:
            return None
    return refined_busy_clock(open_busy_clock(procfs, hierarchy), sysfs)


def open_busy_clock(procfs: Path, hierarchy: CgroupHierarchy | None) -> BusyClock | None:
    """The most precise source of busy time on this host; None without any."""
    try:
        if hierarchy is not None and not hierarchy.unified and is_host_root(hierarchy):
            return CpuacctBusyClock(hierarchy.root)
    except OSError:
        pass
    try:
        return ProcStatBusyClock(procfs)
    except OSError:
        return None


def refined_busy_clock(busy: BusyClock | None, sysfs: Path) -> BusyClock | None:
    """``busy``, refined by the CPUs' idle states if it is coarse and the host has them."""
    if not isinstance(busy, ProcStatBusyClock):
        return busy
    try:
        return IdleStateBusyClock(sysfs, busy)
    except OSError:
        return busy
