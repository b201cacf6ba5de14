"""``wattspan run``: the agent, until it is told to stop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path

import click

from wattspan.cli.emulated import emulate_option, emulated_host, emulation_flags
from wattspan.cli.options import Loaded, config_options, load_configuration
from wattspan.cli.signals import StopRequest, stop_on_signals
from wattspan.ports import WattspanError

LOOK_EVERY = 1.0  # seconds between looks for what has begun to fail


@click.command(name="run")
@config_options
@emulate_option
def command(config_file: Path | None, settings: tuple[str, ...], emulate: str | None) -> None:
    """Read the counters and serve joules until told to stop (SIGTERM, SIGINT)."""
    with stop_on_signals() as request:
        run(load_configuration(config_file, settings, emulation_flags(emulate)), request)


def run(loaded: Loaded, request: StopRequest) -> None:
    """Run the configured agent in this thread's name, until a request or a failure ends it."""
    from wattspan.cli.compose import build_agent
    from wattspan.cli.troubles import Troubles, refuse_if_blind

    without: list[str] = []  # told when all else is well: an error stands alone
    tell, warn = loggers(loaded.config.agent.log_level)
    with contextlib.ExitStack() as stack:
        emulated = stack.enter_context(emulated_host(loaded.config.emulation))
        if emulated is not None:
            about = emulated.profile.about
            tell(f"Emulated host: {about}. No figure of it is true of any machine.")
        if request.asked:
            return
        agent = build_agent(
            loaded.config, loaded.plugins, log=warn, tell=without.append, emulated=emulated
        )
        stack.callback(agent.stop)
        agent.start()
        refuse_if_blind(agent.view().health)
        for sentence in (*without, *(f"Serving {address}" for address in agent.addresses)):
            tell(sentence)
        request.tell(agent.request_stop)
        # What exists by now lives as long as the agent: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        # Spans are tens of thousands of small values that wait for a second and go: nothing that
        # a collector would find.
        gc.set_threshold(50_000, 20, 100)
        troubles = Troubles(warn, known=[f"[{one.table}]" for one in loaded.plugins.broken])
        while True:
            snapshot = agent.view()
            troubles.look(snapshot.health, snapshot.at.mono)
            if agent.wait(LOOK_EVERY):
                break
    if agent.failure is not None:
        raise WattspanError("The agent ended because a part of it failed, as said above.")


Log = Callable[[str], None]


def loggers(level: str) -> tuple[Log, Log]:
    """What goes on, and what goes wrong: sentences to standard error, where systemd finds them."""
    import logging

    logging.basicConfig(format="wattspan: %(message)s", level=level.upper())
    log = logging.getLogger("wattspan")
    return lambda told: log.info("%s", told), lambda wrong: log.warning("%s", wrong)
