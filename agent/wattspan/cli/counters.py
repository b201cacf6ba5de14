"""``wattspan counters``: the helper that reads performance counters for the agent."""

from __future__ import annotations

import socket
from functools import partial

import click

from wattspan.ports import WattspanError


@click.command(name="counters")
@click.option("--user", "users", multiple=True, default=("wattspan",), metavar="NAME")
def command(users: tuple[str, ...]) -> None:
    """Pass sums of performance counters to the agent. systemd starts this for each connection.

    Standard input is the connection. Root and each --user may ask.
    """
    from wattspan.processes.performance_counters import (
        CLOCKED_EVENTS,
        HARDWARE_EVENTS,
        open_program,
        serve_sums,
    )
    from wattspan.util.unix_sockets import uids_of

    try:
        connection = socket.socket(fileno=0)
    except OSError:
        raise WattspanError(
            "Standard input is no connection. Use `systemctl enable --now wattspan-counters.socket`"
            " instead of this command."
        ) from None
    permitted, _ = uids_of(users)
    opener = partial(open_program, (HARDWARE_EVENTS, CLOCKED_EVENTS))
    with connection:
        if error := serve_sums(connection, permitted | {0}, opener):
            click.echo(f"wattspan: Cannot read performance counters: {error}.", err=True)
