"""The tables of serving engines whose pages the agent reads, and of energy on the whole host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from rich.text import Text

from wattspan.api.inference_entries import EngineEntry, HostEnergyEntry
from wattspan.api.snapshot_document import SnapshotDocument
from wattspan.cli import formatting
from wattspan.cli.formatting import TableColumn
from wattspan.cli.top.controls import ViewOptions
from wattspan.model import IDLE_PART, HwType
from wattspan.util.text import printable


def engine_columns(options: ViewOptions) -> list[TableColumn]:
    """One line for each model of a serving engine: joules with half-widths of their 95 % ranges.

    The last column is the state of the engine's page, on a wide terminal with the reason; on any
    other one the reason is below the tables, as that of every source.
    """
    columns = [
        TableColumn("ENGINE", _engine_name, left=True, ratio=3),
        TableColumn("J/token", partial(_joules_of_token, "all")),
        TableColumn("J/token in", partial(_joules_of_token, "input")),
        TableColumn("J/token out", partial(_joules_of_token, "output")),
        TableColumn("J/request", _joules_of_request),
        TableColumn("idle", _idle_share),
        TableColumn("page", _page_state, left=True),
    ]
    if options.wide:
        columns[-1] = TableColumn("page", _page_state_with_reason, left=True, ratio=4)
    return columns


def _engine_name(row: EngineEntry) -> Text:
    return Text.assemble(printable(row.engine), (f" {printable(row.model)}", "dim"))


def _joules_of_token(way: str, row: EngineEntry) -> str:
    return formatting.estimate(row.token_joules.get(way), row.token_uncertainty_joules.get(way))


def _joules_of_request(row: EngineEntry) -> str:
    return formatting.estimate(row.request_joules, row.request_uncertainty_joules)


def _idle_share(row: EngineEntry) -> str:
    return formatting.UNKNOWN if row.idle_ratio is None else formatting.share(row.idle_ratio, 1)


def _page_state(row: EngineEntry) -> Text:
    return Text("read") if row.up else Text("not read", "yellow")


def _page_state_with_reason(row: EngineEntry) -> Text:
    reason = f": {printable(row.failure)}" if row.failure else ""
    return _page_state(row).append(reason)


# -------------------------------------------------------------------------- the whole host

_PARTS = {HwType.GPU: "gpu", HwType.CPU: "cpu", HwType.MEMORY: "mem", IDLE_PART: "idle"}


class HostRow(NamedTuple):
    """A model of a service or an engine, and its energy on the whole host; None if unknown."""

    name: str
    sender: str
    energy: HostEnergyEntry | None


def host_rows(document: SnapshotDocument) -> list[HostRow]:
    """Language models, and then engines; none unless the energy of one of them is known."""
    rows = [HostRow(row.model, row.service, row.host) for row in document.spans.inference]
    rows += [HostRow(row.engine, row.model, row.host) for row in document.engines]
    return rows if any(row.energy for row in rows) else []


def host_columns() -> list[TableColumn]:
    """Joules of a request by part, of a request and a generated token, and the parts' method.

    The energy of engines is with the time in which they wait. Its uncertainty is unknown. Parts of
    different requests have no sum; without a counter of the memory it is a lower bound.
    """
    return [
        TableColumn("HOST J/request", _host_name, left=True, ratio=3),
        *(TableColumn(title, partial(_joules_of_part, part)) for part, title in _PARTS.items()),
        TableColumn("sum", partial(_sum, "request_joules")),
        TableColumn("J/token out", partial(_sum, "output_token_joules")),
        TableColumn("method", lambda row: row.energy.method if row.energy else "", left=True),
    ]


def _host_name(row: HostRow) -> Text:
    return Text.assemble(printable(row.name), (f" {printable(row.sender)}", "dim"))


def _joules_of_part(part: str, row: HostRow) -> str:
    joules = row.energy.request_joules.get(part) if row.energy else None
    return formatting.UNKNOWN if joules is None else formatting.energy_each(joules * 1e6, 1)


def _sum(figure: str, row: HostRow) -> str:
    if row.energy is None or not row.energy.alike:
        return formatting.UNKNOWN
    parts: Mapping[str, float] = getattr(row.energy, figure)
    text = formatting.energy_each(sum(parts.values()) * 1e6, 1) if parts else formatting.UNKNOWN
    return formatting.at_least(text, bounded=row.energy.bounded)
