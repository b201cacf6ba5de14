"""A group of commands that are imported when they run, and whose errors are sentences."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from wattspan.ports import WattspanError
from wattspan.util.text import printable

FAULT = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


class LazyGroup(click.Group):
    """Knows its commands by name and summary; imports the one that is called."""

    lazy: Mapping[str, str] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in self.lazy if importlib.util.find_spec(_module(name))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(_module(cmd_name)).command
        assert isinstance(command, click.Command)  # noqa: S101 - the modules are our own
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known, name = self.list_commands(ctx), args[0]
        if name not in known and name[:1].isalnum() and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.lazy[name]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=self.lazy[name]) for name in names] + click.Command(
            "", params=self.params
        ).shell_complete(ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            raise click.exceptions.Exit(INTERRUPTED) from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            _explain(error)


def _module(name: str) -> str:
    return f"wattspan.cli.{name}"


def _explain(error: Exception) -> NoReturn:
    """End with the error's own sentences; for a fault of ours, with one that says so."""
    if isinstance(error, WattspanError):
        message, code = str(error), error.exit_code
    else:
        cause = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        arguments = " ".join(sys.argv[1:])
        message, code = (
            f"This is a fault of wattspan itself ({cause}). "
            f"Please report it with what `wattspan --debug {arguments}` prints.",
            FAULT,
        )
    for line in message.splitlines():
        click.echo(f"wattspan: {printable(line)}", err=True)
    raise click.exceptions.Exit(code) from error
