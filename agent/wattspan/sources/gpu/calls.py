"""Calls to a GPU's driver with classified errors: an error costs a field, a GPU, or the session.

Drivers answer every call with a code; those of other libraries are translated to NVML's. Codes
that mean "not supported" are remembered, so that an unsupported field is not requested at every
sample. Codes that mean a lost GPU or a lost connection to the driver are raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wattspan.model import SECOND, Failure, Instant, Trouble
from wattspan.ports import Clock
from wattspan.sources.driver_thread import CallGivenUpError

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMED_OUT = 10
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

FIELD_RETRY_INTERVAL = 60 * SECOND
"""MIG can be turned off, a permission granted: refusals do not last."""

MAX_UNKNOWN_ERRORS = 3  # so many "unknown error" in a row are a GPU that is gone
MAX_LIST_RETRIES = 3  # a list may grow between the call for its size and the call for its content


class DriverError(Exception):
    """A call that failed with ``code``, one of NVML's.

    ``bare``: it had no argument but a handle, so that no other one can be invalid. ``cause`` and
    ``remedy`` are those that its code does not tell.
    """

    def __init__(self, code: int, *, bare: bool = False, cause: str = "", remedy: str = "") -> None:
        super().__init__(cause or f"the driver answers with error {code}")
        self.code, self.bare, self.cause, self.remedy = code, bare, cause, remedy


class SessionLostError(DriverError):
    """The library must be reinitialised: every handle of it is invalid."""


class GpuLostError(DriverError):
    """The GPU behind a handle no longer answers; the others may."""


def code_of(error: Exception) -> int:
    """The code of a DriverError; "unknown" of any other."""
    return error.code if isinstance(error, DriverError) else UNKNOWN


def raise_if_lost(code: int) -> None:
    """Raise if ``code`` means that the GPU or the session is lost."""
    if code in SESSION_ERRORS:
        raise SessionLostError(code)
    if code in GPU_ERRORS:
        raise GpuLostError(code)


def call_trouble(code: int) -> Trouble:
    """The class of the failure of a call by ``code``."""
    if code == NO_PERMISSION:
        return Trouble.DENIED
    absent = code in FIELD_ERRORS or code in {DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND}
    return Trouble.ABSENT if absent else Trouble.RETRY


@dataclass(frozen=True, slots=True)
class DriverMessages:
    """The sentences of a vendor's source: causes and remedies by code, and some single ones.

    ``counter`` names the energy counter; ``untrusted`` is the remedy of one that does not fit the
    power, ``unmeasured`` that of a board without figures, ``motionless`` that of one whose counter
    stays at 0.
    """

    source: str
    label: str
    causes: Mapping[int, str] = field(default_factory=dict)
    remedies: Mapping[int, str] = field(default_factory=dict)
    setter_remedies: Mapping[int, str] = field(default_factory=dict)
    counter: str = "energy counter"
    untrusted: str = "Its power is integrated instead."
    unmeasured: str = "In a virtual machine, read it on the host."
    motionless: str = "In a virtual machine, read it on the host."
    no_gpu: tuple[str, str] = (
        "the driver is loaded and finds no GPU",
        "Look at lspci and dmesg; the agent keeps trying.",
    )
    list_command: str = ""
    """A sentence on how to list the GPUs."""
    unlisted: str = "Run the agent in the host's pid namespace."
    """The remedy of a busy GPU without a process in the driver's list."""
    report: str = "Please report it with the driver's version."
    hang: str = "Look for messages of the driver in dmesg"
    """A clause on how to examine a call that does not return."""

    def cause_of(self, code: int) -> str:
        """The meaning of ``code``, as the cause in a sentence."""
        return self.causes.get(code, f"{self.label} answers with error {code}")

    def failure(self, thing: str, code: int, domain_id: str | None = None) -> Failure:
        """The failure of ``thing`` by ``code``."""
        cause, remedy = self.cause_of(code), self.remedies.get(code, "")
        return Failure(self.source, thing, call_trouble(code), cause, remedy, domain_id)

    def unexpected(self, thing: str, error: Exception, domain_id: str | None = None) -> Failure:
        """The failure of ``thing`` by an exception that is none of the driver's."""
        cause = f"an unexpected {type(error).__name__}: {error}"
        return Failure(self.source, thing, Trouble.MALFORMED, cause, self.report, domain_id)


@dataclass(slots=True, eq=False)
class DriverCall:
    """A call under way, since a monotonic time; ``board`` is "" if it is not of a single one."""

    name: str
    since: int
    board: str
    given_up: bool = False


class _CallingThread(threading.local):
    """The board of the next calls of a thread, and the one whose call of it was given up, or ""."""

    board = given_up = ""


class DriverLibrary:
    """The functions of a vendor's library. Errors are DriverErrors.

    ``current`` is the call under way; None without one. Other threads may read it. ``calls`` counts
    them.
    """

    def __init__(
        self,
        binding: Any,
        clock: Clock,
        errors: type[Exception],
        translate: Callable[[Exception], int],
    ) -> None:
        """``binding`` raises ``errors``; ``translate`` returns NVML's code of one."""
        self.binding = binding
        self.current: DriverCall | None = None
        self.thread = _CallingThread()
        self._lock = threading.Lock()  # of the end of a call
        self.calls = 0
        self._clock, self._errors, self._translate = clock, errors, translate

    def call(self, name: str, *arguments: Any, of: Any = None) -> Any:
        """The answer of a function of the binding, or ``of`` a part of it."""
        function = getattr(of or self.binding, name, None)
        if function is None:
            raise DriverError(FUNCTION_NOT_FOUND)
        if self.thread.given_up:
            raise CallGivenUpError(self.thread.given_up)
        self.current = call = DriverCall(name, self._clock.monotonic(), self.thread.board)
        self.calls += 1
        try:
            return function(*arguments)
        except self._errors as error:
            raise DriverError(self._translate(error), bare=len(arguments) == 1) from None
        finally:
            with self._lock:
                if not call.given_up:
                    self.current = None
            if call.given_up:
                self.thread.given_up = call.board
                raise CallGivenUpError(call.board)

    def give_up(self, before: int) -> DriverCall | None:
        """Give up the call of a board that began before a monotonic time; None without one.

        It raises CallGivenUpError in its thread when it returns, and so does every later call.
        """
        with self._lock:
            call = self.current
            if call is None or not call.board or call.since >= before:
                return None
            call.given_up, self.current = True, None
            return call

    def bound(self, handle: Any) -> Callable[..., Any]:
        """``call`` for one device: ``handle`` is the first argument of each function."""
        return lambda name, *arguments: self.call(name, handle, *arguments)

    def optional(self, name: str, *arguments: Any) -> Any:
        """The answer of a call that may fail without consequences; None if it does."""
        try:
            return self.call(name, *arguments)
        except DriverError:
            return None


class UnavailableField(NamedTuple):
    """The reason for which a field is not available, and the time of the next request for it."""

    code: int
    until: int


class GpuCalls:
    """The calls on one GPU. An unavailable answer is None, and is remembered."""

    def __init__(self, library: DriverLibrary, handle: Any, clock: Clock) -> None:
        self.library = library
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
        except DriverError as error:
            self._count_unknown(error.code)
            self.record_error(what, error.code)
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
                return self.library.call(name, self.handle, *arguments)
            except DriverError as error:
                if nothing is not None and error.code in {SUCCESS, NOT_FOUND}:
                    return nothing
                left -= 1
                if error.code != INSUFFICIENT_SIZE or left == 0:
                    raise

    def try_call(self, name: str, *arguments: Any, handle: Any = None) -> tuple[Any, int | None]:
        """The answer of a call and None, or None and the code of its error, which is not kept.

        ``handle`` is that of a MIG device, by default that of the GPU. Raises if the GPU or the
        session is lost.
        """
        try:
            return self.library.call(
                name, self.handle if handle is None else handle, *arguments
            ), None
        except DriverError as error:
            raise_if_lost(error.code)
            return None, error.code

    def record_answer(self, what: str) -> None:
        """Record an answer to ``what``, which clears its earlier errors."""
        if self._refused:
            self._refused.pop(what, None)
        if self._failing:
            self._failing.pop(what, None)

    def record_error(self, what: str, code: int) -> None:
        """Record the error ``code`` of ``what``, or raise if the GPU or the session is lost."""
        raise_if_lost(code)
        if code in FIELD_ERRORS:
            self._failing.pop(what, None)
            until = self._clock.monotonic() + FIELD_RETRY_INTERVAL
            self._refused[what] = UnavailableField(code, until)
        else:
            self._failing[what] = code

    def stamped(self, what: str, name: str, *arguments: Any) -> tuple[Any, Instant]:
        """The answer as ``ask`` returns it, and the time half-way through the call."""
        began = self._clock.now()
        answer = self.ask(what, name, *arguments)
        half = (self._clock.monotonic() - began.mono) // 2
        return answer, Instant(began.mono + half, began.wall + half, began.asleep)

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
