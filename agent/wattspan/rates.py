"""Powers from energies that only ever grow: means over at least a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from wattspan.model import SECOND, HwType, Milliwatts, mean_power

WINDOW = SECOND
"""Powers are means over at least this."""

K = TypeVar("K")


@dataclass(slots=True)
class Rate:
    """The mean power of one counter over the last full window."""

    energy: int = 0
    duration: int = 0
    power: Milliwatts | None = None

    def add(self, energy: int, duration: int) -> None:
        """``energy`` uJ were spent in the next ``duration`` ns."""
        self.energy += energy
        self.duration += duration
        if self.duration >= WINDOW:
            self.power = mean_power(self.energy, self.duration)
            self.energy = self.duration = 0

    def unknown(self) -> None:
        """There is a gap: the power is not known until another window is full."""
        self.energy, self.duration, self.power = 0, 0, None


@dataclass(frozen=True, slots=True)
class _Mark(Generic[K]):
    """The energies that the powers were last computed from."""

    at: int
    energy: dict[K, int]


class Powers(Generic[K]):
    """The mean powers of many accounts, one hardware type at a time.

    Each type has a time of its own, the instant up to which it is settled: GPU energy is booked
    later than CPU energy, and a mean over anything else would swing.
    """

    def __init__(self) -> None:
        self._marks: dict[HwType, _Mark[K]] = {}
        self._powers: dict[K, dict[HwType, Milliwatts]] = {}

    def of(self, account: K) -> dict[HwType, Milliwatts]:
        """The account's powers as far as they are known, in a dictionary of the caller's own."""
        return dict(self._powers.get(account, {}))

    def update(self, kind: HwType, settled: int, energies: Mapping[K, int]) -> None:
        """These are all accounts' energies of ``kind``, settled up to ``settled`` ns.

        Nothing happens until a window has passed since the last one that counted.
        """
        mark = self._marks.get(kind)
        if mark is not None and 0 <= settled - mark.at < WINDOW:
            return
        if mark is not None and settled > mark.at:
            elapsed = settled - mark.at
            for account, energy in energies.items():
                spent = energy - mark.energy.get(account, 0)
                self._powers.setdefault(account, {})[kind] = mean_power(spent, elapsed)
            for account in self._powers.keys() - energies.keys():
                del self._powers[account]
        self._marks[kind] = _Mark(settled, dict(energies))
