"""Typed settings: the building blocks of every configuration table.

A plugin declares its own table as a :class:`Table`; :func:`convert` turns what was written into
it, or says in one sentence what is wrong: the key, the value, and what would be right.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_UNITS["d"] = 24 * _UNITS["h"]
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ns|us|ms|s|m|h|d)\s*")


class Duration(int):
    """Nanoseconds, written as ``"100ms"``, ``"1.5s"``, ``"2m"``, ``"24h"`` or ``"7d"``."""

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read ``text``; ValueError says what a duration looks like."""
        match = _DURATION.fullmatch(text)
        if match is None:
            raise ValueError(
                f'{text!r} is not a duration; write for example "100ms", "2s" or "24h"'
            )
        return cls(round(float(match[1]) * _UNITS[match[2]]))

    def __str__(self) -> str:
        for unit in ("d", "h", "m", "s", "ms", "us"):
            if self and int(self) % _UNITS[unit] == 0:
                return f"{int(self) // _UNITS[unit]}{unit}"
        return f"{int(self)}ns"


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration table: strict types, no unknown keys, a default for everything."""


class SettingError(ValueError):
    """A setting that cannot be; the message is one sentence."""


T = TypeVar("T", bound=Table)


def convert(raw: Mapping[str, object], to: type[T], where: str) -> T:
    """``raw`` as the table ``to``; SettingError names the key, the fault and the remedy.

    ``where`` is the table's dotted name, such as ``sources.rapl``.
    """
    known = {field.encode_name: field for field in msgspec.structs.fields(to)}
    for key in raw:
        if key not in known:
            raise SettingError(unknown_key(f"{where}.{key}" if where else key, key, known))
    try:
        return msgspec.convert(dict(raw), to, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError) as error:
        raise SettingError(_sentence(str(error), where)) from None


def unknown_key(path: str, key: str, known: Mapping[str, object]) -> str:
    """The sentence for a key that nobody knows, naming the nearest one that somebody does."""
    near = difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}."
    return f"Unknown key {path!r}: {remedy}"


def to_plain(table: msgspec.Struct) -> dict[str, Any]:
    """The table as plain TOML-like values, durations as they are written."""
    plain = msgspec.to_builtins(table, enc_hook=_encode)
    assert isinstance(plain, dict)  # noqa: S101 - a struct always becomes a dict
    return plain


def _decode(kind: type, value: object) -> object:
    if kind is Duration:
        if isinstance(value, str):
            return Duration.parse(value)
        raise ValueError(f'{value!r} is not a duration; write it as text with a unit, "100ms"')
    raise NotImplementedError(kind)


def _encode(value: object) -> object:
    if isinstance(value, Duration):
        return str(value)
    raise NotImplementedError(type(value))


def _sentence(message: str, where: str) -> str:
    """msgspec says "Expected `int`, got `str` - at `$.top`": the same, key first."""
    fault, _, path = message.partition(" - at `$")
    key = f"{where}{path.rstrip('`')}".lstrip(".")
    fault = fault.replace("`", "")
    return f"Bad value for {key!r}: {fault[:1].lower()}{fault[1:]}."
