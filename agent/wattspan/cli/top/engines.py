"""The table of serving engines whose pages the agent reads."""

from __future__ import annotations

from functools import partial

from rich.text import Text

from wattspan.api.engine_entries import EngineEntry
from wattspan.cli import formatting
from wattspan.cli.formatting import TableColumn
from wattspan.cli.top.controls import ViewOptions
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
