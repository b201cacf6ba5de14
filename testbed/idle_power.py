"""Power of an idle board with and without the agent, from its energy counter alone.

The counter is read twice a minute apart before anything else is opened, and again while the agent
reads the board at rest and finely, and once more without it. Each reading opens the library,
reads and closes it, so that only the agent has the board open in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

SECONDS = 60
PAUSE = 10
"""Seconds before each period, in which a board leaves the state that a reading has woken it to."""

LEAST_RISE, RELATIVE_RISE = 1.0, 0.01
"""The smallest rise that counts: watts, and the part of the idle power."""


class CounterReading(NamedTuple):
    """Microjoules of the counter, the monotonic time in ns, and the busy percentage."""

    energy: int
    mono: int
    busy: int


class NotIdleError(Exception):
    """The board works, or its counter does not count: nothing can be said."""


class IdlePowers(NamedTuple):
    """Watts of the idle board: ``without`` the agent before and after, and with it."""

    without: tuple[float, float]
    with_agent: Sequence[float]

    @property
    def rise(self) -> float:
        """Watts by which the agent raises the power at most, whatever its interval."""
        return max(self.with_agent) - sum(self.without) / 2

    @property
    def tolerance(self) -> float:
        """The rise in watts that the drift of the board alone can explain."""
        drift = abs(self.without[0] - self.without[1])
        return max(LEAST_RISE, RELATIVE_RISE * sum(self.without) / 2, 2 * drift)


def measure_idle_powers(
    read: Callable[[], CounterReading],
    wait: Callable[[float], None],
    agents: Sequence[Callable[[], AbstractContextManager[object]]],
) -> IdlePowers:
    """The idle powers, without and with each of ``agents``. NotIdleError.

    ``wait`` lets so many seconds pass.
    """
    powers = [_power(read, wait, agent) for agent in (nullcontext, *agents, nullcontext)]
    return IdlePowers((powers[0], powers[-1]), powers[1:-1])


def _power(
    read: Callable[[], CounterReading],
    wait: Callable[[float], None],
    agent: Callable[[], AbstractContextManager[object]],
) -> float:
    with agent():
        wait(PAUSE)
        first = read()
        wait(SECONDS)
        last = read()
    if first.busy or last.busy:
        raise NotIdleError(f"the board is {max(first.busy, last.busy)} % busy")
    if last.energy <= first.energy:
        raise NotIdleError("its counter does not count")
    return (last.energy - first.energy) * 1000 / (last.mono - first.mono)
