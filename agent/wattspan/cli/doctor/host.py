"""Checks of the host, a running agent, the configuration, its directories and the energy rates."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from wattspan import __version__
from wattspan.api.snapshot_document import (
    SNAPSHOT_PATH,
    DomainEntry,
    SnapshotSchemaError,
    decode_snapshot,
)
from wattspan.capper.protocol import has_capper_unit
from wattspan.cli.doctor import Finding, declared, failure, note, ok, warning
from wattspan.cli.doctor.network import answering_agents
from wattspan.cli.formatting import duration_text
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.config.loading import DEFAULT_PATH
from wattspan.config.tables import RateSettings
from wattspan.footprint.cost import BILLION
from wattspan.http.sockets import directory_fault
from wattspan.model import COUNTERS, CPU_TIME, LEARNED_POWERS, SECOND, HwType
from wattspan.model.settings import Size
from wattspan.plugins import Plugins
from wattspan.ports import Clock, ConfigError, SourceError
from wattspan.sdk import AgentUnavailableError, MeasurementError
from wattspan.service.configuration import ask_agent, run_directory
from wattspan.util.files import file_text

_CAPABILITIES = {
    2: "CAP_DAC_READ_SEARCH",
    12: "CAP_NET_ADMIN",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
    38: "CAP_PERFMON",
    39: "CAP_BPF",
}
"""Capabilities that widen what can be read, by their bit of ``CapEff`` in ``/proc/self/status``."""


def examine_host(root: Path = Path("/"), euid: int | None = None) -> Iterator[Finding]:
    """The host under ``root``, for the user ``euid``, by default the calling one."""
    import psutil

    euid = os.geteuid() if euid is None else euid
    memory = f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
    up = duration_text(round(SystemClock().now().wall - psutil.boot_time() * 1e9))
    cpus = f"{platform.machine()}, {psutil.cpu_count()} CPUs, {memory} of memory, up {up}"
    yield note("kernel", f"{platform.system()} {platform.release()}, {cpus}")
    held = ", ".join(capabilities(root)) or "without capabilities"
    yield note("user", f"{'root' if euid == 0 else f'uid {euid}'}, {held}")
    if euid == 0 and has_capper_unit(root):
        yield declared("service-user")
    if vendor := hypervisor(root):
        yield declared("virtual-machine", vendor=vendor)
    if runtime := container(root):
        yield declared("container", runtime=runtime)
    powercap = root / "sys/class/powercap"
    if powercap.is_dir():
        yield ok("powercap", f"{powercap} exists")
    elif platform.machine() not in ("x86_64", "i686"):
        yield declared("powercap-of-x86", powercap=powercap)
    else:
        yield declared("powercap-missing", powercap=powercap)


def capabilities(root: Path = Path("/")) -> list[str]:
    """The effective capabilities among ``_CAPABILITIES``."""
    for line in file_text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return [name for bit, name in _CAPABILITIES.items() if mask >> bit & 1]
    return []


def hypervisor(root: Path = Path("/")) -> str:
    """The vendor of the hypervisor; empty on bare metal, as far as the guest can tell."""
    lines = file_text(root / "proc/cpuinfo").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    kind = file_text(root / "sys/hypervisor/type")
    if kind or "hypervisor" in flags.split():
        return kind or file_text(root / "sys/class/dmi/id/sys_vendor") or "unknown hypervisor"
    return ""


def container(root: Path = Path("/")) -> str:
    """The runtime of the container this runs in; empty outside of one."""
    if named := file_text(root / "run/systemd/container"):
        return named
    if (root / ".dockerenv").exists():
        return "docker"
    return "podman" if (root / "run/.containerenv").exists() else ""


def examine_processes(config: Config, clock: SystemClock) -> Iterator[Finding]:
    """The means to observe processes, as the agent would open them."""
    from wattspan.processes import open_processes

    try:
        processes = open_processes(clock, events=config.processes.events)
    except SourceError as error:
        yield failure("process events", str(error))
        return
    try:
        for capability in processes.capabilities:
            if capability.active:
                yield ok(capability.name, capability.detail)
            else:
                yield warning(capability.name, capability.detail, capability.remedy)
    finally:
        processes.usage.close()


def examine_counters(config: Config, clock: Clock, path: Path | None = None) -> Iterator[Finding]:
    """The performance counters of processes: by the helper at ``path``, or why there are none."""
    from wattspan.processes import ebpf
    from wattspan.processes.performance_counters import HARDWARE_EVENTS, SOCKET_PATH, CountersClient

    path = path or SOCKET_PATH
    if config.processes.counters == "off":
        yield declared("counters-off")
    elif path.exists():
        client = CountersClient(clock, path, 5 * SECOND)
        client.request()
        found = client.sample()
        client.close()
        yield from (warning("performance counters", str(one)) for one in client.failures)
        if found is not None:
            yield ok("performance counters", "the helper counts what processes do")
        elif not client.failures:
            yield declared("counters-late")
    else:
        unused = declared("counters-unused")
        try:
            with suppress(PermissionError):  # the helper may have it
                ebpf.close_all(ebpf.open_perf_events(HARDWARE_EVENTS[:1], 0))
        except OSError:
            unused = declared("counters-missing")
        yield unused


def examine_pods(config: Config) -> Iterator[Finding]:
    """The pods of GPUs by the node's kubelet, if the agent would ask it."""
    from wattspan.processes.pod_resources import open_pod_resources

    settings = config.processes
    pods = open_pod_resources(settings.pod_resources, settings.kubernetes_node)
    if pods is not None:
        pods.read()
    found = () if pods is None else pods.health()  # none while there is no kubelet
    for health in found:
        if pods is not None and not health.failures:
            yield ok("pods", f"{len(pods.devices())} devices of pods by the kubelet")
        yield from (warning("pods", str(one)) for one in health.failures)
    if not found and settings.kubernetes_node:
        yield declared("pods-not-asked")


def examine_agent(config: Config) -> Iterator[Finding]:
    """The running agent, by its snapshot on the Unix socket."""
    name = "running agent"
    if not config.agent.api:
        yield declared("agent-not-examined")
        return
    try:
        facts = ask_agent(config, SNAPSHOT_PATH)
        snapshot = decode_snapshot(msgspec.json.encode(facts))
    except MeasurementError as error:
        detail, absent = str(error).partition(". ")[0], isinstance(error, AgentUnavailableError)
        at = next(answering_agents(config), None) if absent else None
        yield declared("agent-elsewhere", detail=detail, at=at) if at else note(name, detail)
        return
    except SnapshotSchemaError as error:
        yield declared("agent-schema", error=str(error))
        return
    agent = snapshot.agent
    up = snapshot.at_unix_ns - agent.started_unix_ns
    size = "" if agent.rss_bytes is None else f", {agent.rss_bytes / 2**20:.0f} MiB of memory"
    load = f"{agent.cpu_seconds / (up / 1e9):.2%} of a CPU" if up > 0 else ""
    detail = f"wattspan {snapshot.agent_version}, up {duration_text(up)}, {load}{size}"
    if snapshot.agent_version == __version__:
        yield ok(name, detail)
    else:
        yield declared("agent-version", detail=detail, version=__version__)
    for source in snapshot.sources:
        yield from (warning(source.source, sentence) for sentence in source.failures)
    yield from examine_division(snapshot.domains)


def examine_division(domains: Iterable[DomainEntry]) -> Iterator[Finding]:
    """The present methods by which the energy of CPUs is divided among processes."""
    names: dict[str, list[str]] = {}
    for one in domains:
        if one.attributed and one.present and one.hw_type is HwType.CPU:
            names.setdefault(one.method, []).append(one.hw_name)
    methods = {
        COUNTERS: "performance counters",
        LEARNED_POWERS: "CPU time at its learned cost, since the uses of processes vary",
    }
    for method in sorted(names.keys() & methods):
        yield ok("CPU energy", f"{', '.join(names[method])}: divided by {methods[method]}")
    if CPU_TIME in names:
        yield declared("division-by-cpu-time", names=", ".join(names[CPU_TIME]))


# ------------------------------------------------------------------------------- configuration


def examine_configuration(
    config: Config,
    plugins: Plugins,
    owners: Collection[int] | None = None,
    faults: Iterable[str] = (),
) -> Iterator[Finding]:
    """Faults and warnings of the settings, and the users who can change the file.

    ``owners`` are the users who may own the file, by default ``allowed_owners``.
    """
    if owners is None:
        owners = allowed_owners(config.path, os.geteuid())
    broken = [declared("configuration-broken", fault=fault) for fault in faults]
    yield from broken
    if config.path is not None:
        yield from _check_file(config.path, owners)
    elif config.hidden is not None:
        yield declared("configuration-hidden", path=config.hidden)
    elif not broken:
        yield ok("file", "no file, the defaults apply")
    yield from (warning("environment", sentence) for sentence in config.warnings)
    for plugin in plugins.broken:
        if not plugin.table.startswith("sources."):
            yield failure(f"[{plugin.table}]", plugin.cause, plugin.remedy)


def allowed_owners(path: Path | None, euid: int) -> frozenset[int]:
    """Root and the calling user; root only for the system's file, which root's capper reads."""
    return frozenset({0} if path == DEFAULT_PATH else {0, euid})


def _check_file(path: Path, owners: Collection[int]) -> Iterator[Finding]:
    # A user who can write a directory can replace the file in it, and a link has one of its own.
    places = dict.fromkeys((path.resolve(), path.resolve().parent, path.parent.resolve()))
    warnings = [one for place in places for one in _writable_by_others(place, owners)]
    yield from warnings or [ok("file", f"{path}")]


def _writable_by_others(path: Path, owners: Collection[int]) -> Iterator[Finding]:
    try:
        found, read_only = path.stat(), bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return
    if who := other_writers(found.st_mode, read_only=read_only):
        yield declared("file-writable", path=path, who=who)
    if found.st_uid not in owners:
        yield declared("file-owner", path=path, uid=found.st_uid)


def other_writers(mode: int, *, read_only: bool) -> str:
    """The users besides the owner who can change a file, or replace files of a directory.

    ``read_only``: the file system is mounted read-only. Kubernetes mounts a ConfigMap so, as a
    directory with write permission for everybody.
    """
    # In a sticky directory, such as /tmp, only owners can replace files.
    if read_only or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return ""
    others = {stat.S_IWGRP: "its group", stat.S_IWOTH: "everybody"}
    return " and ".join(name for bit, name in others.items() if mode & bit)


# --------------------------------------------------------------------------------- directories


def examine_directories(config: Config) -> Iterator[Finding]:
    """Check that the agent can write its directories. Creates nothing."""
    yield from _state_directory(config, Path(config.agent.state_dir))
    run_dir = run_directory(config)
    finding = _directory("run_dir", run_dir, note)
    if run_dir.is_dir() and not finding.remedy:
        found = run_dir.stat()
        if fault := directory_fault(run_dir, found, {found.st_uid}):
            remedy = f"{fault.remedy[0].upper()}{fault.remedy[1:]}."
            finding = failure("run_dir", fault.cause, remedy)
    yield finding


def _state_directory(config: Config, path: Path) -> Iterator[Finding]:
    finding = _directory("state_dir", path, warning)
    yield finding
    if finding.remedy or config.store.enabled is False:
        return
    existing = next(place for place in (path, *path.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < config.store.max_size:
        left = Size(free // 2**20 * 2**20)
        yield declared("disk-space", left=left, place=existing, limit=config.store.max_size)


def _directory(key: str, path: Path, problem: Callable[[str, str, str], Finding]) -> Finding:
    remedy = f"Create it for the user that runs wattspan, or set agent.{key} to another."
    existing = next((place for place in (path, *path.parents) if place.exists()), Path("/"))
    if existing == path and not path.is_dir():
        return failure(key, f"{path} is not a directory", remedy)
    writable = os.access(existing, os.W_OK | os.X_OK)
    if existing == path:
        state = "can be written" if writable else "cannot be written by this user"
    else:
        state = "will be created" if writable else "is missing and cannot be created by this user"
    return ok(key, f"{path} {state}") if writable else problem(key, f"{path} {state}", remedy)


# --------------------------------------------------------------------------------------- rates


def examine_footprint(config: Config, clock: Clock) -> Iterator[Finding]:
    """The present rates of [cost] and [carbon]; requests them if a server is configured."""
    yield from _check_rate("cost", config.cost, clock)
    yield from _check_rate("carbon", config.carbon, clock)


def _check_rate(name: str, table: RateSettings, clock: Clock) -> Iterator[Finding]:
    from wattspan.footprint.price_and_carbon import PolledRate, open_rate

    if faults := schedule_faults(table):
        yield from (failure(name, fault.rstrip(".")) for fault in faults)
        return
    rate = open_rate(name, table, clock)
    if rate is None:
        yield declared("rate-none", name=name)
        return
    if isinstance(rate, PolledRate):
        rate.poll()
        for one in rate.health().failures:
            yield warning(name, f"cannot {one.verb} {one.thing}: {one.cause}", one.remedy)
    now = rate.at(clock.now())
    origin = f"by {name}.{table.rate_keys[0]}"
    if now is not None:
        yield ok(name, f"{now / BILLION:.10g} {table.unit}/kWh now, {origin}")
    elif table.schedule:
        yield declared("rate-unknown", name=name, origin=origin)


def schedule_faults(table: RateSettings) -> list[str]:
    """The faults of the tariff file of ``table``."""
    from wattspan.footprint.tariff_file import read_schedule

    try:
        if table.schedule:
            read_schedule(Path(table.schedule))
    except ConfigError as error:
        return str(error).splitlines()
    return []
