"""The operator pages quote real messages and contain valid configurations."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from testbed.requirements import ROOT

from wattspan.config import load
from wattspan.plugins import discover

HOW_TO = ROOT / "docs" / "how-to"
TROUBLESHOOT = HOW_TO / "troubleshoot.md"
_LEAST = 8  # characters of a quotation that are worth looking for


def quotations() -> list[str]:
    """The sentences in quotation blocks, each in one line."""
    return re.findall(r"^> (.+)$", TROUBLESHOOT.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def said() -> str:
    """Every text in the program, names and figures in it as one character."""
    texts: list[str] = []
    for folder in ("agent", "exporters"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (getattr(part, "value", "") for part in node.values)
                    texts.append("\0".join(part for part in parts if isinstance(part, str)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
        data = (ROOT / folder).rglob("*.toml")  # the findings of `doctor`, and others
        texts += (re.sub(r"\{.*?\}", "\0", path.read_text(encoding="utf-8")) for path in data)
    return "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("sentence", quotations())
def test_quoted_messages_match_the_program(sentence: str) -> None:
    parts = [part.strip() for part in re.split(r"…|; |\. ", sentence)]  # cause, remedy: two texts
    sought = [part for part in parts if len(part) >= _LEAST]
    assert sought, "nothing in it that could be looked for"
    assert [part for part in sought if part not in said()] == []


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The code in that language in every guide, and whose it is."""
    for path in sorted(HOW_TO.glob("*.md")):
        found = re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        yield from ((f"{path.stem}-{number}", text) for number, text in enumerate(found, 1))


# a file without a table is a ceiling or a tariff
CONFIGURATIONS = [
    (where, text)
    for where, text in blocks("toml")
    if re.search(r"^\[", text, re.MULTILINE)
    and not re.search(r"^\[(project|\[period)", text, re.MULTILINE)
]


@pytest.mark.parametrize(("where", "text"), CONFIGURATIONS, ids=[one for one, _ in CONFIGURATIONS])
def test_every_configuration_in_a_guide_is_accepted(where: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    assert load(path, environ={}, schema=discover().schema).path == path
