"""Values of protobuf's JSON, as OTLP changes it, made what message constructors take."""

from __future__ import annotations

import base64
import binascii
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

DEEPEST = 48
"""Messages inside messages that are followed. protobuf's own readers follow 100."""

_HEX = ("trace_id", "span_id", "parent_span_id")
_REALS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Convert = Callable[[Any, int], Any]
"""Converts a value that stands so many messages deep."""


class WrongError(Exception):
    """A value cannot be what it should be; ``where`` grows on the way out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.where = ""

    def inside(self, step: str) -> WrongError:
        self.where = f"{step}{'' if self.where[:1] in ('', '[') else '.'}{self.where}"
        return self


def arguments(descriptor: Any, value: Any, depth: int = 0) -> dict[str, Any]:
    """What the constructor of a message of this type takes, of a JSON object. WrongError.

    Names are lowerCamelCase or as in the protobuf; unknown ones are passed over, null is nothing.
    """
    if type(value) is not dict:
        raise WrongError("is not an object")
    if depth > DEEPEST:
        raise WrongError("is nested too deeply")
    fields = _fields(descriptor)
    made = {}
    for key, each in value.items():
        if each is not None and (field := fields.get(key)) is not None:
            try:
                made[field[0]] = field[1](each, depth)
            except WrongError as error:
                raise error.inside(key) from None
    return made


@functools.cache
def _fields(descriptor: Any) -> Mapping[str, tuple[str, Convert]]:
    """For each name a field may have in JSON, its own name and how it is converted."""
    found = {}
    for field in descriptor.fields:
        convert = _converter(field)
        found[field.name] = found[field.json_name] = (
            field.name,
            _each(convert) if field.is_repeated else convert,
        )
    return found


def _converter(field: Any) -> Convert:
    match field.type:
        case field.TYPE_MESSAGE:
            inner = field.message_type
            return lambda value, depth: arguments(inner, value, depth + 1)
        case field.TYPE_STRING:
            return _text
        case field.TYPE_BYTES:
            return _hexadecimal if field.name in _HEX else _base64
        case field.TYPE_BOOL:
            return _bool
        case field.TYPE_DOUBLE | field.TYPE_FLOAT:
            return _real
        case field.TYPE_ENUM:
            return _enum(dict(field.enum_type.values_by_name))
        case field.TYPE_FIXED64 | field.TYPE_UINT64:
            return _whole(0, 1 << 64)
        case field.TYPE_FIXED32 | field.TYPE_UINT32:
            return _whole(0, 1 << 32)
        case field.TYPE_INT64:
            return _whole(-1 << 63, 1 << 63)
        case _:
            return _whole(-1 << 31, 1 << 31)


def _each(convert: Convert) -> Convert:
    def array(value: Any, depth: int) -> list[Any]:
        if type(value) is not list:
            raise WrongError("is not an array")
        made: list[Any] = []
        try:
            made.extend(convert(each, depth) for each in value)
        except WrongError as error:
            raise error.inside(f"[{len(made)}]") from None
        return made

    return array


def _text(value: Any, _: int) -> str:
    if type(value) is not str:
        raise WrongError("is not a string")
    return value


def _bool(value: Any, _: int) -> bool:
    if type(value) is not bool:
        raise WrongError("is neither true nor false")
    return value


def _hexadecimal(value: Any, _: int) -> bytes:
    try:
        return binascii.unhexlify(_text(value, 0))
    except ValueError:
        raise WrongError("is not hexadecimal, as ids are in OTLP's JSON") from None


def _base64(value: Any, _: int) -> bytes:
    text = _text(value, 0)
    try:
        return base64.b64decode(
            text + "=" * (-len(text) % 4),
            altchars=b"-_" if "-" in text or "_" in text else None,
            validate=True,
        )
    except ValueError:
        raise WrongError("is not base64") from None


def _real(value: Any, _: int) -> float:
    if type(value) is str:
        value = _REALS.get(value, value)
    if type(value) is bool:
        raise WrongError("is not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise WrongError("is not a number") from None


def _whole(least: int, beyond: int) -> Convert:
    def convert(value: Any, _: int) -> Any:
        kind = type(value)
        if (kind is str and len(value) < 25) or (kind is float and value.is_integer()):
            try:
                value = int(value)
            except ValueError:
                raise WrongError("is not a whole number") from None
        elif kind is not int:
            raise WrongError("is not a whole number")
        if not least <= value < beyond:
            raise WrongError("is out of bounds")
        return value

    return convert


def _enum(names: Mapping[str, Any]) -> Convert:
    numbers = {name: value.number for name, value in names.items()}
    whole = _whole(-1 << 31, 1 << 31)

    def convert(value: Any, depth: int) -> Any:
        if type(value) is str and value in numbers:
            return numbers[value]
        return whole(value, depth)

    return convert
