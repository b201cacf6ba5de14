"""Namespaces and root filesystem of a nested systemd: shell, run before it exists."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

COVERED = {"/var": "0755", "/home": "0755", "/opt": "0755", "/dev/shm": "1777", "/tmp": "1777"}

PREFIX = "systemd-host-"

# a new cgroup mount at a path visible to this process only: /sys/fs/cgroup may be read-only,
# or version 1. The mount point can be any folder.
_WITH_CGROUPS = "mount --make-rprivate / && mount -t cgroup2 cgroup2 /mnt && "

ENTER_CGROUP = (
    *("unshare", "--mount", "sh", "-c"),
    _WITH_CGROUPS + 'mkdir "/mnt/$1" && echo $$ >"/mnt/$1/cgroup.procs" && umount /mnt && '
    'exec unshare --fork --kill-child --pid --cgroup --uts --ipc --net sh "$2"',
    "sh",
)
"""Then a name, and a script that is process 1 of new namespaces, in a cgroup of that name."""

LEAVE_CGROUP = (
    *("unshare", "--mount", "sh", "-c"),
    _WITH_CGROUPS + 'find "/mnt/$1" -depth -type d -exec rmdir {} \\;',
    "sh",
)
"""Followed by the name: remove the cgroup, which must be empty."""


def cgroups() -> set[str]:
    """The names of the cgroups that such hosts have now, or have left."""
    script = _WITH_CGROUPS + "ls /mnt"
    told = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=True
    )
    return {name for name in told.stdout.split() if name.startswith(PREFIX)}


def sweep() -> None:
    """Remove the cgroups of hosts whose tests were killed."""
    for name in cgroups():
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            subprocess.run([*LEAVE_CGROUP, name], capture_output=True, check=False)


_TARGETS = (
    *("sysinit", "basic", "sockets", "timers", "paths", "slices", "multi-user", "shutdown"),
    *("network", "network-online", "time-sync"),
)
"""Units that services with default dependencies require; they are empty here."""


def own_units(folder: Path, *, alone: bool) -> None:
    """Write the units required for a boot; ``alone`` if no other units exist."""
    (folder / "systemd-host.target").write_text("[Unit]\nDefaultDependencies=no\n")
    if alone:
        for name in _TARGETS:
            (folder / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    # No journal runs: output of services goes to a file, regardless of their units.
    printed = folder / "service.d" / "systemd-host.conf"
    printed.parent.mkdir()
    printed.write_text(
        "[Service]\nStandardOutput=append:/run/systemd-host/printed\nStandardError=inherit\n"
    )


def boot_script(
    folder: Path, root: Path, binds: Mapping[Path, Path], target: str, console: str
) -> str:
    """Actions of process 1 before it executes systemd."""
    alone = root == Path("/")
    inside = "" if alone else f"{folder}/root"
    staging = f"{folder}/staging"
    lines = ["set -eu", "ip link set lo up", f"mkdir {shlex.quote(staging)}"]
    lines += [f"mount -t tmpfs -o mode=0755 staging {shlex.quote(staging)}"]
    # open paths needed inside before anything is covered
    for number, source in enumerate(binds.values()):
        lines += _bind(str(source), f"{staging}/{number}", is_folder=source.is_dir())
    if alone:
        lines += [f"cp -a /etc {staging}/etc", f"mount --bind {staging}/etc /etc"]
        lines += [
            f"mount -t tmpfs -o mode={mode} covered {path}"
            for path, mode in COVERED.items()
            if path != "/tmp"  # the last: all that this script works with is there
        ]
        lines += ["mkdir -p /var/lib /var/cache /var/log", "mkdir -m 1777 /var/tmp"]
    else:
        lines += [f"mkdir {inside}", f"mount --bind {shlex.quote(str(root))} {inside}"]
        lines += [f"mount --rbind /{each} {inside}/{each}" for each in ("sys", "dev")]
        lines += [f"mount -t tmpfs -o mode=1777 covered {inside}/dev/shm"]
    lines += [
        f"mount -t proc -o nosuid,nodev,noexec proc {inside}/proc",
        f"mount -t tmpfs -o mode=0755,nosuid,nodev run {inside}/run",
        f"mkdir -p {inside}/run/lock {inside}/run/systemd-host",
    ]
    lines += _bind(f"{folder}/units", f"{inside}/run/systemd/system", is_folder=True)
    for number, (path, source) in enumerate(binds.items()):
        lines += _bind(f"{staging}/{number}", f"{inside}{path}", is_folder=source.is_dir())
    lines += [
        f"umount -R {inside}/sys/fs/cgroup 2>/dev/null || true",
        f"mount -t cgroup2 cgroup2 {inside}/sys/fs/cgroup",
        f"mount --bind {console} {inside}/dev/console",
    ]
    if alone:
        lines += [f"mount -t tmpfs -o mode={COVERED['/tmp']} covered /tmp", "cd /"]
        lines += ["export SYSTEMD_UNIT_PATH=/run/systemd/system"]
    else:
        lines += [
            *(f"cd {inside}", "mkdir -p run/systemd-host/machine"),
            *("pivot_root . run/systemd-host/machine", "cd /"),
            "umount -l /run/systemd-host/machine",
        ]
    lines += [
        "exec /lib/systemd/systemd --system --log-target=console --log-color=no"
        f" --show-status=no --unit={target}"
    ]
    return "\n".join(lines) + "\n"


def _bind(source: str, target: str, *, is_folder: bool) -> list[str]:
    source, target = shlex.quote(source), shlex.quote(target)
    parent = shlex.quote(str(Path(shlex.split(target)[0]).parent))
    make = f"mkdir -p {target}" if is_folder else f"mkdir -p {parent} && touch {target}"
    return [f"test -e {target} || {{ {make}; }}", f"mount --bind {source} {target}"]
