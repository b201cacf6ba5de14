"""Metrics of the exporter and of its process, by prometheus-client.

They concern this exporter and not the host's energy, so they are not in the catalogue. They are
few, so prometheus-client's writer is fast enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from wattspan_exporters.prometheus.renderer import OPENMETRICS_END, ExpositionFormat


class SelfMetrics:
    """Counters of the exporter, as a prometheus-client collector."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._lock = threading.Lock()
        self._answers = dict.fromkeys(ExpositionFormat, 0)
        self._refused = 0
        self._rendering = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count_scrape(self, form: ExpositionFormat) -> None:
        with self._lock:
            self._answers[form] += 1

    def count_refused(self) -> None:
        with self._lock:
            self._refused += 1

    @property
    def refusals(self) -> int:
        return self._refused

    def set_render_time(self, nanoseconds: int) -> None:
        self._rendering = nanoseconds

    def render(self, form: ExpositionFormat) -> str:
        """All metrics in one format, without the closing line of OpenMetrics."""
        if form is ExpositionFormat.TEXT:
            return generate_latest(self._registry).decode()
        document: bytes = generate_openmetrics(self._registry)  # type: ignore[no-untyped-call]
        return document.decode().removesuffix(OPENMETRICS_END)

    def families(self) -> list[Metric]:
        """The metric families that ``render`` writes."""
        return list(self._registry.collect())

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "wattspan_build", "The version of wattspan.", value={"version": self._version}
        )
        scrapes = CounterMetricFamily(
            "wattspan_scrapes", "Number of scrapes answered before this one.", labels=["format"]
        )
        with self._lock:
            answers, refused = dict(self._answers), self._refused
        for form, count in answers.items():
            scrapes.add_metric([form.name.lower()], count)
        yield scrapes
        yield CounterMetricFamily(
            "wattspan_scrape_connections_refused",
            "Connections refused because too many were open.",
            value=refused,
        )
        yield GaugeMetricFamily(
            "wattspan_scrape_duration_seconds",
            "Duration of the rendering of the previous scrape.",
            value=self._rendering / 1e9,
        )
