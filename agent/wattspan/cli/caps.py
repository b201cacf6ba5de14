"""Where a capper was, by a configuration that cannot be: what of it can be read all the same.

``wattspan caps``: who holds which limit, and how to have them all back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wattspan.cli.capper import emulated_option, open_isolated_actuators
from wattspan.cli.options import (
    config_options,
    echo_json,
    json_option,
    load_without_plugins,
)
from wattspan.config import (
    DEFAULT_PATH,
    TABLES,
    AgentSettings,
    Config,
    FlagValue,
    environment_variable,
    load,
    reading,
)
from wattspan.config.tables import FAMILIES
from wattspan.model.settings import keys
from wattspan.ports import ConfigError
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.capper.process import RestoreContext
    from wattspan.capper.protocol import KnobRow, StateReply
    from wattspan.model import CapRow
    from wattspan.ports import Clock


class FallbackConfiguration(NamedTuple):
    """The defaults, with the directories that were named."""

    config: Config
    guessed: bool
    """Whether nobody knows which state directory was meant: it is the default."""


def load_fallback(
    config_file: Path | None,
    settings: Iterable[str],
    environ: Mapping[str, str],
    default: Path = DEFAULT_PATH,
) -> FallbackConfiguration:
    """The directories that options, the environment or the file name, whatever else they say."""
    table, known = _agent_table(config_file or default, wanted=config_file is not None)
    options = {
        key.strip(): value.strip() for key, _, value in (one.partition("=") for one in settings)
    }
    places: dict[str, FlagValue] = {}
    for name in ("state_dir", "run_dir"):
        key = f"agent.{name}"
        said = [options.get(key), environ.get(environment_variable(key)), table.get(name)]
        values = [value for value in said if value is not None]
        kept = next((value for value in values if _is_valid(key, value)), None)
        if kept is not None:
            places[key] = FlagValue(key, kept)
        elif name == "state_dir":
            known = known and not values
    guessed = not known and "agent.state_dir" not in places
    return FallbackConfiguration(load(Path(os.devnull), environ={}, flags=places), guessed)


def _agent_table(path: Path, *, wanted: bool) -> tuple[Mapping[str, object], bool]:
    """``[agent]`` of the file, and whether what it leaves out is left out for certain.

    A name that nobody knows may be a key misspelt.
    """
    if not wanted and not os.path.lexists(path):
        return {}, True
    try:
        values = reading.read_toml(path).values
    except ConfigError:
        return {}, False
    table = values.get("agent", {})
    if not isinstance(table, dict):
        return {}, False
    return table, values.keys() <= {*TABLES, *FAMILIES} and table.keys() <= keys(
        AgentSettings
    ).keys()


def _is_valid(key: str, value: object) -> bool:
    try:
        load(Path(os.devnull), environ={}, flags={key: FlagValue(key, value)})
    except ConfigError:
        return False
    return True


_NAME_STATE_DIRECTORY = (
    "Mend the configuration, or name the state directory with `--set agent.state_dir=DIR`, and"
    " run this again if a limit still stands."
)

_SOURCES = {
    "configuration": "[caps] budget_watts",
    "file": "[caps] budget_file",
    "socket": "set on the socket",
}


@click.group(name="caps")
def command() -> None:
    """Say who holds which power limit, or have all of them back."""


@command.command()
@config_options
@json_option
def status(config_file: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Say what each limit is, who holds it, since when, and why.

    Exits with 6 if no capper answers.
    """
    config = load_without_plugins(config_file, settings)
    from wattspan.capper.client import CapperClient
    from wattspan.clock import SystemClock
    from wattspan.service.configuration import capper_socket

    clock = SystemClock()
    # One that systemd starts because of this question takes a while to wake the driver first.
    client = CapperClient(capper_socket(config), clock, who="wattspan caps status", timeout=10.0)
    try:
        client.rows()
    finally:
        client.close()
    state = client.state
    assert state is not None  # noqa: S101 - it has just answered
    if as_json:
        import msgspec

        echo_json(msgspec.to_builtins(state))
        return
    for line in state_lines(state, clock):
        click.echo(printable(line))


@command.command()
@config_options
@emulated_option
@click.option(
    "--tuned",
    is_flag=True,
    help="Restore only limits that tuning set, after a capper has ended; limits of fixed caps and"
    " of a power budget stay in force.",
)
@json_option
def restore(
    config_file: Path | None,
    settings: tuple[str, ...],
    emulated: Path | None,
    tuned: bool,
    as_json: bool,
) -> None:
    """Give every original limit back, whoever holds it. For root.

    A running capper is asked to, and then sets nothing any more until it is started anew. Where
    none runs, the journal that it left says what is to be given back. A limit that somebody else
    has set since is left alone.

    Exits with 6 if anything could not be given back, if a damaged journal leaves it unknown what is
    to be given back, or if nothing was and the configuration is
    so broken that the journal's directory had to be guessed.
    """
    from wattspan.capper.paths import capper_directory
    from wattspan.capper.process import restore_limits as give_back

    config, guessed = _load_or_fallback(config_file, settings)
    done = give_back(_restore_context(config, emulated), tuned_only=tuned)
    troubles = list(done.troubles)
    if guessed and done.by == "journal":
        place = capper_directory(Path(config.agent.state_dir), emulated=emulated is not None)
        said = f"{place} was only guessed to be the capper's directory. {_NAME_STATE_DIRECTORY}"
        click.echo(f"wattspan: {said}", err=True)
        if not done.restored:
            troubles.append(said)
    if as_json:
        facts: dict[str, Any] = {
            "by": done.by,
            "restored": done.restored,
            "foreign": [row.state.key.device for row in done.foreign],
            "retained": done.retained,
            "troubles": troubles,
        }
        echo_json(facts)
    else:
        said = "limit was" if done.restored == 1 else "limits were"
        click.echo(f"{done.restored} {said} given back, by the {done.by}.")
        if done.retained:
            stay = "limit stays" if done.retained == 1 else "limits stay"
            click.echo(f"{done.retained} {stay} in force: a fixed cap or the power budget.")
        for row in done.foreign:
            click.echo(f"Left alone: {printable(_foreign_limit(row))}")
    if troubles:
        raise click.exceptions.Exit(6)


@command.command()
@config_options
@emulated_option
@json_option
def accept(
    config_file: Path | None, settings: tuple[str, ...], emulated: Path | None, as_json: bool
) -> None:
    """Take limits that somebody else has set as the originals from now on. For root.

    They are left alone otherwise, until the original has stood for a while. Nothing is written to
    a device by this; but it may be capped again.
    """
    from wattspan.capper.process import accept_foreign_limits as take

    config = load_without_plugins(config_file, settings)
    count = take(_restore_context(config, emulated))
    if as_json:
        echo_json({"accepted": count})
    else:
        click.echo(f"{count} limit{'' if count == 1 else 's'} of somebody else accepted.")


def _load_or_fallback(config_file: Path | None, settings: tuple[str, ...]) -> tuple[Config, bool]:
    """The configuration, or what is left of one that cannot be; whether a guess is in it."""
    try:
        return load_without_plugins(config_file, settings), False
    except ConfigError as error:
        for line in str(error).splitlines():
            click.echo(f"wattspan: {printable(line)}", err=True)

    found = load_fallback(config_file, settings, os.environ)
    click.echo(
        f"wattspan: Limits are given back all the same, going by {found.config.agent.state_dir},"
        f" {'the default' if found.guessed else 'the state directory'}.",
        err=True,
    )
    return found


def _restore_context(config: Config, emulated: Path | None) -> RestoreContext:
    from wattspan.capper.paths import open_capper_host
    from wattspan.capper.process import RestoreContext
    from wattspan.clock import SystemClock
    from wattspan.model import Knob
    from wattspan.service.configuration import capper_socket

    clock = SystemClock()
    # systemd says how the capper ended to what it runs afterwards (ExecStopPost=). Its socket is
    # systemd's own and still open then, and whoever knocks would start the capper again.
    return RestoreContext(
        lambda: open_capper_host(Path(config.agent.state_dir), emulated),
        capper_socket(config),
        config,
        # All of them: what the configuration named when a cap was set it may not name any more.
        lambda: open_isolated_actuators(tuple(Knob), emulated, clock),
        clock,
        lambda sentence: click.echo(f"wattspan: {printable(sentence)}", err=True),
        ended="SERVICE_RESULT" in os.environ,
    )


def _foreign_limit(row: CapRow) -> str:
    knob, stands = row.state.key.knob, setting_text(row.state.key.knob.unit, row.state.requested)
    return f"{row.state.name}, whose {knob} somebody else has set to {stands}."


def state_lines(state: StateReply, clock: Clock) -> list[str]:
    """What a capper says, for a person."""
    if not state.rows:
        return ["There is nothing here whose power could be limited."]
    now, told = clock.now(), []
    if state.suspended:
        told.append("Everything was given back on request; nothing is set before a restart.")
    if state.ceiling is not None:
        told += _ceiling_lines(state, state.ceiling, now.mono)
    for row in state.rows:
        told += [
            f"{row.name} ({row.device})",
            *(f"    {line}" for line in _row_lines(row, now.mono)),
        ]
    return told


def _ceiling_lines(state: StateReply, least: int, now: int) -> list[str]:
    told = [f"Ceiling of all devices together: {setting_text('mW', least)}"]
    for ceiling in state.ceilings:
        owner = "" if ceiling.uid is None else f" by user {ceiling.uid}"
        line = f"    {_SOURCES.get(ceiling.source, ceiling.source)}{owner}"
        line += f": {setting_text('mW', ceiling.limit)}"
        if ceiling.expires is not None:
            line += f", for {_seconds(ceiling.expires - now)}"
        told.append(f"{line}; because: {ceiling.why}" if ceiling.why else line)
    if state.short:
        told.append(
            "    It cannot be kept: the devices' floors take "
            f"{setting_text('mW', state.short)} more."
        )
    return told


def _row_lines(row: KnobRow, now: int) -> list[str]:
    unit = row.knob.unit
    told = [f"{row.knob}: {setting_text(unit, row.requested)}{_range(row)}"]
    if row.enforced is not None and row.enforced != row.requested:
        told.append(f"obeys {setting_text(unit, row.enforced)}")
    if row.holder:
        held = (
            f"held for {row.holder}: {setting_text(unit, row.wanted)}" if row.wanted else row.holder
        )
        told.append(f"{held}; the original is {setting_text(unit, row.original)}")
        if row.since_mono is not None:
            told.append(f"for {_seconds(now - row.since_mono)}")
        if row.expires is not None:
            told.append(f"lapses in {_seconds(row.expires - now)} unless renewed")
        if row.why:
            told.append(f"because: {row.why}")
    if row.ceiling is not None:
        told.append(f"its share of the ceiling: {setting_text(unit, row.ceiling)}")
    if row.trouble:
        told.append(row.trouble)
    return told


def _range(row: KnobRow) -> str:
    """What it may be, as far as the device tells."""
    unit, most, default = row.knob.unit, setting_text(row.knob.unit, row.maximum), row.default
    told = ""
    if row.maximum is not None and row.minimum is not None:
        told = f" of {setting_text(unit, row.minimum)} to {most}"
    elif row.maximum is not None:
        told = f", at most {most}"
    return told if default is None else f"{told}, default {setting_text(unit, default)}"


def setting_text(unit: str, value: int | None) -> str:
    """A setting as a person reads it."""
    if value is None:
        return "unknown"
    return f"{value / 1000:g} W" if unit == "mW" else f"{value} {unit}"


def _seconds(nanoseconds: int) -> str:
    seconds = max(0, round(nanoseconds / 1e9))
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
