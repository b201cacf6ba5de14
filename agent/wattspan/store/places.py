"""Where the stores are."""

from __future__ import annotations

from pathlib import Path

_TRUE, _EMULATED = "wattspan.sqlite", "wattspan-emulated.sqlite"


def store_path(state_dir: Path, *, emulated: bool = False) -> Path:
    """The database in ``state_dir``: an emulated host's joules are kept apart from true ones."""
    return state_dir / (_EMULATED if emulated else _TRUE)
