"""Block YAML is read as a complete reader of YAML reads it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from wattspan.util.yaml_subset import MAX_DEPTH, YamlError, parse_block_yaml

WORDS = st.text("abcXYZ019 _-/.:=#'\"{}[]&*!|>%@,~?<\\äß☺", max_size=20)
DATA = st.recursive(
    WORDS | st.none(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4)
        | st.dictionaries(WORDS, inner, min_size=1, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(WORDS, DATA, min_size=1, max_size=4), st.booleans(), st.integers(2, 6))
def test_dumped_documents_are_read_back(data: Any, unicode: bool, indent: int) -> None:
    text = yaml.safe_dump(
        data, default_flow_style=False, width=10**6, allow_unicode=unicode, indent=indent
    )
    if "? " in text or "\\x" in text:
        return  # keys and escapes that encoders of such files do not write
    assert parse_block_yaml(text) == data


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    with suppress(YamlError):
        parse_block_yaml(text)


TEXTS = {
    "empty": ("", None),
    "comments": ("# a\n---\n# b\na: b # c\n", {"a": "b"}),
    "list at the key's indentation": (
        "a:\n- b\n- c: d\n  e: f\n", {"a": ["b", {"c": "d", "e": "f"}]}),
    "empty items": ("a:\n-\n- b\nc:\n", {"a": [None, "b"], "c": None}),
    "item on its next line": ("-\n  a: b\n", [{"a": "b"}]),
    "quoted": ("a: \"x\\ny\"\nb: 'it''s'\n\"c d\": e\n", {"a": "x\ny", "b": "it's", "c d": "e"}),
    "flow is text": ("a: [1, 2]\nb: {}\n", {"a": "[1, 2]", "b": "{}"}),
    "block scalars are passed over": (
        "a: |\n  x: y\n   z\nb: >-\n  q\nc: d\n", {"a": "", "b": "", "c": "d"}),
    "a block scalar in a list": ("- |\n  x\n- b\n", ["", "b"]),
    "second document": ("a: b\n---\nc: d\n", {"a": "b"}),
    "broken quotes are text": ('a: "b\nc: "\\x41"\n', {"a": '"b', "c": '"\\x41"'}),
    "open single quote": ("a: 'b\n", {"a": "'b"}),
    "directive": ("%YAML 1.2\n---\na: b\n", {"a": "b"}),
    "scalar": ("word\n", "word"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TEXTS.values(), ids=TEXTS.keys())
def test_forms_of_encoders(text: str, expected: Any) -> None:
    assert parse_block_yaml(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a: b\n  c: d\n",
        "a:\n\tb: c\n",
        "a:\n  b: c\n d: e\n",
        "a: b\nword\n",
        "\n".join(" " * n + "a:" for n in range(MAX_DEPTH + 3)),
        "a: " + "b" * 9000,
        "- a\n" * 60_000,
    ],
    ids=lambda text: text[:20],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(YamlError, match="line"):
        parse_block_yaml(text)
