"""The Prometheus exporter. Its server is imported only if it is enabled."""

from __future__ import annotations

from wattspan.ports import Exporter, ExporterContext, ExporterPlugin
from wattspan_exporters.prometheus.settings import PrometheusSettings


def open_exporter(settings: PrometheusSettings, context: ExporterContext) -> Exporter | None:
    """The exporter, not yet started; None if ``listen`` is empty."""
    if not settings.listen:
        return None
    from wattspan_exporters.prometheus.exporter import PrometheusExporter

    return PrometheusExporter(settings, context)


plugin = ExporterPlugin(settings=PrometheusSettings, open=open_exporter)
