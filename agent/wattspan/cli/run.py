"""``wattspan run``: the agent, until it is told to stop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.service.configuration import (
    LoadedConfiguration,
    config_options,
    emulate_option,
    emulation_flags,
    load_configuration,
)
from wattspan.service.signals import hangup_reloads, stop_on_signals
from wattspan.util.text import printable

if TYPE_CHECKING:
    import logging


@click.command(name="run")
@config_options
@emulate_option
def command(config_file: Path | None, settings: tuple[str, ...], emulate: str | None) -> None:
    """Read the counters and serve joules until told to stop (SIGTERM, SIGINT).

    SIGHUP has a service read its configuration again; on a terminal it ends the agent.
    """
    from wattspan.service.systemd import SystemdNotifier

    notify = SystemdNotifier.taken(os.environ)

    def load() -> LoadedConfiguration:
        return load_configuration(config_file, settings, emulation_flags(emulate))

    with stop_on_signals(reload=hangup_reloads(managed=notify.heard)) as request:
        loaded = load()
        from wattspan.clock import SystemClock
        from wattspan.service.daemon import AgentDaemon
        from wattspan.util import malloc

        malloc.share_heap()
        tell, warn = loggers(loaded.config.agent.log_level)
        running = AgentDaemon(request, notify, SystemClock(), again=load, tell=tell, warn=warn)
        running.run(loaded)


Log = Callable[[str], None]


def one_line(record: logging.LogRecord) -> bool:
    """Make the record's message one printable line; a filter that lets everything through."""
    record.msg, record.args = printable(record.getMessage().replace("\n", " ")), None
    return True


def loggers(level: str) -> tuple[Log, Log]:
    """What goes on, and what goes wrong: sentences to standard error, where systemd finds them."""
    import logging

    # Not everybody's level: libraries of HTTP/2 log every header at theirs, tokens among them.
    logging.basicConfig(format="wattspan: %(message)s", level="WARNING")
    # Every message quotes what others named: one line each, so that none of it passes for ours.
    logging.getLogger().handlers[0].addFilter(one_line)
    log = logging.getLogger("wattspan")
    log.setLevel(level.upper())
    return lambda told: log.info("%s", told), lambda wrong: log.warning("%s", wrong)
