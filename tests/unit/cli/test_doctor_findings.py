"""The catalogue of findings: each is used, with the facts that its texts name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from wattspan.cli import doctor
from wattspan.cli.doctor import Finding, Severity, catalogue, declared

SOURCES = [
    ast.parse(path.read_text(encoding="utf-8"))
    for path in Path(doctor.__file__).parent.glob("*.py")
]


def fields(entry: Finding) -> set[str]:
    """The names of the facts in the texts of a finding."""
    texts = (entry.what, entry.detail, entry.remedy)
    return {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}


def composed(code: ast.expr) -> list[str]:
    """The codes of an f-string: those of the catalogue that it can be."""
    if not isinstance(code, ast.JoinedStr):
        return []
    texts = [str(part.value) if isinstance(part, ast.Constant) else r"\w+" for part in code.values]
    return [known for known in catalogue() if re.fullmatch("".join(texts), known)]


def calls() -> Iterator[tuple[set[str], set[str]]]:
    """The codes and the facts of each call of ``declared``; no codes if they are variables."""
    for node in (node for source in SOURCES for node in ast.walk(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "declared":
            code, facts = node.args[0], {str(keyword.arg) for keyword in node.keywords}
            choices = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
            codes = {str(one.value) for one in choices if isinstance(one, ast.Constant)}
            yield codes | {*composed(code)}, facts


def test_each_call_gives_the_facts_that_the_texts_of_its_finding_name() -> None:
    found = [(code, facts) for codes, facts in calls() for code in codes]
    assert len(found) > 50
    assert [code for code, facts in found if not fields(catalogue()[code]) <= facts] == []


def test_each_finding_of_the_catalogue_is_used() -> None:
    texts = {
        node.value
        for source in SOURCES
        for node in ast.walk(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(catalogue()) - texts - {code for codes, _ in calls() for code in codes} == set()


@pytest.mark.parametrize("code", catalogue())
def test_remedy_is_a_sentence_and_a_problem_has_one(code: str) -> None:
    entry = catalogue()[code]
    assert entry.remedy == "" or entry.remedy.endswith((".", "{held}"))
    assert entry.remedy or entry.mark is Severity.NOTE or code in WITHOUT_REMEDY


WITHOUT_REMEDY = {"capper-ended", "counters-none"}


def test_facts_are_not_read_as_templates() -> None:
    assert declared("rate-none", name="{name} {0}").detail == (
        "not configured: [{name} {0}] is empty"
    )
