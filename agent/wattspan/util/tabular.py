"""Common parts of tables in CSV and Parquet files."""

from __future__ import annotations

import importlib.util

_FORMULA_STARTS = frozenset("=+-@\t\r\n'＝＋－＠")
"""First characters of formulas in spreadsheets, and the apostrophe that marks text."""

NO_PYARROW = (
    "Parquet needs the package pyarrow, which is not installed; "
    "`pip install wattspan[parquet]` brings it, or choose another format."
)


def escape_formula(text: str) -> str:
    """Return ``text`` as a cell that no spreadsheet interprets as a formula.

    A leading apostrophe marks such text; text that begins with an apostrophe gets another one, so
    that removing one apostrophe always restores the original.
    """
    return f"'{text}" if text[:1] in _FORMULA_STARTS else text


def has_pyarrow() -> bool:
    """Return True if pyarrow is installed, without importing it."""
    return importlib.util.find_spec("pyarrow") is not None
