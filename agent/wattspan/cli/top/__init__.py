"""``wattspan top``: watch a running agent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from wattspan.cli.top.controls import SortKey, ViewOptions, ViewSection
from wattspan.clock import SystemClock
from wattspan.model.settings import Duration
from wattspan.service.configuration import (
    DurationType,
    agent_directories,
    config_options,
    echo_json,
    json_option,
    load_configuration,
)

if TYPE_CHECKING:
    from wattspan.cli.top.scraping import AgentView
    from wattspan.config import Config
    from wattspan.config.access import AccessSettings
    from wattspan.model.settings import Table

PORT = "127.0.0.1:9949"


@click.command(name="top")
@click.option("--address", help="The agent's metrics address; by default the configured one.")
@click.option(
    "--interval", type=DurationType(), default="2s", show_default=True, help="Time between scrapes."
)
@click.option("--once", is_flag=True, help="Print one view and end. So it is without a terminal.")
@click.option(
    "--by",
    type=click.Choice([str(by) for by in ViewSection]),
    default="all",
    show_default=True,
    help="What to list.",
)
@click.option(
    "--sort",
    type=click.Choice([str(sort) for sort in SortKey]),
    default="watts",
    show_default=True,
    help="What comes first.",
)
@click.option("--filter", "wanted", default="", help="Only rows that contain this text.")
@config_options
@json_option
def command(
    address: str | None,
    interval: Duration,
    once: bool,
    by: str,
    sort: str,
    wanted: str,
    config_file: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Watch devices, groups and processes, live.

    Reads the metrics of a running agent; the watts of processes and groups are what they spent
    between two scrapes. Keys: ? tells them.
    """
    if interval <= 0:
        raise click.BadParameter("must be more than nothing", param_hint="--interval")
    from wattspan.cli.local_agent import AgentCredentials, credentials_for
    from wattspan.cli.top.scraping import AgentView, MetricsScraper, authenticated_fetch

    config = load_configuration(config_file, settings).config
    clock = SystemClock()
    # Its token is for our own agent alone, never for an address that somebody typed.
    entry = (
        AgentCredentials() if address else credentials_for(cast("AccessSettings", _table(config)))
    )
    scraper = MetricsScraper(address or _configured(config), clock, authenticated_fetch(entry))
    view = AgentView(scraper, agent_directories(config))
    options = ViewOptions(by=ViewSection(by), sort=SortKey(sort), filter=wanted)
    scraper()
    # A short first stretch, so that the first view already tells processes' watts.
    first = interval if once or as_json else min(interval, Duration.parse("500ms"))
    clock.sleep_until(clock.monotonic() + first)
    if as_json:
        from wattspan.cli.top.rows import snapshot_facts

        echo_json(snapshot_facts(view(), options))
    else:
        _show(view, options, clock, interval, once=once)


def _show(
    view: AgentView, options: ViewOptions, clock: SystemClock, interval: Duration, *, once: bool
) -> None:
    from rich.console import Console

    from wattspan.cli.top.controls import Keyboard
    from wattspan.cli.top.view import print_once, watch

    console = Console()
    if once or not (console.is_terminal and sys.stdin.isatty()):
        print_once(view, options, console, lambda: view.notice)
        return
    with Keyboard() as keys:
        watch(
            view,
            options,
            clock=clock,
            console=console,
            keys=keys,
            interval=interval,
            notice=lambda: view.notice,
        )


def _table(config: Config) -> Table | None:
    return config.exporters.get("prometheus")


def _configured(config: Config) -> str:
    """Where the configured Prometheus exporter listens, as this host reaches it."""
    table = _table(config)
    listen = str(getattr(table, "listen", "") or PORT)
    host, _, port = listen.rpartition(":")
    everywhere = host in ("", "*", "0.0.0.0", "[::]")  # noqa: S104 - asked about, not bound
    scheme = "https" if getattr(table, "tls_certificate", "") else "http"
    return f"{scheme}://{'127.0.0.1' if everywhere else host}:{port}"
