"""Typed settings: the building blocks of every configuration table.

A plugin declares its own table as a :class:`Table`; :func:`convert` turns what was written into
it, or says in one sentence for each fault what is wrong: the key, the value, and what would be
right. ``Annotated[int, about("Why one would change it.", least=1)]`` documents a key and bounds
it; the reference page is written from that.
"""

from __future__ import annotations

import difflib
import enum
import functools
import ipaddress
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from wattspan.util.text import printable

_TIMES = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_TIMES["d"] = 24 * _TIMES["h"]
_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NUMBER = r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*"
_INT64_MAX = 2**63 - 1


# ------------------------------------------------------------------------- kinds of value


class Duration(int):
    """Nanoseconds, written as ``"100ms"``, ``"1.5s"``, ``"2m"``, ``"24h"`` or ``"7d"``."""

    kind = 'duration such as "100ms", "2s" or "24h"'

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read ``text``; ValueError says what a duration looks like."""
        return cls(_scaled(text, _TIMES, cls.kind))

    def __str__(self) -> str:
        return _with_unit(int(self), _TIMES, ("d", "h", "m", "s", "ms", "us", "ns"))


class Size(int):
    """Bytes, written as ``"512KiB"``, ``"64MiB"``, ``"1.5GB"``."""

    kind = 'size such as "64MiB" or "1.5GB"'

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read ``text``; ValueError says what a size looks like."""
        return cls(_scaled(text, _SIZES, cls.kind))

    def __str__(self) -> str:
        return _with_unit(int(self), _SIZES, ("GiB", "MiB", "KiB", "GB", "MB", "kB", "B"))


class Listen(str):
    """Where to listen: ``"HOST:PORT"``, ``"[::1]:9949"``; ``""`` turns the listener off.

    A port without a host (``":9949"``) means every address of the machine.
    """

    __slots__ = ()
    kind = 'listen address such as "127.0.0.1:9949", or "" for none'

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Check ``text``; ValueError says which part of it cannot be."""
        if text:
            host, colon, port = text.rpartition(":")
            if not colon:
                raise ValueError(f'{quoted(text)} names no port; write "HOST:PORT"')
            if not (port.isascii() and port.isdecimal() and int(port[:6]) <= 65535):
                raise ValueError(f"the port {quoted(port)} is not a number from 0 to 65535")
            if host.startswith("[") != host.endswith("]") or (":" in host and host[:1] != "["):
                raise ValueError(f'{quoted(text)}: an IPv6 address stands in brackets, "[::1]:80"')
            if not re.fullmatch(r"[\w.*:%\[\]-]*", host, re.ASCII):
                raise ValueError(f'{quoted(host)} is not a host; write "HOST:PORT"')
        return cls(text)

    @property
    def host(self) -> str:
        """The host without brackets; every address when none is named."""
        host = self.rpartition(":")[0].removeprefix("[").removesuffix("]")
        return "" if host == "*" else host

    @property
    def port(self) -> int:
        return int(self.rpartition(":")[2])

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @staticmethod
    def written(host: str, port: int) -> str:
        """``HOST:PORT``, an IPv6 address in its brackets."""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _scaled(text: str, units: Mapping[str, int], kind: str) -> int:
    match = re.fullmatch(f"{_NUMBER}({'|'.join(units)})\\s*", text)
    if match is None:
        raise ValueError(f"{quoted(text)} is not a {kind}")
    value = round(Fraction(match[1]) * units[match[2]])
    if value > _INT64_MAX:
        raise ValueError(f"{quoted(text)} is too much")
    return value


def _with_unit(value: int, units: Mapping[str, int], preferred: tuple[str, ...]) -> str:
    """The value in the first unit that divides it, so that it reads back as the same."""
    unit = next((u for u in preferred if value and value % units[u] == 0), preferred[-1])
    return f"{value // units[unit]}{unit}"


_TEXT_TYPES = (Duration, Size, Listen)


# ---------------------------------------------------------------------- tables and their keys


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration table: strict types, no unknown keys, a default for everything."""


def about(
    text: str,
    *,
    least: float | str | None = None,
    most: float | str | None = None,
    hint: str = "",
    secret: bool = False,
) -> msgspec.Meta:
    """What a key is for, and its bounds, written as its values are: ``least="10ms"``.

    ``hint`` is told to whoever misses the bounds: how its values are meant. The value of a
    ``secret`` is shown to nobody.
    """
    extra = {"least": least, "most": most, "hint": hint, "secret": secret}
    return msgspec.Meta(description=text, extra=extra)


@dataclass(frozen=True, slots=True)
class SettingKey:
    """What may be written under one key."""

    name: str
    type: Any
    doc: str
    default: object
    required: bool
    least: float | str | None = None
    most: float | str | None = None
    hint: str = ""
    secret: bool = False

    @property
    def rows(self) -> type[Table] | None:
        """The table that stands here any number of times, ``[[where.key]]``; None for a value."""
        kind = self.type
        while typing.get_origin(kind) is Annotated:
            kind = kind.__origin__
        if typing.get_origin(kind) in (list, tuple):
            kind = typing.get_args(kind)[0]
            if isinstance(kind, type) and issubclass(kind, Table):
                return kind
        return None

    @property
    def kind(self) -> str:
        """What a value of this key is, in words."""
        return _type_words(self.type)


@functools.cache
def keys(table: type[Table]) -> Mapping[str, SettingKey]:
    """The keys of ``table`` by name, in the order they are declared."""
    return {field.encode_name: _key(field) for field in msgspec.structs.fields(table)}


def _key(field: msgspec.structs.FieldInfo) -> SettingKey:
    meta: list[msgspec.Meta] = []
    kind = field.type
    while typing.get_origin(kind) is Annotated:
        meta += [m for m in kind.__metadata__ if isinstance(m, msgspec.Meta)]
        kind = kind.__origin__
    extra: dict[str, Any] = {}
    for each in meta:
        extra |= {k: v for k, v in (("least", each.ge), ("most", each.le)) if v is not None}
        extra |= each.extra or {}
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return SettingKey(
        name=field.encode_name,
        type=field.type,
        doc=next((m.description for m in meta if m.description), ""),
        default=None if field.required else default,
        required=field.required,
        least=extra.get("least"),
        most=extra.get("most"),
        hint=extra.get("hint", ""),
        secret=extra.get("secret", False),
    )


_KINDS = {
    bool: ("true", "false"),
    int: ("whole number",),
    float: ("number",),
    str: ("text",),
    type(None): (),
}


def _type_words(kind: Any) -> str:
    return _join_alternatives(_alternatives(kind))


def _join_alternatives(alternatives: Iterable[str]) -> str:
    words = list(alternatives)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _alternatives(kind: Any) -> Iterator[str]:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        yield from _alternatives(kind.__origin__)
    elif origin in (typing.Union, types.UnionType):
        # words before true and false: "auto", true or false
        for each in sorted(typing.get_args(kind), key=lambda k: k is bool):
            yield from _alternatives(each)
    elif origin in (list, tuple, set, frozenset):
        item = typing.get_args(kind)[0]
        yield "list of tables" if _is_table(item) else f"list of {_type_words(item)}"
    elif choices := _choices(kind):
        yield from map(quoted, choices)
    elif (origin or kind) in (dict, Mapping) or _is_table(kind):
        yield "table"
    elif hasattr(kind, "kind"):
        yield kind.kind
    else:
        yield from _KINDS.get(kind, (getattr(kind, "__name__", str(kind)),))


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Table)


def _choices(kind: Any) -> list[str]:
    """The words a key accepts, if it accepts words."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return _choices(kind.__origin__)
    if origin is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    if origin in (typing.Union, types.UnionType):
        return [word for k in typing.get_args(kind) for word in _choices(k)]
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return [str(member) for member in kind]
    return []


def _item_choices(kind: Any) -> list[str]:
    """The words that items of a list may be, if it is a list of words."""
    while typing.get_origin(kind) is Annotated:
        kind = kind.__origin__
    if typing.get_origin(kind) in (list, tuple, set, frozenset):
        return _choices(typing.get_args(kind)[0])
    return []


# --------------------------------------------------------------------- what was written, checked


class SettingFault(NamedTuple):
    """One thing wrong with one key; ``sentence`` names key, cause and remedy."""

    key: str
    sentence: str


class SettingError(ValueError):
    """Settings that cannot be: every fault of one table, each one sentence."""

    def __init__(self, *faults: SettingFault) -> None:
        super().__init__("\n".join(fault.sentence for fault in faults))
        self.faults = faults


T = TypeVar("T", bound=Table)


def convert(raw: Mapping[str, object], to: type[T], where: str) -> T:
    """``raw`` as the table ``to``; SettingError lists everything that is wrong with it.

    ``where`` is the table's dotted name, such as ``sources.rapl``.
    """
    known = keys(to)
    values: dict[str, object] = {}
    faults: list[SettingFault] = []
    for name, value in raw.items():
        path = f"{where}.{name}" if where else name
        if name not in known:
            faults.append(SettingFault(name, unknown_key(path, name, known)))
            continue
        try:
            rows = known[name].rows
            values[name] = _rows(value, rows, path) if rows else value_of(value, known[name])
        except SettingError as error:
            faults += (SettingFault(f"{name}{fault.key}", fault.sentence) for fault in error.faults)
        except ValueError as error:
            faults.append(SettingFault(name, _with_full_stop(f"Bad value for {path!r}: {error}")))
    faults += (
        SettingFault(name, f"{where!r} needs the key {name!r}: {key.doc or key.kind}")
        for name, key in known.items()
        if key.required and name not in raw
    )
    if faults:
        raise SettingError(*faults)
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(to)}
    try:
        return to(**{fields[name]: value for name, value in values.items()})
    except (TypeError, ValueError) as error:  # the table's own __post_init__
        raise SettingError(SettingFault("", _with_full_stop(f"[{where}]: {error}"))) from None


def _rows(value: object, to: type[T], where: str) -> tuple[T, ...]:
    """An array of tables; the faults' keys begin with the row, ``[0].name``."""
    if not isinstance(value, list | tuple):
        got = _shortened(value)
        raise SettingError(
            SettingFault(
                "", f"Bad value for {where!r}: expected tables, each [[{where}]], got {got}."
            )
        )
    rows: list[T] = []
    faults: list[SettingFault] = []
    for number, each in enumerate(value):
        row = f"{where}[{number}]"
        if not isinstance(each, Mapping):
            got = _shortened(each)
            sentence = f"Bad value for {row!r}: expected a table, [[{where}]], got {got}."
            faults.append(SettingFault(f"[{number}]", sentence))
            continue
        try:
            rows.append(convert(each, to, row))
        except SettingError as error:
            faults += (
                SettingFault(f"[{number}]{fault.key and '.'}{fault.key}", fault.sentence)
                for fault in error.faults
            )
    if faults:
        raise SettingError(*faults)
    return tuple(rows)


def value_of(value: object, key: SettingKey) -> object:
    """``value`` as ``key`` wants it; ValueError ends the sentence "Bad value for ...:"."""
    if isinstance(value, str) and not value.isascii() and _not_unicode(value):
        raise ValueError(f"{quoted(value)} is not UTF-8 text")
    try:
        converted: object = msgspec.convert(value, key.type, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise ValueError(_mismatch(value, key, error)) from None
    for bound, word, beyond in ((key.least, "least", -1), (key.most, "most", 1)):
        if bound is not None and isinstance(converted, int | float):
            limit = type(converted).parse(bound) if isinstance(bound, str) else bound  # type: ignore[union-attr]
            # written so that a NaN is out of every bound
            if not (converted >= limit if beyond < 0 else converted <= limit):
                hint = f"; {key.hint}" if key.hint else ""
                raise ValueError(
                    f"{_shortened(value)} is out of bounds, at {word} {_shortened(bound)}{hint}"
                )
    return converted


def unknown_key(path: str, key: str, known: Mapping[str, object]) -> str:
    """The sentence for a key that nobody knows, naming the nearest one that somebody does."""
    near = difflib.get_close_matches(key, known, n=1)
    listing = f"known here: {', '.join(sorted(known))}." if known else "no key is known here."
    remedy = f"did you mean {near[0]!r}?" if near else listing
    return f"Unknown key {path!r}: {remedy}"


def to_plain(table: msgspec.Struct) -> dict[str, Any]:
    """The table as plain TOML-like values, durations as they are written."""
    plain = msgspec.to_builtins(table, enc_hook=_encode)
    assert isinstance(plain, dict)  # noqa: S101 - a struct always becomes a dict
    return plain


REDACTED = "..."
"""What stands for a secret."""


def redacted(table: T) -> T:
    """The table as it may be shown to anybody."""
    hidden = [name for name, key in keys(type(table)).items() if key.secret]
    told = {name: REDACTED for name in hidden if getattr(table, name)}
    return msgspec.structs.replace(table, **told)


def quoted(text: str) -> str:
    """Text in double quotes, on one line, not too long: as it would stand in the file."""
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return '"' + printable(shown) + '"'


def _with_full_stop(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."


def _not_unicode(text: str) -> bool:
    """Whether ``text`` was made of bytes that are no text, as an environment can hold."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def _mismatch(value: object, key: SettingKey, error: Exception) -> str:
    choices = _choices(key.type)
    if choices and isinstance(value, str):
        return f"{quoted(value)} is not {key.kind}{_nearest(value, choices)}"
    if isinstance(value, list | tuple) and (choices := _item_choices(key.type)):
        wrong = next((each for each in value if each not in choices), None)
        if isinstance(wrong, str):
            alternatives = _join_alternatives(map(quoted, choices))
            return f"{quoted(wrong)} is not {alternatives}{_nearest(wrong, choices)}"
    cause = error.__cause__ or error
    if isinstance(cause, ValueError) and not isinstance(cause, msgspec.ValidationError):
        return str(cause)  # a Duration, Size or Listen knows better
    if bound := re.search(r"`(?:int|float)` [<>]=? \S+$", str(error)):
        return f"{_shortened(value)} is out of bounds, {bound[0].replace('`', '')}"
    hint = f"; {key.hint}" if key.hint else ""
    return f"expected {key.kind}, got {_shortened(value)}{hint}"


def _nearest(word: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean {quoted(near[0])}?" if near else ""


def _shortened(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return quoted(value)
        case float():
            return str(value)
        case int():
            return str(value) if abs(value) < 10**20 else "a huge number"
        case dict():
            return "a table"
        case list():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def _decode(kind: type, value: object) -> object:
    if issubclass(kind, _TEXT_TYPES):
        if isinstance(value, str):
            return kind.parse(value)
        raise ValueError(f"expected a {kind.kind}, got {_shortened(value)}")
    raise NotImplementedError(kind)


def _encode(value: object) -> object:
    if isinstance(value, _TEXT_TYPES):
        return str(value)
    raise NotImplementedError(type(value))


def each_key(tables: Mapping[str, type[Table]]) -> Iterator[tuple[str, SettingKey]]:
    """Every key of several tables that has one value, with its dotted name."""
    for where, table in tables.items():
        for name, key in keys(table).items():
            if key.rows is None:
                yield f"{where}.{name}", key


def each_array(tables: Mapping[str, type[Table]]) -> Iterator[tuple[str, type[Table]]]:
    """Every array of tables in several tables, with its dotted name and what its rows are."""
    for where, table in tables.items():
        for name, key in keys(table).items():
            if key.rows is not None:
                yield f"{where}.{name}", key.rows
