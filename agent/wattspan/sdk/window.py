"""Windows: a period of a program, and its energy.

The begin and end of a window take a time stamp each, and note it in memory that the agent reads:
they read no counter and wait for nothing. The agent is queried when a value is read.

On request a window waits for a device at its edges. Work is queued on a GPU and runs later;
without waiting, a window ends when its work was queued. A framework that the program has not
imported has queued nothing, so this module imports none.
"""

from __future__ import annotations

import sys
from time import monotonic_ns

from wattspan import sdk
from wattspan.sdk import MeasurementError, WindowError

TYPE_CHECKING = False  # the sdk imports `typing` for type checkers only

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Self

    from wattspan.sdk import WatchRegistration
    from wattspan.sdk.client import Device, Energy, Measurement


def synchronize_torch() -> None:
    """Wait for the current CUDA or ROCm device of PyTorch, if the process uses one."""
    module = sys.modules.get("torch")
    if module is not None and module.cuda.is_initialized():
        module.cuda.synchronize()


def synchronize_jax() -> None:
    """Wait for the pending arrays and side effects of JAX, if the process uses it."""
    module = sys.modules.get("jax")
    if module is not None:
        finish_jax(module)


def finish_jax(module: Any) -> None:
    """Wait for the pending arrays and side effects of the loaded JAX ``module``."""
    module.block_until_ready(module.live_arrays())
    module.effects_barrier()


_HOOKS = {"torch": synchronize_torch, "jax": synchronize_jax}


def synchronize_hook(wanted: str | Callable[[], object]) -> Callable[[], object]:
    """A hook by its name, or the given function; ValueError for an unknown name."""
    if callable(wanted):
        return wanted
    try:
        return _HOOKS[wanted]
    except KeyError:
        raise ValueError(
            f'synchronize={wanted!r} is not known: give "torch", "jax" or a function '
            "that returns when the device is done."
        ) from None


_PROCESS = {"pid": "self", "family": "1"}

RESULT_TIMEOUT = 5.0
"""Seconds to wait for a value: GPU counters settle 1 to 3 s late."""


class Window:
    """One measured period; used once. Windows may nest and overlap.

    The values ``joules``, ``process``, ``host`` and ``devices`` can be read after the end, from
    any thread. Reading waits until they are known, at most 5 s, and may raise
    AgentUnavailableError or NotSettledError; it can be repeated. ``await w.aresult()`` waits
    without blocking an event loop.
    """

    __slots__ = ("__weakref__", "_begun", "_ended", "_measurement", "_owner", "_sync", "name")

    def __init__(self, name: str, synchronize: Callable[[], object] | None = None) -> None:
        self.name = name
        self._sync = synchronize
        self._begun = 0
        self._ended = 0
        self._owner: WatchRegistration | None = None
        self._measurement: Measurement | None = None

    # ---------------------------------------------------------------------------- measuring

    def begin(self) -> Self:
        """Begin the window now, where ``with`` is not possible."""
        if self._begun:
            raise WindowError(f"{self!r} was begun before. Open a new one each time.")
        if self._sync is not None:
            self._sync()
        self._owner = registration = sdk.registration
        now = monotonic_ns()
        if now >= registration.due:
            registration.renew_if_due()
            now = monotonic_ns()
        self._begun = now
        registration.note_edge(now)
        return self

    def end(self) -> Self:
        """End the window now, after the device if ``synchronize`` is set."""
        if not self._begun or self._ended:
            raise WindowError(f"{self!r} is not open. Begin a window before ending it, once.")
        try:
            if self._sync is not None:
                self._sync()
        finally:
            self._finish()
        return self

    def _finish(self) -> None:
        self._ended = now = monotonic_ns()
        if self._owner is sdk.registration:  # else in a child of a fork
            sdk.registration.note_edge(now)
            sdk.registration.unread.add(self)
            if now >= sdk.registration.due:  # an agent may have restarted since the begin
                sdk.registration.renew_if_due()

    __enter__ = begin

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ended:  # by a call of ``end`` in the block
            return
        if kind is None:
            self.end()
        else:  # without waiting for the device, which may have failed
            self._finish()

    # ------------------------------------------------------------------------------ reading

    @property
    def joules(self) -> Energy:
        """The energy of this process and its descendants, by kind; ``joules.total`` is the sum."""
        return self.result().joules

    @property
    def total(self) -> float:
        """``joules.total``."""
        return self.result().joules.total

    @property
    def process(self) -> Energy:
        """The energy of this process without its descendants."""
        return self.result().process

    @property
    def host(self) -> Energy:
        """The energy of all devices of the host, of all processes."""
        return self.result().host

    @property
    def devices(self) -> tuple[Device, ...]:
        """The energy of each device, of all processes."""
        return self.result().devices

    @property
    def static(self) -> float | None:
        """The static part of ``joules["gpu"]``: the static power of the boards times the time.

        None while the static power is unknown; see ``static_basis``.
        """
        return self.result().static

    @property
    def dynamic(self) -> float | None:
        """The rest of ``joules["gpu"]``; None while the static power is unknown."""
        return self.result().dynamic

    @property
    def static_basis(self) -> str | None:
        """The origin of the static power: configured, fitted or lower_bound; None: unknown."""
        return self.result().static_basis

    @property
    def coverage(self) -> float:
        """The measured fraction of the window, 0 to 1."""
        return self.result().joules.coverage

    @property
    def certainty(self) -> str:
        """``"known"``, ``"lower_bound"`` if a part of the energy is unknown, or ``"unknown"``."""
        return self.result().joules.certainty

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """The uncertainty of each value of ``joules``, in joules."""
        return self.result().joules.uncertainty

    @property
    def provenance(self) -> Mapping[str, str]:
        """The provenance of each kind: measured, derived, estimated or emulated."""
        return self.result().provenance

    @property
    def seconds(self) -> float:
        """The duration of the window; known without an agent."""
        return (self._closed() - self._begun) / 1e9

    @property
    def ok(self) -> bool:
        """True if the energy of all kinds is known; waits for it. False without an agent."""
        try:
            return not self.result().joules.unknown
        except MeasurementError:
            return False

    def result(self, timeout: float = RESULT_TIMEOUT, *, partial: bool = False) -> Measurement:
        """All values; waits at most ``timeout`` seconds until they are known.

        NotSettledError if they are not known by then; with ``partial``, the values known so far,
        with a coverage below 1.
        """
        if self._measurement is not None:
            return self._measurement
        from wattspan.sdk.client import NotSettledError, read_measurement, read_measurements

        parameters = self._parameters()
        measurement: Measurement = sdk.registration.unread.read(
            self, "process", lambda periods: read_measurements(_PROCESS, periods, timeout)
        ) or read_measurement(parameters, timeout)
        if not self.accept("process", measurement) and not partial:
            raise NotSettledError(
                f"The energy of {self!r} is not known yet after {timeout:g} s. Read it again "
                "later, wait longer with result(timeout=...), or take result(partial=True).",
                measurement,
            )
        return measurement

    def accept(self, kind: object, measurement: Measurement) -> bool:
        """Keep a measurement that is final; True if it is."""
        if measurement.complete:
            self._measurement = measurement
        return measurement.complete

    async def aresult(
        self, timeout: float = RESULT_TIMEOUT, *, partial: bool = False
    ) -> Measurement:
        """As ``result``, without blocking the event loop."""
        import asyncio

        return await asyncio.to_thread(self.result, timeout, partial=partial)

    def _closed(self) -> int:
        if not self._begun:
            raise WindowError(f"{self!r} was never begun. Begin and end it before reading.")
        if not self._ended:
            raise WindowError(f"{self!r} is still open. Read its values after its end.")
        return self._ended

    @property
    def period(self) -> tuple[int, int]:
        """Begin and end in nanoseconds of the monotonic clock; known without an agent."""
        return self._begun, self._closed()

    def _parameters(self) -> dict[str, str]:
        begun, ended = self.period
        edges = {"start": f"mono:{begun}", "end": f"mono:{ended}"}
        if self._owner is not sdk.registration:  # of a parent, or pickled elsewhere
            raise WindowError(
                f"{self!r} belongs to another process, which opened it. Read it there; this one "
                "measures itself with windows of its own."
            )
        return {**_PROCESS, **edges}

    def __repr__(self) -> str:
        state = "not begun"
        if self._ended:
            state = f"{(self._ended - self._begun) / 1e9:.6g} s"
        elif self._begun:
            state = "open"
        return f"<window {self.name!r}, {state}>"


def window(name: str = "", *, synchronize: str | Callable[[], object] | None = None) -> Window:
    """A window: ``with wattspan.window("train") as w: ...``, then ``w.joules``.

    ``synchronize`` waits for a device at both edges, so that queued work counts in the window
    that queued it: ``"torch"``, ``"jax"``, or a function. Without it no window waits.
    """
    return Window(name, None if synchronize is None else synchronize_hook(synchronize))
