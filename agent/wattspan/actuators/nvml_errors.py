"""What NVML's codes mean to somebody who wants to turn a knob."""

from __future__ import annotations

from wattspan.actuators.errors import refused
from wattspan.model import Trouble
from wattspan.ports import ActuatorError

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

OF_THE_SESSION = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
OF_A_BOARD = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND, UNKNOWN})
OF_A_FIELD = frozenset({NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED})

_CAUSES: dict[int, tuple[Trouble, str, str]] = {
    UNINITIALIZED: (
        Trouble.RETRY,
        "the connection to the driver is gone",
        "It is made anew at the next attempt.",
    ),
    INVALID_ARGUMENT: (
        Trouble.MALFORMED,
        "the driver says that this is no value of it",
        "Ask for one within the device's range, as `wattspan caps status` shows it.",
    ),
    NOT_SUPPORTED: (
        Trouble.ABSENT,
        "this GPU does not have it",
        "Virtual GPUs, and many in laptops, leave it to their host; cap them there.",
    ),
    NO_PERMISSION: (
        Trouble.DENIED,
        "permission denied",
        "The driver wants CAP_SYS_ADMIN in the host's own user namespace, which root in a "
        "container does not have by itself; run `wattspan capper` as root on the host.",
    ),
    DRIVER_NOT_LOADED: (
        Trouble.RETRY,
        "the NVIDIA driver is not loaded",
        "Load it (modprobe nvidia); limits are the driver's defaults afterwards.",
    ),
    FUNCTION_NOT_FOUND: (
        Trouble.ABSENT,
        "the installed driver is too old to know the call",
        "Install a newer one.",
    ),
    GPU_IS_LOST: (
        Trouble.RETRY,
        "the GPU has fallen off the bus or is otherwise inaccessible",
        "Look for Xid messages in dmesg; it is tried again.",
    ),
    RESET_REQUIRED: (
        Trouble.RETRY,
        "the GPU needs a reset",
        "Reset it with nvidia-smi --gpu-reset, or reboot.",
    ),
    LIB_RM_VERSION_MISMATCH: (
        Trouble.RETRY,
        "the NVML library and the loaded driver differ in version",
        "Reload the driver or reboot: it was upgraded while in use.",
    ),
    GPU_NOT_FOUND: (
        Trouble.RETRY,
        "the driver no longer knows the GPU",
        "Look at lspci and dmesg; it is tried again.",
    ),
    UNKNOWN: (
        Trouble.RETRY,
        "the driver reports an unknown error",
        "Look for Xid messages in dmesg; it is tried again.",
    ),
}


def code_of(error: Exception) -> int:
    """NVML's code behind the binding's error."""
    code = getattr(error, "value", UNKNOWN)
    return code if isinstance(code, int) else UNKNOWN


def refusal(thing: str, code: int) -> ActuatorError:
    """Why ``thing`` (as in "set the power limit of GPU 0") was answered with ``code``."""
    trouble, cause, remedy = _CAUSES.get(
        code,
        (
            Trouble.ABSENT if code in OF_A_FIELD else Trouble.RETRY,
            f"NVML answers with error {code}",
            "",
        ),
    )
    return refused(thing, cause, remedy, trouble)
