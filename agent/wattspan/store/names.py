"""Names as the database takes them."""

from __future__ import annotations

LONGEST_NAME = 200
"""Names are cut here; the books keep them whole."""


def text(name: str) -> str:
    """``name`` as SQLite takes it: what is not Unicode is written as an escape."""
    return name.encode("utf-8", "backslashreplace").decode()[:LONGEST_NAME]
