"""The energy of a payer, merged into its profile only when it is wanted.

A host has many processes that have sent a span once, and few whose spans wait for energy. The
settled steps of a domain are therefore kept once for all payers (:class:`DomainSteps`), and of each
payer only its shares. :meth:`ProcessEnergy.merge` adds both to the profile. Its cost depends on the
number of shares: a period in which the payer has none is one interval for each domain.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from wattspan.attribution.division import StaticDivider, StaticShare
from wattspan.attribution.packed_attributions import share_error
from wattspan.model import Domain, Interval, StaticBasis, StaticPower
from wattspan.spans.profiles import Edges, EnergyProfile

_NEVER = 1 << 62
_MAX_PERIODS = 256  # periods without a gap that are known of a domain


class DomainStep(NamedTuple):
    """A settled interval of a domain, without its division.

    ``divided`` is the energy that its payers share, ``edge`` the energy that the counter's last
    step may put on the wrong side of an edge, ``error`` the half-width of the idle power's range in
    milliwatts; ``static`` is the static part of the energy, None if it is unknown.
    """

    start: int
    end: int
    divided: int
    edge: int
    error: float = 0.0
    static: tuple[StaticShare, StaticBasis] | None = None

    @classmethod
    def of(
        cls,
        domain: Domain,
        interval: Interval,
        divided: int,
        error: float = 0.0,
        static: tuple[StaticShare, StaticBasis] | None = None,
    ) -> DomainStep:
        stale = domain.resolution if interval.stale is None else interval.stale
        duration = max(1, interval.duration)  # a step has no more energy than the interval
        edge = interval.energy * min(stale, duration) // duration
        return cls(interval.start.mono, interval.end.mono, divided, edge, error, static)


class DomainSteps:
    """The recent steps of one domain, and its older periods without a gap. Times are monotonic."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.steps: list[DomainStep] = []
        self._ends = array("q")
        self._periods: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: DomainStep) -> bool:
        """Append a step; False if it is ignored, because it ends before its predecessor."""
        if self._periods and step.end <= self._periods[-1][1]:
            return False
        self.steps.append(step)
        self._ends.append(step.end)
        if self._periods and step.start <= self._periods[-1][1]:
            self._periods[-1] = self._periods[-1][0], step.end
        else:
            self._periods.append((step.start, step.end))
            del self._periods[:-_MAX_PERIODS]
        return True

    def redefine(self, domain: Domain) -> None:
        """Replace the properties of the domain, such as its resolution."""
        self.domain = domain

    @property
    def end(self) -> int:
        """The end of the last step; 0 without any."""
        return self._periods[-1][1] if self._periods else 0

    def trim(self, before: int) -> None:
        """Remove the steps that end before a time, once they are many."""
        old = bisect_left(self._ends, before)
        if old > len(self.steps) // 4:
            del self.steps[:old], self._ends[:old]

    def after(self, time: int) -> int:
        """The number of the first step that ends after ``time``."""
        return bisect_right(self._ends, time)

    def begin(self, time: int) -> int:
        """``time``, or the start of the step that it is inside of."""
        number = self.after(time)
        return min(time, self.steps[number].start) if number < len(self.steps) else time

    def periods(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of a period without a gap."""
        for first, last in self._periods:
            if first < end and last > start:
                yield max(first, start), min(last, end)


class ProcessShares:
    """The shares of a payer, or of several together, of one domain in order of time."""

    def __init__(self) -> None:
        self.ends = array("q")  # of the steps
        self.energies: list[int] = []
        self.doubts: list[int] = []

    def add(self, end: int, energy: int, doubt: int) -> None:
        if self.ends and self.ends[-1] == end:
            self.energies[-1] += energy
            self.doubts[-1] += doubt
            return
        self.ends.append(end)
        self.energies.append(energy)
        self.doubts.append(doubt)


class ProcessEnergy:
    """A profile, and the shares that are not merged into it yet."""

    def __init__(self, edges: Edges = tuple) -> None:
        self._edges = edges
        self.profile = EnergyProfile(edges=edges)
        self._merged: dict[str, int] = {}  # by domain
        self._shares: dict[str, ProcessShares] = {}

    @property
    def waiting(self) -> bool:
        """True if there are shares that are not merged."""
        return bool(self._shares)

    def begin(self, domain: Domain, since: int, *, expected: bool) -> None:
        """Take the steps of a known domain from the time ``since``, the begin of one.

        The profile waits for the first one of an ``expected`` domain.
        """
        self._merged[domain.id] = since
        if expected:
            self.profile.expect(domain.id, domain.hw_type, since)

    def add(self, domain_id: str, end: int, energy: int, doubt: int = 0) -> None:
        """Add a share of the step of a domain that ends at ``end``."""
        shares = self._shares.get(domain_id)
        if shares is None:
            shares = self._shares[domain_id] = ProcessShares()
        shares.add(end, energy, doubt)

    def copy(self) -> ProcessEnergy:
        """The same energy, for a family that has had one process until now."""
        found = ProcessEnergy(self._edges)
        found.profile = self.profile.fork()
        found._merged = dict(self._merged)
        return found

    def merge(self, domains: Mapping[str, DomainSteps]) -> int:
        """Merge all shares; returns the number of intervals that the profile has received.

        ``domains`` have every step of a share that is not merged.
        """
        kinds: dict[object, list[_DomainMerge]] = {}
        for key, steps in domains.items():
            merged, shares = self._merged.get(key, 0), self._shares.get(key)
            part = _DomainMerge(self.profile, steps, merged, shares)
            kinds.setdefault(steps.domain.hw_type, []).append(part)
        for parts in kinds.values():
            _merge_together(parts)
        count = 0
        for part in (part for parts in kinds.values() for part in parts):
            self._merged[part.id] = part.merged
            count += part.count
        if count:
            self.profile.merge()
        self._shares.clear()
        return count


def _merge_together(parts: list[_DomainMerge]) -> None:
    """Add the steps of all domains of one type in order of time."""
    while True:
        active = min(part.active_from for part in parts)
        for part in parts:
            part.skip(active)
        following = min(parts, key=_next_end)
        if following.next_end == _NEVER:
            return
        following.take()


class _DomainMerge:
    """The steps of one domain that are added to a profile, and a payer's shares of them."""

    def __init__(
        self, profile: EnergyProfile, steps: DomainSteps, merged: int, shares: ProcessShares | None
    ) -> None:
        self.id, self._kind = steps.domain.id, steps.domain.hw_type
        self.merged = merged
        self.count = 0
        self._profile, self._steps = profile, steps
        self._shares = shares or ProcessShares()
        self._at = 0  # number of the next share
        self._number = steps.after(merged)
        self._find_next()

    def _find_next(self) -> None:
        steps, number = self._steps.steps, self._number
        self.next_end = steps[number].end if number < len(steps) else _NEVER
        ends = self._shares.ends
        while self._at < len(ends) and ends[self._at] <= self.merged:
            self._at += 1
        self.active_from = _NEVER
        if self._at < len(ends):
            step = self._steps.after(ends[self._at] - 1)
            self.active_from = steps[step].start if step < len(steps) else _NEVER

    def skip(self, until: int) -> None:
        """Add the steps without energy that end by ``until`` as one for each period."""
        if self.next_end > min(until, _NEVER - 1) or not self._profile.is_even(self.id):
            return
        self._number = self._steps.after(until)
        self._append_periods(self._steps.steps[self._number - 1].end)
        self._find_next()

    def _append_periods(self, until: int) -> None:
        for start, end in self._steps.periods(self.merged, until):
            self._profile.append(self.id, self._kind, start, end, 0, 0)
            self.count += 1
        self.merged = until

    def take(self) -> None:
        """Add the next step."""
        step = self._steps.steps[self._number]
        if self.merged < step.start:
            self._append_periods(step.start)
        ends, own, doubt = self._shares.ends, 0, 0
        if self._at < len(ends) and ends[self._at] == step.end:
            own, doubt = self._shares.energies[self._at], self._shares.doubts[self._at]
        append_share(self._profile, self._steps.domain, step, own, doubt)
        self.count += 1
        self._number, self.merged = self._number + 1, step.end
        self._find_next()


def _next_end(part: _DomainMerge) -> int:
    return part.next_end


def append_share(
    profile: EnergyProfile, domain: Domain, step: DomainStep, own: int, doubt: int = 0
) -> None:
    """Append the energy ``own`` of a payer in a step to its profile, with its errors.

    ``doubt`` is the error where the division is an assumption.
    """
    start, end, divided, edge, error, share = step
    duration, active = end - start, max(1, divided)
    noise = edge * own // active
    if own < active and domain.usage_step:
        # Usage at a resolution of a sixth of a second distinguishes payers, but not their times:
        # where two alternate, each has some energy of the other on both sides of an edge.
        exchanged = own * (active - own) // active
        noise += exchanged * 3 * domain.usage_step // max(1, duration)
    static = None if share is None else (share[0].of(own), share[1])
    baseline = share_error(own, active, doubt, error * duration / 1e6)
    profile.append(domain.id, domain.hw_type, start, end, own, noise, static, baseline)


def static_share(
    domain: Domain,
    interval: Interval,
    idle: int,
    powers: Mapping[str, StaticPower],
    dividers: dict[str, StaticDivider],
) -> tuple[StaticShare, StaticBasis] | None:
    """The static part of the energy that an interval's payers share; None if it is unknown."""
    power = powers.get(domain.id)
    if power is None:
        return None
    divider = dividers.get(domain.id)
    if divider is None:
        divider = dividers[domain.id] = StaticDivider()
    return divider.divide(interval, idle, power.power, domain.resolution), power.basis
