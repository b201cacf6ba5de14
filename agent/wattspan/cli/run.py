"""``wattspan run``: the agent, until it is told to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from wattspan.cli.options import Loaded, config_options, load_configuration
from wattspan.config import Flag
from wattspan.ports import WattspanError


@click.command(name="run")
@config_options
@click.option(
    "--emulate",
    metavar="PROFILE",
    help="Measure an emulated host in place of this one; every figure is labelled emulated.",
)
def command(config_file: Path | None, settings: tuple[str, ...], emulate: str | None) -> None:
    """Read the counters and serve joules until told to stop (SIGTERM, SIGINT)."""
    flags = {"emulation.profile": Flag("--emulate", emulate)} if emulate is not None else {}
    run(load_configuration(config_file, settings, flags))


def run(loaded: Loaded) -> None:
    """Run the configured agent in this thread's name, until a signal or a failure ends it."""
    from wattspan.cli.compose import build_agent, say_what_fails

    log = logger(loaded.config.agent.log_level)
    with contextlib.ExitStack() as stack:
        emulated = None
        if loaded.config.emulation.profile:
            from wattspan.emulation.host import EmulatedHost
            from wattspan.emulation.profiles import profile_named

            profile = profile_named(loaded.config.emulation.profile)
            emulated = stack.enter_context(EmulatedHost(profile))
            log(f"Emulated host: {profile.about}. No figure of it is true of any machine.")
        agent = build_agent(loaded.config, loaded.plugins, log=log, emulated=emulated)
        agent.start()
        try:
            with stop_on_signals(agent.request_stop):
                say_what_fails(agent.view().health, log)
                for address in agent.addresses:
                    log(f"Serving {address}")
                agent.wait()
        finally:
            agent.stop()
        if agent.failure is not None:
            raise WattspanError("The agent ended because one of its threads failed, as said above.")


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM or SIGINT, once; a second one ends the program at once."""

    def once(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, once) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def logger(level: str) -> Callable[[str], None]:
    """A function that writes a sentence to standard error, where systemd picks it up."""
    import logging

    logging.basicConfig(format="wattspan: %(message)s", level=level.upper())
    log = logging.getLogger("wattspan")
    return lambda sentence: log.info("%s", sentence)
