"""The energy of an engine's processes between readings of its page, and the engine's totals.

The energy of a counter's step in which a page is read is divided by time, in integer microjoules:
the periods between readings have the energy of the counter's steps together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.attribution.top_n import OTHER
from wattspan.inference.engine_metrics import Figure, Progress
from wattspan.inference.step_queue import MAX_LENGTH
from wattspan.model import EngineRow, HostRequests, Microjoules
from wattspan.spans.aggregator import shortened_name

MAX_ROWS = 8
"""Models and owners of one engine with a row; further models count as ``other``."""

UNUSED_INTERVALS = 720
"""A row that had no interval among so many, as in an hour, may become a part of ``other``."""

_NO_ENERGY = Microjoules(0)


class ProcessStep(NamedTuple):
    """A counter's step: the microjoules of an engine's processes, and their half-width.

    ``known`` is False if a part of them is unknown.
    """

    start: int
    end: int
    energy: int
    doubt: float = 0.0
    known: bool = True

    def until(self, time: int) -> int:
        """The microjoules up to a time."""
        passed = min(max(time, self.start), self.end) - self.start
        return self.energy * passed // (self.end - self.start)


@dataclass(slots=True)
class CounterEnergy:
    """The steps of a counter from the last reading on."""

    steps: deque[ProcessStep] = field(default_factory=deque)
    until: int = 0  # the end of the last step
    length: int = 0  # of that one
    used: bool = False

    def add(self, steps: Iterable[ProcessStep]) -> None:
        """Append steps, in order of time."""
        for step in steps:
            self.steps.append(step)
            self.until, self.length = step.end, min(MAX_LENGTH, step.end - step.start)
            self.used = self.used or step.energy > 0

    def between(self, start: int, end: int) -> tuple[int, float, int]:
        """The microjoules of a period, their half-width, and the nanoseconds that are unknown.

        Unknown time has the power of the other steps at most.
        """
        total, doubt, most, missing = 0, 0.0, 0.0, end - start
        for step in self.steps:
            overlap = min(end, step.end) - max(start, step.start)
            if overlap > 0:
                total += step.until(end) - step.until(start)
                doubt += step.doubt * overlap / (step.end - step.start)
                most = max(most, step.energy / (step.end - step.start))
                missing -= overlap if step.known else 0
        return total, doubt + most * missing, missing

    def at(self, time: int) -> ProcessStep | None:
        """The step in which a time is."""
        return next((step for step in self.steps if step.start <= time < step.end), None)

    def trim(self, since: int) -> None:
        while self.steps and self.steps[0].end < since:
            self.steps.popleft()


class EngineTotals:
    """The totals of one row of an engine, which continue from the row of an earlier run."""

    def __init__(self, earlier: EngineRow) -> None:
        self._key, self._energy, self._requests = earlier.key, earlier.energy, earlier.requests
        self._tokens = Counter[str](earlier.tokens)
        self._parts = Counter[str](earlier.host.energy)
        self._host_tokens = Counter[str](earlier.host.tokens)
        self._host_requests = earlier.host.requests
        self._counts = dict(earlier.host.counts)

    def add(self, energy: int | None, done: Progress, parts: Mapping[str, int] | None) -> None:
        """Add an interval with its GPU energy, and that of the host by part; None if unknown.

        Without GPU energy, ``parts`` that are not None tell only that another row has the host's.
        """
        tokens = {way: round(count) for way, count in done.tokens.items()}
        requests = done.figures.get(Figure.REQUESTS)
        if energy is not None:
            self._energy = Microjoules((self._energy or 0) + energy)
        self._tokens.update(tokens)
        if requests is not None:
            self._requests = (self._requests or 0) + round(requests)
        if parts is not None:
            self._parts.update(parts)
            self._host_tokens.update(tokens)
            self._host_requests += round(requests or 0)
            self._count({part: (round(requests or 0), tokens.get("output", 0)) for part in parts})

    def take_energy(self, other: EngineTotals) -> None:
        """Take the energy of another row, whose own is unknown from now on."""
        self._energy = Microjoules((self._energy or 0) + (other._energy or 0))
        self._parts.update(other._parts)
        other._energy, other._parts, other._counts = None, Counter(), {}

    def absorb(self, other: EngineTotals) -> None:
        """Add all totals of a row that ends."""
        self._count(other._counts)
        if other.has_energy:
            self.take_energy(other)
        self._tokens.update(other._tokens)
        if other._requests is not None:
            self._requests = (self._requests or 0) + other._requests
        self._host_tokens.update(other._host_tokens)
        self._host_requests += other._host_requests

    def _count(self, counts: Mapping[str, tuple[int, int]]) -> None:
        """Add requests with each part, and their generated tokens."""
        for part, (requests, output) in counts.items():
            before = self._counts.get(part, (0, 0))
            self._counts[part] = before[0] + requests, before[1] + output

    @property
    def has_energy(self) -> bool:
        return self._energy is not None

    def row(self) -> EngineRow:
        """The totals, without figures of a window."""
        host = HostRequests(
            {part: Microjoules(energy) for part, energy in self._parts.items()},
            dict(self._host_tokens),
            self._host_requests,
            counts=dict(self._counts),
        )
        totals = self._energy, dict(self._tokens), self._requests
        return EngineRow(*self._key, *totals, host=host)


class ModelTotals:
    """The rows of one engine by model and owner, which continue from those of an earlier run.

    The energy of several models on one page is that of a row without a model. A new one takes the
    energy of the models that were alone before. If a new row has no place, the one unused longest
    becomes a part of ``other``.
    """

    def __init__(self, engine: str, earlier: Iterable[EngineRow] = ()) -> None:
        self._engine = engine
        own = (row for row in earlier if row.engine == engine)
        self._totals = {(row.model, row.owner): EngineTotals(row) for row in own}
        self._intervals = 0
        self._used = dict.fromkeys(self._totals, 0)  # the number of the last interval

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._totals

    def add(
        self, owner: str, energy: int, done: Progress, parts: Mapping[str, int] | None
    ) -> tuple[str, str]:
        """Add an interval as `EngineTotals.add` does; the model and owner of its energy."""
        self._intervals += 1
        divided = any(not one.has_energy for one in self._models(owner))
        models = done.models or ((done,) if divided else ())
        if not models:
            key, whole = self._of(shortened_name(done.model), owner)
            whole.add(energy, done, parts)
            return key
        is_new = ("", owner) not in self._totals
        key, whole = self._of("", owner)
        if is_new and key == ("", owner):
            for one in self._models(owner):
                whole.take_energy(one)
        for part in models:
            _, one = self._of(shortened_name(part.model), owner, None)
            one.add(None, part, None if parts is None else {})
        whole.add(energy, Progress(done.page), parts)
        return key

    def rows(self) -> dict[tuple[str, str], EngineRow]:
        """The totals by model and owner, without figures of a window."""
        return {key: totals.row() for key, totals in self._totals.items()}

    def _models(self, owner: str) -> list[EngineTotals]:
        """The totals of an owner's models that have a row."""
        named = ((name, one) for (name, of), one in self._totals.items() if of == owner)
        return [one for name, one in named if name not in ("", OTHER)]

    def _of(
        self, model: str, owner: str, energy: Microjoules | None = _NO_ENERGY
    ) -> tuple[tuple[str, str], EngineTotals]:
        """The totals of a model, or of those beyond the limit; new ones have ``energy``."""
        key = model, owner
        if key not in self._totals and len(self._totals) >= MAX_ROWS and not self._release():
            key, energy = self._other(owner), None
        self._used[key] = self._intervals
        new = EngineTotals(EngineRow(self._engine, *key, energy))
        return key, self._totals.setdefault(key, new)

    def _other(self, owner: str) -> tuple[str, str]:
        return OTHER, owner if (OTHER, owner) in self._totals else ""

    def _release(self) -> bool:
        """Add the row that is unused longest to ``other``; False if all are in use."""
        until = self._intervals - UNUSED_INTERVALS
        unused = [
            (used, key) for key, used in self._used.items() if key[0] != OTHER and used <= until
        ]
        if not unused:
            return False
        _, key = min(unused)
        del self._used[key]
        other = self._other(key[1])
        self._used[other] = self._intervals
        new = EngineTotals(EngineRow(self._engine, *other, None))
        self._totals.setdefault(other, new).absorb(self._totals.pop(key))
        return True
