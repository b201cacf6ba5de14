"""The command line, and the composition root.

Importing this imports click and nothing else of weight: a command's module is imported when the
command runs.
"""

from __future__ import annotations

import click

from wattspan import __version__
from wattspan.cli.lazy import LazyGroup

COMMANDS = {
    "run": "Run the agent: read counters, attribute energy, export metrics.",
    "demo": "Show everything working on an emulated host.",
    "measure": "Run a command and print its energy.",
    "top": "Show devices, groups, processes, spans and tuning jobs, live.",
    "report": "Report past energy by process, group or span, from the store.",
    "tune": "Say how each job's tuning stands, why, and what was decided.",
    "caps": "Say who holds which power limit, or have all of them back.",
    "capper": "Set power limits for those who may ask, and give the original ones back.",
    "service": "Install, remove or show the systemd services.",
    "doctor": "Examine this host: readable counters, problems and remedies.",
    "config": "Check or show the configuration.",
    "completion": "Print the completion script of a shell.",
}
"""The commands in the order of the help. Each is ``wattspan.cli.NAME:command``."""

EPILOG = """\b
Exit codes:
  0    done
  1    it went wrong, and the message says why
  2    bad usage, or a configuration that cannot be
  3    no energy counter can be read, or not the one asked for
  4    an exporter cannot start: port in use, bad certificate
  5    the store cannot be used
  6    a cap was refused, or the capper does not answer
  7    tuning is off
  70   a fault of wattspan itself
  130  interrupted

Settings come from flags, WATTSPAN_* variables, /etc/wattspan/config.toml and defaults, in this
order: see `wattspan config show --origin`."""


@click.group(
    cls=LazyGroup,
    commands=None,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="wattspan", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, envvar="WATTSPAN_DEBUG", help="Show tracebacks of errors.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Where do the joules go, and how many can we give back?"""
    context.obj = {"debug": debug}


cli.lazy = COMMANDS


def main() -> None:
    """The ``wattspan`` program."""
    cli(prog_name="wattspan")
