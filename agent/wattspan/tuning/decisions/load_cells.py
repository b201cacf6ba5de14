"""Evidence about a latency objective: misses and energy by load bin and setting.

Settings are numbered from 0, the original, to lower ones. A *gate* is a limit of the objective for
all requests, or for those of one class of lengths. A setting is certified in a bin if every gate
has certainly no more misses than permitted, by requests that were served at this setting or a
lower one, and at this load or a higher one: evidence never counts for a higher load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wattspan.tuning.decisions.sequential_test import MissCounts

LENGTH_CLASSES = (256, 1024)
"""Prompt tokens at which the classes of lengths ``medium`` and ``long`` begin."""

CLASS_NAMES = ("short", "medium", "long")

MIN_CLASS_SHARE = 0.05
"""Smallest share of a class in the requests that needs evidence of its own."""

MIN_NEAR_REQUESTS = 100
"""Requests at the present setting before a lower one is tried."""

_ENERGY_TOLERANCE = 1.03
_MIN_ENERGY_PERIODS = 6
_MIN_COMPARED_PERIODS = 24


class LatencyObjective(NamedTuple):
    """A limit in nanoseconds that at most a ratio ``allowed`` of the requests may exceed.

    ``first`` tells the time to the first token from the time between tokens.
    """

    first: bool
    limit: int
    allowed: float


class RequestTimes(NamedTuple):
    """A finished request; times in nanoseconds, None where unknown.

    ``again``: another entry has the other latency of such a request. ``number``: so many requests
    have these times.
    """

    start: int
    end: int
    first_token: int | None = None  # since the start
    between: int | None = None  # mean time between two tokens
    input_tokens: int | None = None
    output_tokens: int | None = None
    again: bool = False
    number: int = 1

    def latency(self, objective: LatencyObjective) -> int | None:
        return self.first_token if objective.first else self.between

    @property
    def length_class(self) -> int | None:
        """The class of its prompt; None if that is unknown."""
        if self.input_tokens is None:
            return None
        return sum(self.input_tokens >= begin for begin in LENGTH_CLASSES)


class Gate(NamedTuple):
    """An objective, for all requests or for one class.

    A request is near a miss if ``near`` times its latency exceeds the limit. This is the growth of
    the latency to expect from the next lower setting.
    """

    objective: LatencyObjective
    length_class: int | None = None
    near: float = 1.0

    def applies(self, request: RequestTimes) -> bool:
        return self.length_class is None or request.length_class == self.length_class


def gates(
    objectives: Sequence[LatencyObjective], *, by_length: bool, near: float = 1.0
) -> tuple[Gate, ...]:
    """The gates of an objective, those of all requests first."""
    classes = range(len(CLASS_NAMES)) if by_length else ()
    return (
        *(Gate(one, near=near) for one in objectives),
        *(Gate(one, number, near) for one in objectives for number in classes),
    )


class GateCounts(NamedTuple):
    """Misses at one gate, and the requests near a miss."""

    missed: MissCounts = MissCounts()
    near: MissCounts = MissCounts()

    def add(self, requests: int, missed: int, near: int) -> GateCounts:
        return GateCounts(self.missed.add(requests, missed), self.near.add(requests, near))

    def plus(self, other: GateCounts) -> GateCounts:
        return GateCounts(self.missed.plus(other.missed), self.near.plus(other.near))

    @property
    def dispersion(self) -> float:
        """Clustering of the misses, or else that of the near ones, which are more frequent."""
        return max(self.missed.dispersion, self.near.dispersion)


class LoadCell(NamedTuple):
    """One setting in one load bin; energy in microjoules and generated tokens of its periods."""

    counts: tuple[GateCounts, ...]
    energy: float = 0.0
    tokens: float = 0.0
    periods: int = 0

    @property
    def energy_per_token(self) -> float | None:
        """Microjoules per token; None without enough periods of known energy."""
        if self.periods < _MIN_ENERGY_PERIODS or not self.tokens:
            return None
        return self.energy / self.tokens


class MissTally(NamedTuple):
    """Requests, misses and near misses of one period at each gate, in one cell."""

    counts: tuple[tuple[int, int, int], ...]

    @classmethod
    def empty(cls, count: int) -> MissTally:
        return cls(((0, 0, 0),) * count)

    def add(self, each: Sequence[Gate], request: RequestTimes, *, only_misses: bool) -> MissTally:
        """Add requests; ``only_misses`` ignores them at the gates that they keep."""
        counts = list(self.counts)
        for place, gate in enumerate(each):
            latency = request.latency(gate.objective)
            if latency is None or not gate.applies(request):
                continue
            missed = latency > gate.objective.limit
            if missed or not only_misses:
                requests, misses, near = counts[place]
                number, is_near = request.number, gate.near * latency > gate.objective.limit
                counts[place] = (
                    requests + number,
                    misses + number * missed,
                    near + number * is_near,
                )
        return MissTally(tuple(counts))


@dataclass(frozen=True, slots=True)
class LoadCells:
    """All cells by bin and setting, and the lowest certified setting of each bin.

    ``error`` is the permitted probability of a wrong certification.
    """

    gates: tuple[Gate, ...]
    error: float = 0.05
    cells: Mapping[tuple[int, int], LoadCell] = field(default_factory=dict)
    certified: Mapping[int, int] = field(default_factory=dict)

    def cell(self, number: int, setting: int) -> LoadCell:
        """The cell of a bin and a setting, which may be empty."""
        return self.cells.get((number, setting)) or LoadCell((GateCounts(),) * len(self.gates))

    @property
    def met(self) -> frozenset[int]:
        """The bins in which requests or energy are known."""
        return frozenset(number for number, _ in self.cells)

    def lowest(self, number: int) -> int:
        """The lowest setting that is certified in a bin; 0 is the original."""
        above = (setting for other, setting in self.certified.items() if other >= number)
        return max(above, default=0)

    def add_tally(self, number: int, setting: int, tally: MissTally) -> LoadCells:
        """Add the requests of one period."""
        cell = self.cell(number, setting)
        counts = tuple(
            one.add(*added) for one, added in zip(cell.counts, tally.counts, strict=True)
        )
        cells = {**self.cells, (number, setting): cell._replace(counts=counts)}
        changed = replace(self, cells=cells)
        if not setting:
            return changed  # only the original's own misses: they change what is permitted later
        certified = dict(self.certified)
        for other in {one for one in self.met if one <= number}:
            if changed.proves(other, setting):
                certified[other] = max(certified.get(other, 0), setting)
            elif certified.get(other) == setting:
                del certified[other]
                lower = [one for one in range(1, setting) if changed.proves(other, one)]
                if lower:
                    certified[other] = lower[-1]
        return replace(changed, certified=certified)

    def add_energy(self, number: int, setting: int, energy: float, tokens: float) -> LoadCells:
        """Add the energy of one period."""
        cell = self.cell(number, setting)
        cell = cell._replace(
            energy=cell.energy + energy, tokens=cell.tokens + tokens, periods=cell.periods + 1
        )
        return replace(self, cells={**self.cells, (number, setting): cell})

    def without(self, number: int, setting: int) -> LoadCells:
        """Forget the evidence by which a setting was certified in a bin: it has failed there.

        This is the evidence of this setting and lower ones, in this bin and higher ones. Energy
        stays.
        """
        empty = (GateCounts(),) * len(self.gates)
        cells = {
            (other, level): cell._replace(counts=empty)
            if other >= number and level >= setting
            else cell
            for (other, level), cell in self.cells.items()
        }
        certified = {
            other: min(level, setting - 1) if other >= number else level
            for other, level in self.certified.items()
        }
        return replace(self, cells=cells, certified=certified)

    def proves(self, number: int, setting: int) -> bool:
        """True if the requests at a setting, in a bin and some higher ones, certify it."""
        return any(
            all(self._keeps(place, number, pool) for place in range(len(self.gates)))
            for pool in self._pools(number, setting)
        )

    def keeps(self, number: int, setting: int) -> bool | None:
        """True if a setting certainly keeps the objective in a bin, False if certainly not.

        None: there are too few requests. Where the original itself misses too often the objective
        is not kept, although lower settings are permitted to miss as often (:meth:`allowed`).
        """
        for level in (0, setting):
            for gate, one in zip(self.gates, self.cell(number, level).counts, strict=True):
                if one.missed.at_least(self.error) > gate.objective.allowed:
                    return False
        return True if self.proves(number, setting) else None

    def may_try(self, number: int, setting: int) -> bool:
        """True if latencies at ``setting`` leave room for the next lower setting in a bin."""
        general = [place for place, gate in enumerate(self.gates) if gate.length_class is None]
        for pool in self._pools(number, setting):
            if all(
                pool[place].near.requests >= MIN_NEAR_REQUESTS
                and (pool[place].near.ratio or 0.0) <= self.allowed(place, number)
                for place in general
            ):
                return True
        return False

    def allowed(self, place: int, number: int) -> float:
        """The permitted ratio of misses at a gate in a bin.

        Where the original itself certainly misses more, its own misses are added.
        """
        permitted = self.gates[place].objective.allowed
        original = self.cell(number, 0).counts[place].missed.at_least(self.error)
        return original + permitted if original > permitted else permitted

    def cheapest(self, number: int, lowest: int) -> int:
        """The setting with the least energy per token in a bin, down to ``lowest``.

        A setting with unknown energy counts as cheaper than the one above it.
        """
        best, least = 0, self._compared_energy(number, 0)
        for setting in range(1, lowest + 1):
            energy = self._compared_energy(number, setting)
            if energy is not None and least is not None and energy > _ENERGY_TOLERANCE * least:
                break
            best, least = setting, energy if energy is not None else least
        return best

    def _compared_energy(self, number: int, setting: int) -> float | None:
        cell = self.cell(number, setting)
        return cell.energy_per_token if cell.periods >= _MIN_COMPARED_PERIODS else None

    def _pools(self, number: int, setting: int) -> Iterator[tuple[GateCounts, ...]]:
        """The counts of a bin and of all bins above it, up to each of these."""
        pool: tuple[GateCounts, ...] = (GateCounts(),) * len(self.gates)
        for other in sorted(self.met):
            cell = self.cells.get((other, setting))
            if other >= number and cell is not None:
                pool = tuple(one.plus(more) for one, more in zip(pool, cell.counts, strict=True))
                yield pool

    def _keeps(self, place: int, number: int, pool: tuple[GateCounts, ...]) -> bool:
        gate, counts = self.gates[place], pool[place]
        allowed = self.allowed(place, number)
        if gate.length_class is not None:
            every = sum(
                one.missed.requests
                for other, one in zip(self.gates, pool, strict=True)
                if other.objective == gate.objective and other.length_class is None
            )
            if counts.missed.requests < MIN_CLASS_SHARE * every:
                return counts.missed.at_least(self.error) <= allowed
        return counts.missed.surely_below(allowed, self.error, counts.dispersion)
