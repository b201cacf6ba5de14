"""``wattspan counters``: the helper that reads performance counters for the agent."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import click

from wattspan.ports import WattspanError


@click.command(name="counters")
@click.option("--user", help="User who may ask, besides root.  [default: wattspan]")
@click.option(
    "--listen",
    type=click.Path(path_type=Path),
    help="Unix socket to listen at, where systemd passes no connection.",
)
def command(user: str | None, listen: Path | None) -> None:
    """Pass sums of performance counters to the agent.

    systemd starts this for each connection, which is standard input.
    """
    from wattspan.http.sockets import directory_fault
    from wattspan.processes import performance_counters as counters
    from wattspan.processes.counters_server import CountersServer
    from wattspan.util.unix_sockets import uids_of

    def tell(error: str) -> None:
        click.echo(f"wattspan: Cannot read performance counters: {error}.", err=True)

    users, unknown = uids_of(["wattspan" if user is None else user])
    if user is not None and unknown:  # images of containers have no user wattspan
        raise WattspanError(
            f"Cannot permit user {user!r} of --user: this host has no such user. Name one that"
            " `getent passwd` lists, or a number."
        )
    permitted = users | {0}
    opener = partial(counters.open_program, counters.OFFERED_EVENTS)
    if listen is not None:
        try:
            place = listen.parent.resolve()
            if fault := directory_fault(place, place.stat(), {0, os.geteuid()}):
                raise WattspanError(
                    f"Cannot listen at {listen}: {fault.cause}. Name a socket in a directory that"
                    " only this user may write."
                )
            server = CountersServer(listen, permitted, opener, tell)
        except OSError as error:
            raise WattspanError(
                f"Cannot listen at {listen}: {error.strerror or error}. Make its directory, and "
                "let this user write to it."
            ) from None
        with server:
            server.serve_forever()
        return
    try:
        connection = socket.socket(fileno=0)
    except OSError:
        raise WattspanError(
            "Standard input is no connection. Use `systemctl enable --now wattspan-counters.socket`"
            " instead of this command."
        ) from None
    with connection:
        if told := counters.serve_sums(connection, permitted, opener):
            tell(told)
