"""The time left of a running study, for its progress bar."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from wattspan.cli.formatting import duration_text
from wattspan.frontier.allocation import spent_seconds
from wattspan.frontier.trials import Study
from wattspan.model import SECOND


class BudgetColumn(ProgressColumn):
    """The rest of a time budget, counted down while a task runs."""

    def __init__(self, left: float) -> None:
        """``left``: seconds at the start of the task."""
        super().__init__()
        self._left = left

    def render(self, task: Task) -> Text:
        left = max(0.0, self._left - (task.elapsed or 0.0))
        return Text(f"{duration_text(round(left * SECOND))} of the budget left")


def time_left(study: Study, budget: float | None) -> ProgressColumn:
    """The rest of ``budget`` seconds for all trials; without one, an estimate by past trials."""
    if budget is None:
        return TimeRemainingColumn()
    return BudgetColumn(budget - spent_seconds(study))
