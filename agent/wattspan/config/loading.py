"""Loading: merges file, environment and flags into one `Config`, or reports every fault.

The environment variable of ``[sources.rapl] reader`` is ``WATTSPAN_SOURCES_RAPL_READER``.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wattspan.config.published import PublishedAgent
from wattspan.config.settings import (
    FAMILIES,
    TABLES,
    Config,
    ConfigSchema,
    FlagValue,
    SettingOrigin,
)
from wattspan.model.settings import (
    SettingError,
    SettingKey,
    Table,
    convert,
    each_array,
    each_key,
    keys,
    unknown_key,
    value_of,
)
from wattspan.ports import ConfigError
from wattspan.util.files import UnsuitableFileError, read_regular
from wattspan.util.text import printable

DEFAULT_PATH = Path("/etc/wattspan/config.toml")

_ROUNDS = 3
"""Conversions of a table: after each, the default replaces the values with faults."""


@dataclass(slots=True)
class _Draft:
    """Values, origins and faults collected so far."""

    schema: ConfigSchema
    values: dict[str, dict[str, object]]
    origins: dict[str, SettingOrigin] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def put(self, dotted: str, value: object, origin: SettingOrigin) -> None:
        where, _, key = dotted.rpartition(".")
        self.values[where][key] = value
        self.origins[dotted] = origin

    def converted(self, where: str, source: TomlFile | None) -> Table:
        """Return a table, with the default in place of each faulty value."""
        kind, values = self.schema.tables[where], dict(self.values[where])
        for attempt in range(_ROUNDS):
            try:
                return convert(values, kind, where)
            except SettingError as error:
                if not attempt:
                    self._report(where, error, source)
                for key, _ in error.faults:  # a fault in an array of tables removes the array
                    values.pop(re.split(r"[.\[]", key)[0], None)
        return convert({}, kind, where)

    def _report(self, where: str, error: SettingError, source: TomlFile | None) -> None:
        """Add the faults of a table, each prefixed by the origin of its value."""
        for key, sentence in error.faults:
            dotted = f"{where}.{key}" if key else where
            origin = self.origins.get(dotted)
            place = origin.where if origin else (source.place(dotted) if source else "")
            self.faults.append(f"{place}: {sentence}" if place else sentence)


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, FlagValue] | None = None,
    schema: ConfigSchema | None = None,
    default: Path = DEFAULT_PATH,
    faults: list[str] | None = None,
    published: PublishedAgent | None = None,
) -> Config:
    """Return the configuration: flag over environment over file over default.

    ``path`` must exist if it is given; without it, ``default`` is read if it exists. ``flags``
    maps dotted keys to values of the command line. ConfigError has one line for each fault. If
    ``faults`` is given, the faults are appended to it instead, and the default replaces each
    faulty value. ``published`` is for a client of a running agent: its settings are used below the
    file, and a ``default`` that this user may not read is no fault.
    """
    schema = schema or ConfigSchema()
    draft = _Draft(schema, {where: {} for where in schema.tables})
    source: TomlFile | None = None
    hidden: Path | None = None
    if path is not None:
        published = None
    elif published is not None:
        _read_published(draft, published)
    try:
        source = _read_file(path, default)
    except ConfigError as error:
        if published is not None and isinstance(error, _DeniedFileError):
            hidden = default
        elif faults is None:
            raise
        else:
            draft.faults.append(str(error))
    if source is not None:
        _read_tables(draft, source)
    for dotted, setting in each_key(schema.tables):
        name = environment_variable(dotted)
        if name in environ:
            value = parse_setting_text(environ[name], setting)
            draft.put(dotted, value, SettingOrigin("environment", name))
    for array, _ in each_array(schema.tables):
        if (name := environment_variable(array)) in environ:
            draft.faults.append(f"{name}: {file_only_sentence(array)}")
    for dotted, flag in (flags or {}).items():
        _apply_flag(draft, dotted, flag)
    tables = {where: draft.converted(where, source) for where in schema.tables}
    if draft.faults:
        found = sorted(draft.faults, key=_line_number)
        if faults is None:
            raise ConfigError("\n".join(found))
        faults += found
    own: dict[str, Any] = {name: tables[name] for name in TABLES}
    for family in FAMILIES:
        own[family] = {name: tables[f"{family}.{name}"] for name in _members(family, tables)}
    return Config(
        **own,
        origins=draft.origins,
        path=source.path if source else None,
        hidden=hidden,
        warnings=(
            *_hidden_file_warnings(hidden, published),
            *unknown_variable_warnings(environ, schema),
            *own["autotune"].warnings(spans=own["spans"].enabled),
            *own["caps"].warnings(),
        ),
    )


class _DeniedFileError(ConfigError):
    """This user may not read the file."""


def _read_published(draft: _Draft, published: PublishedAgent) -> None:
    for dotted, value in published.settings.items():
        where, _, name = dotted.rpartition(".")
        key = keys(draft.schema.tables[where]).get(name) if where in draft.schema.tables else None
        if key is not None and value != key.default:
            draft.put(dotted, value, SettingOrigin("agent", published.place))


def _hidden_file_warnings(hidden: Path | None, published: PublishedAgent | None) -> Iterator[str]:
    """The reason why defaults apply, unless the agent has published its settings."""
    if hidden is not None and not (published and published.place):
        yield (
            f"{hidden} is not readable for this user, and no running agent publishes its settings:"
            " the defaults apply. Start the agent, or name a file with --config."
        )


def _line_number(fault: str) -> int:
    """Return the line of a fault; faults of flags and the environment sort last."""
    match = re.match(r"[^ ]*?:(\d+): ", fault)
    return int(match[1]) if match else sys.maxsize


def _read_file(path: Path | None, default: Path) -> TomlFile | None:
    if path is not None:
        return read_toml(path)
    try:
        default.stat()  # `exists` is False from Python 3.14 on if the directory is not accessible
    except OSError as error:  # reading reports the other ones
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return None
    return read_toml(default)


def _members(family: str, tables: Iterable[str]) -> list[str]:
    """The names of the plugins that have a table in ``family``."""
    prefix = f"{family}."
    return [where.removeprefix(prefix) for where in tables if where.startswith(prefix)]


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
        dotted = f"{where}.{key}"
        draft.put(dotted, each, SettingOrigin("file", source.place(dotted)))
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
        prefix, known = f"{family}.", _members(family, known)
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
    draft.put(dotted, value, SettingOrigin("flag", flag.option))


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


# ---------------------------------------------------------------------------------- TOML files

_HEADER = re.compile(r"""^\s*\[(\[?)([\w."'\s-]+)\]\]?\s*(?:#.*)?$""")
_ENTRY = re.compile(r"""^\s*([\w"'-]+(?:\s*\.\s*[\w"'-]+)*)\s*=""")
_POSITION = re.compile(r"\s*\(at line (\d+), column \d+\)")


@dataclass(frozen=True, slots=True)
class TomlFile:
    """The values of a file, and the line of each dotted key where the reader found it.

    A number from 0 distinguishes the tables of an array: ``autotune.job[0].span``.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """Return ``FILE:LINE`` of a dotted key, of a key in or around it, or only ``FILE``."""
        within = (f"{key}.", f"{key}[")
        below = (line for name, line in self.lines.items() if name.startswith(within))
        line = self.lines.get(key) or next(below, None)
        while line is None and key:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
            line = self.lines.get(key)
        return f"{self.path}:{line}" if line else str(self.path)


def read_toml(path: Path) -> TomlFile:
    """Read the file at ``path``. ConfigError if it is missing, unreadable or not TOML."""
    content = b""
    try:
        content = read_regular(path).content
        text = content.decode()
    except FileNotFoundError:
        raise ConfigError(
            f"Cannot read {path}: there is no such file. "
            "Leave out --config to run with the defaults."
        ) from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text. Save the file as UTF-8.") from None
    except UnsuitableFileError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror}. Name the configuration, or copy it into a file."
        ) from None
    except OSError as error:
        kind = _DeniedFileError if isinstance(error, PermissionError) else ConfigError
        raise kind(
            f"Cannot read {path}: {(error.strerror or str(error)).lower()}. "
            "Make it readable for the user that runs wattspan."
        ) from None
    return parse_toml(text, path)


def parse_toml(text: str, path: Path) -> TomlFile:
    """Return the values and lines of ``text``; ConfigError names file, line and cause."""
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(
            f"{path}: nested too deeply. A configuration has two levels of tables."
        ) from None
    except ValueError as error:
        cause = str(error)
        match = _POSITION.search(cause)
        last = len(text.splitlines()) or 1
        place = f"{path}:{match[1] if match else last}"
        cause = _POSITION.sub("", cause).replace("(at end of document)", "at the end of the file")
        raise ConfigError(
            f"{place}: not TOML: {cause[:1].lower()}{cause[1:]}. Keys are written key = value, "
            'text in "quotes", tables as [name].'
        ) from None
    return TomlFile(path, values, _lines(text))


def _lines(text: str) -> dict[str, int]:
    """Return line numbers by dotted key and table name.

    ``tomllib`` reports no lines, so this function searches for plain headers and entries. It
    misses keys in unusual notation and may mistake a line of a multi-line string for a key:
    only messages use the result.
    """
    found: dict[str, int] = {}
    rows: Counter[str] = Counter()
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _dotted(header[2])
            found.setdefault(table, number)
            if header[1]:
                table = f"{table}[{rows[table]}]"
                rows[table.partition("[")[0]] += 1
                found.setdefault(table, number)
        elif entry := _ENTRY.match(line):
            key = _dotted(entry[1])
            found.setdefault(f"{table}.{key}" if table else key, number)
    return found


def _dotted(name: str) -> str:
    return re.sub(r"""[\s"']""", "", name)


# ------------------------------------------------------------------------- environment variables

ENVIRONMENT_PREFIX = "WATTSPAN_"

OPTION_VARIABLES = {"WATTSPAN_CONFIG": "--config", "WATTSPAN_DEBUG": "--debug"}
"""Variables of command line options; they are not configuration keys."""

APPLICATION_VARIABLES = ("WATTSPAN_RUN_DIR", "WATTSPAN_DISABLED", "WATTSPAN_EMULATED_HOST")
"""Variables for instrumented applications and programs on emulated devices; no settings."""


def environment_variable(dotted: str) -> str:
    """Return the environment variable of a dotted key."""
    return ENVIRONMENT_PREFIX + "".join(c if c.isalnum() else "_" for c in dotted).upper()


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without variables of settings, for a child with a whole configuration.

    They would take precedence over it, although flags of its parent may have replaced them.
    """
    names = {environment_variable(dotted) for dotted, _ in each_key(ConfigSchema().tables)}
    return {name: value for name, value in environ.items() if name not in names}


def file_only_sentence(array: str) -> str:
    """Return the sentence for an array of tables in a variable or flag."""
    return f"Only the file can contain tables [[{array}]]. Write them there."


def parse_setting_text(text: str, key: SettingKey) -> object:
    """Return the value of a variable or option for ``key``.

    The result is text where ``key`` takes text, else the TOML value (``true``, ``50``,
    ``["a"]``), else for a list the items between commas. Any other text stays text, and the
    conversion of the table reports it.
    """
    readings: list[object] = [text]
    with contextlib.suppress(ValueError, RecursionError):
        readings.append(tomllib.loads(f"value = {text}")["value"])
    readings.append([item.strip() for item in text.split(",") if item.strip()])
    for reading in readings:
        try:
            value_of(reading, key)
        except ValueError:
            continue
        return reading
    return text


def unknown_variable_warnings(environ: Mapping[str, str], schema: ConfigSchema) -> Iterator[str]:
    """Yield a warning for each unknown ``WATTSPAN_*`` variable."""
    known = [environment_variable(dotted) for dotted, _ in each_key(schema.tables)]
    known += [*OPTION_VARIABLES, *APPLICATION_VARIABLES]
    arrays = [array for array, _ in each_array(schema.tables)]
    known += map(environment_variable, arrays)  # array_variable_faults reports these
    uncheckable = tuple(environment_variable(table) + "_" for table in schema.skipped)
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known or name.startswith(uncheckable):
            continue
        array = next((a for a in arrays if name.startswith(environment_variable(a) + "_")), None)
        if array:
            yield f"{printable(name[:200])} is ignored. {file_only_sentence(array)}"
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        yield f"{printable(name[:200])} is ignored: no such setting.{hint}"
