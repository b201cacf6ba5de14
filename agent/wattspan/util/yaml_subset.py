"""Block mappings, sequences and scalars of YAML, as programs write them.

CDI specifications and similar files are YAML, whose complete grammar needs a package. This reader
knows what encoders write: nested blocks of keys and items, plain and quoted scalars. All scalars
are text. Flow collections, anchors and tags are returned as their text, and block scalars as "".
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

MAX_LINES = 50_000
MAX_LINE = 8192
MAX_DEPTH = 32

_DOUBLE, _SINGLE = r'"(?:[^"\\]|\\.)*"', r"'(?:[^']|'')*'"
_PLAIN = r"[^\s#'\"\[\]{},&*!|>%@`](?:[^#]|(?<!\s)#)*?"
_KEY = re.compile(rf"({_DOUBLE}|{_SINGLE}|{_PLAIN})\s*:(?:\s+|$)")
_ITEM = re.compile(r"-(?:\s+|$)")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_BLOCK_SCALAR = re.compile(r"[|>][+-]?[0-9]?[+-]?$")


class YamlError(ValueError):
    """The text is no block YAML; the message names the line."""


class _Line(NamedTuple):
    number: int
    indent: int
    text: str


def parse_block_yaml(text: str) -> Any:
    """Dictionaries, lists and texts of the first document; None for an empty one. YamlError."""
    lines = _lines(text)
    if not lines:
        return None
    value, rest = _node(lines, 0, 0)
    if rest < len(lines):
        raise YamlError(f"line {lines[rest].number}: unexpected indentation")
    return value


def _lines(text: str) -> list[_Line]:
    found: list[_Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        if raw.startswith("---") and not found:
            continue
        if raw.startswith(("---", "...")):
            break
        content = raw.strip(" ")
        if not content or content.startswith("#") or (raw.startswith("%") and not found):
            continue
        if len(found) >= MAX_LINES or len(raw) > MAX_LINE or content.startswith("\t"):
            raise YamlError(f"line {number}: too many lines, too long, or indented by tabs")
        found.append(_Line(number, len(raw) - len(raw.lstrip(" ")), content))
    return found


def _node(lines: list[_Line], at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a line, and the line after it."""
    line = lines[at]
    if depth > MAX_DEPTH:
        raise YamlError(f"line {line.number}: nested more than {MAX_DEPTH} deep")
    if _ITEM.match(line.text):
        return _sequence(lines, at, depth)
    if _KEY.match(line.text):
        return _mapping(lines, at, depth)
    return _scalar(line.text), at + 1


def _sequence(lines: list[_Line], at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    indent = lines[at].indent
    while at < len(lines) and lines[at].indent == indent:
        line = lines[at]
        match = _ITEM.match(line.text)
        if match is None:
            break
        rest = line.text[match.end() :]
        if rest and not rest.startswith("#"):
            lines[at] = _Line(line.number, indent + match.end(), rest)
            value, at = _value_of(lines, at, depth)
        elif at + 1 < len(lines) and lines[at + 1].indent > indent:
            value, at = _node(lines, at + 1, depth + 1)
        else:
            value, at = None, at + 1
        items.append(value)
    return items, at


def _value_of(lines: list[_Line], at: int, depth: int) -> tuple[Any, int]:
    """The value of an item that begins in the line of its dash."""
    line = lines[at]
    if _BLOCK_SCALAR.match(line.text):
        return _skip(lines, at, line.indent - 1)
    return _node(lines, at, depth + 1)


def _mapping(lines: list[_Line], at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    indent = lines[at].indent
    while at < len(lines) and lines[at].indent == indent:
        line = lines[at]
        match = _KEY.match(line.text)
        if match is None:
            if _ITEM.match(line.text):
                break  # an item of the sequence above
            raise YamlError(f"line {line.number}: neither a key nor an item")
        value: Any
        key, rest = str(_scalar(match[1])), _COMMENT.sub("", line.text[match.end() :]).strip()
        following = lines[at + 1] if at + 1 < len(lines) else None
        if _BLOCK_SCALAR.match(rest):
            value, at = _skip(lines, at, indent)
        elif rest:
            value, at = _scalar(line.text[match.end() :]), at + 1
        elif following is not None and (
            following.indent > indent
            or (following.indent == indent and _ITEM.match(following.text))
        ):
            value, at = _node(lines, at + 1, depth + 1)
        else:
            value, at = None, at + 1
        found[key] = value
    return found, at


def _skip(lines: list[_Line], at: int, indent: int) -> tuple[str, int]:
    """Pass over a block scalar, whose lines are deeper than ``indent``."""
    at += 1
    while at < len(lines) and lines[at].indent > indent:
        at += 1
    return "", at


def _scalar(text: str) -> str | None:
    if text.startswith('"'):
        end = re.match(r'"(?:[^"\\]|\\.)*"', text)
        try:
            return str(json.loads(end[0])) if end is not None else text
        except ValueError:
            return text
    if text.startswith("'"):
        end = re.match(r"'((?:[^']|'')*)'", text)
        return end[1].replace("''", "'") if end is not None else text
    plain = _COMMENT.sub("", text).strip()
    return None if plain in {"", "~", "null"} else plain
