"""Zeus's Prometheus metrics, which push to a gateway from the program.

The agent is scraped instead, with counters that lose no energy between two windows. Each class
names its replacement when it is constructed.
"""

from __future__ import annotations

from collections.abc import Sequence


class PushedMetricError(NotImplementedError):
    """A metric that is pushed from the program is not provided."""

    def __init__(self, name: str, replacement: str) -> None:
        super().__init__(
            f"{name} is not provided: the agent is scraped, and no program pushes energy to a "
            f"gateway. {replacement} See docs/how-to/move-from-zeus.md."
        )


class _PushedMetric:
    """The methods of all of them; no instance is ever constructed."""

    def begin_window(self, name: str, sync_execution: bool = False) -> None:
        """Never called: the constructor raises."""
        raise NotImplementedError

    def end_window(self, name: str, sync_execution: bool = False) -> None:
        """Never called: the constructor raises."""
        raise NotImplementedError


class EnergyHistogram(_PushedMetric):
    """Not provided; the energy of each repetition is that of a span."""

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
        raise PushedMetricError(
            "EnergyHistogram",
            "Put a span around the code: wattspan_span_energy_joules_total and "
            "wattspan_spans_total have its energy by name.",
        )

    def begin_window(self, name: str, sync_execution: bool = True) -> None:
        """Never called: the constructor raises."""
        raise NotImplementedError

    def end_window(self, name: str, sync_execution: bool = True) -> None:
        """Never called: the constructor raises."""
        raise NotImplementedError


class EnergyCumulativeCounter(_PushedMetric):
    """Not provided; the agent's counters run all the time."""

    def __init__(
        self,
        cpu_indices: list[int],
        gpu_indices: list[int],
        update_period: int,
        pushgateway_url: str,
        job: str,
    ) -> None:
        raise PushedMetricError(
            "EnergyCumulativeCounter",
            "Scrape hw_energy_joules_total for devices, or "
            "wattspan_process_energy_joules_total for this process.",
        )


class PowerGauge(_PushedMetric):
    """Not provided; the agent has the power of each device."""

    def __init__(
        self,
        gpu_indices: list[int],
        update_period: int,
        pushgateway_url: str,
        job: str,
    ) -> None:
        raise PushedMetricError("PowerGauge", "Scrape hw_power_watts.")
