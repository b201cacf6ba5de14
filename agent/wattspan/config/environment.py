"""Configuration by environment: ``[sources.rapl] reader`` is ``WATTSPAN_SOURCES_RAPL_READER``."""

from __future__ import annotations

import contextlib
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from wattspan.config.tables import Schema
from wattspan.plaintext import printable
from wattspan.settings import Key, each_array, each_key, value_of

PREFIX = "WATTSPAN_"

OPTIONS = {"WATTSPAN_CONFIG": "--config", "WATTSPAN_DEBUG": "--debug"}
"""Variables that stand for an option of the command line and are no configuration keys."""

APPLICATIONS = ("WATTSPAN_RUN_DIR",)
"""Variables that are for measured applications, and mean nothing to the agent."""


class Variable(NamedTuple):
    """One environment variable that names a configuration key."""

    name: str
    where: str  # the table, "sources.rapl"
    key: str
    value: object


def variable(dotted: str) -> str:
    """The environment variable of a dotted key."""
    return PREFIX + "".join(c if c.isalnum() else "_" for c in dotted).upper()


def variables(environ: Mapping[str, str], schema: Schema) -> Iterator[Variable]:
    """The keys that the environment sets, in the order of the schema."""
    for dotted, key in each_key(schema.tables):
        name = variable(dotted)
        if name in environ:
            where = dotted[: -len(key.name) - 1]
            yield Variable(name, where, key.name, understood(environ[name], key))


def unsettable(environ: Mapping[str, str], schema: Schema) -> Iterator[str]:
    """A fault for each variable that would set what only a file can."""
    for array, _ in each_array(schema.tables):
        if variable(array) in environ:
            yield f"{variable(array)}: {in_a_file(array)}"


def in_a_file(array: str) -> str:
    """The sentence for an array of tables that was to be set in some other way."""
    return f"Tables [[{array}]] can be written in the file only. Write them there."


def understood(text: str, key: Key) -> object:
    """The text of a variable or option as the value it means for ``key``.

    Text where text is wanted; otherwise what it would be in a file (``true``, ``50``,
    ``["a"]``), or, for a list, the items between commas. If it is none of them it stays text,
    for the reader of the key to refuse it by name.
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


def strangers(environ: Mapping[str, str], schema: Schema) -> Iterator[str]:
    """A warning for each ``WATTSPAN_*`` variable that means nothing."""
    known = [variable(dotted) for dotted, _ in each_key(schema.tables)]
    known += [*OPTIONS, *APPLICATIONS]
    arrays = [array for array, _ in each_array(schema.tables)]
    known += map(variable, arrays)  # these are faults
    uncheckable = tuple(variable(table) + "_" for table in schema.skipped)
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known or name.startswith(uncheckable):
            continue
        array = next((a for a in arrays if name.startswith(variable(a) + "_")), None)
        if array:
            yield f"{_shown(name)} is ignored. {in_a_file(array)}"
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        yield f"{_shown(name)} is ignored: no such setting.{hint}"


def _shown(name: str) -> str:
    """A variable's name, fit for a log."""
    return printable(name[:200])
