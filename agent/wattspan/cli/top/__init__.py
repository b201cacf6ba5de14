"""``wattspan top``: show a running agent, live or once."""

from __future__ import annotations

import sys
from typing import cast

import click
import msgspec

from wattspan.cli.options import (
    DURATION,
    ConfigurationOptions,
    config_options,
    echo_json,
    json_option,
)
from wattspan.cli.top.controls import Keyboard, SortKey, ViewOptions, ViewSection
from wattspan.clock import SystemClock
from wattspan.config import AccessSettings
from wattspan.model.settings import Duration, Table
from wattspan.service.configuration import agent_directories

DEFAULT_LISTEN = "127.0.0.1:9949"


@click.command(name="top")
@click.option("--address", help="The agent's metrics address; by default the configured one.")
@click.option("--interval", type=DURATION, default="2s", help="Time between reads.")
@click.option(
    "--once", is_flag=True, help="Print one view and end; the default without a terminal."
)
@click.option(
    "--by",
    type=click.Choice(ViewSection, case_sensitive=False),
    default="all",
    help="Rows to list.",
)
@click.option(
    "--sort",
    type=click.Choice(SortKey, case_sensitive=False),
    default="watts",
    help="Column that sorts the rows.",
)
@click.option(
    "--filter",
    "wanted",
    default="",
    show_default=False,
    help="List only rows that contain this text.",
)
@config_options
@json_option
def command(
    address: str | None,
    interval: Duration,
    once: bool,
    by: ViewSection,
    sort: SortKey,
    wanted: str,
    configuration: ConfigurationOptions,
    as_json: bool,
) -> None:
    """Show devices, groups, processes, spans and tuning jobs, live.

    Reads the snapshot of a running agent: /v1/snapshot at its metrics address. If this user may not
    read it there, the agent's Unix socket serves the user's own processes and coarse power of the
    host; a line tells what is left out. The key ? lists all keys.
    """
    from rich.console import Console

    from wattspan.cli import agent_client
    from wattspan.cli.top.tables import select_rows
    from wattspan.cli.top.view import print_once, watch

    if interval <= 0:
        raise click.BadParameter("must be more than 0", param_hint="--interval")
    clock = SystemClock()
    config = configuration.load(client=True).config
    table = config.exporters.get("prometheus")
    # The token of the configuration is for this host's agent, not for an address of the user.
    access = None if address else cast("AccessSettings | None", table)
    fetch = agent_client.http_fetch(agent_client.credentials_for(access))
    if not address:
        fetch = agent_client.fetch_with_fallback(fetch, agent_directories(config))
    view = agent_client.SnapshotClient(address or _configured_address(table), clock, fetch)
    options = ViewOptions(by=by, sort=sort, filter=wanted)
    if as_json:
        echo_json(msgspec.to_builtins(select_rows(view(), options)))
        return
    console = Console()
    if once or not (console.is_terminal and sys.stdin.isatty()):
        print_once(view, options, console, lambda: view.notice)
        return
    with Keyboard() as keys:
        watch(view, options, clock, console, keys, interval, notice=lambda: view.notice)


def _configured_address(table: Table | None) -> str:
    """The URL of this host's agent."""
    listen = str(getattr(table, "listen", "") or DEFAULT_LISTEN)
    host, _, port = listen.rpartition(":")
    everywhere = host in ("", "*", "0.0.0.0", "[::]")  # noqa: S104 - compared, not bound
    scheme = "https" if getattr(table, "tls_certificate", "") else "http"
    return f"{scheme}://{'127.0.0.1' if everywhere else host}:{port}"
