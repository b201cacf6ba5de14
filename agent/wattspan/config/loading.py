"""Loading: merges file, environment and flags into one `Config`, or reports every fault."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wattspan.config import reading
from wattspan.config.checks import find_faults, find_warnings
from wattspan.config.reading import (
    TomlFile,
    array_variable_faults,
    file_only_sentence,
    parse_setting_text,
    unknown_variable_warnings,
    variables,
)
from wattspan.config.tables import (
    FAMILIES,
    TABLES,
    Config,
    ConfigSchema,
    FlagValue,
    SettingOrigin,
)
from wattspan.model.settings import (
    SettingError,
    Table,
    convert,
    each_array,
    keys,
    unknown_key,
)
from wattspan.ports import ConfigError

DEFAULT_PATH = Path("/etc/wattspan/config.toml")


@dataclass(slots=True)
class _Draft:
    """Values, origins and faults collected so far."""

    schema: ConfigSchema
    values: dict[str, dict[str, object]]
    origins: dict[str, SettingOrigin] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def put(self, where: str, key: str, value: object, origin: SettingOrigin) -> None:
        self.values[where][key] = value
        self.origins[f"{where}.{key}"] = origin

    def located(self, dotted: str, sentence: str, source: TomlFile | None) -> str:
        """Return ``sentence`` about a key, prefixed by the origin of its value."""
        origin = self.origins.get(dotted)
        place = origin.where if origin else (source.place(dotted) if source else "")
        return f"{place}: {sentence}" if place else sentence


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, FlagValue] | None = None,
    schema: ConfigSchema | None = None,
    default: Path = DEFAULT_PATH,
    faults: list[str] | None = None,
) -> Config:
    """Return the configuration: flag over environment over file over default.

    ``path`` must exist if it is given; without it, ``default`` is read if it exists. ``flags``
    maps dotted keys to values of the command line. ConfigError has one line for each fault. If
    ``faults`` is given, the faults are appended to it instead, and the default replaces each
    faulty value.
    """
    schema = schema or ConfigSchema()
    draft = _Draft(schema, {where: {} for where in schema.tables})
    source: TomlFile | None = None
    try:
        source = _read_file(path, default)
    except ConfigError as error:
        if faults is None:
            raise
        draft.faults.append(str(error))
    if source is not None:
        _read_tables(draft, source)
    for name, where, key, value in variables(environ, schema):
        draft.put(where, key, value, SettingOrigin("environment", name))
    draft.faults += array_variable_faults(environ, schema)
    for dotted, flag in (flags or {}).items():
        _apply_flag(draft, dotted, flag)
    tables = _convert_tables(draft, source)
    draft.faults += (draft.located(*fault, source) for fault in find_faults(tables))
    if draft.faults:
        found = sorted(draft.faults, key=_line_number)
        if faults is None:
            raise ConfigError("\n".join(found))
        faults += found
        tables = _tables_without_faults(draft)
    own: dict[str, Any] = {name: tables[name] for name in TABLES}
    return Config(
        **own,
        sources=_family("sources", tables),
        exporters=_family("exporters", tables),
        origins=draft.origins,
        path=source.path if source else None,
        warnings=(*unknown_variable_warnings(environ, schema), *find_warnings(tables)),
    )


def _tables_without_faults(draft: _Draft) -> dict[str, Table]:
    """Return the tables with the default in place of each faulty value."""
    for _ in range(2):
        tables = {
            where: _valid_table(draft.values[where], kind, where)
            for where, kind in draft.schema.tables.items()
        }
        faulty = [dotted for dotted, _ in find_faults(tables)]
        if not faulty:
            return tables
        for where, values in draft.values.items():
            for dotted in faulty:
                if dotted.startswith(f"{where}."):
                    _drop(values, dotted.removeprefix(f"{where}."))
    return {where: convert({}, kind, where) for where, kind in draft.schema.tables.items()}


def _valid_table(values: dict[str, object], kind: type[Table], where: str) -> Table:
    try:
        return convert(values, kind, where)
    except SettingError as error:
        for key, _ in error.faults:
            _drop(values, key)
    try:
        return convert(values, kind, where)
    except SettingError:
        return convert({}, kind, where)


def _drop(values: dict[str, object], key: str) -> None:
    """Remove ``key``; for a key in an array of tables the whole array."""
    values.pop(re.split(r"[.\[]", key)[0], None)


def _line_number(fault: str) -> int:
    """Return the line of a fault; faults of flags and the environment sort last."""
    match = re.match(r"[^ ]*?:(\d+): ", fault)
    return int(match[1]) if match else sys.maxsize


def _read_file(path: Path | None, default: Path) -> TomlFile | None:
    if path is not None:
        return reading.read_toml(path)
    try:
        exists = default.exists()
    except OSError:
        exists = True  # the directory is not accessible: reading reports the cause
    return reading.read_toml(default) if exists else None


def _family(family: str, tables: Mapping[str, Table]) -> dict[str, Table]:
    prefix = f"{family}."
    return {
        where.removeprefix(prefix): table
        for where, table in tables.items()
        if where.startswith(prefix)
    }


# ------------------------------------------------------------------------------------ the file


def _read_tables(draft: _Draft, source: TomlFile) -> None:
    for name, value in source.values.items():
        if name in FAMILIES and isinstance(value, dict):
            for plugin, table in value.items():
                _read_table(draft, source, f"{name}.{plugin}", table)
        else:
            _read_table(draft, source, name, value)


def _read_table(draft: _Draft, source: TomlFile, where: str, value: Any) -> None:
    if draft.schema.skips(where):
        return
    if where not in draft.schema.tables:
        place = source.place(where)
        draft.faults.append(f"{place}: {_unknown_table(draft.schema, where, value)}")
        return
    if not isinstance(value, dict):
        draft.faults.append(
            f"{source.place(where)}: Bad value for {where!r}: expected a table, [{where}]."
        )
        return
    for key, each in value.items():
        draft.put(where, key, each, SettingOrigin("file", source.place(f"{where}.{key}")))
    for key in keys(draft.schema.tables[where]).values():
        if key.rows is not None:
            _record_row_origins(draft, source, f"{where}.{key.name}", value.get(key.name))


def _record_row_origins(draft: _Draft, source: TomlFile, where: str, rows: Any) -> None:
    """Record the origin of each value in an array of tables; conversion checks the type."""
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        for key in row if isinstance(row, dict) else ():
            dotted = f"{where}[{number}].{key}"
            draft.origins[dotted] = SettingOrigin("file", source.place(dotted))


def _unknown_table(schema: ConfigSchema, where: str, value: object) -> str:
    """Return the sentence for an unknown table, or for a key outside all tables."""
    if where in FAMILIES:
        return f"Bad value for {where!r}: expected tables, [{where}.NAME]."
    homes = [table for table, kind in schema.tables.items() if where in keys(kind)]
    if homes and not isinstance(value, dict):
        return f"Unknown key {where!r}: it belongs under [{homes[0]}]."
    known = [*schema.tables, *sorted(schema.broken)]
    family, _, name = where.partition(".")
    if family in FAMILIES:
        prefix = f"{family}."
        known = [table.removeprefix(prefix) for table in known if table.startswith(prefix)]
        fallback = f"installed {family}: {', '.join(known) or 'none'}."
    else:
        prefix, name = "", where
        fallback = f"known here: {', '.join(f'[{table}]' for table in known)}."
        known += FAMILIES
    near = difflib.get_close_matches(name, known, n=1)
    return f"Unknown table {where!r}: " + (
        f"did you mean [{prefix}{near[0]}]?" if near else fallback
    )


# ----------------------------------------------------------------------------------- the flags


def _apply_flag(draft: _Draft, dotted: str, flag: FlagValue) -> None:
    for array, _ in each_array(draft.schema.tables):
        whole = dotted == array and not isinstance(flag.value, str)  # set by a command itself
        if not whole and re.match(rf"{re.escape(array)}(?:$|[.\[])", dotted):
            draft.faults.append(f"{flag.option}: {file_only_sentence(array)}")
            return
    where, _, name = dotted.rpartition(".")
    if not draft.schema.checks_plugins and draft.schema.skips(where):
        return
    table = draft.schema.tables.get(where)
    if table is None:
        sentence = _unknown_table(draft.schema, where or dotted, {})
        draft.faults.append(f"{flag.option}: {sentence}")
        return
    key = keys(table).get(name)
    if key is None:
        draft.faults.append(f"{flag.option}: {unknown_key(dotted, name, keys(table))}")
        return
    value = parse_setting_text(flag.value, key) if isinstance(flag.value, str) else flag.value
    draft.put(where, name, value, SettingOrigin("flag", flag.option))


# -------------------------------------------------------------------------------- all together


def _convert_tables(draft: _Draft, source: TomlFile | None) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for where, kind in draft.schema.tables.items():
        try:
            tables[where] = convert(draft.values[where], kind, where)
        except SettingError as error:
            draft.faults += (
                draft.located(f"{where}.{key}" if key else where, sentence, source)
                for key, sentence in error.faults
            )
            continue
        for key in keys(kind).values():
            draft.origins.setdefault(f"{where}.{key.name}", SettingOrigin("default"))
            if key.rows is not None:
                for number in range(len(getattr(tables[where], key.name))):
                    for name in keys(key.rows):
                        dotted = f"{where}.{key.name}[{number}].{name}"
                        draft.origins.setdefault(dotted, SettingOrigin("default"))
    return tables


def changed_keys(old: Config, new: Config) -> frozenset[str]:
    """Return the dotted keys whose values differ, and names of tables that only one has."""
    before, after = old.tables, new.tables
    keys = set(before.keys() ^ after.keys())
    for where in before.keys() & after.keys():
        was, now = (msgspec.structs.asdict(tables[where]) for tables in (before, after))
        keys |= {
            f"{where}.{key}" for key in was.keys() | now.keys() if was.get(key) != now.get(key)
        }
    return frozenset(keys)
