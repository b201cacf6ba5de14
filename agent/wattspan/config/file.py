"""Reading the file: what it says, on which line, or one sentence why it cannot be read."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wattspan.ports import ConfigError
from wattspan.regular_file import UnfitFileError, read_regular

_HEADER = re.compile(r"""^\s*\[(\[?)([\w."'\s-]+)\]\]?\s*(?:#.*)?$""")
_ENTRY = re.compile(r"""^\s*([\w"'-]+(?:\s*\.\s*[\w"'-]+)*)\s*=""")
_PLACE = re.compile(r"\s*\(at line (\d+), column \d+\)")


@dataclass(frozen=True, slots=True)
class TomlFile:
    """What a file says, and on which line each dotted key stands, where that is certain.

    The tables of an array are told apart by their number, from 0: ``autotune.job[0].span``.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """``FILE:LINE`` of a dotted key; of what is in or around it; or only ``FILE``."""
        within = (f"{key}.", f"{key}[")
        below = (line for name, line in self.lines.items() if name.startswith(within))
        line = self.lines.get(key) or next(below, None)
        while line is None and key:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
            line = self.lines.get(key)
        return f"{self.path}:{line}" if line else str(self.path)


def read(path: Path) -> TomlFile:
    """The file at ``path``; ConfigError says why it cannot be had. A missing file is one."""
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
    except UnfitFileError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror}. Name the configuration, or copy it into a file."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path}: {(error.strerror or str(error)).lower()}. "
            "Make it readable for the user that runs wattspan."
        ) from None
    return parse(text, path)


def parse(text: str, path: Path) -> TomlFile:
    """The values and the lines of ``text``; ConfigError names file, line and cause."""
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply. A configuration is two deep.") from None
    except ValueError as error:
        cause = str(error)
        match = _PLACE.search(cause)
        last = len(text.splitlines()) or 1
        place = f"{path}:{match[1] if match else last}"
        cause = _PLACE.sub("", cause).replace("(at end of document)", "at the end of the file")
        raise ConfigError(
            f"{place}: not TOML: {cause[:1].lower()}{cause[1:]}. Keys are written key = value, "
            'text in "quotes", tables as [name].'
        ) from None
    return TomlFile(path, values, _lines(text))


def _lines(text: str) -> dict[str, int]:
    """Dotted keys and table names to line numbers.

    ``tomllib`` tells no lines, so this looks for what plainly is a header or an entry. A key
    that is written some other way is not found, and a line inside a multi-line string may be
    taken for one: a place is a courtesy and nothing depends on it.
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
