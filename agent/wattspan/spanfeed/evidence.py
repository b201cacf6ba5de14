"""What may be asked of the kernel about processes and connections, and at what expense."""

from __future__ import annotations

from typing import Protocol

from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock


class Living(Protocol):
    """A process that lives."""

    @property
    def consumer(self) -> Consumer: ...
    @property
    def parent(self) -> int: ...
    @property
    def born(self) -> int:
        """Nanoseconds since boot, in which the host's sleep counts; a clock tick too early."""
        ...

    @property
    def users(self) -> frozenset[int]:
        """Real, effective, saved and of the file system."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Its pid in each pid namespace, from ours inwards."""
        ...

    @property
    def copied(self) -> bool:
        """It was forked and runs no program of its own since."""
        ...

    @property
    def kernel(self) -> bool: ...


class Owner(Protocol):
    """Whose a socket is."""

    @property
    def user(self) -> int: ...
    @property
    def inode(self) -> int: ...


class Kernel(Protocol):
    """Process lookups; None for a process that is gone or hidden (``ProcessInspector``)."""

    def identify(self, pid: int) -> Consumer | None: ...
    def look(self, pid: int) -> Living | None: ...
    def pids(self) -> list[int]: ...
    def owner(self, pid: int) -> int | None: ...
    def cgroup(self, pid: int) -> str: ...
    def owner_of(self, end: tuple[str, int], other: tuple[str, int]) -> Owner | None: ...
    def holds(self, pid: int, inode: int) -> bool | None: ...


class Allowance:
    """Keeps what is slow from being asked for without end: time, earned at a rate.

    A sender can make us look through every process of the host, so all such looking together
    may take one part in ``share`` of the time, and ``most`` nanoseconds at a stretch.
    """

    def __init__(self, clock: Clock, share: int = 20, most: int = SECOND // 4) -> None:
        self._clock = clock
        self._share = share
        self._most = most
        self._left = most
        self._earned = clock.monotonic()
        self._began = 0
        self.refused = 0

    def __enter__(self) -> bool:
        """Whether there is time for one more look; what follows is paid for, and may overdraw."""
        self._began = self._clock.monotonic()
        self._left = min(self._most, self._left + (self._began - self._earned) // self._share)
        self._earned = self._began
        if self._left <= 0:
            self.refused += 1
        return self._left > 0

    def __exit__(self, *_: object) -> None:
        self._left -= self._clock.monotonic() - self._began
