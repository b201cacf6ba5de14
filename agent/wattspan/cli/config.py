"""``wattspan config``: check and show the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from wattspan.cli.doctor.host import schedule_faults
from wattspan.cli.doctor.network import access_error, inline_secrets, tcp_listeners
from wattspan.cli.options import (
    ConfigurationOptions,
    config_options,
    echo_error,
    echo_json,
    json_option,
)
from wattspan.config import AccessSettings, Config, writing
from wattspan.config.settings import FAMILIES, ineffective_settings
from wattspan.model.settings import Table, redacted
from wattspan.plugins import discover, exporter_faults, source_advice
from wattspan.ports import ConfigError
from wattspan.service.configuration import forward_faults
from wattspan.util.text import printable


def access_faults(config: Config) -> Iterator[str]:
    """Yield the faults of tokens and certificates that this user can read."""
    for name, settings, _ in tcp_listeners(config):
        if _is_readable(settings) and (error := access_error(name, settings)):
            yield error


def _is_readable(table: AccessSettings) -> bool:
    """False if this user may not read one of the files that exist, or may not see if it exists."""
    named = (table.token_file, table.tls_certificate, table.tls_key, table.tls_client_ca)
    for path in map(Path, filter(None, named)):
        try:
            path.stat()
        except PermissionError:
            return False
        except OSError:
            continue
        if not os.access(path, os.R_OK):
            return False
    return True


@click.group(name="config")
def command() -> None:
    """Check or show the configuration."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path, readable=False), required=False)
@config_options
@json_option
def check(file: Path | None, configuration: ConfigurationOptions, as_json: bool) -> None:
    """Check FILE, or the file of `wattspan run`, with the environment on top.

    Lists all faults at once, including those of the tariff, token, certificate and header files
    that it names. The exit code is then 2. Opens no port and no connection. Warns of settings
    that match nothing on this host.
    """
    loaded = configuration._replace(file=file or configuration.file).load()
    tariffs = (loaded.config.cost, loaded.config.carbon)
    faults = [fault for table in tariffs for fault in schedule_faults(table)]
    faults += [*access_faults(loaded.config), *forward_faults(loaded.config)]
    if faults := [*faults, *exporter_faults(loaded.plugins, loaded.config)]:
        raise ConfigError("\n".join(faults))
    path = str(loaded.config.path) if loaded.config.path else None
    advice = [*inline_secrets(loaded.config), *ineffective_settings(loaded.config)]
    for name in loaded.plugins.sources if not loaded.config.emulation.profile else ():
        advice += source_advice(loaded.plugins, loaded.config, name)
    if as_json:
        echo_json({"ok": True, "file": path, "warnings": [*loaded.config.warnings, *advice]})
    else:
        for sentence in advice:
            echo_error(f"warning: {sentence}")
        click.echo(f"{printable(path)}: ok" if path else "ok: no file, the defaults apply")


@command.command()
@config_options
@click.option("--origin", is_flag=True, help="Show the origin of each value.")
@json_option
def show(configuration: ConfigurationOptions, origin: bool, as_json: bool) -> None:
    """Show the whole configuration, including defaults, as TOML that can be read back.

    "..." replaces secrets.
    """
    config = _without_secrets(configuration.load().config)
    if not as_json:
        click.echo(writing.to_toml(config, origins=origin))
    elif origin:
        echo_json(
            {
                where: {
                    key: {"value": value, "origin": config.origin(f"{where}.{key}")._asdict()}
                    for key, value in table.items()
                }
                for where, table in config.plain().items()
            }
        )
    else:
        echo_json(config.plain())


def _without_secrets(config: Config) -> Config:
    """Return the configuration with placeholders for secrets."""
    tables = {f.name: getattr(config, f.name) for f in fields(config)}
    shown: dict[str, Any] = {
        name: redacted(table) for name, table in tables.items() if isinstance(table, Table)
    }
    for family in FAMILIES:
        shown[family] = {name: redacted(table) for name, table in tables[family].items()}
    return replace(config, **shown)


@command.command(name="reference")
def reference_page() -> None:
    """Print all keys of the installed plugins, with their meaning, in Markdown."""
    click.echo(writing.reference_page(discover().schema.tables), nl=False)
