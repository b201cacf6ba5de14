"""What there is to see processes with, said so that a person can act on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """One means of seeing what processes do; ``detail`` says what follows from (not) having it."""

    name: str
    active: bool
    detail: str
    remedy: str = ""


def visible(active: bool) -> Capability:
    if active:
        return Capability("processes", True, "the processes of all users are visible")
    return Capability(
        "processes",
        False,
        "other users' processes are hidden, so their work is unattributed",
        "Grant CAP_SYS_PTRACE, or mount procfs with hidepid=0 (ProtectProc=default).",
    )


def births(error: str | None) -> Capability:
    name = "process events"
    if error is None:
        return Capability(name, True, "the kernel reports every fork, exec and exit")
    return Capability(
        name,
        False,
        f"newcomers are found by the pids given out ({error})",
        "Grant CAP_NET_ADMIN and allow AF_NETLINK, in the initial user and pid namespaces.",
    )


def finals(error: str | None, fallback: bool) -> Capability:
    name = "exit accounting (taskstats)"
    if error is None:
        return Capability(name, True, "work shorter than a poll is charged to who did it")
    to = "to its cgroup" if fallback else "to nobody"
    return Capability(
        name,
        False,
        f"work shorter than a poll is charged {to} ({error})",
        "Grant CAP_NET_ADMIN and allow AF_NETLINK, in the initial user and pid namespaces.",
    )


def cgroups(clocks: str | None) -> Capability:
    name = "cgroup clocks"
    if clocks is not None:
        return Capability(name, True, f"{clocks} bounds what each cgroup did")
    return Capability(
        name,
        False,
        "work of processes never seen is unattributed",
        "Make /sys/fs/cgroup readable (v2, or v1 with the cpuacct controller).",
    )


def busy(clock: str | None, step: int) -> Capability:
    name = "busy time"
    if clock is not None:
        unit = "1 ns" if step == 1 else f"{step // 1_000_000} ms"
        return Capability(name, True, f"from {clock}, in steps of {unit}")
    return Capability(
        name,
        False,
        "how much work nobody can be charged with is unknown",
        "Make /proc/stat readable (ProcSubset=all).",
    )
