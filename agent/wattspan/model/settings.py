"""Typed settings: the parts of configuration tables.

A plugin declares its table as a :class:`Table`; :func:`convert` builds it from plain values, or
reports each fault as one sentence with key, value and remedy.
The section ``Keys:`` of a table's docstring documents its keys, or ``about("Purpose.")`` of
each; the reference page is generated from them. ``Annotated[int, about(least=1)]`` limits a value.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import ipaddress
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import msgspec

from wattspan.util.text import printable

_NUMBER = r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*"
_INT64_MAX = 2**63 - 1


class _Quantity(int):
    """A number with a unit; ``units`` are in order of preference, the smallest is last."""

    kind: ClassVar[str]
    units: ClassVar[dict[str, int]]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``text``; ValueError."""
        match = re.fullmatch(f"{_NUMBER}({'|'.join(cls.units)})\\s*", text)
        if match is None:
            raise ValueError(f"{quoted(text)} is not a {cls.kind}")
        value = round(Fraction(match[1]) * cls.units[match[2]])
        if value > _INT64_MAX:
            raise ValueError(f"{quoted(text)} is too much")
        return cls(value)

    def __str__(self) -> str:
        value = int(self)
        exact = (name for name, size in self.units.items() if value and value % size == 0)
        unit = next(exact, next(reversed(self.units)))
        return f"{value // self.units[unit]}{unit}"


class Duration(_Quantity):
    """Nanoseconds, written as ``"100ms"``, ``"1.5s"``, ``"2m"``, ``"24h"`` or ``"7d"``."""

    kind = 'duration such as "100ms", "2s" or "24h"'
    units: ClassVar = {
        "d": 86_400 * 10**9, "h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9,
        "ms": 10**6, "us": 10**3, "ns": 1,
    }  # fmt: skip


class Size(_Quantity):
    """Bytes, written as ``"512KiB"``, ``"64MiB"``, ``"1.5GB"``."""

    kind = 'size such as "64MiB" or "1.5GB"'
    units: ClassVar = {
        "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1,
    }  # fmt: skip


class Listen(str):
    """A listen address: ``"HOST:PORT"``, ``"[::1]:9949"``; ``""`` for no listener.

    A port without a host (``":9949"``) means all addresses of the machine.
    """

    __slots__ = ()
    kind = 'listen address such as "127.0.0.1:9949", or "" for none'

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Parse ``text``; ValueError names the invalid part."""
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
        """The host without brackets; "" for all addresses."""
        host = self.rpartition(":")[0].removeprefix("[").removesuffix("]")
        return "" if host == "*" else host

    @property
    def port(self) -> int:
        return int(self.rpartition(":")[2])

    @property
    def loopback(self) -> bool:
        """True if the address is reachable from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @staticmethod
    def written(host: str, port: int) -> str:
        """``HOST:PORT``, with an IPv6 address in brackets."""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_TEXT_TYPES = (Duration, Size, Listen)


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration table: strict types, no unknown keys, defaults for all keys."""

    def contradictions(self) -> Iterable[tuple[str, str]]:
        """Keys whose value contradicts another one, each with cause and remedy."""
        return ()


def about(
    text: str = "",
    *,
    least: float | str | None = None,
    most: float | str | None = None,
    hint: str = "",
    secret: bool = False,
) -> msgspec.Meta:
    """The limits of a key's values, such as ``least="10ms"``, and its documentation.

    ``text`` may stand in the docstring of the table instead, in its section ``Keys:``.
    ``hint`` is added to the error message of an invalid value. The value of a ``secret`` is never
    displayed.
    """
    extra = {"least": least, "most": most, "hint": hint, "secret": secret}
    return msgspec.Meta(description=text, extra=extra)


@dataclass(frozen=True, slots=True)
class SettingKey:
    """The properties of one key."""

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
        """The table of an array of tables, ``[[where.key]]``; None for a value."""
        item: type[Table] = _item(self.type)
        return item if _is_table(item) else None

    @property
    def kind(self) -> str:
        """The description of a valid value."""
        return _type_words(self.type)


@functools.cache
def keys(table: type[Table]) -> Mapping[str, SettingKey]:
    """The keys of ``table`` by name, in the order they are declared; inherited keys are last."""
    own = table.__annotations__
    docs = {name: text for kind in reversed(table.__mro__) for name, text in _sections(kind)[1]}
    fields = sorted(msgspec.structs.fields(table), key=lambda field: field.name not in own)
    return {field.encode_name: _key(field, docs.get(field.name, "")) for field in fields}


def table_text(table: type[Table]) -> str:
    """The docstring of ``table`` before its section ``Keys:``; "" without one of its own."""
    return _sections(table)[0]


_KEY_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def _sections(table: type) -> tuple[str, Iterator[tuple[str, str]]]:
    """The text of a docstring, and the keys that it documents, by name."""
    # A class without a docstring would inherit one, which describes its base.
    text, _, documented = inspect.cleandoc(table.__dict__.get("__doc__") or "").partition(
        "\n\nKeys:\n"
    )
    return text, ((name, " ".join(said.split())) for name, said in _KEY_ENTRY.findall(documented))


def _key(field: msgspec.structs.FieldInfo, doc: str) -> SettingKey:
    # Nested annotations are flat: the metadata of the innermost comes first.
    metadata = getattr(field.type, "__metadata__", ())
    meta = [each for each in metadata if isinstance(each, msgspec.Meta)]
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
        doc=next((m.description for m in meta if m.description), doc),
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


def _bare(kind: Any) -> Any:
    """``kind`` without annotations."""
    return kind.__origin__ if typing.get_origin(kind) is Annotated else kind


def _item(kind: Any) -> Any:
    """The type of the items of a list; None for other types."""
    kind = _bare(kind)
    is_list = typing.get_origin(kind) in (list, tuple, set, frozenset)
    return typing.get_args(kind)[0] if is_list else None


def _type_words(kind: Any) -> str:
    return _join_alternatives(_alternatives(kind))


def _join_alternatives(alternatives: Iterable[str]) -> str:
    words = list(alternatives)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _alternatives(kind: Any) -> Iterator[str]:
    kind = _bare(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        # words before true and false: "auto", true or false
        for each in sorted(typing.get_args(kind), key=lambda k: k is bool):
            yield from _alternatives(each)
    elif (item := _item(kind)) is not None:
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
    """The words that a type accepts."""
    kind = _bare(kind)
    origin = typing.get_origin(kind)
    if origin is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    if origin in (typing.Union, types.UnionType):
        return [word for k in typing.get_args(kind) for word in _choices(k)]
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return [str(member) for member in kind]
    return []


class SettingFault(NamedTuple):
    """One fault of one key; ``sentence`` names key, cause and remedy."""

    key: str
    sentence: str


class SettingError(ValueError):
    """Invalid settings: all faults of one table."""

    def __init__(self, *faults: SettingFault) -> None:
        super().__init__("\n".join(fault.sentence for fault in faults))
        self.faults = faults


T = TypeVar("T", bound=Table)


def convert(raw: Mapping[str, object], to: type[T], where: str) -> T:
    """``raw`` as the table ``to``; SettingError with all faults.

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
            faults.append(_bad_value(name, path, error))
    faults += (
        SettingFault(name, f"{where!r} needs the key {name!r}: {key.doc or key.kind}")
        for name, key in known.items()
        if key.required and name not in raw
    )
    if faults:
        raise SettingError(*faults)
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(to)}
    try:
        table = to(**{fields[name]: value for name, value in values.items()})
    except (TypeError, ValueError) as error:  # the table's own __post_init__
        raise SettingError(SettingFault("", _with_full_stop(f"[{where}]: {error}"))) from None
    faults += (_bad_value(key, f"{where}.{key}", cause) for key, cause in table.contradictions())
    if faults:
        raise SettingError(*faults)
    return table


def _bad_value(key: str, path: str, cause: object) -> SettingFault:
    return SettingFault(key, _with_full_stop(f"Bad value for {path!r}: {cause}"))


def _rows(value: object, to: type[T], where: str) -> tuple[T, ...]:
    """An array of tables; keys of faults begin with the row, ``[0].name``."""
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
    """``value`` as the type of ``key``; the ValueError ends the sentence "Bad value for ...:"."""
    if isinstance(value, str) and not value.isascii() and _not_unicode(value):
        raise ValueError(f"{quoted(value)} is not UTF-8 text")
    try:
        converted: object = msgspec.convert(value, key.type, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise ValueError(_mismatch(value, key, error)) from None
    for bound, word, beyond in ((key.least, "least", -1), (key.most, "most", 1)):
        if bound is not None and isinstance(converted, int | float):
            limit = type(converted).parse(bound) if isinstance(bound, str) else bound  # type: ignore[union-attr]
            # A NaN must be out of all bounds.
            if not (converted >= limit if beyond < 0 else converted <= limit):
                hint = f"; {key.hint}" if key.hint else ""
                raise ValueError(
                    f"{_shortened(value)} is out of bounds, at {word} {_shortened(bound)}{hint}"
                )
    return converted


def unknown_key(path: str, key: str, known: Mapping[str, object]) -> str:
    """The sentence about an unknown key, with the most similar known one."""
    near = difflib.get_close_matches(key, known, n=1)
    listing = f"known here: {', '.join(sorted(known))}." if known else "no key is known here."
    remedy = f"did you mean {near[0]!r}?" if near else listing
    return f"Unknown key {path!r}: {remedy}"


def to_plain(table: Table) -> dict[str, Any]:
    """The table as plain TOML values, durations as text."""
    plain = msgspec.to_builtins(table, enc_hook=_encode)
    return {name: plain[name] for name in keys(type(table))}


REDACTED = "..."
"""The displayed value of a secret."""


def redacted(table: T) -> T:
    """The table with its secrets replaced."""
    secrets = (name for name, key in keys(type(table)).items() if key.secret)
    return msgspec.structs.replace(table, **{s: REDACTED for s in secrets if getattr(table, s)})


def quoted(text: str) -> str:
    """Text in double quotes, on one line, shortened to 60 characters."""
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return '"' + printable(shown) + '"'


def _with_full_stop(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."


def _not_unicode(text: str) -> bool:
    """True if ``text`` has surrogates, from environment variables that are not UTF-8."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def _mismatch(value: object, key: SettingKey, error: Exception) -> str:
    choices = _choices(key.type)
    if choices and isinstance(value, str):
        return f"{quoted(value)} is not {key.kind}{_nearest(value, choices)}"
    if isinstance(value, list | tuple) and (choices := _choices(_item(key.type))):
        wrong = next((each for each in value if each not in choices), None)
        if isinstance(wrong, str):
            alternatives = _join_alternatives(map(quoted, choices))
            return f"{quoted(wrong)} is not {alternatives}{_nearest(wrong, choices)}"
    cause = error.__cause__ or error
    if isinstance(cause, ValueError) and not isinstance(cause, msgspec.ValidationError):
        return str(cause)  # from the parser of a Duration, Size or Listen
    if isinstance(value, dict) and (entry := _wrong_entry(value, key.type)):
        return entry
    if bound := re.search(r"`(?:int|float)` [<>]=? \S+$", str(error)):
        return f"{_shortened(value)} is out of bounds, {bound[0].replace('`', '')}"
    hint = f"; {key.hint}" if key.hint else ""
    return f"expected {key.kind}, got {_shortened(value)}{hint}"


def _wrong_entry(table: Mapping[str, object], kind: Any) -> str:
    """The fault of the first entry whose key or value has another type; "" without such types."""
    kind = _bare(kind)
    if typing.get_origin(kind) not in (dict, Mapping):
        return ""
    names, values = typing.get_args(kind)
    choices = _choices(names)
    faults = (_entry_fault(name, value, choices, values) for name, value in table.items())
    return next(filter(None, faults), "")


def _entry_fault(name: str, value: object, choices: list[str], kind: Any) -> str:
    if choices and name not in choices:
        alternatives = _join_alternatives(map(quoted, choices))
        return f"{quoted(name)} is not {alternatives}{_nearest(name, choices)}"
    try:
        msgspec.convert(value, kind, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError, OverflowError):
        return f"expected {_type_words(kind)} for {quoted(name)}, got {_shortened(value)}"
    return ""


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
    """All keys of several tables except arrays of tables, with dotted names."""
    for where, table in tables.items():
        for name, key in keys(table).items():
            if key.rows is None:
                yield f"{where}.{name}", key


def each_array(tables: Mapping[str, type[Table]]) -> Iterator[tuple[str, type[Table]]]:
    """All arrays of tables in several tables: dotted name and type of the rows."""
    for where, table in tables.items():
        for name, key in keys(table).items():
            if key.rows is not None:
                yield f"{where}.{name}", key.rows
