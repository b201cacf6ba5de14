"""Units of work that a command reports in its output or by spans, and their steady window."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.ports import ConfigError

MIN_WINDOW = 5 * SECOND
"""A shorter window is not used: counters of GPUs move ten times a second."""

MIN_UNITS = 3
"""Units of work that a window has at least."""

_OUTPUT, _SPAN = "stdout:", "span:"
_FORMS = (
    "write stdout:REGEX, such as stdout:'step \\d+' or, for the number of samples,"
    " stdout:'samples=(\\d+)'; or write span:NAME or span:NAME:ATTRIBUTE, such as span:train_step"
)


class Completion(NamedTuple):
    """Work that was completed at a monotonic time."""

    at: int
    work: float


RESOLUTION = SECOND // 1000
"""Work that is completed within this time is one completion: a command may report it at will."""


class Completions:
    """Completed work in the order of time; that within RESOLUTION is one completion."""

    def __init__(self, completions: Iterable[Completion] = ()) -> None:
        self.found: list[Completion] = []
        self._since = 0  # of the newest completion
        for one in completions:
            self.add(*one)

    def add(self, at: int, work: float) -> None:
        """Add work that was completed at ``at``, no earlier than that before."""
        if self.found and at - self._since < RESOLUTION:
            self.found[-1] = Completion(at, self.found[-1].work + work)
        else:
            self._since = at
            self.found.append(Completion(at, work))


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
        if not text.startswith(_OUTPUT):
            raise ConfigError(f"--unit {text}: {_FORMS}.")
        try:
            self._pattern = re.compile(text.removeprefix(_OUTPUT))
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
            work = float(match[1] or 0)
        except ValueError:
            return 0.0
        return work if 0 < work < inf else 0.0


class UnitSpan(NamedTuple):
    """The spans that are completed work: their name, and the attribute with their work.

    Without an attribute each span is one unit.
    """

    name: str
    attribute: str = ""


def parse_unit(text: str) -> OutputPattern | UnitSpan:
    """The unit of ``stdout:REGEX``, ``span:NAME`` or ``span:NAME:ATTRIBUTE``; ConfigError.

    The last colon precedes the attribute, so ``span:a:b:`` is the name ``a:b`` without one.
    """
    if not text.startswith(_SPAN):
        return OutputPattern(text)
    rest = text.removeprefix(_SPAN)
    name, colon, attribute = rest.rpartition(":")
    unit = UnitSpan(name, attribute) if colon else UnitSpan(rest)
    if not unit.name:
        raise ConfigError(f"--unit {text}: the name of the span is missing; {_FORMS}.")
    return unit


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
    work = 0.0
    for number, one in enumerate(completions[first + 1 :], start=1):
        work += one.work
        start = completions[first].at
        if one.at - start >= length and number >= MIN_UNITS:
            return SteadyWindow(start, one.at, work)
    return None


def last_window(completions: Sequence[Completion], begin: int, warm_up: int) -> SteadyWindow | None:
    """The window up to the last completion, of a command that has ended."""
    after = [one for one in completions if one.at >= begin + warm_up]
    if len(after) <= MIN_UNITS or after[-1].at - after[0].at < MIN_WINDOW:
        return None
    return SteadyWindow(after[0].at, after[-1].at, sum(one.work for one in after[1:]))
