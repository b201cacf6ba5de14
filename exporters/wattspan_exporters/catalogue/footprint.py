"""Metrics of cost and carbon. Amounts are whole billionths."""

from __future__ import annotations

from collections.abc import Iterator

from wattspan.model import RatedEnergy, Snapshot
from wattspan_exporters.catalogue.definition import Chapter, Instrument, Metric, Sample
from wattspan_exporters.catalogue.energy import worst_provenance


def cost(snapshot: Snapshot) -> Iterator[Sample]:
    if (weighed := snapshot.footprint.cost) is not None:
        yield (weighed.unit, weighed.origin, worst_provenance(snapshot.cover) or ""), weighed.total


def carbon(snapshot: Snapshot) -> Iterator[Sample]:
    if (weighed := snapshot.footprint.carbon) is not None:
        yield (weighed.origin, worst_provenance(snapshot.cover) or ""), weighed.total


def price(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield nothing while the rate is unknown."""
    weighed = snapshot.footprint.cost
    if weighed is not None and weighed.rate is not None:
        yield (weighed.unit, weighed.origin), weighed.rate


def intensity(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield nothing while the rate is unknown."""
    weighed = snapshot.footprint.carbon
    if weighed is not None and weighed.rate is not None:
        yield (weighed.origin,), weighed.rate


def energy_without_rate(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield zero as well, so that the first increase is visible to rate functions."""
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
    "Energy of the cover, multiplied by the rate of a kilowatt-hour at the time of settlement. "
    "Absent unless `[cost]` and `[carbon]` set a rate "
    "([how](../how-to/cost-and-carbon.md)). A rate is absent while it is unknown; a price below "
    "zero counts as unknown. Energy without a known rate is in "
    "`wattspan_unweighed_energy_joules_total` and in no total. On an emulated host the figures "
    "are not measurements: `provenance` is `emulated`.",
    (
        Metric(
            "wattspan.host.cost", COUNTER, "{currency}",
            "Cost of the host's energy.",
            ("currency", "origin", "provenance"), cost,
            lasting=True,
        ),
        Metric(
            "wattspan.host.carbon", COUNTER, "g",
            "Carbon dioxide equivalent of the host's energy.",
            ("origin", "provenance"), carbon,
            lasting=True,
        ),
        Metric(
            "wattspan.energy.price", GAUGE, "{currency}/kWh",
            "Current price of a kilowatt-hour.",
            ("currency", "origin"), price,
        ),
        Metric(
            "wattspan.carbon.intensity", GAUGE, "g/kWh",
            "Current carbon dioxide equivalent of a kilowatt-hour.",
            ("origin",), intensity,
        ),
        Metric(
            "wattspan.unweighed.energy", COUNTER, "J",
            "Energy of the host while the rate was unknown.",
            ("footprint", "provenance"), energy_without_rate,
            lasting=True,
        ),
    ),
)  # fmt: skip
