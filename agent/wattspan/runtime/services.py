"""Parts that live and die together, in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field


@dataclass(slots=True)
class Services:
    """Implements agent.Service over parts that are started in order and stopped in reverse.

    What cannot start takes down what was started before it; stopping goes on whatever fails.
    """

    name: str
    parts: list[tuple[Callable[[], object], Callable[[], object]]] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    _undo: ExitStack = field(default_factory=ExitStack)

    def add(self, start: Callable[[], object], stop: Callable[[], object]) -> None:
        """Another part, started after those that were added before."""
        self.parts.append((start, stop))

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.reached)

    def start(self) -> None:
        """Begin; the first error is passed on."""
        with ExitStack() as undo:
            for start, stop in self.parts:
                start()
                undo.callback(stop)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """End every part. Again: nothing."""
        self._undo.close()
