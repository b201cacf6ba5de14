"""The reference page of the configuration, made of the tables themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from wattspan.config.environment import variable
from wattspan.config.writing import value_text
from wattspan.settings import Key, Table, keys

_HEAD = """\
# Configuration

`wattspan run` reads `/etc/wattspan/config.toml`, or the file that `--config` names. The default
file may be absent; one that is named may not. A value is taken from, in this order:

1. a flag: `--set agent.interval=50ms`, or a command's own option;
2. the environment: `WATTSPAN_AGENT_INTERVAL=50ms`;
3. the file;
4. the default.

`wattspan config show --origin` says of each value where it came from, and `wattspan config check`
names everything that is wrong at once. An unknown table or key is an error, an unknown
`WATTSPAN_*` variable a warning.

Durations are written with a unit (`ns`, `us`, `ms`, `s`, `m`, `h`, `d`), sizes too (`B`, `kB`,
`MB`, `GB`, `KiB`, `MiB`, `GiB`). In the environment a list is written as in TOML, `["a", "b"]`, or
with commas, `a,b`.

A table in double brackets, such as `[[autotune.job]]`, may be written any number of times, in the
file only: no variable and no flag sets it. Messages call the first one `autotune.job[0]`.

This page is what `wattspan config reference` prints; with other plugins installed, the command
prints their tables as well.
"""


def page(tables: Mapping[str, type[Table]]) -> str:
    """The page for ``tables``, in Markdown."""
    return "\n".join([_HEAD, *(line for item in tables.items() for line in _section(*item))])


def _section(where: str, table: type[Table], *, array: bool = False) -> Iterator[str]:
    yield f"## `[[{where}]]`\n" if array else f"## `[{where}]`\n"
    # A Table without a docstring would inherit the one of Table, which describes nothing.
    yield f"{inspect.cleandoc(table.__dict__.get('__doc__') or '')}\n"
    if array:
        yield "Any number of these tables may be written, in the file only.\n"
    for key in keys(table).values():
        if key.rows is None:
            yield f"### `{key.name}`\n"
            yield f"{key.doc}\n"
            yield from _facts(where, key, array=array)
    for key in keys(table).values():
        if key.rows is not None:
            yield from _section(f"{where}.{key.name}", key.rows, array=True)


def _facts(where: str, key: Key, *, array: bool) -> Iterator[str]:
    yield f"- value: {key.kind}{_bounds(key)}"
    if key.required:
        yield "- required"
    else:
        yield f"- default: {'none' if key.default is None else f'`{value_text(key.default)}`'}"
    yield "" if array else f"- environment: `{variable(f'{where}.{key.name}')}`\n"


def _bounds(key: Key) -> str:
    match key.least, key.most:
        case None, None:
            return ""
        case least, None:
            return f", at least {least}"
        case None, most:
            return f", at most {most}"
        case least, most:
            return f", {least} to {most}"
