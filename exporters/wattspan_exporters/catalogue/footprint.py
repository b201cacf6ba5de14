"""How the series about money and carbon are drawn from a snapshot: in whole billionths.

The catalogue's chapter on cost and carbon.
"""

from __future__ import annotations

from collections.abc import Iterator

from wattspan.model import RatedEnergy, Snapshot
from wattspan_exporters.catalogue.energy import worst_provenance
from wattspan_exporters.catalogue.metric import Chapter, Instrument, Metric, Sample


def cost(snapshot: Snapshot) -> Iterator[Sample]:
    if (weighed := snapshot.footprint.cost) is not None:
        yield (weighed.unit, weighed.origin, worst_provenance(snapshot.cover) or ""), weighed.total


def carbon(snapshot: Snapshot) -> Iterator[Sample]:
    if (weighed := snapshot.footprint.carbon) is not None:
        yield (weighed.origin, worst_provenance(snapshot.cover) or ""), weighed.total


def price(snapshot: Snapshot) -> Iterator[Sample]:
    """Nothing while it is not known."""
    weighed = snapshot.footprint.cost
    if weighed is not None and weighed.rate is not None:
        yield (weighed.unit, weighed.origin), weighed.rate


def intensity(snapshot: Snapshot) -> Iterator[Sample]:
    """Nothing while it is not known."""
    weighed = snapshot.footprint.carbon
    if weighed is not None and weighed.rate is not None:
        yield (weighed.origin,), weighed.rate


def energy_without_rate(snapshot: Snapshot) -> Iterator[Sample]:
    """Of what is weighed at all, zero included: the first rise must be seen."""
    parts: tuple[tuple[str, RatedEnergy | None], ...] = (
        ("cost", snapshot.footprint.cost),
        ("carbon", snapshot.footprint.carbon),
    )
    for name, weighed in parts:
        if weighed is not None:
            yield (name, worst_provenance(snapshot.cover) or ""), weighed.unknown


COUNTER, GAUGE = Instrument.COUNTER, Instrument.GAUGE

FOOTPRINT = Chapter(
    "Cost and carbon",
    "The cover's energy, weighed when it is booked by what a kilowatt-hour costs and emits then. "
    "Absent unless `[cost]` and `[carbon]` say that "
    "([how](../how-to/cost-and-carbon.md)). A rate is absent while it is not known, and a price "
    "below zero counts as not known; what is spent meanwhile is in "
    "`wattspan_unweighed_energy_joules_total` and in no total. On an emulated host these are "
    "figures of no machine: `provenance` says so.",
    (
        Metric(
            "wattspan.host.cost", COUNTER, "{currency}",
            "What the host's energy has cost.",
            ("currency", "origin", "provenance"), cost,
            lasting=True,
        ),
        Metric(
            "wattspan.host.carbon", COUNTER, "g",
            "Carbon dioxide equivalent that the host's energy has emitted.",
            ("origin", "provenance"), carbon,
            lasting=True,
        ),
        Metric(
            "wattspan.energy.price", GAUGE, "{currency}/kWh",
            "What a kilowatt-hour costs now.",
            ("currency", "origin"), price,
        ),
        Metric(
            "wattspan.carbon.intensity", GAUGE, "g/kWh",
            "Carbon dioxide equivalent that a kilowatt-hour emits now.",
            ("origin",), intensity,
        ),
        Metric(
            "wattspan.unweighed.energy", COUNTER, "J",
            "Energy of the host that was spent while the rate was not known.",
            ("footprint", "provenance"), energy_without_rate,
            lasting=True,
        ),
    ),
)  # fmt: skip
