"""``wattspan demo``: everything at work, on an emulated host, within seconds."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.cli.duration import DurationType
from wattspan.cli.run import logger, stop_on_signals
from wattspan.settings import Duration

if TYPE_CHECKING:
    from wattspan.cli.options import Loaded
    from wattspan.runtime.agent import Agent

LISTEN = "127.0.0.1:9949"
AT_REST = 4.5  # seconds before the jobs begin, enough for the idle baselines
FIRST_FIGURES = 4.0  # seconds after: GPU energy is settled then, and watts are a second's mean
EVERY = 5.0


@click.command(name="demo")
@click.option(
    "--profile", default="two-socket-h100", show_default=True, help="The emulated host to show."
)
@click.option("--listen", default=LISTEN, show_default=True, help="Where to serve /metrics.")
@click.option(
    "--duration",
    type=DurationType(),
    help="End after this time. Without it: when you press q or Ctrl-C.",
)
@click.option("--plain", is_flag=True, help="Print tables one after the other, as to a file.")
def command(profile: str, listen: str, duration: Duration | None, plain: bool) -> None:
    """Show everything working on an emulated host: no rights, no counters, no GPU needed.

    The host's hardware and so every figure is emulated. Two real processes, a trainer and a
    server, keep this machine's CPUs a little busy; the emulated counters follow that.
    """
    from wattspan.cli.compose import build_agent
    from wattspan.emulation.host import EmulatedHost
    from wattspan.emulation.profiles import profile_named

    chosen = profile_named(profile)
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="wattspan-demo-"))
        click.echo(f"Starting an emulated host: {chosen.about}.")
        host = stack.enter_context(EmulatedHost(chosen))
        loaded = _configuration(state, free_address(listen))
        agent = build_agent(loaded.config, loaded.plugins, log=logger("warning"), emulated=host)
        stack.callback(agent.stop)
        agent.start()
        with stop_on_signals(agent.request_stop):
            for address in agent.addresses:
                click.echo(f"Every figure is EMULATED. Metrics: curl {address}")
            click.echo("Watching it idle for a moment, to learn what it draws by doing nothing.")
            if not agent.wait(AT_REST):
                for name, pid in host.start_jobs().items():
                    click.echo(f"Job {name!r} begins: process {pid}")
                show(agent, duration, plain=plain)
    click.echo("Done: the emulated host and its files are gone.")


def show(agent: Agent, duration: Duration | None, *, plain: bool) -> None:
    """The live view in a terminal; one table after the other anywhere else."""
    from rich.console import Console

    from wattspan.cli.controls import Options
    from wattspan.cli.keyboard import Keyboard
    from wattspan.cli.live import print_once, watch
    from wattspan.clock import SystemClock

    clock, console, options = SystemClock(), Console(), Options()
    end = None if duration is None else clock.monotonic() + duration

    def left(most: float) -> float:
        return most if end is None else max(0.0, min(most, (end - clock.monotonic()) / 1e9))

    if agent.wait(left(FIRST_FIGURES)):
        return
    where = ", ".join(agent.addresses)
    if not plain and console.is_terminal and sys.stdin.isatty():
        with Keyboard() as keys:
            watch(
                agent.view,
                replace(options, notice=f"Metrics: {where}"),
                clock=clock,
                console=console,
                keys=keys,
                interval=10**9,
                running=lambda: not agent.wait(0) and left(1.0) > 0,
            )
        return
    while True:
        print_once(agent.view, options, console)
        click.echo(f"Metrics: {where}  (Ctrl-C ends the demo)")
        if left(EVERY) <= 0 or agent.wait(left(EVERY)):
            return


def free_address(listen: str) -> str:
    """``listen`` if nobody has its port, else the same host with a port that is free."""
    host, _, port = listen.rpartition(":")
    for candidate in (int(port), 0):
        with socket.socket() as probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, candidate))
            except OSError:
                continue
            return f"{host}:{probe.getsockname()[1]}"
    return listen


def _configuration(state_dir: str, listen: str) -> Loaded:
    """The defaults and nothing else: a demo does not depend on how this machine is configured."""
    from wattspan.cli.options import Loaded
    from wattspan.config import Flag, load
    from wattspan.plugins import discover

    plugins = discover()
    flags = {
        "agent.state_dir": Flag("demo", state_dir),
        "exporters.prometheus.listen": Flag("--listen", listen),
    }
    config = load(None, environ={}, flags=flags, schema=plugins.schema, default=Path(os.devnull))
    return Loaded(config, plugins)
