"""What a cgroup's own clock shows beyond the processes known in it."""

from __future__ import annotations

from collections.abc import Mapping

from wattspan.attribution import split


class EnvelopeBook:
    """Cumulative excess of each cgroup's clock over what its known processes were charged.

    An excess is work of processes that came and went unseen, and of the last moments of those
    that ended. A deficit is kept as a debt: the clocks are not read at one moment, and a process
    may have moved from one cgroup to another unnoticed. All excess together is therefore settled
    only as far as it is not matched by debt elsewhere, so that nothing is charged twice.
    """

    def __init__(self) -> None:
        self._excess: dict[str, int] = {}

    def measured(self, change: Mapping[str, int]) -> None:
        """The cgroups' clocks went on by this much."""
        for cgroup, amount in change.items():
            self._excess[cgroup] = self._excess.get(cgroup, 0) + amount

    def charged(self, cgroup: str, amount: int) -> None:
        """A known process in ``cgroup`` was charged."""
        self._excess[cgroup] = self._excess.get(cgroup, 0) - amount

    def moved(self, old: str, new: str) -> None:
        """A process turned out to have moved: what was charged to the wrong one is set right."""
        wrong = min(-self._excess.get(old, 0), self._excess.get(new, 0))
        if wrong > 0:
            self._excess[old] += wrong
            self._excess[new] -= wrong

    def folded(self, cgroup: str, into: str | None) -> None:
        """A cgroup was removed: from now on its like counts with the one above."""
        left = self._excess.pop(cgroup, 0)
        if into is not None:
            self._excess[into] = self._excess.get(into, 0) + left

    def settle(self) -> dict[str, int]:
        """The excess of each cgroup that is due now, and is settled by this."""
        open_ones = {cgroup: excess for cgroup, excess in self._excess.items() if excess > 0}
        due = min(sum(open_ones.values()), sum(self._excess.values()))
        if due <= 0:
            return {}
        parts = dict(zip(open_ones, split(due, list(open_ones.values())), strict=True))
        for cgroup, part in parts.items():
            self._excess[cgroup] -= part
        return {cgroup: part for cgroup, part in parts.items() if part}
