"""What kind of host this is, as far as it decides which counters there can be.

What processes can be seen with: every means, and what follows where it is missing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from wattspan.capper.client import has_capper_unit
from wattspan.cli.doctor.findings import DiagnosisSection, Finding, Severity
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.ports import SourceError
from wattspan.processes import open_processes

_CAPABILITIES = {
    2: "CAP_DAC_READ_SEARCH",
    12: "CAP_NET_ADMIN",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
}
"""Those that decide what can be read: the bits of ``CapEff`` in ``/proc/self/status``."""


def examine_host(root: Path = Path("/"), euid: int | None = None) -> DiagnosisSection:
    """The host under ``root``; ``euid`` is who looks, whoever calls this unless said otherwise."""
    return DiagnosisSection("Host", tuple(_findings(root, os.geteuid() if euid is None else euid)))


def _findings(root: Path, euid: int) -> Iterator[Finding]:
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
    yield Finding(Severity.NOTE, "kernel", f"{platform.system()} {platform.release()}, {machine}")
    yield Finding(Severity.NOTE, "user", _user(root, euid))
    if euid == 0 and has_capper_unit(root):
        yield Finding(
            Severity.NOTE,
            "service",
            "the service reads as user wattspan: what root can read below, it may not",
            "`sudo -u wattspan wattspan doctor` looks with its rights.",
        )
    if vendor := hypervisor(root):
        yield Finding(
            Severity.WARN,
            "virtual machine",
            f"this is one ({vendor}); few hosts pass their energy counters through",
            "Run wattspan on the host, or opt in to [sources.estimate].",
        )
    if runtime := container(root):
        yield Finding(
            Severity.WARN,
            "container",
            f"wattspan runs in one ({runtime}); it sees this container's processes only, and "
            "counters may be masked",
            "Run it on the host, or with the host's pid namespace and /sys mounted.",
        )
    powercap = root / "sys/class/powercap"
    if powercap.is_dir():
        yield Finding(Severity.OK, "powercap", f"{powercap} is there")
    else:
        yield Finding(
            Severity.WARN,
            "powercap",
            f"{powercap} is missing: the kernel offers no CPU energy counters",
            "Load intel_rapl_msr; a kernel built without CONFIG_POWERCAP has none.",
        )
    if (root / "sys/bus/event_source/devices/power").is_dir():
        yield Finding(Severity.NOTE, "perf", "the kernel has energy events too; wattspan uses none")


def _user(root: Path, euid: int) -> str:
    held = capabilities(root)
    name = "root" if euid == 0 else f"uid {euid}"
    return f"{name}, {', '.join(held) if held else 'without capabilities'}"


def capabilities(root: Path = Path("/")) -> list[str]:
    """The effective capabilities that matter here."""
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return [name for bit, name in _CAPABILITIES.items() if mask >> bit & 1]
    return []


def hypervisor(root: Path = Path("/")) -> str:
    """Who emulates this machine; empty on bare metal, as far as can be told."""
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


def examine_processes(config: Config, clock: SystemClock) -> DiagnosisSection:
    """Open what the agent would open, ask what it can, and close it."""
    try:
        processes = open_processes(clock, events=config.processes.events)
    except SourceError as error:
        return DiagnosisSection(
            "Processes", (Finding(Severity.FAIL, "process events", str(error)),)
        )
    try:
        return DiagnosisSection(
            "Processes",
            tuple(
                Finding(
                    Severity.OK if capability.active else Severity.WARN,
                    capability.name,
                    capability.detail,
                    "" if capability.active else capability.remedy,
                )
                for capability in processes.capabilities
            ),
        )
    finally:
        processes.usage.close()
