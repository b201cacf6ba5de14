"""Options that several commands share, and the configuration they lead to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from wattspan.config import Config, ConfigSchema, FlagValue, load
from wattspan.plugins import Plugins, discover
from wattspan.ports import ConfigError
from wattspan.util.text import printable

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration, and the plugins that gave it its tables."""

    config: Config
    plugins: Plugins


def config_options(function: F) -> F:
    """Add ``--config`` and ``--set``, passed as ``config_file`` and ``settings``."""
    function = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set one configuration key, such as agent.interval=50ms. Repeatable.",
    )(function)
    return click.option(
        "--config",
        "-c",
        "config_file",
        type=click.Path(path_type=Path),
        envvar="WATTSPAN_CONFIG",
        help="Read this file instead of /etc/wattspan/config.toml.",
    )(function)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def load_configuration(
    config_file: Path | None,
    settings: Iterable[str] = (),
    flags: Mapping[str, FlagValue] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    quiet: bool = False,
    faults: list[str] | None = None,
) -> Loaded:
    """The configuration with the installed plugins; its warnings go to standard error.

    Unless ``quiet``: then the caller shows ``config.warnings`` and ``plugins.broken`` itself. If
    ``faults`` is given, what is wrong is added to it, and the default stands for what is wrong.

    ``flags`` holds what a command's own options set, by dotted key. ``--set`` is stronger.
    """
    plugins = discover()
    config = load(
        config_file,
        environ=os.environ if environ is None else environ,
        flags={**(flags or {}), **_assignments(settings)},
        schema=plugins.schema,
        faults=faults,
    )
    if not quiet:
        _warn((*config.warnings, *map(str, plugins.broken)))
    return Loaded(config, plugins)


def load_without_plugins(config_file: Path | None, settings: Iterable[str] = ()) -> Config:
    """The configuration for a command that imports no plugin, because it may run as root.

    Tables and settings of plugins are skipped; the agent checks them. Warnings go to standard
    error.
    """
    config = load(
        config_file,
        environ=os.environ,
        flags=_assignments(settings),
        schema=ConfigSchema(checks_plugins=False),
    )
    _warn(config.warnings)
    return config


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        click.echo(f"wattspan: warning: {printable(sentence)}", err=True)


def _assignments(settings: Iterable[str]) -> dict[str, FlagValue]:
    flags = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {setting}: no value. Write --set KEY=VALUE, "
                "for example --set agent.interval=50ms."
            )
        flags[key.strip()] = FlagValue(f"--set {key.strip()}", value.strip())
    return flags


def json_text(facts: object) -> str:
    """Facts for a program: JSON, printable text unescaped, one trailing newline.

    Characters that would command a terminal are escaped, which changes no fact.
    """
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def echo_json(facts: object) -> None:
    """Print facts for a program."""
    click.echo(json_text(facts), nl=False)
