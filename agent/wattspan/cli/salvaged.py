"""Where a capper was, by a configuration that cannot be: what of it can be read all the same."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

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


class Salvaged(NamedTuple):
    """The defaults, with the directories that were named."""

    config: Config
    guessed: bool
    """Whether nobody knows which state directory was meant: it is the default."""


def salvaged(
    config_file: Path | None,
    settings: Iterable[str],
    environ: Mapping[str, str],
    default: Path = DEFAULT_PATH,
) -> Salvaged:
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
        kept = next((value for value in values if _stands(key, value)), None)
        if kept is not None:
            places[key] = FlagValue(key, kept)
        elif name == "state_dir":
            known = known and not values
    guessed = not known and "agent.state_dir" not in places
    return Salvaged(load(Path(os.devnull), environ={}, flags=places), guessed)


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


def _stands(key: str, value: object) -> bool:
    try:
        load(Path(os.devnull), environ={}, flags={key: FlagValue(key, value)})
    except ConfigError:
        return False
    return True
