"""Options that several commands share, the configuration they select, and JSON output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from wattspan.config import Config, ConfigSchema, FlagValue, PublishedAgent, find_published, load
from wattspan.model.settings import Duration
from wattspan.plugins import discover
from wattspan.ports import ConfigError
from wattspan.sdk import run_directories
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


DURATION = DurationType()
FILE = click.Path(path_type=Path, dir_okay=False)


class ConfigurationOptions(NamedTuple):
    """The file of ``--config``, and the settings of ``--emulate`` and ``--set`` by dotted key."""

    file: Path | None = None
    flags: Mapping[str, FlagValue] = {}

    def load(
        self,
        flags: Mapping[str, FlagValue] | None = None,
        *,
        faults: list[str] | None = None,
        client: bool = False,
    ) -> LoadedConfiguration:
        """The configuration and the installed plugins; warnings go to standard error.

        ``flags`` are settings of the command's own options; ``--set`` overrides them. With
        ``faults``, each fault is appended to it, the default replaces the value at fault, and
        nothing is printed. A ``client`` of a running agent needs no right to read the agent's file:
        the settings that the agent publishes are used.
        """
        plugins = discover()
        config = self._load({**(flags or {}), **self.flags}, plugins.schema, faults, client=client)
        if faults is None:
            _warn((*config.warnings, *map(str, plugins.broken)))
        return LoadedConfiguration(config, plugins)

    def load_without_plugins(
        self, *, faults: list[str] | None = None, client: bool = False
    ) -> Config:
        """The configuration for a command that may run as root and therefore imports no plugin.

        Tables of plugins are skipped; the agent checks them. Warnings go to standard error.
        ``client`` as in ``load``.
        """
        schema = ConfigSchema(checks_plugins=False)
        config = self._load(self.flags, schema, faults, client=client)
        _warn(config.warnings)
        return config

    @property
    def published(self) -> PublishedAgent:
        """The settings that the running agent publishes; none for clients of another file."""
        return PublishedAgent() if self.file is not None else find_published(run_directories())

    def _load(
        self,
        flags: Mapping[str, FlagValue],
        schema: ConfigSchema,
        faults: list[str] | None,
        *,
        client: bool,
    ) -> Config:
        # Root reads the file, and must not obey the agent's user.
        return load(
            self.file,
            environ=os.environ,
            flags=flags,
            schema=schema,
            faults=faults,
            published=self.published if client and os.geteuid() != 0 else None,
        )


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Add ``options``, which are given in the order of the help."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_config_options = with_options(
    click.option(
        "--config",
        "-c",
        "config_file",
        type=click.Path(path_type=Path, readable=False),  # the reader's error has a remedy
        envvar="WATTSPAN_CONFIG",
        help="Read this file instead of /etc/wattspan/config.toml.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set one configuration key, such as agent.interval=50ms. Repeatable.",
    ),
)


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config`` and ``--set``, passed with ``--emulate`` as ``configuration``."""

    @wraps(function)
    def collected(
        *args: Any,
        config_file: Path | None,
        settings: tuple[str, ...],
        emulate: str | None = None,
        **others: Any,
    ) -> Any:
        flags = {} if emulate is None else {"emulation.profile": FlagValue("--emulate", emulate)}
        chosen = ConfigurationOptions(config_file, flags | _assignments(settings))
        return function(*args, configuration=chosen, **others)

    return _config_options(collected)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

emulate_option = click.option(
    "--emulate",
    metavar="PROFILE",
    help="Use an emulated host instead of this one; every figure is labelled emulated.",
)


def echo_error(sentence: str) -> None:
    """Print a sentence on standard error."""
    click.echo(f"wattspan: {printable(sentence)}", err=True)


def echo_lines(lines: Iterable[str]) -> None:
    """Print lines for people, without characters that command a terminal."""
    for line in lines:
        click.echo(printable(line))


def echo_result(facts: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print ``facts`` as JSON, or else ``lines`` for people."""
    if as_json:
        echo_json(facts)
    else:
        echo_lines(lines)


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
