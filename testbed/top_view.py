"""The view of ``wattspan top`` as lines of plain text."""

from __future__ import annotations

from rich.console import Console

from wattspan.api.snapshot_document import SnapshotDocument, snapshot_document
from wattspan.cli.top.controls import ViewOptions
from wattspan.cli.top.view import render_snapshot
from wattspan.model import Snapshot


def document(snapshot: Snapshot) -> SnapshotDocument:
    return snapshot_document(snapshot, "1.2.3")


def drawn(
    snapshot: Snapshot, width: int = 100, height: int | None = None, **chosen: object
) -> list[str]:
    """The view as lines of plain text."""
    console = Console(width=width, height=height, color_system=None)
    options = ViewOptions(width=width, height=height, **chosen)  # type: ignore[arg-type]
    with console.capture() as captured:
        console.print(render_snapshot(document(snapshot), options))
    return [line.rstrip() for line in captured.get().splitlines()]


def line_with(text: str, lines: list[str]) -> str:
    (found,) = [line for line in lines if text in line]
    return found
