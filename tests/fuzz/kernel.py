"""Data shown by the kernel and chosen by processes: sysfs, procfs, cgroups, netlink."""

from __future__ import annotations

import contextlib
import ipaddress
import struct
from pathlib import Path
from typing import Any, cast

from testbed.netlink import batch_of

from fuzz.registry import target
from fuzz.supply import Supply, folder, one_line
from wattspan.capper.actuators.cpu import find_packages
from wattspan.ingest.process_lookups import container_id
from wattspan.model import NamePolicy
from wattspan.processes import netlink
from wattspan.processes.cgroup_names import cgroup_paths, names_of
from wattspan.processes.cgroups import (
    CgroupClocks,
    CgroupHierarchy,
    TotalCpuClock,
    find_hierarchy,
)
from wattspan.processes.inspector import ProcessInspector, TcpConnections
from wattspan.processes.kernel_events import (
    ExitLayout,
    ProcessEvents,
    acknowledgement,
    parse_exit,
    record_events,
    record_exits,
)
from wattspan.processes.metadata import HostProcesses, command_of
from wattspan.processes.procfs import ProcFs, parse_stat
from wattspan.processes.scripts import script_of
from wattspan.sources.estimate import busy_ticks
from wattspan.sources.rapl.powercap import PowercapSource
from wattspan.sources.rapl.sysfs import cpu_vendor
from wattspan.testing import ManualClock
from wattspan.util.cpu_topology import (
    CpuTopology,
    parse_cpu_list,
)
from wattspan.util.text import MAX_LABEL

_HEX = b"0123456789abcdef" * 4
_ZONE_FILES = (
    *("name", "energy_uj", "max_energy_range_uj", "enabled"),
    *("constraint_0_name", "constraint_0_power_limit_uw", "constraint_0_max_power_uw"),
    *("constraint_1_name", "constraint_99999999999999999999_name"),
)
_ZONES = (
    *("intel-rapl", "intel-rapl:0", "intel-rapl:0:0", "intel-rapl:0/intel-rapl:0:0"),
    *("intel-rapl:1", "intel-rapl:a", "intel-rapl-mmio:0", "intel-rapl:0:0:0", "dtpm:0"),
    *("intel-rapl/intel-rapl:2", ":", "x:", ":0:", "intel-rapl:0:", "intel-rapl:\N{SNOWMAN}"),
)


def _files(*files: tuple[int, int, bytes]) -> bytes:
    return b"".join(bytes([zone, file, len(content)]) + content for zone, file, content in files)


@target(
    "powercap",
    whose="the kernel and its firmware, or a mounted substitute tree",
    holds="a batch with a domain for each reading, unique ids, counters within their range",
    watched=("wattspan.sources", "wattspan.capper.actuators.cpu"),
    samples=(
        _files((1, 0, b"package-0\n"), (1, 1, b"12345\n"), (1, 2, b"262143328850\n")),
        _files(
            (1, 0, b"package-0\n"),
            (1, 1, b"5\n"),
            (2, 0, b"core\n"),
            (2, 1, b"3\n"),
            (1, 4, b"long_term\n"),
            (1, 5, b"65000000\n"),
            (5, 0, b"psys\n"),
            (5, 1, b"7\n"),
        ),
        _files((4, 0, b"package-1-die-1\n"), (4, 1, b"9"), (6, 0, b"package-0"), (6, 1, b"5")),
    ),
    words=(b"package-", b"-die-", b"dram", b"psys-1", b"9" * 24, b"9" * 200, b"-1", b"long_term"),
)
def powercap(data: bytes) -> None:
    supply = Supply(data)
    with folder() as sysfs:
        root = sysfs / "class/powercap"
        root.mkdir(parents=True)
        while not supply.is_empty:
            zone, kind, content = supply.pick(_ZONES), supply.byte(), supply.chunk()
            path = root / zone / _ZONE_FILES[kind % len(_ZONE_FILES)]
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                if kind >= 240:
                    path.symlink_to(root / supply.pick(_ZONES))  # to a zone, itself or nowhere
                elif kind >= 230:
                    path.mkdir()
                else:
                    path.write_bytes(content * (40 if kind >= 220 else 1))
        clock = ManualClock()
        source = PowercapSource(sysfs, clock)
        for _ in range(2):
            batch = source.read()
            clock.advance(6.0)
            ids = [domain.id for domain in batch.domains]
            assert len(ids) == len(set(ids))
            assert {reading.domain_id for reading in batch.readings} <= set(ids)
            for domain in batch.domains:
                one_line(domain.name, 5000)
            for failure in batch.failures:
                assert str(failure).isprintable(), str(failure)
                assert len(str(failure)) < 6000
            limits = {domain.id: domain.modulus for domain in batch.domains}
            for reading in batch.readings:
                most = limits[reading.domain_id]
                assert 0 <= reading.counter < (2**64 if most is None else most)
        source.close()
        find_packages(sysfs)
        cpu_vendor(sysfs)


_STAT = (
    b"42 (python3) S 1 42 42 0 -1 4194304 5 0 0 0 3 4 0 0 20 0 7 0 12345 1 2 3 "
    b"1 1 0 0 0 0 0 0 0 0 0 0 17 3 0 0 0 0 0 0\n"
)


@target(
    "proc-stat",
    whose="any process, which chooses its name",
    holds="a line's fields, with any name, or ValueError",
    watched=(
        "wattspan.processes.procfs",
        "wattspan.processes.metadata",
        "wattspan.processes.metadata",
    ),
    samples=(_STAT, _STAT.replace(b"python3", b"a) S 1 ("), _STAT.replace(b"S 1", b"S 2")),
    words=(b") (", b"\xff", b"\n", b"kworker/0:1-", b"9" * 30, b"-1"),
)
def proc_stat(data: bytes) -> None:
    try:
        stat = parse_stat(data)
    except ValueError:
        return
    one_line(command_of(stat, _NoProcesses()), 64)
    opening = data.find(b"(")
    comm = data[opening + 1 : data.rfind(b")")]
    assert stat.comm == comm.decode("utf-8", "replace")


class _NoProcesses:
    """The peer is gone."""

    def command_line(self, pid: int) -> bytes | None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@target(
    "command-lines",
    whose="any process, which may overwrite its command line",
    holds="a program's name and the last part of one word, short and printable, or nothing",
    watched=("wattspan.processes.scripts", "wattspan.processes.scripts"),
    samples=(
        b"python3\0python3\0-uW\0x\0/srv/train.py\0--key\0",
        b"torchrun\0/usr/bin/python3\0/usr/bin/torchrun\0--nnodes\x002\0-m\0a.b\0",
        b"sh\0-sh\0-euo\0pipefail\0+x\0--\0job.sh\0",
        b"perl\0perl\0-lne\0print\0",
        b"node\0node\0--require=a\0--no-warnings\0web.js\0",
        b"java\0java\0-Dkey=x\0-cp\0a:b\0-jar\0/opt/a.jar\0",
        b"R\0R\0--no-echo\0--file=fit.R\0--args\0",
        b"work\0gunicorn: worker [a]\0\0\0",
    ),
    words=(b"\0", b"\0--\0", b"\0-m\0", b"\0-c\0", b"=", b"/", b"..", b"\xff", b"\n", b"\0-o\0"),
)
def command_lines(data: bytes) -> None:
    comm, _, line = data.partition(b"\0")
    name = script_of(comm.decode("utf-8", "replace"), line, 64)
    if name is None:
        return
    one_line(name, 64)
    whole = script_of(comm.decode("utf-8", "replace"), line, 2**20) or ""
    told = whole.rpartition(" ")[2]
    shown = "".join(c if c.isprintable() else "?" for c in line.decode("utf-8", "replace"))
    assert told.removeprefix("-") in shown
    assert "/" not in whole


@target(
    "procfs",
    whose="any process, through /proc/PID",
    holds="every described process has a short printable name and groups; no file raises an error",
    watched=("wattspan.processes",),
    samples=(
        bytes([0, len(_STAT)]) + _STAT + b"\1\x14" + b"0::/user.slice/a.scope"[:20],
        bytes([0, len(_STAT)]) + _STAT.replace(b"42 (python3)", b"42 (fifteen_letters)"[:19]),
        b"\3\x08/a b 5 9\2\x0fNSpid:\t42\t7\nUid",
        b"\4\x50"
        + b"  sl  local_address\n   0: 0100007F:10DE 0100007F:0050 01 0:0 0:0 0 1000 0 9 1\n",
    ),
    words=(b"NSpid:\t", b"Uid:\t", b"PPid:\t", b"9" * 30, b"-1", b"\xff", b"0::/", b"\0"),
)
def procfs(data: bytes) -> None:
    supply = Supply(data)
    names = ("stat", "cgroup", "status", "cmdline")
    with folder() as proc:
        (proc / "42").mkdir()
        (proc / "net").mkdir()
        (proc / "loadavg").write_bytes(b"0 0 0 1/2 42\n")
        (proc / "42/stat").write_bytes(_STAT)
        while not supply.is_empty:
            kind, content = supply.byte() % 6, supply.chunk()
            if kind < 4:
                (proc / "42" / names[kind]).write_bytes(content)
            elif kind == 4:
                (proc / "net/tcp").write_bytes(content)
            else:
                (proc / "loadavg").write_bytes(content)
        _look(proc)


def _look(proc: Path) -> None:
    with contextlib.closing(ProcFs(proc)) as processes:
        assert processes.pids() == [42]
        last = processes.last_pid()
        assert last is None or isinstance(last, int)
        for names in NamePolicy:
            directory = HostProcesses(processes, names)
            consumer = directory.identify(42)
            info = directory.describe(consumer) if consumer is not None else None
            if info is None:
                continue
            one_line(info.command, 64)
            for group in info.groups:
                one_line(group.name, MAX_LABEL)
        witness = ProcessInspector(proc)
        living = witness.look(42)
        if living is not None:
            assert all(user >= 0 for user in living.users)
            assert living.pids
        witness.cgroup(42)
        owner = witness.owner_of(("127.0.0.1", 4318), ("127.0.0.1", 80))
        assert owner is None or owner.inode > 0
        witness.close()


@target(
    "cgroup-paths",
    whose="creators of cgroups: containers, users, Slurm, Kubernetes",
    holds="at most one group a kind, each with a short printable name; no path leads upwards",
    watched=(
        "wattspan.processes.metadata",
        "wattspan.processes.cgroup_names",
        "wattspan.processes.cgroup_names",
        "wattspan.ingest.identity_verification",
    ),
    samples=(
        b"0::/system.slice/docker-" + _HEX + b".scope\n",
        b"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
        b"0123abcd_4567_89ab_cdef_0123456789ab.slice/cri-containerd-" + _HEX + b".scope\n",
        b"12:cpuacct,cpu:/slurm/uid_5/job_77/step_0\n1:name=systemd:/x\n0::/\n",
        b"0::/system.slice/slurmstepd.scope/job_5/step_0/user/task_0\n",
        b"0::/machine.slice/systemd-nspawn@a\\x2db.service/payload\n",
        b"0::/lxc.payload.web/init.scope\n",
        b"0::/machine.slice/machine-qemu\\x2d6\\x2dvm1.scope/libvirt/vcpu0\n",
        b"0::/pbs_jobs.service/jobs/7[3].server\n",
    ),
    words=(_HEX, b"job_", b"lxc/", b".scope", b"..", b"\n", b"\\x0a", b"\\xff", b":", b"kubepods"),
)
def cgroup_text(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    groups = names_of(text).groups
    assert len({group.kind for group in groups}) == len(groups)
    for group in groups:
        one_line(group.name, MAX_LABEL)
        assert group.name
    for path in cgroup_paths(text).values():
        assert path.startswith("/")
    for unified in (True, False):
        path = CgroupHierarchy(Path("/sys/fs/cgroup"), unified).path_in(text)
        assert path is None or ".." not in path.split("/")
    found = container_id(text)
    assert not found or len(found) in range(12, 86)


@target(
    "cgroup-clocks",
    whose="the kernel, or a mounted substitute tree",
    holds="nanoseconds or nothing, from any content of cpu.stat and cpuacct.usage",
    watched=("wattspan.processes.cgroups",),
    samples=(
        b"\0\x20usage_usec 12345\nuser_usec 1\n..\1\x10usage_usec 1\nx y\n",
        b"\x80\x05123\n\n\x81\x0a1234567890",
    ),
    words=(b"usage_usec ", b"9" * 30, b"-1", b"\n"),
)
def cgroup_clocks(data: bytes) -> None:
    supply = Supply(data)
    unified = supply.byte() < 128
    with folder() as root:
        marker = root / "cgroup.controllers" if unified else root / "cpuacct/cpuacct.usage"
        marker.parent.mkdir(exist_ok=True)
        marker.write_bytes(b"0\n")
        hierarchy = find_hierarchy(root)
        assert hierarchy is not None
        base, name = (root, "cpu.stat") if unified else (root / "cpuacct", "cpuacct.usage")
        places = [base / "a", base / "a/b", base / "c"]
        for place in places:
            place.mkdir(exist_ok=True)
            (place / name).write_bytes(supply.chunk())
        clocks, total = CgroupClocks(hierarchy), TotalCpuClock(hierarchy)
        try:
            for path in ("/a", "/a/b", "/c", "/../x", "/nowhere"):
                clocks.add(path)
            for _ in range(2):
                own, gone = clocks.read()
                assert all(isinstance(value, int) for value in own.values())
                assert not gone.keys() & own.keys()
                whole = total.read()
                assert whole is None or isinstance(whole, int)
                for place in places:
                    (place / name).write_bytes(supply.chunk())
        finally:
            clocks.close()
            total.close()


@target(
    "cpu-files",
    whose="the kernel, or a mounted substitute tree",
    holds="CPUs and sockets within the possible number, or ValueError for an invalid /proc/stat",
    watched=("wattspan.processes.cpus", "wattspan.sources.estimate"),
    samples=(b"\0000-3,8\n", b"\1cpu  1 2 3 4 5 6 7\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 5\n"),
    words=(b"0-4000000000", b"9" * 30, b"-", b",", b"cpu99999999999999999999 "),
)
def cpu_files(data: bytes) -> None:
    supply = Supply(data)
    if supply.byte() % 2:
        with contextlib.suppress(ValueError):
            assert all(value >= 0 or b"-" in data for value in busy_ticks(supply.rest()).values())
        return
    text = supply.rest().decode("utf-8", "replace")
    assert len(list(parse_cpu_list(text))) <= 1 << 20
    with folder() as sysfs:
        cpus = sysfs / "devices/system/cpu"
        for number in range(2):
            (cpus / f"cpu{number}/topology").mkdir(parents=True)
            (cpus / f"cpu{number}/topology/physical_package_id").write_text(text)
        (cpus / "online").write_text(text)
        found = CpuTopology(sysfs)
        assert found.sockets
        assert all(socket >= 0 for socket in found.sockets)
        found.capacity()


def _exit(size: int = 400) -> bytes:
    stats = netlink.attribute(3, struct.pack("=H", 14) + b"\1" * (size - 2))
    both = netlink.attribute(1, struct.pack("=I", 42)) + stats
    return struct.pack("=BBH", 1, 1, 0) + netlink.attribute(4, both)


_LAYOUT = ExitLayout.of(30, netlink.message(30, 0, _exit()), 0x01010101)


class _Link:
    """A netlink socket on which the input comes."""

    def __init__(self, datagram: bytes) -> None:
        self._datagram = datagram

    def send(self, data: bytes) -> int:
        return len(data)

    def recv(self, size: int) -> bytes:
        return self._datagram[:size]


@target(
    "netlink",
    whose="the kernel; and other processes, which may send to a netlink socket",
    holds="events, exits and sockets, or nothing; OSError for an error reported by the kernel",
    watched=("wattspan.processes",),
    samples=(
        b"\0" + netlink.message(3, 0, struct.pack("=II12xI12xIIII", 1, 1, 1, 7, 7, 9, 9)),
        b"\1" + netlink.message(30, 0, _exit()),
        b"\1" + netlink.message(2, 0, struct.pack("=i", -13)),
        b"\2" + netlink.message(20, 0, b"\2" + b"\0" * 100),
        b"\2" + netlink.message(2, 0, struct.pack("=i", -2)),
    ),
    words=(b"\x02\0\0\0", b"\xff\xff", b"\x10\0\0\0", b"\4\0"),
)
def netlink_messages(data: bytes) -> None:
    supply = Supply(data)
    kind, datagram = supply.byte() % 3, supply.rest()
    if kind == 0:
        news = ProcessEvents()
        record_events(batch_of(datagram, datagram), news)
        error = acknowledgement(datagram)
        assert error is None or isinstance(error, int)
    elif kind == 1:
        for number, payload in netlink.messages(datagram):
            if number == netlink.ERROR:
                with contextlib.suppress(OSError):
                    netlink.raise_error(payload)
            final = parse_exit(payload)
            assert final is None or len(final.command) <= 32
        news = ProcessEvents()
        record_exits(_LAYOUT, batch_of(datagram, longest=1024), news)
        for records in news.exits.values():
            assert all(len(final.command) <= 32 for final in records)
    else:
        connections = TcpConnections()
        here = ipaddress.IPv6Address("::ffff:127.0.0.1")
        with contextlib.suppress(OSError):
            found = connections.find(cast(Any, _Link(datagram)), (here, 4318), (here, 80))
            assert found is None or found.inode >= 0
