"""``wattspan counters``: the helper that reads performance counters for the agent."""

from __future__ import annotations

import socket
from functools import partial

import click

from wattspan.ports import WattspanError


@click.command(name="counters")
@click.option("--user", default="wattspan", help="User who may ask, besides root.")
def command(user: str) -> None:
    """Pass sums of performance counters to the agent.

    systemd starts this for each connection, which is standard input.
    """
    from wattspan.processes import performance_counters as counters
    from wattspan.util.unix_sockets import uids_of

    try:
        connection = socket.socket(fileno=0)
    except OSError:
        raise WattspanError(
            "Standard input is no connection. Use `systemctl enable --now wattspan-counters.socket`"
            " instead of this command."
        ) from None
    permitted, _ = uids_of([user])
    opener = partial(counters.open_program, counters.OFFERED_EVENTS)
    with connection:
        if error := counters.serve_sums(connection, permitted | {0}, opener):
            click.echo(f"wattspan: Cannot read performance counters: {error}.", err=True)
