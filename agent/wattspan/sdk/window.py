"""Waiting for a device to finish what it was given, on request only.

Work is queued on a GPU and runs later; without this, a window ends when the work was queued.
Nothing is imported here: a framework that the program has not loaded has queued nothing.

A stretch of a program's time, and what it spent.

Beginning and ending a window takes a time stamp and nothing else: no counter is read, no GPU is
stopped, nobody is asked. The figures are the agent's, asked for when they are read.
"""

from __future__ import annotations

import sys
from time import monotonic_ns

import wattspan.sdk.agent as process
from wattspan.sdk.agent import MeasurementError, WindowError

TYPE_CHECKING = False  # the sdk imports `typing` for type checkers only

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from wattspan.sdk.agent import WatchRegistration
    from wattspan.sdk.measurement import Device, Energy, Measurement


def synchronize_torch() -> None:
    """Wait for PyTorch's current CUDA (or ROCm) device, if this process uses one."""
    module = sys.modules.get("torch")
    if module is not None and module.cuda.is_initialized():
        module.cuda.synchronize()


def synchronize_jax() -> None:
    """Wait for every array that JAX still computes, and for its side effects."""
    module = sys.modules.get("jax")
    if module is not None:
        module.block_until_ready(module.live_arrays())
        module.effects_barrier()


_HOOKS = {"torch": synchronize_torch, "jax": synchronize_jax}


def synchronize_hook(wanted: str | Callable[[], object]) -> Callable[[], object]:
    """The hook by its name, or the caller's own; ValueError for a name that is none."""
    if callable(wanted):
        return wanted
    try:
        return _HOOKS[wanted]
    except KeyError:
        raise ValueError(
            f'synchronize={wanted!r} is not known: give "torch", "jax" or a function '
            "that returns when the device is done."
        ) from None


RESULT_TIMEOUT = 5.0
"""Seconds that reading a figure waits for it: GPU counters settle 1 to 3 s late."""


class Window:
    """One measured stretch; used once. Windows nest and overlap as they like.

    Figures are read after its end, from any thread: ``joules``, ``process``, ``host``,
    ``devices``. Reading waits until they are known, at most 5 s, and may raise
    AgentUnavailableError or NotSettledError; it can be tried again. ``await w.aresult()`` waits
    without blocking an event loop.
    """

    __slots__ = ("_begun", "_ended", "_here", "_measurement", "_synchronize", "name")

    def __init__(self, name: str, synchronize: Callable[[], object] | None = None) -> None:
        self.name = name
        self._synchronize = synchronize
        self._begun = 0
        self._ended = 0
        self._here: WatchRegistration | None = None
        self._measurement: Measurement | None = None

    # ---------------------------------------------------------------------------- measuring

    def begin(self) -> Self:
        """The window begins now; for those who cannot write ``with``."""
        if self._begun:
            raise WindowError(f"{self!r} was begun before. Open a new one each time.")
        if self._synchronize is not None:
            self._synchronize()
        self._here = here = process.registration
        now = monotonic_ns()
        if now >= here.due:
            here.keep()
            now = monotonic_ns()
        self._begun = now
        return self

    def end(self) -> Self:
        """The window ends now, after waiting for the device if that was asked for."""
        if not self._begun or self._ended:
            raise WindowError(f"{self!r} is not open. Begin a window before ending it, once.")
        try:
            if self._synchronize is not None:
                self._synchronize()
        finally:
            self._ended = monotonic_ns()
        return self

    __enter__ = begin

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ended:  # within its block, and so it shall be
            return
        if kind is None:
            self.end()
        else:  # what went wrong is the program's to hear; a device may be beyond waiting for
            self._ended = monotonic_ns()

    # ------------------------------------------------------------------------------ reading

    @property
    def joules(self) -> Energy:
        """What this process and its descendants spent, by kind; ``joules.total`` in all."""
        return self.result().joules

    @property
    def total(self) -> float:
        """``joules.total``."""
        return self.result().joules.total

    @property
    def process(self) -> Energy:
        """What this process spent, its descendants left out."""
        return self.result().process

    @property
    def host(self) -> Energy:
        """What all devices of the host spent, whoever caused it."""
        return self.result().host

    @property
    def devices(self) -> tuple[Device, ...]:
        """What each device spent, whoever caused it."""
        return self.result().devices

    @property
    def coverage(self) -> float:
        """The part of the window's time that was measured, 0 to 1."""
        return self.result().joules.coverage

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """How many joules each figure of ``joules`` may be off."""
        return self.result().joules.uncertainty

    @property
    def provenance(self) -> Mapping[str, str]:
        """How each kind's figures were obtained: measured, derived, estimated, emulated."""
        return self.result().provenance

    @property
    def seconds(self) -> float:
        """How long the window was; known without an agent."""
        return (self._closed() - self._begun) / 1e9

    @property
    def ok(self) -> bool:
        """Whether all kinds are known; waits for them, and raises nothing for want of an agent."""
        try:
            return not self.result().joules.unknown
        except MeasurementError:
            return False

    def result(self, timeout: float = RESULT_TIMEOUT, *, partial: bool = False) -> Measurement:
        """All figures at once, waiting at most ``timeout`` seconds until they are known.

        NotSettledError if they are not known by then; with ``partial``, what is known so far,
        its coverage below 1.
        """
        if self._measurement is not None:
            return self._measurement
        from wattspan.sdk.client import read_measurement
        from wattspan.sdk.measurement import NotSettledError

        measurement = read_measurement(self._question(), timeout)
        if measurement.complete:
            self._measurement = measurement
        elif not partial:
            raise NotSettledError(
                f"The energy of {self!r} is not known yet after {timeout:g} s. Read it again "
                "later, wait longer with result(timeout=...), or take result(partial=True).",
                measurement,
            )
        return measurement

    async def aresult(
        self, timeout: float = RESULT_TIMEOUT, *, partial: bool = False
    ) -> Measurement:
        """As ``result``, without blocking the event loop."""
        import asyncio

        return await asyncio.to_thread(self.result, timeout, partial=partial)

    def _closed(self) -> int:
        if not self._begun:
            raise WindowError(f"{self!r} was never begun, so there is nothing to read.")
        if not self._ended:
            raise WindowError(f"{self!r} is still open. Read its figures after its end.")
        return self._ended

    def _question(self) -> dict[str, str]:
        edges = {"start": f"mono:{self._begun}", "end": f"mono:{self._closed()}"}
        if self._here is not process.registration:  # we are a child, and `self` would be us
            raise WindowError(
                f"{self!r} belongs to another process, which opened it before it forked this one. "
                "Read it there; a child measures itself with windows of its own."
            )
        return {"pid": "self", "family": "1", **edges}

    def __repr__(self) -> str:
        state = "not begun"
        if self._ended:
            state = f"{(self._ended - self._begun) / 1e9:.6g} s"
        elif self._begun:
            state = "open"
        return f"<window {self.name!r}, {state}>"


def window(name: str = "", *, synchronize: str | Callable[[], object] | None = None) -> Window:
    """A window to measure with: ``with wattspan.window("train") as w: ...``, then ``w.joules``.

    ``synchronize`` waits for a device at both edges, so that work which was queued on it counts
    where it was queued: ``"torch"``, ``"jax"``, or a function of your own. Without it nothing is
    ever waited for.
    """
    if synchronize is None:
        return Window(name)

    return Window(name, synchronize_hook(synchronize))
