"""Cgroup directories of container runtimes, hypervisors, Kubernetes and batch schedulers.

Each pattern matches whole path segments: a unit such as ``incus-lxc.service`` is no container
``service``. Names that are valid only below a certain directory are matched together with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wattspan.model import GroupKind
from wattspan.model.principals import SHORT_CONTAINER


class Guest(NamedTuple):
    """A container or virtual machine: its complete name, and the short one of listings."""

    kind: GroupKind
    name: str
    short: str


_HEX = r"[0-9a-f]{64}"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_SEGMENT = r"[^/]+"

_Patterns = Mapping[int, re.Pattern[str]]


def _patterns(*patterns: str) -> _Patterns:
    """Patterns of the end of a path by their number of segments; the group of each is a name."""
    by_depth: dict[int, list[str]] = {}
    for pattern in patterns:
        depth = pattern.replace("[^/", "").count("/") + 1
        by_depth.setdefault(depth, []).append(pattern)
    return {depth: re.compile("|".join(those)) for depth, those in by_depth.items()}


# docker-<id>.scope, cri-containerd-<id>.scope, libpod-payload-<id>; crio-conmon-<id>.scope is the
# monitor of a container
_SCOPE = rf"(?!(?:[\w.]+-)*conmon-)(?!kata_)[\w.]+(?:-[\w.]+)*-({_HEX})(?:\.scope)?"
_CONTAINERS = _patterns(
    _SCOPE,
    # cri-containerd:<namespace>:<id> as some managers write it; <pod slice>:cri-containerd:<id>
    rf"[^/]*:[^/:]+:({_HEX})",
    rf"({_HEX})",  # cgroupfs drivers: the bare id
    rf"lxc\.(?:payload|monitor)\.({_SEGMENT})",
    rf"systemd-nspawn@({_SEGMENT})\.service",
    rf"(?:lxc-[0-9]+-)?({_SEGMENT})\.libvirt-lxc",
    rf"lxc(?:\.payload|\.monitor)?/({_SEGMENT})",  # v1, Proxmox, and libvirt's libvirt/lxc
    rf"machine(?:-{_SEGMENT})?\.slice/machine-(?:lxc-[0-9]+-)?({_SEGMENT})\.scope",
    # nspawn with --slice=
    rf"(?!machine[-.]){_SEGMENT}\.slice/machine-({_SEGMENT})\.scope/(?:payload|supervisor)",
    r"buildkit/([0-9a-z]{25})",
    rf"ecs/{_SEGMENT}/([0-9a-f]{{32}}-[0-9]{{1,20}})",  # a task of Amazon ECS
)
_VMS = _patterns(
    # libvirt with and without machined; of a user's session and of an embedded driver as well
    rf"machine-(?:qemu|ch)-(?:embed-[0-9a-f]{{8}}-)?[0-9]+-({_SEGMENT})\.scope",
    rf"machine-(?:qemu|ch)-[a-z_][\w.]*-[0-9]+-({_SEGMENT})\.scope",
    rf"machine-(?:qemu|ch)-({_SEGMENT})\.scope",
    rf"(?:(?:qemu|ch)-[0-9]+-)?({_SEGMENT})\.libvirt-(?:qemu|ch)",
    rf"libvirt/qemu/({_SEGMENT})",
    r"qemu\.slice/([0-9]+)\.scope",  # Proxmox
    r"firecracker(?:-v?[0-9][\w.-]*)?/([A-Za-z0-9-]{1,64})",  # its jailer
    rf"systemd-vmspawn@({_SEGMENT})\.service",
    rf"kata_({_HEX})",
)
_UNIT_OF_CONTAINER = re.compile(_SCOPE)

_POD = re.compile(
    r"(?:(?P<slice>(?:[\w.-]+-)?kubepods(?:-(?:besteffort|burstable|guaranteed))?)-)?"
    r"pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?"
)

SLUID = re.compile(r"s[0-9A-HJKMNP-TV-Z]{13}")
"""Slurm's name of a run of a job, since 26.05."""

_PBS = r"[0-9]+(?:\[[0-9]*\])?(?:\.[\w.-]+)?"
_JOBS = _patterns(
    # Slurm: v2, also of one of several slurmd; v1
    rf"(?:{_SEGMENT}_)?slurmstepd\.scope/job_([0-9]+)",
    rf"(?:{_SEGMENT}_)?slurmstepd\.scope/({SLUID.pattern})",
    rf"slurm(?:_{_SEGMENT})?/uid_[0-9]+/job_([0-9]+)",
    rf"slurm(?:_{_SEGMENT})?/job_([0-9]+)",
    # OpenPBS and PBS Professional; Torque
    rf"pbs_jobs\.service/(?:jobid|jobs)/({_PBS})",
    rf"pbspro\.service/jobid/({_PBS})",
    rf"(?:pbspro|torque)/({_PBS})",
    rf"pbspro\.slice/pbspro-({_PBS})\.slice",
    rf"lsf/{_SEGMENT}/job\.([0-9]+(?:\[[0-9]+\])?)(?:\.[0-9]+)*",
    # OAR 2 and 3
    rf"oar/{_SEGMENT}_([0-9]+)",
    rf"oar\.slice/{_SEGMENT}_([0-9]+)\.scope",
    r"oar\.slice/oar-u?[0-9]+\.slice/oar-u?[0-9]+-j([0-9]+)\.slice",
    # HTCondor names the slot, and reuses it for the next job
    rf"condor_{_SEGMENT}_(slot[0-9]+(?:_[0-9]+)?(?:@{_SEGMENT})?)",
    # Hadoop YARN, by the application: the prefix is a setting of the cluster
    r"container_(?:e[0-9]+_)?([0-9]{10,}_[0-9]{4,})_[0-9]{2,}_[0-9]{6,}",
    # Grid Engine: job and task
    r"(?:UGE|AGE|SGE|uge|age|sge)/([0-9]+\.[0-9]+)",
    r"sge-shepherd-([0-9]+)(?:-[0-9]+)?\.(?:slice|scope)",
    # Flux, below the user manager of its instance's owner
    r"user@[0-9]+\.service/(?:imp-)?shell-[0-9]+-(f[1-9A-HJ-NP-Za-km-z]+)\.service",
    # Nomad: allocation and task
    rf"nomad\.slice/(?:share|reserve)\.slice/({_UUID}[.-]{_SEGMENT})\.scope",
    rf"nomad\.slice/({_UUID}[.-]{_SEGMENT})\.scope",
    rf"nomad/({_UUID}[.-]{_SEGMENT}?)(?:\.scope)?",
    rf"nomad/{_SEGMENT}/({_UUID}[.-]{_SEGMENT}?)(?:\.scope)?",
)

_UNIT = re.compile(r"[^/]+\.(?:service|scope|socket|mount|swap|timer|path)")
_USER_MANAGER = re.compile(r"user@[0-9]+\.service")
_SYSTEM_ROOT = re.compile(r"(?:system\.slice|init\.scope|user\.slice/user-[0-9]+\.slice)(?:/.*)?")
_ESCAPE = r"\\x[0-9a-fA-F]{2}"


def guest_in(parts: Sequence[str], at: int) -> Guest | None:
    """The container or virtual machine that a directory is for."""
    for kind, patterns in ((GroupKind.VM, _VMS), (GroupKind.CONTAINER, _CONTAINERS)):
        if name := _name_in(patterns, parts, at):
            return Guest(kind, name, name[:SHORT_CONTAINER] if re.fullmatch(_HEX, name) else name)
    return None


def _name_in(patterns: _Patterns, parts: Sequence[str], at: int) -> str:
    """The name in the end of a path; "" if no pattern matches."""
    for depth, pattern in patterns.items():
        if depth <= at + 1:
            # An escaped slash separates no directories.
            whole = (unescaped(part).replace("/", "\0") for part in parts[at + 1 - depth : at + 1])
            match = pattern.fullmatch("/".join(whole))
            if match is not None:
                return match[match.lastindex or 0]
    return ""


def pod_in(parts: Sequence[str], at: int) -> str:
    """The uid of the Kubernetes pod that a directory is for; "" if there is none."""
    for piece in parts[at].split(":"):
        match = _POD.fullmatch(piece)
        if match is not None and (match["slice"] or _is_below_kubepods(parts, at)):
            return match["uid"].replace("_", "-")
    return ""


def _is_below_kubepods(parts: Sequence[str], at: int) -> bool:
    """True below ``kubepods`` and ``kubepods/burstable`` of the cgroupfs driver."""
    return any(part.removesuffix(".slice").endswith("kubepods") for part in parts[:at])


def job_in(parts: Sequence[str], at: int) -> str:
    """The batch job that a directory is for; "" if there is none."""
    return _name_in(_JOBS, parts, at)


def unit_in(parts: Sequence[str], at: int) -> str:
    """The systemd unit that a directory is for, except the scopes of containers; "" for none."""
    part = parts[at]
    return (
        unescaped(part) if _UNIT.fullmatch(part) and not _UNIT_OF_CONTAINER.fullmatch(part) else ""
    )


def system_root_in(parts: Sequence[str], at: int) -> str:
    """The directory in which another systemd runs, if ``parts[at]`` is at its top; else "".

    The units of a system below a unit or other directory, as of a container that no pattern
    knows, are not the host's.
    """
    above = [part for part in parts[:at] if not part.endswith(".slice")]
    if not above or not _SYSTEM_ROOT.fullmatch("/".join(parts[at : at + 2])):
        return ""
    name = next(filter(_UNIT.fullmatch, reversed(above)), above[-1])
    return "" if _USER_MANAGER.fullmatch(name) else unescaped(name)


def unescaped(name: str) -> str:
    r"""Undo systemd's ``\x2d``."""
    if "\\" not in name:
        return name

    def plain(run: re.Match[str]) -> str:
        return bytes.fromhex(run[0].replace("\\x", "")).decode("utf-8", "replace")

    return re.sub(rf"(?:{_ESCAPE})+", plain, name)
