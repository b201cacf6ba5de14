"""The exporter ``files``: writes metrics to files. Its modules are imported on use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from wattspan.model.settings import Duration, Size, Table, about
from wattspan.ports import Exporter, ExporterContext, ExporterPlugin

DEFAULT_METRICS = (
    "hw.*",
    "wattspan.host.*",
    "wattspan.host.certainty.info",
    "wattspan.domain.certainty.info",
    "wattspan.attribution.certainty.info",
    "wattspan.energy.price",
    "wattspan.carbon.intensity",
    "wattspan.unweighed.energy",
    "wattspan.gap.time",
    "wattspan.process.*",
    "wattspan.group.*",
    "wattspan.idle.*",
    "wattspan.unattributed.*",
    "wattspan.pending.*",
    "wattspan.span.*",
    "wattspan.spans",
    "wattspan.power.*",
    "wattspan.gpu.*",
    "wattspan.autotune.*",
    "wattspan.agent.start.time",
)
"""Metrics for notebooks: energies and their certainty, power, cost, gaps, GPUs, spans, tuning."""


class FilesSettings(Table, frozen=True):
    """The settings of the table ``[exporters.files]``.

    Keys:
        directory: The directory of the files; "" turns the exporter off.
        format: JSON Lines, CSV, or Parquet (needs the package pyarrow).
        interval: The interval of rows.
        metrics: OpenTelemetry names of the written metrics; `*` matches anything, and a leading `!`
            excludes.
        rotate: The time after which a file is closed and the next one begun.
        rotate_size: The size at which a file is closed, before compression.
        keep: Closed files to keep; the oldest are removed. 0: any number.
        keep_size: The total size of closed files to keep; the oldest are removed.
        compression: The compression of closed JSON Lines and CSV files; Parquet is always
            compressed.
    """

    directory: str = ""
    format: Literal["jsonl", "csv", "parquet"] = "jsonl"
    interval: Annotated[Duration, about(least="100ms")] = Duration.parse("10s")
    metrics: tuple[str, ...] = DEFAULT_METRICS
    rotate: Annotated[Duration, about(least="1s")] = Duration.parse("1h")
    rotate_size: Annotated[Size, about(least="4KiB")] = Size.parse("64MiB")
    keep: Annotated[int, about(least=0)] = 0
    keep_size: Annotated[Size, about(least="4KiB")] = Size.parse("1GiB")
    compression: Literal["none", "gzip"] = "none"

    def __post_init__(self) -> None:
        if self.compression != "none" and self.format == "parquet":
            raise ValueError('Parquet is compressed by itself; leave compression at "none"')
        if not self.metrics:
            raise ValueError('metrics is empty; set directory = "" to write no files')


def open_exporter(settings: FilesSettings, context: ExporterContext) -> Exporter | None:
    """The exporter, not started; None if ``directory`` is empty."""
    if not settings.directory:
        return None
    from wattspan_exporters.files.exporter import FilesExporter

    return FilesExporter(settings, context)


def faults(settings: FilesSettings) -> Iterable[str]:
    """A sentence for each error that would prevent opening."""
    if not settings.directory:
        return ()
    from wattspan_exporters.files.exporter import files_faults

    return files_faults(settings)


plugin = ExporterPlugin(settings=FilesSettings, open=open_exporter, faults=faults)
