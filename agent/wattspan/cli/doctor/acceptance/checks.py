"""The result of a test of the host, as a finding and as figures, and the numbers of its devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from wattspan.cli.doctor import Diagnosis, Finding
from wattspan.model import Domain, HwType

SOURCES = "Sources"
IDLE, STEPS, SENSORS = "Idle power", "Counter steps", "Sensor against counter"
LOADS, LIMITS = "Attribution of two loads", "Limits"

Scalar = float | int | str | bool | None


class Check(Struct, frozen=True):
    """One test of one device: its result as a finding, and its figures.

    ``device`` is its kind and number, as in "gpu 0", or the name of a source.
    """

    test: str
    device: str
    finding: Finding
    figures: dict[str, Scalar]

    def plain(self) -> dict[str, object]:
        """The check without a text, which might name a file or a user."""
        return {
            "test": self.test,
            "device": self.device,
            "result": self.finding.mark,
            "figures": self.figures,
        }


def diagnosis(checks: Sequence[Check], *, emulated: bool) -> Diagnosis:
    """The checks by test."""
    sections: dict[str, list[Finding]] = {}
    for one in checks:
        sections.setdefault(one.test, []).append(one.finding)
    counters = {one.device for one in checks if one.test == STEPS and "steps" in one.figures}
    return Diagnosis(sections, len(counters), emulated)


def device_labels(domains: Iterable[Domain]) -> dict[str, str]:
    """The kind and number of each domain, by id: "gpu 0". They name no serial number."""
    counts: dict[HwType, int] = {}
    labels = {}
    for one in domains:
        number = counts.get(one.hw_type, 0)
        counts[one.hw_type] = number + 1
        labels[one.id] = f"{one.hw_type} {number}"
    return labels
