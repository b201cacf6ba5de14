"""What every table that leaves the agent as a file has in common."""

from __future__ import annotations

import importlib.util

_FORMULA_STARTS = frozenset("=+-@\t\r\n'＝＋－＠")
"""How a cell begins that a spreadsheet would carry out, and the mark that prevents it."""

NO_PYARROW = (
    "Parquet needs the package pyarrow, which is not installed; "
    "`pip install wattspan[parquet]` brings it, or choose another format."
)


def escape_formula(text: str) -> str:
    """``text`` as a cell that no spreadsheet takes for a formula.

    A leading apostrophe marks it as text; text that begins with an apostrophe gets another one. So
    whoever takes one apostrophe away has the original, always.
    """
    return f"'{text}" if text[:1] in _FORMULA_STARTS else text


def has_pyarrow() -> bool:
    """Whether Parquet can be written; nothing is imported to find out."""
    return importlib.util.find_spec("pyarrow") is not None
