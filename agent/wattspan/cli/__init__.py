"""The command line: its commands, their errors and exit codes.

Importing this imports click and nothing else of weight: the module of a command is imported when
the command runs.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import Any

import click
from click.shell_completion import get_completion_class

from wattspan import __version__
from wattspan.ports import WattspanError
from wattspan.sdk import MeasurementError
from wattspan.util.text import printable

COMMANDS = {
    "run": "Run the agent: read counters, attribute energy, export metrics.",
    "demo": "Run the agent on an emulated host.",
    "measure": "Run a command and print its energy.",
    "top": "Show devices, groups, processes, spans and tuning jobs, live.",
    "report": "Report past energy by process, group, span or language model, from the store.",
    "advise": "Advise what would save GPU energy, with joules and a confidence.",
    "frontier": "Measure a command at several settings, and recommend one.",
    "pipeline": "Plan clocks for pipeline-parallel training, from a profile.",
    "recurring": "Choose the batch size of recurring trainings, and show what the runs have cost.",
    "tune": "Show the state of tuning jobs, its reasons, and past decisions.",
    "caps": "Show or restore power limits.",
    "fleet": "Show or change the power budgets of a fleet.",
    "capper": "Set power limits for permitted users, and restore the original ones.",
    "counters": "Pass sums of performance counters to the agent.",
    "serving": "Find serving engines whose pages the agent can read.",
    "service": "Install, remove or show the systemd services.",
    "doctor": "Examine this host: readable counters, problems and remedies.",
    "config": "Check or show the configuration.",
    "completion": "Print the completion script of a shell.",
}
"""The commands in the order of the help: ``wattspan.cli.NAME:command``, and ``completion``."""

EPILOG = """\b
Exit codes:
  0    success
  1    failure; the message gives the cause
  2    bad usage, or an invalid configuration
  3    no energy counter can be read, or not the requested one
  4    an exporter cannot start: port in use, bad certificate
  5    the store cannot be used
  6    a cap was refused, or the capper does not answer
  7    tuning is off
  8    etcd cannot be reached, or rejects the fleet's credentials
  9    a change of the fleet is refused
  70   an internal error of wattspan
  130  interrupted

Settings come from flags, WATTSPAN_* variables, /etc/wattspan/config.toml and defaults, in this
order: see `wattspan config show --origin`."""

INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Errors of a write for want of room; without a name of a file it is mostly the output."""


class LazyGroup(click.Group):
    """Lists COMMANDS in their order, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and command.callback is None:
            command = importlib.import_module(f"wattspan.cli.{name}").command
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            raise click.exceptions.Exit(INTERRUPTED) from None
        except Exception as error:
            if ctx.params.get("debug") or _is_full(error):
                raise
            message, code = _message_and_code(error)
            for line in message.splitlines():
                click.echo(f"wattspan: {printable(line)}", err=True)
            raise click.exceptions.Exit(code) from error


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL and error.filename is None


def _message_and_code(error: Exception) -> tuple[str, int]:
    if isinstance(error, WattspanError):
        return str(error), error.exit_code
    if isinstance(error, MeasurementError):
        return str(error), 1
    cause = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return (
        f"This is an internal error of wattspan ({cause}). "
        f"Please report it with the output of `wattspan --debug {' '.join(sys.argv[1:])}`.",
        INTERNAL_ERROR,
    )


@click.group(
    cls=LazyGroup,
    commands=[click.Command(name, short_help=summary) for name, summary in COMMANDS.items()],
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, prog_name="wattspan", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, envvar="WATTSPAN_DEBUG", help="Show tracebacks of errors.")
def cli(debug: bool) -> None:  # LazyGroup reads it from the context
    """Measure, attribute and reduce the energy of this host."""


_PLACES = {
    "bash": "wattspan completion bash > ~/.local/share/bash-completion/completions/wattspan",
    "zsh": 'wattspan completion zsh > "${fpath[1]}/_wattspan"',
    "fish": "wattspan completion fish > ~/.config/fish/completions/wattspan.fish",
}


@cli.command(epilog="\b\nTo install it:\n" + "\n".join(f"  {p}" for p in _PLACES.values()))
@click.argument("shell", type=click.Choice(list(_PLACES)))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has these three since 8.0
    click.echo(kind(cli, {}, "wattspan", "_WATTSPAN_COMPLETE").source())


def main() -> None:
    """The ``wattspan`` program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of processes on an ASCII terminal
    try:
        cli(prog_name="wattspan")
    except OSError as error:
        if not _is_full(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes its rest there at exit
        cause = os.strerror(error.errno or 0).lower()
        sys.exit(f"wattspan: Cannot write: {cause}. Free some room, or write to another place.")
