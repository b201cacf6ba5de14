"""A writer of the files exporter without its thread, and independent readers."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from testbed.scrapes import full_host
from wattspan.model import Snapshot
from wattspan.model.settings import convert
from wattspan.testing import ManualClock
from wattspan_exporters.files import FilesSettings
from wattspan_exporters.files.exporter import SnapshotWriter

Row = Mapping[str, Any]


def settings(directory: Path, **keys: object) -> FilesSettings:
    return convert({"directory": str(directory), **keys}, FilesSettings, "exporters.files")


@dataclass
class Desk:
    """A writer with its input and its log."""

    directory: Path
    writer: SnapshotWriter
    log: list[str]
    clock: ManualClock = field(default_factory=ManualClock)
    snapshot: Snapshot = field(default_factory=full_host)
    turns: int = 0

    def turn(self, seconds: float = 10, **changes: Any) -> Snapshot:
        """Write a snapshot of ``seconds`` later."""
        at = self.clock.advance(seconds)
        self.turns += 1
        self.snapshot = replace(self.snapshot, at=at, sequence=self.turns, **changes)
        self.writer.turn(self.snapshot)
        return self.snapshot

    @property
    def closed(self) -> list[Path]:
        """Finished files, the oldest first."""
        return sorted(p for p in self.directory.iterdir() if not p.name.endswith(".part"))

    @property
    def parts(self) -> list[Path]:
        return sorted(self.directory.glob("*.part"))


@contextmanager
def desk(directory: Path, **keys: object) -> Iterator[Desk]:
    """A desk that is closed at the end of the block."""
    log: list[str] = []
    made = Desk(directory, SnapshotWriter(settings(directory, **keys), log.append), log)
    with closing(made.writer):
        yield made


def read(path: Path) -> list[Row]:
    """The rows of a file in any format: None for null, exact numbers for text."""
    if path.name.endswith(".parquet"):
        import pyarrow.parquet as pq

        return list(pq.read_table(path).to_pylist())
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if ".jsonl" in path.name:
        return [json.loads(line, parse_float=Decimal) for line in data.decode().split("\n")[:-1]]
    rows = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
    return [{name: _typed(name, cell) for name, cell in row.items()} for row in rows]


def _typed(name: str, cell: str) -> object:
    if cell == "":
        return None
    if name in ("monotonic_ns", "whole", "pid"):
        return int(cell)
    return Decimal(cell) if name == "value" else cell.removeprefix("'")
