"""Money and carbon, as a scrape tells of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from wattspan.model import Footprint, Microjoules, RatedEnergy, RateOrigin

Samples = Callable[[str], list[tuple[Mapping[str, str], float]]]
"""The samples of a series by its name."""


def footprint_of(samples: Samples) -> Footprint:
    """What the scrape says of cost and carbon; what it says in no known way is left out."""
    unknown = {
        labels.get("footprint", ""): round(value * 1e6)
        for labels, value in samples("wattspan_unweighed_energy_joules_total")
        if math.isfinite(value)
    }

    def weighed(kind: str, total: str, rate: str, unit: str) -> RatedEnergy | None:
        for labels, value in samples(total):
            if labels.get("origin") in list(RateOrigin) and math.isfinite(value):
                now = [one for _, one in samples(rate) if math.isfinite(one)]
                return RatedEnergy(
                    labels.get("currency", unit),
                    RateOrigin(labels["origin"]),
                    round(now[0] * 1e9) if now else None,
                    round(value * 1e9),
                    Microjoules(unknown.get(kind, 0)),
                )
        return None

    return Footprint(
        weighed("cost", "wattspan_host_cost_total", "wattspan_energy_price_per_kwh", ""),
        weighed(
            "carbon",
            "wattspan_host_carbon_grams_total",
            "wattspan_carbon_intensity_grams_per_kwh",
            "g",
        ),
    )
