"""Children whose parents have not come yet."""

from __future__ import annotations

from wattspan.joining.recent import Recent
from wattspan.spans import Span


class Children:
    """What is known of the children of a span that has not come yet."""

    __slots__ = ("cpu", "first", "last", "time")

    def __init__(self, start: int) -> None:
        self.first = self.last = start
        self.time = 0
        self.cpu: dict[int, int] = {}  # by thread

    def add(self, start: int, end: int, thread: int, cpu: int | None) -> None:
        self.time += max(0, end - max(start, self.last)) + max(0, min(end, self.first) - start)
        self.first, self.last = min(self.first, start), max(self.last, end)
        if cpu is not None:
            self.cpu[thread] = self.cpu.get(thread, 0) + cpu


class Orphans(Recent[Children]):
    """Children that came before their parents, by the parent's id."""

    def remember(self, span: Span, start: int, end: int) -> None:
        """Remember a child for the parent that has not come yet."""
        children = self.get(span.parent)
        if children is None:
            children = self[span.parent] = Children(start)
        children.add(start, end, span.thread, span.cpu)
