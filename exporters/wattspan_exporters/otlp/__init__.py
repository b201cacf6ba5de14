"""Metrics, pushed by OTLP. What it needs is imported only when it is wanted."""

from __future__ import annotations

from collections.abc import Iterable

from wattspan.ports import Exporter, ExporterContext, ExporterPlugin
from wattspan_exporters.otlp.settings import OtlpSettings


def open_exporter(settings: OtlpSettings, context: ExporterContext) -> Exporter | None:
    """The exporter, not yet started; None if ``endpoint`` is empty."""
    if not settings.endpoint:
        return None
    from wattspan_exporters.otlp.exporter import open_otlp

    return open_otlp(settings, context)


def faults(settings: OtlpSettings) -> Iterable[str]:
    """What would keep it from opening."""
    if not settings.endpoint:
        return ()
    from wattspan_exporters.otlp.endpoint import otlp_faults

    return otlp_faults(settings)


plugin = ExporterPlugin(settings=OtlpSettings, open=open_exporter, faults=faults)
