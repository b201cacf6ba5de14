"""Measured results in a file: the tables and figures of docs/autotune.md are made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("results.json")

Results = dict[str, Any]


def load(path: Path = PATH) -> Results:
    """All sections that were ever written."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def save(section: str, facts: Any, path: Path = PATH) -> None:
    """Replace one section by another."""
    results = load(path)
    results[section] = _rounded(facts)
    path.write_text(text(results) + "\n", encoding="utf-8")


def text(facts: Any) -> str:
    return json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False)


def _rounded(facts: Any) -> Any:
    """Six figures are enough for anybody, and NaN is null."""
    if isinstance(facts, float):
        return float(f"{facts:.6g}") if facts == facts else None
    if isinstance(facts, dict):
        return {str(key): _rounded(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_rounded(one) for one in facts]
    return facts
