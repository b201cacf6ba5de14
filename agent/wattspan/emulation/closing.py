"""What is used in a ``with`` block and closed at its end."""

from __future__ import annotations

from typing import Self


class Closing:
    """Whoever owns something of an emulated host: leaving the block is ``close``."""

    def close(self) -> None:
        """End it; again: nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
