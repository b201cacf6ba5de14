"""The page of cases from the field, from the files in ``tests/field``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "field"


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Cases from the field\n"
    yield (
        "Inputs that other programs, kernels and users made: public reports, recorded layouts and\n"
        "payloads of real clients. Each is a file in `tests/field/`, which names its source; a\n"
        "new report is one more file. This page is generated from them (`make docs`).\n"
    )
    for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir()):
        cases = [tomllib.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.toml"))]
        if not cases:
            continue
        yield f"## {folder.name.replace('_', ' ').capitalize()}\n"
        if (test := FOLDER / f"test_{folder.name}.py").exists():
            yield f"Test: `tests/field/{test.name}`, unless another is named.\n"
        yield "| case | input | right | source |"
        yield "|---|---|---|---|"
        for case in cases:
            right = case["right"] + (f" (`{case['test']}`)" if "test" in case else "")
            cells = [case["id"], case["input"], right, case["source"]]
            yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
