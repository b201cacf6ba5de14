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

This page is what `wattspan config reference` prints; with other plugins installed, the command
prints their tables as well.
"""


def page(tables: Mapping[str, type[Table]]) -> str:
    """The page for ``tables``, in Markdown."""
    return "\n".join([_HEAD, *(line for item in tables.items() for line in _section(*item))])


def _section(where: str, table: type[Table]) -> Iterator[str]:
    yield f"## `[{where}]`\n"
    # A Table without a docstring would inherit the one of Table, which describes nothing.
    yield f"{inspect.cleandoc(table.__dict__.get('__doc__') or '')}\n"
    for key in keys(table).values():
        yield f"### `{key.name}`\n"
        yield f"{key.doc}\n"
        yield from _facts(where, key)


def _facts(where: str, key: Key) -> Iterator[str]:
    yield f"- value: {key.kind}{_bounds(key)}"
    if key.required:
        yield "- required"
    else:
        yield f"- default: {'none' if key.default is None else f'`{value_text(key.default)}`'}"
    yield f"- environment: `{variable(f'{where}.{key.name}')}`\n"


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
