"""``wattspan run``: the agent as a daemon, and its log."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import click

from wattspan.cli.options import ConfigurationOptions, config_options, emulate_option
from wattspan.clock import SystemClock
from wattspan.service.systemd import SystemdNotifier, hangup_reloads, stop_on_signals
from wattspan.util.text import printable


@click.command(name="run")
@config_options
@emulate_option
def command(configuration: ConfigurationOptions) -> None:
    """Run the agent: read counters, attribute energy, export metrics.

    SIGTERM and SIGINT end it. SIGHUP reloads the configuration of a service; on a terminal it
    ends the agent.
    """
    notify = SystemdNotifier.from_environment(os.environ)

    with stop_on_signals(reload=hangup_reloads(managed=notify.available)) as request:
        from wattspan.util.process import configure_memory

        configure_memory()
        loaded = configuration.load()
        from wattspan.service.daemon import AgentDaemon

        info, warn = loggers(loaded.config.agent.log_level)
        AgentDaemon(request, notify, SystemClock(), configuration.load, info, warn).run(loaded)


Log = Callable[[str], None]


def one_line(record: logging.LogRecord) -> bool:
    """A log filter that makes each message one printable line."""
    record.msg, record.args = printable(record.getMessage().replace("\n", " ")), None
    return True


def loggers(level: str) -> tuple[Log, Log]:
    """The functions that log information and warnings to standard error."""
    # The root level stays: HTTP/2 libraries log every header at lower levels, including tokens.
    logging.basicConfig(format="wattspan: %(message)s", level="WARNING")
    # Messages quote external names: one line each, so that a name cannot forge a log line.
    logging.getLogger().handlers[0].addFilter(one_line)
    log = logging.getLogger("wattspan")
    log.setLevel(level.upper())
    return lambda message: log.info("%s", message), lambda message: log.warning("%s", message)
