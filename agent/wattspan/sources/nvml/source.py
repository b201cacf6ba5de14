"""The ``nvml`` source plugin: NVIDIA GPUs, and the thread that makes the calls.

A call into the driver can hang and cannot be ended from outside. One daemon thread makes all
calls; ``read`` returns its results since the last call, and reports a call that takes too long.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

from wattspan.model import MILLISECOND, Domain, Failure, GpuStatus, Reading, Trouble, Usage
from wattspan.ports import (
    Batch,
    Clock,
    CounterSource,
    SourceContext,
    SourceError,
    SourcePlugin,
)
from wattspan.sources.nvml.calls import SOURCE, CallTracker
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.sources.nvml.session import NvmlSession

LIBRARY = "libnvidia-ml.so.1"
MAX_QUEUED = 4096  # readings, or usages, that wait for a reader: some minutes of eight GPUs
MAX_STATUSES = 3  # status intervals
EDGE_DELAY = 13 * MILLISECOND


class NvmlSource:
    """A ``CounterSource`` with a thread of its own."""

    name = SOURCE

    def __init__(
        self, session: NvmlSession, watch: CallTracker, clock: Clock, settings: NvmlSettings
    ) -> None:
        self._session = session
        self._watch = watch
        self._clock = clock
        self._settings = settings
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._domains: tuple[Domain, ...] = ()
        self._failures: tuple[Failure, ...] = ()
        self._gpus: dict[str, GpuStatus] = {}
        self._readings: deque[Reading] = deque(maxlen=MAX_QUEUED)
        self._usages: deque[Usage] = deque(maxlen=MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name="wattspan-nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def read(self) -> Batch:
        """All results since the last call; never waits for the driver.

        Failures and statuses are those in force. A status that was not renewed in time (its GPU is
        lost, a call is stuck) is omitted.
        """
        oldest = self._clock.monotonic() - MAX_STATUSES * self._settings.status_interval
        stuck = self._stuck() or self._dead()
        with self._lock:
            readings, usages = tuple(self._readings), tuple(self._usages)
            self._readings.clear()
            self._usages.clear()
            failures = self._failures if stuck is None else (*self._failures, stuck)
            gpus = tuple(s for s in self._gpus.values() if s.at.mono >= oldest)
            return Batch(self._domains, readings, failures, usages, gpus)

    def close(self) -> None:
        """End the thread, which lets go of the GPUs. One that is stuck is left behind."""
        self._stop.set()
        if self._stuck() is None and self._thread.is_alive():
            self._thread.join(self._settings.deadline / 1e9)

    def deliver(self, batch: Batch) -> None:
        """Lay down what a turn yielded, for the next ``read``."""
        with self._lock:
            self._domains = batch.domains
            self._failures = batch.failures
            self._readings.extend(batch.readings)
            self._usages.extend(batch.usages)
            self._gpus.update((status.domain_id, status) for status in batch.gpus)

    def _stuck(self) -> Failure | None:
        current = self._watch.current
        if current is None:
            return None
        call, since = current
        elapsed = self._clock.monotonic() - since
        if elapsed <= self._settings.deadline:
            return None
        return Failure(
            SOURCE,
            "NVML",
            Trouble.STUCK,
            f"{call} has not returned for {elapsed / 1e9:.0f} s",
            "Look for Xid messages in dmesg; a driver call cannot be ended from outside.",
        )

    def _dead(self) -> Failure | None:
        """A thread that ended by itself must not pass for a quiet one."""
        if self._thread.is_alive() or self._thread.ident is None or self._stop.is_set():
            return None
        return Failure(
            SOURCE,
            "NVML",
            Trouble.MALFORMED,
            "the thread that calls it has ended",
            "This is a bug; restart the agent to read GPUs again.",
        )

    def _work(self) -> None:
        due = self._clock.monotonic()
        while not self._stop.is_set():
            now = self._clock.monotonic()
            if now >= due:
                self.deliver(self._session.sample())
                now = self._clock.monotonic()
                aside = EDGE_DELAY if self._session.near_an_edge else 0
                due = max(due + self._settings.interval + aside, now)  # none is made up for
            else:
                self._session.read_edges(now)
                now = self._clock.monotonic()
            look = self._session.next_edge_read(now)
            self._stop.wait(max(0, (due if look is None else min(due, look)) - now) / 1e9)
        self._session.close()


def open_nvml(settings: NvmlSettings, context: SourceContext) -> CounterSource | None:
    """The GPUs of this host; None without NVML, unless ``enabled`` is true.

    A driver that is not loaded is no reason for None: it can be loaded at any time.
    """
    if settings.enabled is False:
        return None
    nvml = _nvml_of(context)
    if nvml is None:
        if settings.enabled is True:
            raise SourceError(
                f"Cannot read GPUs: {LIBRARY} was not found. Install NVIDIA's driver, or set"
                ' sources.nvml.enabled = "auto".'
            )
        return None
    watch = CallTracker()
    session = NvmlSession(nvml, settings, context, watch)
    source = NvmlSource(session, watch, context.clock, settings)
    source.start()
    return source


def _nvml_of(context: SourceContext) -> Any:
    """The NVML to ask: an emulated host's own, and never the real one in its stead."""
    return context.nvml if context.emulated or context.nvml is not None else load_binding()


def load_binding() -> Any:
    """The ``pynvml`` module, or None without the library; it costs 6 MB that others can save."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml

    return pynvml


plugin = SourcePlugin(settings=NvmlSettings, open=open_nvml)
