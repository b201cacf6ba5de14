"""Options that several commands share, the configuration they select, and JSON output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from wattspan.config import Config, ConfigSchema, FlagValue, load
from wattspan.model.settings import Duration
from wattspan.plugins import discover
from wattspan.ports import ConfigError
from wattspan.service.configuration import LoadedConfiguration
from wattspan.util.text import printable

F = TypeVar("F", bound=Callable[..., Any])


class DurationType(click.ParamType[Duration]):
    """A duration with a unit, such as ``2s``."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Duration:
        try:
            return value if isinstance(value, Duration) else Duration.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


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

emulate_option = click.option(
    "--emulate",
    metavar="PROFILE",
    help="Use an emulated host instead of this one; every figure is labelled emulated.",
)


def emulation_flags(emulate: str | None) -> dict[str, FlagValue]:
    """``--emulate`` as a setting."""
    return {} if emulate is None else {"emulation.profile": FlagValue("--emulate", emulate)}


def load_configuration(
    config_file: Path | None,
    settings: Iterable[str] = (),
    flags: Mapping[str, FlagValue] | None = None,
    *,
    faults: list[str] | None = None,
) -> LoadedConfiguration:
    """The configuration and the installed plugins; warnings go to standard error.

    ``flags`` are settings of the command's own options, by dotted key; ``--set`` overrides them.
    With ``faults``, each fault is appended to it, the default replaces the value at fault, and
    nothing is printed.
    """
    plugins = discover()
    config = load(
        config_file,
        environ=os.environ,
        flags={**(flags or {}), **_assignments(settings)},
        schema=plugins.schema,
        faults=faults,
    )
    if faults is None:
        _warn((*config.warnings, *map(str, plugins.broken)))
    return LoadedConfiguration(config, plugins)


def load_without_plugins(
    config_file: Path | None, settings: Iterable[str] = (), *, faults: list[str] | None = None
) -> Config:
    """The configuration for a command that may run as root and therefore imports no plugin.

    Tables of plugins are skipped; the agent checks them. Warnings go to standard error. ``faults``
    as for ``load_configuration``.
    """
    schema = ConfigSchema(checks_plugins=False)
    flags = _assignments(settings)
    config = load(config_file, environ=os.environ, flags=flags, schema=schema, faults=faults)
    _warn(config.warnings)
    return config


def echo_error(sentence: str) -> None:
    """Print a sentence on standard error."""
    click.echo(f"wattspan: {printable(sentence)}", err=True)


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        echo_error(f"warning: {sentence}")


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
    """JSON with printable text unescaped, other characters escaped, and a trailing newline."""
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def echo_json(facts: object) -> None:
    """Print ``facts`` as JSON."""
    click.echo(json_text(facts), nl=False)
