"""``[exporters.files]``: what an operator may choose."""

from __future__ import annotations

from typing import Annotated, Literal

from wattspan.model.settings import Duration, Size, Table, about

DEFAULT_METRICS = (
    "hw.*",
    "wattspan.host.*",
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
"""What a notebook asks for: energies, power, cost, gaps, GPUs, spans, tuning."""


class FilesSettings(Table, frozen=True):
    """Time series as files, for notebooks."""

    directory: Annotated[str, about('Where the files are put; "" turns the exporter off.')] = ""
    format: Annotated[
        Literal["jsonl", "csv", "parquet"],
        about("JSON Lines, CSV, or Parquet (needs `pip install wattspan[parquet]`)."),
    ] = "jsonl"
    interval: Annotated[
        Duration, about("How often the newest figures are written.", least="100ms")
    ] = Duration.parse("10s")
    metrics: Annotated[
        tuple[str, ...],
        about(
            "OpenTelemetry names of metrics; `hw.*` is all that begin with `hw.`, and a `!` before "
            "one takes away again."
        ),
    ] = DEFAULT_METRICS
    rotate: Annotated[
        Duration, about("A file is closed, and the next one begun, after this time.", least="1s")
    ] = Duration.parse("1h")
    rotate_size: Annotated[
        Size, about("Or when it would exceed this, before compression.", least="4KiB")
    ] = Size.parse("64MiB")
    keep: Annotated[
        int, about("Closed files to keep; the oldest are removed. 0: any number.", least=0)
    ] = 0
    keep_size: Annotated[
        Size, about("What closed files may take together; the oldest are removed.", least="4KiB")
    ] = Size.parse("1GiB")
    compression: Annotated[
        Literal["none", "gzip"],
        about("Of closed JSON Lines and CSV files; Parquet is always compressed."),
    ] = "none"

    def __post_init__(self) -> None:
        if self.compression != "none" and self.format == "parquet":
            raise ValueError('Parquet is compressed by itself; leave compression at "none"')
        if not self.metrics:
            raise ValueError('metrics names none; directory = "" writes no files')
