"""The page of Zeus's public names, from ``docs/reference/zeus.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "zeus.toml"
ROWS: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["rows"]


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Names of Zeus\n"
    yield (
        "Every public class and function of Zeus 0.16. Those that are not missing are in"
        " `wattspan.compat.zeus`.\n"
    )
    yield "| names | here | difference, and reason |"
    yield "|---|---|---|"
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.get("names", ())) or "others"
        yield f"| `{row['module']}`: {names} | {row['here']} | {row.get('why', '')} |"
