"""Text from outside, as it is printed."""

from __future__ import annotations

import unicodedata

from wattspan.util.text import printable


def test_printable_keeps_ordinary_text() -> None:
    for text in ("", "GPU 0: 300 W", "Zürich 東京 €", "[red]x[/red]"):
        assert printable(text) == text


def test_printable_replaces_every_control_character() -> None:
    controls = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) in {"Cc", "Cs"}]
    bidi = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    invisible = "\u00ad\u200b\u200c\u200d\u2028\u2029\u2060\ufeff"
    for c in (*controls, *bidi, *invisible):
        assert printable(f"a{c}b") == "a?b", hex(ord(c))


def test_printable_uses_the_given_replacement() -> None:
    assert printable("a\x1b[2Jb\n", " ") == "a [2Jb "
