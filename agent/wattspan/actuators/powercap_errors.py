"""What a powercap error means to somebody who wants to set a limit."""

from __future__ import annotations

import errno
import os

from wattspan.actuators.errors import refused
from wattspan.model import Trouble
from wattspan.ports import ActuatorError

GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ESTALE})

_ROOT = "Limits may be written by root only; run `wattspan capper` as root."
_MEANING: dict[int, tuple[Trouble, str, str]] = {
    errno.EACCES: (Trouble.DENIED, "permission denied (EACCES)", _ROOT),
    errno.EPERM: (Trouble.DENIED, "operation not permitted (EPERM)", _ROOT),
    errno.EROFS: (
        Trouble.DENIED,
        "sysfs is mounted read-only (EROFS)",
        "Run `wattspan capper` outside the container, or without ProtectKernelTunables=.",
    ),
    errno.ENODATA: (
        Trouble.RETRY,
        "the driver could not read or write the register (ENODATA)",
        "It is tried again; a package that is offline answers so.",
    ),
    errno.EIO: (
        Trouble.RETRY,
        "the register could not be reached (EIO)",
        "It is tried again; if it stays so, look at the kernel's log for MSR errors.",
    ),
    errno.EBUSY: (
        Trouble.RETRY,
        "the device is busy (EBUSY)",
        "It is tried again; firmware or another driver holds the interface.",
    ),
    errno.EINVAL: (
        Trouble.MALFORMED,
        "the driver says that this is no value of it (EINVAL)",
        "Ask for something within the range that `wattspan caps status` shows.",
    ),
    errno.ENODEV: (
        Trouble.RETRY,
        "the package is gone (ENODEV)",
        "A package taken offline answers so; it is looked for again.",
    ),
    errno.ENOENT: (
        Trouble.RETRY,
        "the zone has vanished",
        "A package taken offline, or an unloaded driver, takes its zones with it.",
    ),
}


def refusal(thing: str, error: OSError) -> ActuatorError:
    """Why ``thing``, as in "set the power limit of package-0", ended in ``error``."""
    number = error.errno or 0
    trouble, cause, remedy = _MEANING.get(
        number, (Trouble.RETRY, os.strerror(number).lower(), "It is tried again.")
    )
    return refused(thing, cause, remedy, trouble)


def locked(thing: str, how: str) -> ActuatorError:
    """Firmware has locked the register; ``how`` it showed."""
    return refused(
        thing,
        f"{how}: firmware has locked the register until the next boot",
        "Look for a power limit lock (package power limit lock, RAPL lock) in the firmware's "
        "setup, and reboot.",
        Trouble.DENIED,
        locked=True,
    )


def switched_off(thing: str, directory: str) -> ActuatorError:
    """The zone's limits are there and not in force."""
    return refused(
        thing,
        "its limits are switched off, so a lower one would change nothing",
        f"Switch them on with `echo 1 > {directory}/enabled`, if they are to hold.",
        Trouble.ABSENT,
    )


def nothing_stands(thing: str) -> ActuatorError:
    """The zone shows a limit of 0, which could not be given back."""
    return refused(
        thing,
        "it shows a limit of 0 W, as registers do that were never set, so nothing could be "
        "given back",
        "Write the limit that should stand there into its power_limit_uw once, as root.",
        Trouble.ABSENT,
    )
