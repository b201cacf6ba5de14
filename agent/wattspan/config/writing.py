"""The configuration as a file that, read back, is the same configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wattspan.config.tables import Config
from wattspan.settings import Duration, Size, Table, keys


def to_toml(config: Config, *, origins: bool = False) -> str:
    """The whole configuration as TOML; with ``origins``, each value's origin as a comment.

    TOML has no word for nothing: a key without a value is left out, as it would be in a file.
    """
    return "\n\n".join(
        "\n".join([header, *_entries(config, where, table, origins)])
        for header, where, table in _tables(config)
    )


def _tables(config: Config) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each table with its header and its dotted name, after it the tables of its arrays."""
    for where, table in config.plain().items():
        arrays = _arrays(config.tables[where])
        values = {key: value for key, value in table.items() if key not in arrays}
        yield f"[{where}]", where, values
        for array in arrays:
            for number, row in enumerate(table[array]):
                yield f"[[{where}.{array}]]", f"{where}.{array}[{number}]", row


def _arrays(table: Table) -> list[str]:
    return [name for name, key in keys(type(table)).items() if key.rows is not None]


def _entries(config: Config, where: str, table: dict[str, Any], origins: bool) -> Iterator[str]:
    lines = [(key, _entry(key, value)) for key, value in table.items() if value is not None]
    width = max((len(line) for _, line in lines), default=0)
    for key, line in lines:
        yield f"{line:{width}}  # {config.origins[f'{where}.{key}']}" if origins else line


def _entry(key: str, value: object) -> str:
    return f"{_key(key)} = {value_text(value)}"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _text(key)


def value_text(value: object) -> str:
    """One value on one line, so that a comment can stand behind it."""
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
            return str(value)  # int and float write themselves as TOML does, inf and nan too


_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r"}


def _text(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c) or _printable(c) for c in text) + '"'


def _printable(c: str) -> str:
    return c if c.isprintable() else f"\\U{ord(c):08X}"
