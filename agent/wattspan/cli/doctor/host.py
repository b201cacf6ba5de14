"""Checks of the host, of the means to observe processes, and of a running agent."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from wattspan import __version__
from wattspan.api.snapshot import SNAPSHOT_PATH, SnapshotSchemaError, decode_snapshot
from wattspan.capper.client import has_capper_unit
from wattspan.cli.doctor.findings import Finding, failure, note, ok, warning
from wattspan.cli.formatting import duration_text
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.ports import SourceError
from wattspan.processes import open_processes
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json
from wattspan.service.configuration import agent_directories

_CAPABILITIES = {
    2: "CAP_DAC_READ_SEARCH",
    12: "CAP_NET_ADMIN",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
}
"""Capabilities that widen what can be read, by their bit of ``CapEff`` in ``/proc/self/status``."""


def examine_host(root: Path = Path("/"), euid: int | None = None) -> Iterator[Finding]:
    """The host under ``root``, for the user ``euid``, by default the calling one."""
    euid = os.geteuid() if euid is None else euid
    memory = f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
    up = duration_text(round(SystemClock().now().wall - psutil.boot_time() * 1e9))
    cpus = f"{platform.machine()}, {psutil.cpu_count()} CPUs, {memory} of memory, up {up}"
    yield note("kernel", f"{platform.system()} {platform.release()}, {cpus}")
    held = ", ".join(capabilities(root)) or "without capabilities"
    yield note("user", f"{'root' if euid == 0 else f'uid {euid}'}, {held}")
    if euid == 0 and has_capper_unit(root):
        yield note(
            "service",
            "the service reads as user wattspan, which may read less than root",
            "Examine with its rights: `sudo -u wattspan wattspan doctor`.",
        )
    if vendor := hypervisor(root):
        yield warning(
            "virtual machine",
            f"this is one ({vendor}); few hosts pass their energy counters through",
            "Run wattspan on the host, or enable [sources.estimate].",
        )
    if runtime := container(root):
        yield warning(
            "container",
            f"wattspan runs in one ({runtime}); it sees this container's processes only, and "
            "counters may be masked",
            "Run it on the host, or with the host's pid namespace and /sys mounted.",
        )
    powercap = root / "sys/class/powercap"
    if powercap.is_dir():
        yield ok("powercap", f"{powercap} exists")
    else:
        yield warning(
            "powercap",
            f"{powercap} is missing: the kernel offers no CPU energy counters",
            "Load intel_rapl_msr; a kernel built without CONFIG_POWERCAP has none.",
        )


def capabilities(root: Path = Path("/")) -> list[str]:
    """The effective capabilities among ``_CAPABILITIES``."""
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return [name for bit, name in _CAPABILITIES.items() if mask >> bit & 1]
    return []


def hypervisor(root: Path = Path("/")) -> str:
    """The vendor of the hypervisor; empty on bare metal, as far as the guest can tell."""
    flags = next(
        (line for line in _text(root / "proc/cpuinfo").splitlines() if line.startswith("flags")), ""
    )
    kind = _text(root / "sys/hypervisor/type").strip()
    if kind or "hypervisor" in flags.split():
        return kind or _text(root / "sys/class/dmi/id/sys_vendor").strip() or "unknown hypervisor"
    return ""


def container(root: Path = Path("/")) -> str:
    """The runtime of the container this runs in; empty outside of one."""
    if named := _text(root / "run/systemd/container").strip():
        return named
    if (root / ".dockerenv").exists():
        return "docker"
    return "podman" if (root / "run/.containerenv").exists() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def examine_processes(config: Config, clock: SystemClock) -> Iterator[Finding]:
    """The means to observe processes, as the agent would open them."""
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


def examine_agent(config: Config) -> Iterator[Finding]:
    """The running agent, by its snapshot on the Unix socket."""
    name = "running agent"
    if not config.agent.api:
        yield note(name, "not examined: [agent] api = false")
        return
    try:
        facts = request_json(SNAPSHOT_PATH, {}, directories=agent_directories(config))
        snapshot = decode_snapshot(msgspec.json.encode(facts))
    except MeasurementError as error:
        yield note(name, str(error).partition(". ")[0])
        return
    except SnapshotSchemaError as error:
        yield warning(name, str(error), "Restart the agent, with this release of wattspan.")
        return
    agent = snapshot.agent
    up = snapshot.at_unix_ns - agent.started_unix_ns
    size = "" if agent.rss_bytes is None else f", {agent.rss_bytes / 2**20:.0f} MiB of memory"
    load = f"{agent.cpu_seconds / (up / 1e9):.2%} of a CPU" if up > 0 else ""
    detail = f"wattspan {snapshot.agent_version}, up {duration_text(up)}, {load}{size}"
    if snapshot.agent_version == __version__:
        yield ok(name, detail)
    else:
        remedy = f"Restart the agent: this is wattspan {__version__}."
        yield warning(name, detail, remedy)
    for source in snapshot.sources:
        yield from (warning(source.source, sentence) for sentence in source.failures)
