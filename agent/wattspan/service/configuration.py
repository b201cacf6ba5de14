"""Options that several commands share, and the configuration they lead to.

Durations on the command line, written as in the configuration.

An emulated host in place of this one, as an option of several commands.

Where the agent's sockets are: as configured, or the user's own place for who is not root.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wattspan.config import AgentSettings, Config, ConfigSchema, EmulationSettings, FlagValue, load
from wattspan.model.settings import Duration
from wattspan.plugins import Plugins, discover
from wattspan.ports import ConfigError
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.emulation.host import EmulatedHost


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class LoadedConfiguration:
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
) -> LoadedConfiguration:
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
    return LoadedConfiguration(config, plugins)


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


class DurationType(click.ParamType[Duration]):
    """A duration with a unit."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Duration:
        if isinstance(value, Duration):
            return value
        try:
            return Duration.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


emulate_option = click.option(
    "--emulate",
    metavar="PROFILE",
    help="Take an emulated host in place of this one; every figure is labelled emulated.",
)


def emulation_flags(emulate: str | None) -> dict[str, FlagValue]:
    """What ``--emulate`` says, as a setting."""
    return {} if emulate is None else {"emulation.profile": FlagValue("--emulate", emulate)}


@contextlib.contextmanager
def selected_emulated_host(chosen: EmulationSettings) -> Iterator[EmulatedHost | None]:
    """The emulated host that is chosen, for as long as it is needed; None for the real one."""
    if not chosen.profile:
        yield None
        return
    from wattspan.emulation.host import EmulatedHost
    from wattspan.emulation.profiles import profile_named

    with EmulatedHost(profile_named(chosen.profile), period=chosen.counters) as host:
        yield host


def run_directory(config: Config) -> Path:
    """The default is another one for who may not write there."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    if config.agent.run_dir == AgentSettings().run_dir and os.geteuid() != 0 and own:
        return Path(own) / "wattspan"
    return Path(config.agent.run_dir)


def agent_directories(config: Config) -> tuple[str, ...]:
    """Where an agent may be: where the environment says, or the configuration, or as usual."""
    from wattspan.sdk.agent import run_directories

    usual = tuple(run_directories())
    if os.environ.get("WATTSPAN_RUN_DIR"):
        return usual
    return tuple(dict.fromkeys((config.agent.run_dir, *usual)))


def capper_socket(config: Config) -> Path:
    """Where the capper answers that somebody at a terminal means: the first that is there."""
    from wattspan.capper.paths import SYSTEM_RUN, capper_socket_path

    own = run_directory(config)
    places = [own, SYSTEM_RUN] if config.agent.run_dir == AgentSettings().run_dir else [own]
    wanted = [
        capper_socket_path(place, emulated=emulated)
        for place in places
        for emulated in (False, True)
    ]
    return next((path for path in wanted if path.exists()), wanted[0])


def is_explicit(config: Config, key: str) -> bool:
    """Whether somebody set ``key``: a listener that was asked for must be had."""
    origin = config.origins.get(key)
    return origin is not None and origin.kind != "default"
