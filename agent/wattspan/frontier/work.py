"""Units of work that a command reports on its standard output, and their steady window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.ports import ConfigError

MIN_WINDOW = 5 * SECOND
"""A shorter window is not used: counters of GPUs move ten times a second."""

MIN_UNITS = 3
"""Units of work that a window has at least."""

_PREFIX = "stdout:"


class Completion(NamedTuple):
    """Work that was completed at a monotonic time."""

    at: int
    work: float


class SteadyWindow(NamedTuple):
    """From one completion to another: monotonic times, and the work between them."""

    start: int
    end: int
    work: float

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / SECOND


class OutputPattern:
    """Finds completed work in a line: the number in the first group, or one unit a match."""

    def __init__(self, text: str) -> None:
        """``text`` is ``stdout:REGEX``; ConfigError."""
        if not text.startswith(_PREFIX):
            raise ConfigError(
                f"--unit {text}: write stdout:REGEX, such as stdout:'step \\d+' or, for the number"
                " of samples, stdout:'samples=(\\d+)'."
            )
        try:
            self._pattern = re.compile(text.removeprefix(_PREFIX))
        except re.error as error:
            raise ConfigError(f"--unit {text}: the expression is invalid: {error}.") from None
        if self._pattern.groups > 1:
            raise ConfigError(f"--unit {text}: use one group at most, for the completed work.")

    def work(self, line: str) -> float:
        """The work that ``line`` reports, 0 if none."""
        match = self._pattern.search(line)
        if match is None:
            return 0.0
        if not self._pattern.groups:
            return 1.0
        try:
            return max(0.0, float(match[1] or 0))
        except ValueError:
            return 0.0


def steady_window(
    completions: Sequence[Completion], begin: int, warm_up: int, length: int
) -> SteadyWindow | None:
    """The window of at least ``length`` that begins after the warm-up; None if there is none yet.

    It begins and ends with a completion, so that it has whole units of work. ``begin`` is the start
    of the command.
    """
    first = next(
        (n for n, one in enumerate(completions) if one.at >= begin + warm_up), len(completions)
    )
    return _window(completions[first:], length)


def last_window(completions: Sequence[Completion], begin: int, warm_up: int) -> SteadyWindow | None:
    """The window up to the last completion, of a command that has ended."""
    after = [one for one in completions if one.at >= begin + warm_up]
    if len(after) <= MIN_UNITS or after[-1].at - after[0].at < MIN_WINDOW:
        return None
    return SteadyWindow(after[0].at, after[-1].at, sum(one.work for one in after[1:]))


def _window(completions: Sequence[Completion], length: int) -> SteadyWindow | None:
    work = 0.0
    for number, one in enumerate(completions[1:], start=1):
        work += one.work
        start = completions[0].at
        if one.at - start >= length and number >= MIN_UNITS:
            return SteadyWindow(start, one.at, work)
    return None
