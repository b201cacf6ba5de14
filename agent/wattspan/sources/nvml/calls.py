"""NVML calls with classified errors: an error costs one field, one GPU, or the whole session.

NVML answers every call with a code. Codes that mean "not supported" are remembered, so that an
unsupported field is not requested at every sample. Codes that mean a lost GPU or a lost
connection to the driver are raised.

Field values: many in one call, each with a return code and a type of its own. The call as a whole
succeeds although single entries fail. The numbers are those of nvml.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from wattspan.model import SECOND, Failure, Trouble
from wattspan.ports import Clock
from wattspan.util.text import printable

SOURCE = "nvml"
SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

FIELD_ERRORS = frozenset(
    {NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED}
)
GPU_ERRORS = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
SESSION_ERRORS = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})

FIELD_RETRY_INTERVAL = (
    60 * SECOND
)  # MIG can be turned off, a permission granted: refusals do not last
MAX_UNKNOWN_ERRORS = 3  # so many "unknown error" in a row are a GPU that is gone
MAX_TEXT = 96  # NVML's own buffers for names and UUIDs
MAX_LIST_RETRIES = 3  # a list may grow between the call for its size and the call for its content

_CAUSES = {
    UNINITIALIZED: "NVML is not initialised",
    NOT_SUPPORTED: "this GPU, in its present mode, does not support it",
    NO_PERMISSION: "permission denied",
    NOT_FOUND: "the driver has no such data",
    INSUFFICIENT_SIZE: "the list grew faster than it could be read",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    10: "the driver timed out",
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found",
    FUNCTION_NOT_FOUND: "the installed driver is too old for the call",
    GPU_IS_LOST: "the GPU has fallen off the bus or is otherwise inaccessible",
    RESET_REQUIRED: "the GPU needs a reset",
    17: "the operating system blocked the request",
    LIB_RM_VERSION_MISMATCH: "the NVML library and the loaded driver differ in version",
    20: "the driver is out of memory",
    VERSION_MISMATCH: "the installed driver does not know this version of the call",
    DEPRECATED: "the installed driver no longer supports the call",
    27: "the driver is not ready yet",
    GPU_NOT_FOUND: "the driver no longer knows the GPU",
    UNKNOWN: "the driver reports an unknown error",
}
_REMEDIES = {
    NO_PERMISSION: (
        "Give the agent access to /dev/nvidiactl and /dev/nvidia*: in a container through"
        " NVIDIA's runtime, in a systemd unit with DeviceAllow=."
    ),
    DRIVER_NOT_LOADED: "Load it (modprobe nvidia); the agent keeps trying.",
    LIB_RM_VERSION_MISMATCH: "Reload the driver or reboot: it was upgraded while in use.",
    GPU_IS_LOST: "Look for Xid messages in dmesg; the agent keeps trying.",
    RESET_REQUIRED: "Reset it with nvidia-smi --gpu-reset, or reboot; the agent keeps trying.",
    17: "Look for a cgroup device rule that keeps the agent from /dev/nvidia*.",
}


def cause_of(code: int) -> str:
    """The meaning of ``code``, as the cause in a sentence."""
    return _CAUSES.get(code, f"NVML answers with error {code}")


def call_failure(thing: str, code: int, domain_id: str | None = None) -> Failure:
    """The failure of ``thing`` by NVML's error ``code``."""
    trouble = Trouble.RETRY
    if code == NO_PERMISSION:
        trouble = Trouble.DENIED
    elif code in FIELD_ERRORS or code in {DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND}:
        trouble = Trouble.ABSENT
    return Failure(SOURCE, thing, trouble, cause_of(code), _REMEDIES.get(code, ""), domain_id)


class LostError(Exception):
    """Calls are impossible because of NVML's error ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(cause_of(code))
        self.code = code


class SessionLostError(LostError):
    """The library must be reinitialised: every handle of it is invalid."""


class GpuLostError(LostError):
    """The GPU behind a handle no longer answers; the others may."""


class DriverLibrary(Protocol):
    """The functions of a driver's library. Errors are of the type ``error``, with NVML's codes."""

    error: type[Exception]

    def call(self, name: str, *arguments: Any) -> Any: ...


class NvmlLibrary:
    """NVML's functions. Errors are the binding's own ``NVMLError``.

    ``current`` is the name of the call under way and the monotonic time of its start; None without
    a call. Other threads read it, so one attribute holds one tuple.
    """

    def __init__(self, nvml: Any, clock: Clock) -> None:
        self._nvml = nvml
        self._clock = clock
        self.error: type[Exception] = nvml.NVMLError
        self.current: tuple[str, int] | None = None

    def structure(self, name: str) -> Any:
        """A new structure of the binding; "function not found" if the binding is too old."""
        kind = getattr(self._nvml, name, None)
        if kind is None:
            raise self.error(FUNCTION_NOT_FOUND)
        return kind()

    def call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise self.error(FUNCTION_NOT_FOUND)
        self.current = (name, self._clock.monotonic())
        try:
            return function(*arguments)
        finally:
            self.current = None


class UnavailableField(NamedTuple):
    """The reason for which a field is not available, and the time of the next request for it."""

    code: int
    until: int


class GpuCalls:
    """The calls on one GPU. An unavailable answer is None, and is remembered."""

    def __init__(self, library: DriverLibrary, handle: Any, clock: Clock) -> None:
        self._library = library
        self._clock = clock
        self.handle = handle
        self._refused: dict[str, UnavailableField] = {}
        self._failing: dict[str, int] = {}  # codes of the last requests, by field
        self._unknowns = 0

    def ask(self, what: str, name: str, *arguments: Any) -> Any:
        """The answer of the function ``name``, or None. ``what`` describes the answer in words."""
        return self._ask(what, name, arguments, nothing=None)

    def ask_list(self, what: str, name: str, *arguments: Any) -> Iterable[Any] | None:
        """The list that ``name`` returns, or None if it is not available.

        The binding raises "success" for a utilisation buffer without entries. NVML returns "not
        found" if no process used the GPU, and "insufficient size" if the list grew between the two
        calls it takes.
        """
        answer = self._ask(what, name, arguments, nothing=())
        return None if answer is None else list(answer)

    def _ask(self, what: str, name: str, arguments: tuple[Any, ...], nothing: Any) -> Any:
        if not self.is_due(what):
            return None
        try:
            answer = self._call(name, arguments, nothing)
        except self._library.error as error:
            code = code_of(error)
            self._count_unknown(code)
            self.record_error(what, code)
            return None
        self._unknowns = 0
        self.record_answer(what)
        return answer

    def _count_unknown(self, code: int) -> None:
        """Count errors of calls only: one field of many may always answer "unknown"."""
        self._unknowns = self._unknowns + 1 if code == UNKNOWN else 0
        if self._unknowns >= MAX_UNKNOWN_ERRORS:
            raise GpuLostError(code)

    def _call(self, name: str, arguments: tuple[Any, ...], nothing: Any) -> Any:
        left = MAX_LIST_RETRIES
        while True:
            try:
                return self._library.call(name, self.handle, *arguments)
            except self._library.error as error:
                code = code_of(error)
                if nothing is not None and code in {SUCCESS, NOT_FOUND}:
                    return nothing
                left -= 1
                if code != INSUFFICIENT_SIZE or left == 0:
                    raise

    def try_call(self, name: str, *arguments: Any, handle: Any = None) -> tuple[Any, int | None]:
        """The answer of a call and None, or None and the code of its error, which is not kept.

        ``handle`` is that of a MIG device, by default that of the GPU. Raises if the GPU or the
        session is lost.
        """
        try:
            return self._library.call(
                name, self.handle if handle is None else handle, *arguments
            ), None
        except self._library.error as error:
            code = code_of(error)
            if code in SESSION_ERRORS:
                raise SessionLostError(code) from None
            if code in GPU_ERRORS:
                raise GpuLostError(code) from None
            return None, code

    def record_answer(self, what: str) -> None:
        """Record an answer to ``what``, which clears its earlier errors."""
        if self._refused:
            self._refused.pop(what, None)
        if self._failing:
            self._failing.pop(what, None)

    def record_error(self, what: str, code: int) -> None:
        """Record the error ``code`` of ``what``, or raise if the GPU or the session is lost."""
        if code in SESSION_ERRORS:
            raise SessionLostError(code)
        if code in GPU_ERRORS:
            raise GpuLostError(code)
        if code in FIELD_ERRORS:
            self._failing.pop(what, None)
            until = self._clock.monotonic() + FIELD_RETRY_INTERVAL
            self._refused[what] = UnavailableField(code, until)
        else:
            self._failing[what] = code

    def refused(self, what: str) -> int | None:
        """The code with which ``what`` was refused, or None if it was not."""
        refusal = self._refused.get(what)
        return None if refusal is None else refusal.code

    @property
    def any_refused(self) -> bool:
        """True if any field was refused."""
        return bool(self._refused)

    def is_due(self, what: str) -> bool:
        """True if ``what`` may be requested: it was not refused, or its retry time has come."""
        refusal = self._refused.get(what)
        return refusal is None or self._clock.monotonic() >= refusal.until

    def retry(self) -> None:
        """Request refused fields again now: the mode of the GPU has changed."""
        self._refused.clear()

    def rebind(self, handle: Any) -> None:
        """The library was reinitialised; this is the same GPU's new handle."""
        self.handle = handle
        self._unknowns = 0

    def failures(self, of: Callable[[str, int], Failure]) -> list[Failure]:
        """Failures to report: denied fields and failing calls, joined by cause.

        A field that the hardware does not have is no failure.
        """
        by_code: dict[int, list[str]] = {}
        for what, refusal in self._refused.items():
            if refusal.code == NO_PERMISSION:
                by_code.setdefault(refusal.code, []).append(what)
        for what, code in self._failing.items():
            by_code.setdefault(code, []).append(what)
        return [of(", ".join(sorted(whats)), code) for code, whats in sorted(by_code.items())]


def driver_text(value: Any) -> str:
    """Text of the driver, printable. Old bindings return bytes."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return printable(text[:MAX_TEXT])


def code_of(error: Exception) -> int:
    code = getattr(error, "value", UNKNOWN)
    return code if isinstance(code, int) else UNKNOWN


POWER_AVERAGE = 185
POWER_INSTANT = 186
LIMIT_MINIMUM = 187
LIMIT_MAXIMUM = 188
LIMIT_DEFAULT = 189
LIMIT_ENFORCED = 190
LIMIT_REQUESTED = 192

THROTTLE_FIELDS = {74: "power_cap", 269: "sw_thermal", 270: "hw_thermal", 271: "power_brake"}
"""Cumulative nanoseconds of throttling, by reason."""

FIELDS = {
    POWER_AVERAGE: "average power",
    POWER_INSTANT: "instant power",
    LIMIT_MINIMUM: "minimum power limit",
    LIMIT_MAXIMUM: "maximum power limit",
    LIMIT_DEFAULT: "default power limit",
    LIMIT_ENFORCED: "enforced power limit",
    LIMIT_REQUESTED: "requested power limit",
    **{field: f"time throttled by {reason}" for field, reason in THROTTLE_FIELDS.items()},
}

_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by value type
_BLANK_VALUES = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFFFFFFFFFF})

FIELD_VALUES = "field values"


def read_fields(calls: GpuCalls, fields: tuple[int, ...]) -> dict[int, int]:
    """The fields that answered. Unavailable fields are omitted, and remembered."""
    asked = list(fields)
    if calls.any_refused:
        asked = [field for field in fields if calls.is_due(FIELDS[field])]
    if not asked:
        return {}
    entries = calls.ask(FIELD_VALUES, "nvmlDeviceGetFieldValues", asked)
    if entries is None:
        return {}
    values: dict[int, int] = {}
    for field, entry in zip(asked, entries, strict=False):
        if entry.nvmlReturn != SUCCESS:
            calls.record_error(FIELDS[field], entry.nvmlReturn)
            continue
        value = _field_value(entry)
        if value is not None:
            values[field] = value
            calls.record_answer(FIELDS[field])
    return values


def _field_value(entry: Any) -> int | None:
    """The number in an entry, whatever its type; None for an unknown type or a blank value."""
    if not 0 <= entry.valueType < len(_VALUE_MEMBERS):
        return None
    number = getattr(entry.value, _VALUE_MEMBERS[entry.valueType])
    return None if number in _BLANK_VALUES else int(number)
