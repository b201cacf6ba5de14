"""The judge of methods that divide the energy of a package among processes.

Every method is judged by the same truth: the energy that each process owes by the rule that its
plant states (:mod:`testbed.cpu_plants`). Energies are in microjoules, times in nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND


class Moment(NamedTuple):
    """A package when its counter is read. All figures but ``at`` are cumulated.

    ``counter`` and ``seen``, the CPU time of each process, are those that an agent reads; ``owed``
    and ``spent`` are the true energy and the true CPU time of each process.
    """

    at: int
    counter: int
    seen: tuple[int, ...]
    owed: tuple[float, ...]
    spent: tuple[float, ...]


class Charge(NamedTuple):
    """The energy of a process by a method, and the half-width of its stated range."""

    energy: float
    uncertainty: float = 0.0
    lower_bound: bool = False

    def contains(self, owed: float) -> bool:
        """True if the stated range contains the truth."""
        low, high = self.energy - self.uncertainty, self.energy + self.uncertainty
        return low <= owed and (self.lower_bound or owed <= high)


@dataclass
class Score:
    """The errors of one method, one for each process and period."""

    errors: list[float] = field(default_factory=list)
    contained: int = 0
    lower_bounds: int = 0

    def add(self, charges: Sequence[Charge], owed: Sequence[float], *, pooled: bool) -> None:
        """Judge the charges of some processes, or with ``pooled`` their sum."""
        if pooled:
            bound = any(one.lower_bound for one in charges)
            uncertainty = sum(one.uncertainty for one in charges)
            charges = [Charge(sum(one.energy for one in charges), uncertainty, bound)]
            owed = [sum(owed)]
        for charge, true in zip(charges, owed, strict=True):
            self.errors.append(abs(charge.energy / true - 1))
            self.contained += charge.contains(true)
            self.lower_bounds += charge.lower_bound

    @property
    def p95(self) -> float:
        """The smallest error that 95 % of the errors do not exceed."""
        return sorted(self.errors)[math.ceil(len(self.errors) * 0.95) - 1]


def owed_energies(moments: Sequence[Moment]) -> list[float]:
    """The truth of a period."""
    return _differences(moments[-1].owed, moments[0].owed)


def by_cpu_time(moments: Sequence[Moment], cpus: int) -> list[float]:
    """The true active energy of each step in proportion to true CPU time: a perfect idle power."""
    total = [0.0] * len(moments[0].owed)
    for before, after in pairwise(moments):
        spent = _differences(after.spent, before.spent)
        whole = sum(spent)
        active = sum(_differences(after.owed, before.owed))
        for i, one in enumerate(spent):
            total[i] += active * one / whole if whole else 0.0
    return total


def by_kepler(moments: Sequence[Moment], cpus: int) -> list[float]:
    """Kepler's rule, for CPUs that these processes alone use.

    The active part of the package's energy is the usage of all CPUs by /proc/stat; each process
    has the part of it that is its part of the CPU time of all processes. Sources:
    sustainable-computing-io/kepler 0.11, internal/monitor/node.go and process.go.
    """
    total = [0.0] * len(moments[0].seen)
    for before, after in pairwise(moments):
        seen = _differences(after.seen, before.seen)
        usage = sum(seen) / (cpus * (after.at - before.at))
        active = (after.counter - before.counter) * usage
        for i, one in enumerate(seen):
            total[i] += active * one / sum(seen) if any(seen) else 0.0
    return total


def by_scaphandre(moments: Sequence[Moment], cpus: int) -> list[float]:
    """Scaphandre's rule: the part of all energy, idle energy included, by the time of all CPUs.

    Source: hubblo-org/scaphandre 1.0, src/sensors/mod.rs,
    ``get_process_power_consumption_microwatts``. Where processes alone use the CPUs, Kepler's rule
    comes to the same in another way.
    """
    total = [0.0] * len(moments[0].seen)
    for before, after in pairwise(moments):
        energy, capacity = after.counter - before.counter, cpus * (after.at - before.at)
        for i, one in enumerate(_differences(after.seen, before.seen)):
            total[i] += energy * one / capacity
    return total


class Rule(NamedTuple):
    """The energies of processes by a method that reads the counter once in a ``period``, in ns."""

    energies: Callable[[Sequence[Moment], int], list[float]]
    period: int

    def charges(self, moments: Sequence[Moment], cpus: int) -> list[Charge]:
        """The charges of all processes; none if the period is shorter than the method's own."""
        read = moments[:: max(1, round(self.period / (moments[1].at - moments[0].at)))]
        return [Charge(one) for one in self.energies(read, cpus)] if len(read) > 1 else []


RULES = {
    "CPU time alone": Rule(by_cpu_time, MILLISECOND),
    "Kepler's rule": Rule(by_kepler, 5 * SECOND),
    "Scaphandre's rule": Rule(by_scaphandre, 2 * SECOND),
}


def _differences(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(after, before, strict=True)]
