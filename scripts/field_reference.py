"""The page of cases from the field, from the files in ``tests/field``."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "field"
HEAD = """# Cases from the field

Inputs that other programs, kernels and users made: public reports, recorded layouts and
payloads of real clients. Each is a file in `tests/field/KIND/`, which has the input, the expected
result (`right`) and its source; a new report is one more file. Tests in `tests/field/` read the
files of their kind; a case that another test tries names it (`test`). This page is generated from
the files (`make docs`).

| kind | cases | read by |
|---|---|---|"""


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    found = {
        folder.name: cases
        for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir())
        if (cases := [tomllib.loads(p.read_text("utf-8")) for p in sorted(folder.glob("*.toml"))])
    }
    for kind, cases in found.items():
        yield f"| [{kind}](../tests/field/{kind}) | {len(cases)} | {_cell(_test(kind))} |"
    yield f"| all | {sum(map(len, found.values()))} | |"
    yield "\n## Inputs\n"
    for kind, cases in found.items():
        names = ", ".join(f"`{case['id']}`" for case in cases)
        yield f"- **{kind}:** {names}"


def _test(kind: str) -> str:
    """The test of a kind, with the first sentence of its docstring."""
    path = FOLDER / f"test_{kind}.py"
    if not path.exists():
        return "the tests that its files name"
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    sentence = re.split(r"(?<=\.) ", " ".join(text.split()).replace("``", "`"))[0]
    return f"`{path.name}`: {sentence}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
