"""An emulated host in place of this one, as an option of several commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from wattspan.config import EmulationSettings, FlagValue

if TYPE_CHECKING:
    from wattspan.emulation.host import EmulatedHost

emulate_option = click.option(
    "--emulate",
    metavar="PROFILE",
    help="Take an emulated host in place of this one; every figure is labelled emulated.",
)


def emulation_flags(emulate: str | None) -> dict[str, FlagValue]:
    """What ``--emulate`` says, as a setting."""
    return {} if emulate is None else {"emulation.profile": FlagValue("--emulate", emulate)}


@contextlib.contextmanager
def emulated_host(chosen: EmulationSettings) -> Iterator[EmulatedHost | None]:
    """The emulated host that is chosen, for as long as it is needed; None for the real one."""
    if not chosen.profile:
        yield None
        return
    from wattspan.emulation.host import EmulatedHost
    from wattspan.emulation.profiles import profile_named

    with EmulatedHost(profile_named(chosen.profile), period=chosen.counters) as host:
        yield host
