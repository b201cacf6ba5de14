"""Readers of the configuration file and of environment variables.

The variable of ``[sources.rapl] reader`` is ``WATTSPAN_SOURCES_RAPL_READER``.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.config.tables import ConfigSchema
from wattspan.model.settings import SettingKey, each_array, each_key, value_of
from wattspan.ports import ConfigError
from wattspan.util.files import UnsuitableFileError, read_regular
from wattspan.util.text import printable

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
        raise ConfigError(
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


ENVIRONMENT_PREFIX = "WATTSPAN_"

OPTION_VARIABLES = {"WATTSPAN_CONFIG": "--config", "WATTSPAN_DEBUG": "--debug"}
"""Variables of command line options; they are not configuration keys."""

APPLICATION_VARIABLES = ("WATTSPAN_RUN_DIR",)
"""Variables for instrumented applications; the agent ignores them."""


class EnvironmentValue(NamedTuple):
    """One environment variable that sets a configuration key."""

    name: str
    where: str  # the table, "sources.rapl"
    key: str
    value: object


def environment_variable(dotted: str) -> str:
    """Return the environment variable of a dotted key."""
    return ENVIRONMENT_PREFIX + "".join(c if c.isalnum() else "_" for c in dotted).upper()


def variables(environ: Mapping[str, str], schema: ConfigSchema) -> Iterator[EnvironmentValue]:
    """Yield the keys that the environment sets, in the order of the schema."""
    for dotted, key in each_key(schema.tables):
        name = environment_variable(dotted)
        if name in environ:
            where = dotted[: -len(key.name) - 1]
            yield EnvironmentValue(name, where, key.name, parse_setting_text(environ[name], key))


def array_variable_faults(environ: Mapping[str, str], schema: ConfigSchema) -> Iterator[str]:
    """Yield a fault for each variable that names an array of tables."""
    for array, _ in each_array(schema.tables):
        if environment_variable(array) in environ:
            yield f"{environment_variable(array)}: {file_only_sentence(array)}"


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
            yield f"{_printable_name(name)} is ignored. {file_only_sentence(array)}"
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        yield f"{_printable_name(name)} is ignored: no such setting.{hint}"


def _printable_name(name: str) -> str:
    """A variable's name, fit for a log."""
    return printable(name[:200])
