"""The times up to which the energy of processes was taken for the requests of an engine.

An engine may be released and return, its processes may come to another engine, and counter steps
are read again for earlier requests. A process that leaves an engine has a mark for each counter:
the end of the last step that the engine has read. No engine takes its energy from before it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping


class ReadMarks:
    """The marks of processes by counter, in nanoseconds."""

    def __init__(self) -> None:
        self._until: dict[Hashable, dict[Hashable, int]] = {}

    def __len__(self) -> int:
        """The number of processes with a mark."""
        return len(self._until)

    def set(self, payers: Iterable[Hashable], until: Mapping[Hashable, int]) -> None:
        """Note the times up to which the energy of some processes was taken; no mark falls."""
        for payer in payers if until else ():
            own = self._until.setdefault(payer, {})
            for counter, time in until.items():
                own[counter] = max(time, own.get(counter, time))

    def latest(self, payers: Collection[Hashable]) -> dict[Hashable, int]:
        """The latest mark of each counter among some processes."""
        found: dict[Hashable, int] = {}
        for payer in self._until.keys() & payers:
            for counter, time in self._until[payer].items():
                found[counter] = max(time, found.get(counter, time))
        return found

    def expire(self, before: int) -> None:
        """Remove the marks up to ``before``: no step from before is read again."""
        self._until = {
            payer: kept
            for payer, own in self._until.items()
            if (kept := {counter: time for counter, time in own.items() if time > before})
        }
