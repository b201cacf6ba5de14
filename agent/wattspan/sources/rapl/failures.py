"""What a powercap error means, and what a person can do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from wattspan.model import SECOND, Failure, Trouble

GRANT_REMEDY = (
    "Run the agent in the group wattspan, or as a user who is a member, and let that group read "
    "energy_uj: by `systemd-tmpfiles --create wattspan.conf` where the service is installed, "
    "elsewhere by a udev rule."
)
UNMASK_REMEDY = (
    "The container runtime masks it: mount the host's /sys/devices/virtual/powercap into the "
    "container, or run the agent outside."
)
LOAD_DRIVER_REMEDY = (
    "Load the driver (modprobe intel_rapl_msr); a virtual machine has no such counter unless its "
    "host passes one through."
)

GONE_ERRNOS = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.EBADF, errno.ESTALE})
"""Errors after which a descriptor is dead and the zone has to be found anew."""


def access_failure(
    source: str, path: Path, error: OSError, domain_id: str | None = None
) -> Failure:
    """The failure behind an ``error`` from opening or reading ``path``."""
    trouble, cause, remedy = _BY_ERRNO.get(
        error.errno or 0,
        (Trouble.RETRY, os.strerror(error.errno or 0).lower(), "It is read again."),
    )
    return Failure(source, str(path), trouble, cause, remedy, domain_id)


def invalid_value(source: str, path: Path, content: bytes, domain_id: str | None = None) -> Failure:
    """The failure of a counter that answered something that is not a value of it."""
    shown = content[:32].decode(errors="replace").strip()
    return Failure(
        source,
        str(path),
        Trouble.MALFORMED,
        f"{shown!r} is not a value this counter can have",
        "It is read again; if it stays so, report it to the kernel driver's maintainers.",
        domain_id,
    )


def stuck_counter(source: str, path: Path, stood: int, domain_id: str | None = None) -> Failure:
    """The failure of a counter that used to move and stands still."""
    return Failure(
        source,
        str(path),
        Trouble.STUCK,
        f"it has stood still for {stood // SECOND} s",
        "Firmware or a hypervisor no longer updates it; it is read on, and counts when it moves.",
        domain_id,
    )


def vanished_zone(source: str, path: Path, domain_id: str | None = None) -> Failure:
    """The failure of a zone that was there and is not any more."""
    return Failure(
        source,
        str(path),
        Trouble.ABSENT,
        "the zone has vanished",
        "It is looked for every few seconds; a package taken offline or an unloaded driver "
        "takes its zones with it.",
        domain_id,
    )


def masked_zones(source: str, root: Path, names: tuple[str, ...]) -> Failure:
    """The failure of zones that are listed and cannot be reached."""
    listed = ", ".join(names[:4]) + (" and more" if len(names) > 4 else "")
    cause = f"{listed} lead nowhere"
    return Failure(source, str(root), Trouble.DENIED, cause, UNMASK_REMEDY)


def no_zones(source: str, root: Path) -> Failure:
    """The failure of a host without any zone."""
    return Failure(
        source, str(root), Trouble.ABSENT, "no zone counts energy there", LOAD_DRIVER_REMEDY
    )


def unnamed_zone(source: str, path: Path, error: ValueError) -> Failure:
    """The failure of a zone whose ``name`` file is nonsense."""
    remedy = "Its counter is left out, and those below it."
    return Failure(source, str(path), Trouble.MALFORMED, str(error), remedy)


def orphan_zone(source: str, path: Path) -> Failure:
    """The failure of a zone below one that cannot be named."""
    cause = "the zone above it cannot be read, so it is not known whose counter it is"
    remedy = "It is looked at again every few seconds."
    return Failure(source, str(path), Trouble.MALFORMED, cause, remedy)


_BY_ERRNO: dict[int, tuple[Trouble, str, str]] = {
    errno.EACCES: (Trouble.DENIED, "permission denied", GRANT_REMEDY),
    errno.EPERM: (Trouble.DENIED, "operation not permitted", GRANT_REMEDY),
    errno.EINVAL: (
        Trouble.RETRY,
        "the driver could not read the register (EINVAL)",
        "It is read again; a package that is offline or asleep answers so.",
    ),
    errno.EIO: (
        Trouble.RETRY,
        "the register read failed (EIO)",
        "It is read again; if it stays so, look at the kernel's log for MSR errors.",
    ),
    errno.ENODATA: (
        Trouble.RETRY,
        "the driver has no data for it (ENODATA)",
        "It is read again; firmware that locks the interface answers so.",
    ),
    errno.ENODEV: (
        Trouble.ABSENT,
        "the device is gone (ENODEV)",
        "It is looked for every few seconds; a package taken offline answers so.",
    ),
    errno.ENOENT: (
        Trouble.ABSENT,
        "there is no such file",
        "It is looked for every few seconds.",
    ),
    errno.EISDIR: (
        Trouble.MALFORMED,
        "it is a directory, not a counter",
        "Check that the sysfs root is the right one.",
    ),
    errno.ELOOP: (
        Trouble.MALFORMED,
        "its links go in a circle",
        "Check that the sysfs root is the right one.",
    ),
    errno.EMFILE: (
        Trouble.RETRY,
        "the agent has too many files open",
        "Raise its limit of open files (LimitNOFILE=).",
    ),
}
