"""Print the manual page wattspan(1), made of the commands' own declarations and help texts.

``scripts/manual.py 2026-01-31`` gives the page that date; scripts/build-deb installs it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator

import click

from wattspan import __version__
from wattspan.cli import COMMANDS, EPILOG, cli
from wattspan.config.loading import APPLICATION_VARIABLES, DEFAULT_PATH, OPTION_VARIABLES
from wattspan.config.settings import AgentSettings
from wattspan.model.settings import keys
from wattspan.util.files import INSTALLED_PAGES

VARIABLES = {
    "WATTSPAN_RUN_DIR": "Run directory of the agent, for applications and commands.",
    "WATTSPAN_DISABLED": "With 1, an instrumented application does not announce its spans.",
    "WATTSPAN_EMULATED_HOST": "Directory of the emulated host, if there are several.",
}
"""Of each of APPLICATION_VARIABLES."""


def page(date: str) -> Iterator[str]:
    """The lines of the page, in roff with the macros of man(7)."""
    yield f'.TH WATTSPAN 1 "{date}" "wattspan {__version__}" "User Commands"'
    top = click.Context(cli, info_name="wattspan", **cli.context_settings)
    summary = (cli.help or "").rstrip(".")
    yield f".SH NAME\nwattspan \\- {_text(summary[0].lower() + summary[1:])}"
    yield f".SH SYNOPSIS\n.B wattspan\n{_text(' '.join(cli.collect_usage_pieces(top)))}"
    yield f".SH DESCRIPTION\n{_lines(cli.help or '')}"
    codes, settings = EPILOG.split("\n\n")
    yield f".PP\n{_lines(settings)}"
    yield ".SH OPTIONS"
    yield from _options(cli, top)
    yield ".SH COMMANDS"
    for name in COMMANDS:
        yield from _command(name, top, cli)
    exits = re.findall(r"^ +(\d+) +(.+)$", codes, re.MULTILINE)
    yield ".SH EXIT STATUS"
    yield from _entries((f".B {code}", f"{meaning}.") for code, meaning in exits)
    yield ".SH ENVIRONMENT"
    options = {name: f"As {option}." for name, option in OPTION_VARIABLES.items()}
    options["WATTSPAN_AGENT_INTERVAL"] = "The setting interval of [agent]; so for each setting."
    entries = {**options, **{name: VARIABLES[name] for name in APPLICATION_VARIABLES}}
    yield from _entries((f".B {name}", meaning) for name, meaning in entries.items())
    yield ".SH FILES"
    of = keys(AgentSettings)
    files = {
        str(DEFAULT_PATH): "Configuration of the agent, the capper and the commands.",
        "/etc/default/wattspan": "Environment of the services.",
        **{str(of[name].default): of[name].doc for name in ("state_dir", "run_dir")},
        str(INSTALLED_PAGES): "Documentation; docs/index.md is its first page.",
    }
    yield from _entries((f".I {_text(name)}", meaning) for name, meaning in files.items())
    yield ".SH SEE ALSO\n.BR systemctl (1),\n.BR journalctl (1)"


def _command(name: str, parent: click.Context, group: click.Group) -> Iterator[str]:
    command = group.resolve_command(parent, [name])[1]
    assert command is not None, name  # noqa: S101 - the group lists it
    context = click.Context(command, parent, info_name=name, **command.context_settings)
    usage = [context.command_path, *command.collect_usage_pieces(context)]
    yield f".SS {_text(' '.join(usage))}"
    yield _prose(command.help or "")
    yield from _options(command, context)
    if command.epilog:
        yield f".PP\n{_prose(command.epilog)}"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            yield from _command(each, context, command)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [one.get_help_record(context) for one in command.get_params(context)]
    shown = [one for one in records if one and (not context.parent or "--help" not in one[0])]
    yield from _entries((f".B {_text(names)}", text) for names, text in shown)


def _entries(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    for head, text in entries:
        yield f".TP\n{head}\n{_lines(text)}"


def _prose(text: str) -> str:
    """Paragraphs; those that click marks with a backspace keep their lines."""
    blocks = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        kept = paragraph.removeprefix("\b\n")
        filled = ".nf\n" + "\n".join(map(_text, kept.splitlines())) + "\n.fi"
        blocks.append(_lines(kept) if kept == paragraph else filled)
    return "\n.PP\n".join(blocks)


def _lines(text: str) -> str:
    return "\n".join(map(_text, textwrap.wrap(" ".join(text.split()), 68, break_on_hyphens=False)))


def _text(line: str) -> str:
    escaped = line.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    print("\n".join(page(sys.argv[1])))
