"""The text of a JSON body: its size in values, and repairs of what clients write against RFC 8259.

A repair keeps one bad value from costing all spans of a request. It is made only where a parser has
refused the text, and changes nothing that was valid.
"""

from __future__ import annotations

import re

MAX_REPAIRED = 4 << 20
"""Bytes of a longer text are not repaired: a repair takes up to 17 times their memory."""

_PIECE = 1 << 16
_MARKS = (b",", b":", b"[", b"{")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACES = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
_BACKSLASH = b"\xff"  # stands for an escaped backslash: no byte of UTF-8
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
_REPLACEMENT = rb"\\ufffd"
_WORDS = (b"NaN", b"Infinity")
_BARE_NUMBER = re.compile(rb"[:,\[]\s*(-?(?:NaN|Infinity))(?=\s*[,\]}])")
# Possessive, so that no position is kept to go back to.
_UP_TO_NUMBER = re.compile(
    rb'(?>[^":,\[]++|"(?>[^"\\]++|\\.)*+"|[:,\[](?!\s*-?(?:NaN|Infinity)\s*[,\]}]))*+', re.DOTALL
)
_MAX_BARE_NUMBERS = 1 << 16


def count_values(raw: bytes, limit: int) -> int:
    """The commas, colons and opening brackets outside of strings: at least the number of values.

    JSON too short for more than ``limit`` of them is not read and counts 0.
    """
    if len(raw) <= limit:
        return 0
    raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # escaped backslashes and quotes
    count, inside = 0, 0
    for at in range(0, len(raw), _PIECE):
        parts = raw[at : at + _PIECE].split(b'"')
        outside = b"".join(parts[inside::2])
        count += sum(map(outside.count, _MARKS))
        inside ^= (len(parts) - 1) & 1
    return count


def repaired(raw: bytes) -> bytes:
    """``raw`` without a byte order mark and with readable text and numbers; ``raw`` if it has both.

    ``raw`` also if it has more than ``MAX_REPAIRED`` bytes.

    Bytes that are not UTF-8 and lone surrogates become U+FFFD, control characters become spaces,
    and the bare words NaN, Infinity and -Infinity become the text that OTLP/JSON has for them.
    """
    if len(raw) > MAX_REPAIRED:
        return raw
    text = raw.removeprefix(_BYTE_ORDER_MARK)
    if not text.isascii():
        text = text.decode("utf-8", "replace").encode()
    text = text.translate(_SPACES)
    if b"\\ud" in text or b"\\uD" in text:
        escaped = text.replace(b"\\\\", _BACKSLASH)
        text = _LONE_SURROGATE.sub(_REPLACEMENT, escaped).replace(_BACKSLASH, b"\\\\")
    if any(word in text for word in _WORDS):
        text = _with_text_for_numbers(text)
    return raw if text == raw else text


def _with_text_for_numbers(text: bytes) -> bytes:
    """``text`` with quotes around the bare numbers that JSON does not have."""
    parts: list[bytes] = []
    at = 0
    for _ in range(_MAX_BARE_NUMBERS):
        begin = _UP_TO_NUMBER.match(text, at).end()  # type: ignore[union-attr]
        found = _BARE_NUMBER.match(text, begin)
        if found is None:
            break
        parts += (text[at : found.start(1)], b'"', found[1], b'"')
        at = found.end()
    return b"".join([*parts, text[at:]])
