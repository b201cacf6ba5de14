"""Metrics, written to files. What it needs is imported only when it is wanted."""

from __future__ import annotations

from collections.abc import Iterable

from wattspan.ports import Exporter, ExporterContext, ExporterPlugin
from wattspan_exporters.files.settings import FilesSettings


def open_exporter(settings: FilesSettings, context: ExporterContext) -> Exporter | None:
    """The exporter, not yet started; None if ``directory`` is empty."""
    if not settings.directory:
        return None
    from wattspan_exporters.files.exporter import FilesExporter

    return FilesExporter(settings, context)


def faults(settings: FilesSettings) -> Iterable[str]:
    """What would keep it from opening."""
    if not settings.directory:
        return ()
    from wattspan_exporters.files.exporter import files_faults

    return files_faults(settings)


plugin = ExporterPlugin(settings=FilesSettings, open=open_exporter, faults=faults)
