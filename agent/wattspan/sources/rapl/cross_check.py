"""Both readers of the CPU's counters, side by side for a moment: what `wattspan doctor` shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wattspan.model import SECOND, Domain, Failure, Microjoules, Reading
from wattspan.ports import Batch, Clock
from wattspan.sources.rapl.powercap import PowercapSource
from wattspan.sources.rapl.pyrapl import PyRaplSource


@dataclass(frozen=True, slots=True)
class ReaderComparison:
    """What two readers saw one domain spend over the same stretch of time.

    None: that reader has no such domain, or could not read it at both ends.
    """

    domain_id: str
    powercap: Microjoules | None
    pyrapl: Microjoules | None

    @property
    def difference(self) -> int | None:
        """Microjoules by which pyRAPL saw more."""
        if self.powercap is None or self.pyrapl is None:
            return None
        return self.pyrapl - self.powercap

    @property
    def agrees(self) -> bool | None:
        """Whether both are within 2 % or 0.1 J: they cannot read at the same instant."""
        if self.difference is None or self.powercap is None:
            return None
        return abs(self.difference) <= max(self.powercap // 50, 100_000)


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """The comparison of every domain that either reader knows, and what went wrong."""

    comparisons: tuple[ReaderComparison, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def agrees(self) -> bool | None:
        """Whether all that could be compared agree; None if nothing could be."""
        verdicts = [c.agrees for c in self.comparisons if c.agrees is not None]
        return all(verdicts) if verdicts else None


def cross_check(
    sysfs: Path, clock: Clock, *, duration: int = SECOND, emulated: bool = False
) -> CrossCheck:
    """Read all counters with both readers, twice, ``duration`` nanoseconds apart."""
    readers = (
        PowercapSource(sysfs, clock, emulated=emulated),
        PyRaplSource(sysfs, clock, emulated=emulated),
    )
    try:
        for reader in readers:
            reader.read()  # the first turn finds and opens; it takes longer
        before = [reader.read() for reader in readers]
        clock.sleep_until(clock.monotonic() + duration)
        after = [reader.read() for reader in readers]
    finally:
        for reader in readers:
            reader.close()
    powercap, pyrapl = map(_energy_between, before, after)
    return CrossCheck(
        tuple(
            ReaderComparison(identity, powercap.get(identity), pyrapl.get(identity))
            for identity in dict.fromkeys([*powercap, *pyrapl])
        ),
        tuple(dict.fromkeys(failure for batch in after for failure in batch.failures)),
    )


def _energy_between(before: Batch, after: Batch) -> dict[str, Microjoules]:
    """What each domain spent between two batches of one reader, wraps undone."""
    domains = {domain.id: domain for domain in after.domains}
    start = {reading.domain_id: reading for reading in before.readings}
    return {
        end.domain_id: energy
        for end in after.readings
        if (energy := _difference(domains[end.domain_id], start.get(end.domain_id), end))
        is not None
    }


def _difference(domain: Domain, start: Reading | None, end: Reading) -> Microjoules | None:
    if start is None or start.epoch != end.epoch:
        return None
    spent = end.counter - start.counter
    if spent < 0 and domain.modulus is not None:
        spent += domain.modulus
    return Microjoules(spent) if spent >= 0 else None
