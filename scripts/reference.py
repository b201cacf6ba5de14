"""Write docs/reference/ and docs/field.md from the code and data they describe: `make docs`.

Each page is made of what the program itself uses: the tables of the configuration, the catalogue
of metrics, the help of the commands, the reasons of the tuner, the fuzz targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import engine_reference
import field_reference
import fuzz_reference
import metrics_reference
import zeus_reference

from wattspan.cli import cli
from wattspan.cli.tune.explanation import REASON_EXPLANATIONS, meaning
from wattspan.config import writing
from wattspan.plugins import discover

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def pages() -> dict[str, str]:
    """Every generated page, by file name."""
    return {
        "commands.md": "\n".join(_commands()),
        "configuration.md": writing.reference_page(discover().schema.tables),
        "engines.md": engine_reference.page(),
        "metrics.md": metrics_reference.page(),
        "zeus.md": zeus_reference.page(),
        "reasons.md": "\n".join(_reasons()),
        "fuzzing.md": fuzz_reference.page(),
        "../field.md": field_reference.page(),
    }


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "What `wattspan --help` and its commands' `--help` print.\n"
    yield from _help(cli, None, "wattspan")


def _reasons() -> Iterator[str]:
    yield "# Reasons of the tuner\n"
    yield "A reason accompanies every decision: in `wattspan tune explain` and `tune history`, and"
    yield "as the label `reason` of `wattspan_autotune_decisions_total`. [How the tuner"
    yield "decides](../explanation/how-the-tuner-decides.md) has the method.\n"
    yield "| reason | meaning | next | remedy |"
    yield "|---|---|---|---|"
    for reason, each in REASON_EXPLANATIONS.items():
        yield f"| `{reason}` | {meaning(reason)} | {each.then} | {each.do or 'none'} |"
    yield ""


def _help(command: click.Command, parent: click.Context | None, name: str) -> Iterator[str]:
    settings = {**command.context_settings, "terminal_width": 96, "max_content_width": 96}
    context = command.context_class(command, parent=parent, info_name=name, **settings)
    yield f"{'#' * (2 if parent is None else 3)} `{context.command_path}`\n"
    yield "```text"
    yield command.get_help(context)
    yield "```\n"
    if isinstance(command, click.Group):
        for one in command.list_commands(context):
            if child := command.resolve_command(context, [one])[1]:
                yield from _help(child, context, one)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        path = (FOLDER / name).resolve()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
