"""The batch size of recurring trainings: an optimizer over the runs of one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wattspan.recurring.optimizer import BatchSizeOptimizer

__all__ = ["BatchSizeOptimizer"]


def __getattr__(name: str) -> Any:
    if name == "BatchSizeOptimizer":
        from wattspan.recurring.optimizer import BatchSizeOptimizer

        return BatchSizeOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
