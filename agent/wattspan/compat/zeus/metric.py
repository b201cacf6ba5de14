"""Zeus's Prometheus metrics, for an agent that is scraped.

Zeus pushes the energy of windows from the program to a gateway. Here a window is a span of the
service ``job``, whose energy the agent adds up under its name, and nothing is pushed: the counters
of the agent lose no energy between two windows, and no gateway can fail.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from wattspan import otel
from wattspan.compat.zeus.monitor import DeviceSynchronizer

_log = logging.getLogger("wattspan")


class _ScrapedMetric:
    """Windows by name, of any thread; each is a span if there is a tracer."""

    def __init__(self, gpu_indices: Sequence[int], job: str, replacement: str) -> None:
        self.gpu_indices = list(gpu_indices)
        self._synchronizer = DeviceSynchronizer("torch")
        self._windows: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._tracer = self._tracer_of(job)
        _log.info("Nothing is pushed to a gateway: %s", replacement)

    def _tracer_of(self, job: str) -> Any:
        """A tracer of spans of the service ``job``; None if there are no spans."""
        if otel.disabled():
            return None
        from wattspan.training.session import agent_tracer

        try:
            provider, tracer = agent_tracer(job)
        except ImportError as error:
            _log.warning("Windows of %s are not measured: %s", type(self).__name__, error)
            return None
        weakref.finalize(self, provider.shutdown)  # at exit at the latest
        return tracer

    def begin_window(self, name: str, sync_execution: bool = False) -> None:
        """Begin a window. ValueError if it is open."""
        if sync_execution and self.gpu_indices:
            self._synchronizer.wait(self.gpu_indices)
        with self._lock:
            if name in self._windows:
                raise ValueError(f"window {name!r} is open: end it, or use another name")
            self._windows[name] = None if self._tracer is None else self._tracer.start_span(name)

    def end_window(self, name: str, sync_execution: bool = False) -> None:
        """End a window. ValueError if it is not open."""
        if sync_execution and self.gpu_indices:
            self._synchronizer.wait(self.gpu_indices)
        with self._lock:
            if name not in self._windows:
                raise ValueError(f"window {name!r} is not open: begin it first")
            span = self._windows.pop(name)
        if span is not None:
            span.end()


class EnergyHistogram(_ScrapedMetric):
    """The energy of each repetition of a window, as a span of the service ``job``.

    Scrape ``wattspan_span_energy_joules_total`` and ``wattspan_spans_total`` of the agent. The
    gateway and the buckets are accepted and not used.
    """

    def __init__(
        self,
        cpu_indices: list[int],
        gpu_indices: list[int],
        pushgateway_url: str,
        job: str,
        gpu_bucket_range: Sequence[float] = [50.0, 100.0, 200.0, 500.0, 1000.0],
        cpu_bucket_range: Sequence[float] = [10.0, 50.0, 100.0, 500.0, 1000.0],
        dram_bucket_range: Sequence[float] = [5.0, 10.0, 20.0, 50.0, 150.0],
    ) -> None:
        self.cpu_indices = list(cpu_indices)
        super().__init__(
            gpu_indices,
            job,
            "scrape wattspan_span_energy_joules_total and wattspan_spans_total of the agent, which "
            "have the energy of the windows by name.",
        )

    def begin_window(self, name: str, sync_execution: bool = True) -> None:
        """Begin a window. ValueError if it is open."""
        super().begin_window(name, sync_execution)

    def end_window(self, name: str, sync_execution: bool = True) -> None:
        """End a window. ValueError if it is not open."""
        super().end_window(name, sync_execution)


class EnergyCumulativeCounter(_ScrapedMetric):
    """The energy of a window since the start, as a span of the service ``job``.

    Scrape ``wattspan_span_energy_joules_total`` of the agent, or ``hw_energy_joules_total`` for
    whole devices. The gateway and the period are accepted and not used.
    """

    def __init__(
        self,
        cpu_indices: list[int],
        gpu_indices: list[int],
        update_period: int,
        pushgateway_url: str,
        job: str,
    ) -> None:
        self.cpu_indices = list(cpu_indices)
        super().__init__(
            gpu_indices,
            job,
            "scrape hw_energy_joules_total of the agent for devices, or "
            "wattspan_span_energy_joules_total for the windows, once they have ended.",
        )


class PowerGauge(_ScrapedMetric):
    """No window of its own: the agent has the power of each device at all times.

    Scrape ``hw_power_watts``. The gateway and the period are accepted and not used.
    """

    def __init__(
        self,
        gpu_indices: list[int],
        update_period: int,
        pushgateway_url: str,
        job: str,
    ) -> None:
        super().__init__(gpu_indices, job, "scrape hw_power_watts of the agent.")

    def _tracer_of(self, job: str) -> Any:
        return None
