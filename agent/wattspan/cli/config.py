"""``wattspan config``: is the configuration right, and what does it come to?"""

from __future__ import annotations

from pathlib import Path

import click

from wattspan.cli.options import config_options, echo_json, json_option, load_configuration
from wattspan.config import reference, writing
from wattspan.plugins import discover


@click.group(name="config")
def command() -> None:
    """Check or show the configuration."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@config_options
@json_option
def check(
    file: Path | None, config_file: Path | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Check FILE, or what `wattspan run` would read, with the environment on top.

    Everything that is wrong is said at once, and the exit code is 2.
    """
    loaded = load_configuration(file or config_file, settings)
    path = str(loaded.config.path) if loaded.config.path else None
    if as_json:
        echo_json({"ok": True, "file": path, "warnings": list(loaded.config.warnings)})
    else:
        click.echo(f"{path}: ok" if path else "ok: no file, the defaults apply")


@command.command()
@config_options
@click.option("--origin", is_flag=True, help="Say of each value where it comes from.")
@json_option
def show(config_file: Path | None, settings: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Show the whole configuration, defaults included, as TOML that can be read back."""
    config = load_configuration(config_file, settings).config
    if not as_json:
        click.echo(writing.to_toml(config, origins=origin))
    elif origin:
        echo_json(
            {
                where: {
                    key: {"value": value, "origin": config.origins[f"{where}.{key}"]._asdict()}
                    for key, value in table.items()
                }
                for where, table in config.plain().items()
            }
        )
    else:
        echo_json(config.plain())


@command.command(name="reference")
def reference_page() -> None:
    """Print every key that can be set here, with its meaning, in Markdown."""
    click.echo(reference.page(discover().schema.tables), nl=False)
