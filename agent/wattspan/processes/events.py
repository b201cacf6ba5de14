"""What the kernel says about births, execs and deaths, in one place for both its channels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Final(NamedTuple):
    """The last words of a process: its total CPU time, nearly.

    The kernel writes this down before the process gives back its memory, so the time of that
    (some tenths of a millisecond, more for a large process) is missing from ``cpu``.
    ``certain`` is False where an old kernel does not say whether it speaks of a process or of
    one of its threads.
    """

    pid: int
    parent: int
    cpu: int  # nanoseconds, all threads
    elapsed: int  # nanoseconds since its start
    command: str
    user_id: int | None
    certain: bool = True
    footprint: int = 0  # the most memory it ever held, in bytes


@dataclass(slots=True)
class News:
    """What happened since the last time somebody asked. ``lost``: and more than that."""

    born: dict[int, int] = field(default_factory=dict)  # pid to its parent's
    execed: set[int] = field(default_factory=set)
    died: set[int] = field(default_factory=set)
    finals: dict[int, list[Final]] = field(default_factory=dict)
    lost: bool = False

    def add_final(self, final: Final) -> None:
        """Note a final; the sum over a group replaces what its first thread said alone."""
        finals = self.finals.setdefault(final.pid, [])
        if final.certain and finals and not finals[-1].certain:
            finals.pop()
        finals.append(final)

    def merge(self, later: News) -> None:
        self.born.update(later.born)
        self.execed |= later.execed
        self.died |= later.died
        for pid, finals in later.finals.items():
            self.finals.setdefault(pid, []).extend(finals)
        self.lost = self.lost or later.lost

    @property
    def churn(self) -> bool:
        return bool(self.born or self.died or self.finals or self.lost)


class Events(Protocol):
    """A channel on which the kernel reports processes."""

    @property
    def overruns(self) -> int:
        """How often the kernel had to drop messages because nobody took them in time."""
        ...

    def drain(self, news: News) -> None:
        """Add everything reported so far to ``news``; never waits, never raises."""
        ...

    def close(self) -> None: ...
