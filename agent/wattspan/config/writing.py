"""Writers of a configuration as TOML and of its reference page as Markdown.

``tomli_w`` writes each list over several lines and does not escape unprintable characters, so
that values here are written by this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wattspan.config.loading import environment_variable
from wattspan.config.settings import Config
from wattspan.model.settings import Duration, SettingKey, Size, Table, keys, table_text


def to_toml(config: Config, *, origins: bool = False) -> str:
    """Return the configuration as TOML; with ``origins``, each value's origin as a comment.

    Reading the result gives an equal configuration. TOML has no null: keys without a value are
    left out.
    """
    return "\n\n".join(
        "\n".join([header, *_entries(config, where, table, origins)])
        for header, where, table in _tables(config)
    )


def _tables(config: Config) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each table with header and dotted name, followed by the tables of its arrays."""
    for where, table in config.plain().items():
        schema = keys(type(config.tables[where]))
        arrays = [name for name, key in schema.items() if key.rows is not None]
        values = {key: value for key, value in table.items() if key not in arrays}
        yield f"[{where}]", where, values
        for array in arrays:
            for number, row in enumerate(table[array]):
                yield f"[[{where}.{array}]]", f"{where}.{array}[{number}]", row


def _entries(config: Config, where: str, table: dict[str, Any], origins: bool) -> Iterator[str]:
    lines = [(key, _entry(key, value)) for key, value in table.items() if value is not None]
    width = max((len(line) for _, line in lines), default=0)
    for key, line in lines:
        yield f"{line:{width}}  # {config.origin(f'{where}.{key}')}" if origins else line


def _entry(key: str, value: object) -> str:
    return f"{_key(key)} = {value_text(value)}"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _text(key)


def value_text(value: object) -> str:
    """Return one value on one line, so that a comment can follow it."""
    match value:
        case bool():
            return str(value).lower()
        case Duration() | Size():
            return _text(str(value))
        case str():
            return _text(value)
        case dict():
            return "{" + ", ".join(_entry(k, v) for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(value_text, value)) + "]"
        case _:
            return str(value)  # int and float, with inf and nan, have the notation of TOML


_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r"}


def _text(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c) or _printable(c) for c in text) + '"'


def _printable(c: str) -> str:
    return c if c.isprintable() else f"\\U{ord(c):08X}"


_HEAD = """\
# Configuration

[Configure](../how-to/configure.md) describes the file, variables and flags, and their precedence.
The default file may be missing; a file that `--config` names must exist. An unknown table or key is
an error, an unknown `WATTSPAN_*` variable a warning.

Durations have a unit (`ns`, `us`, `ms`, `s`, `m`, `h`, `d`), as have sizes (`B`, `kB`, `MB`, `GB`,
`KiB`, `MiB`, `GiB`). A list in the environment has the notation of TOML, `["a", "b"]`, or commas,
`a,b`.

A table in double brackets, such as `[[autotune.job]]`, may occur any number of times, in the file
only: no variable and no flag sets it. Messages call the first one `autotune.job[0]`.

`wattspan config reference` prints this page, with the tables of further installed plugins.
"""


def reference_page(tables: Mapping[str, type[Table]]) -> str:
    """Return the page for ``tables`` in Markdown."""
    return "\n".join(
        [_HEAD, *(line for item in tables.items() for line in _reference_section(*item))]
    )


def _reference_section(where: str, table: type[Table], *, array: bool = False) -> Iterator[str]:
    yield f"## `[[{where}]]`\n" if array else f"## `[{where}]`\n"
    yield f"{table_text(table)}\n"
    if array:
        yield "This table may occur any number of times, in the file only.\n"
    for key in keys(table).values():
        if key.rows is None:
            yield f"### `{key.name}`\n"
            yield f"{key.doc}\n"
            yield from _key_facts(where, key, array=array)
    for key in keys(table).values():
        if key.rows is not None:
            yield from _reference_section(f"{where}.{key.name}", key.rows, array=True)


def _key_facts(where: str, key: SettingKey, *, array: bool) -> Iterator[str]:
    yield f"- value: {key.kind}{_bounds(key)}"
    if key.required:
        yield "- required"
    else:
        yield f"- default: {'none' if key.default is None else f'`{value_text(key.default)}`'}"
    yield "" if array else f"- environment: `{environment_variable(f'{where}.{key.name}')}`\n"


def _bounds(key: SettingKey) -> str:
    match key.least, key.most:
        case None, None:
            return ""
        case least, None:
            return f", at least {least}"
        case None, most:
            return f", at most {most}"
        case least, most:
            return f", {least} to {most}"
