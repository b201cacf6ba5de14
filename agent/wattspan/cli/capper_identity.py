"""The capper that a command asks: its name in messages, and the consent to another agent's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wattspan.capper.host_directory import SYSTEM_CAPPER_RUN, capper_directory
from wattspan.capper.protocol import CapperAddress, RefusalReason
from wattspan.ports import CapsError
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.capper.protocol import CapperClient, StateReply
    from wattspan.config import Config

capper_option = click.option(
    "--capper",
    "socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Ask the capper on this socket, as `wattspan caps status` names it, and no other one.",
)


class AskedCapper(NamedTuple):
    """A capper that has answered: its address and state."""

    address: CapperAddress
    state: StateReply

    @classmethod
    def ask(cls, client: CapperClient) -> AskedCapper:
        """The capper of ``client``, which is closed; CapsError."""
        state = capper_state(client)
        return cls(client.address, state)

    @property
    def devices(self) -> list[str]:
        """The names of its devices, in their order."""
        return list(dict.fromkeys(printable(row.name) for row in self.state.rows))

    def line(self) -> str:
        """One line with the process, its agent and its socket."""
        return capper_line(self.state, self.address.path)

    def to_json(self) -> dict[str, Any]:
        state, path = self.state, str(self.address.path)
        return {"pid": state.pid, "agent": state.agent or None, "socket": path}


def capper_line(state: StateReply, socket: Path) -> str:
    """One line about a capper that answers on ``socket``."""
    if state.agent:
        owner = f" of the agent process {state.agent}"
    elif socket.parent == SYSTEM_CAPPER_RUN:
        owner = " of the system's service"
    else:
        owner = ", started without an agent"
    return printable(f"Capper: process {state.pid}{owner}, on {socket}")


def capper_state(client: CapperClient) -> StateReply:
    """The state of the capper, asked once; CapsError."""
    with closing(client):
        client.rows()
        assert client.state is not None  # noqa: S101 - it has just answered
        return client.state


def permitted_capper(client: CapperClient, socket: Path | None, command: str) -> AskedCapper | None:
    """The capper whose limits ``command`` may change; None if none answers.

    CapsError if it refuses, if it is the one of another agent and the user neither names its
    socket nor agrees, or if none answers on ``socket``.
    """
    try:
        asked = AskedCapper.ask(client)
    except CapsError as error:
        if socket is not None or error.refusal not in ("", RefusalReason.ENDING):
            raise
        return None
    if asked.address.shared and socket is None:
        _require_consent(asked, command)
    return asked


def _require_consent(asked: AskedCapper, command: str) -> None:
    question = (
        f"{asked.line()}, which belongs to another agent. Its devices: {_list(asked.devices)}"
    )
    if sys.stdin.isatty() and click.confirm(f"{question}. Continue?", err=True):
        return
    raise CapsError(
        f"{question}. Nothing was changed. To change its limits, run"
        f" `wattspan caps {command} --capper {printable(str(asked.address.path))}`.",
        RefusalReason.NOT_ALLOWED,
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def require_right(config: Config, command: str) -> None:
    """CapsError unless this user is root, or keeps the journal of a capper."""
    if os.geteuid() == 0:
        return
    for emulated in (False, True):
        with suppress(PermissionError):
            own = capper_directory(Path(config.agent.state_dir), emulated=emulated)
            existing = next(place for place in (own, *own.parents) if place.exists())
            if os.access(existing, os.W_OK, effective_ids=True):
                return
    raise CapsError(
        f"Only root, or the user of the capper, may {command} power limits; nothing was changed."
        f" Run `sudo wattspan caps {command}`.",
        RefusalReason.NOT_ALLOWED,
    )
