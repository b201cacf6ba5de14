"""``wattspan serving``: the serving engines of this host."""

from __future__ import annotations

import click

from wattspan.cli.options import echo_error


@click.group(name="serving")
def command() -> None:
    """Find serving engines whose pages the agent can read."""


@command.command()
def discover() -> None:
    """Print a `[[serving.engine]]` table for each engine on this host.

    Asks the listeners of processes that have a GPU open, and those of their services, for a
    Prometheus page; others are not contacted. Standard error tells what is left out, and why. The
    exit code is 1 if no engine was found. As root it finds the engines of all users.
    """
    from wattspan.service.engine_discovery import EngineDiscovery, fragment  # not for the help

    found = EngineDiscovery().run()
    click.echo("\n\n".join(map(fragment, found.engines)), nl=bool(found.engines))
    for one in found.left_out:
        echo_error(f"left out: {one}")
    if not found.engines:
        echo_error("No serving engine was found.")
        raise click.exceptions.Exit(1)
