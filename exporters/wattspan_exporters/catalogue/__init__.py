"""The list of every metric, for all exporters, and the selection of an exporter's metrics."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from wattspan.model.settings import quoted
from wattspan.ports import ConfigError
from wattspan.util.files import located_pages
from wattspan_exporters.catalogue.agent import AGENT, FOOTPRINT, SOURCES
from wattspan_exporters.catalogue.definition import Instrument, Metric
from wattspan_exporters.catalogue.energy import ACCOUNTS, ENERGY, SPANS
from wattspan_exporters.catalogue.gpu import GPUS
from wattspan_exporters.catalogue.inference import INFERENCE
from wattspan_exporters.catalogue.tuning import FLEET, TUNING

CATALOGUE = (
    *ENERGY, *ACCOUNTS, *SPANS, *INFERENCE, *GPUS, *TUNING, *FLEET, *FOOTPRINT, *SOURCES, *AGENT,
)  # fmt: skip
"""Every metric; scrapes have this order."""


def select_metrics(patterns: Sequence[str], table: str, *, facts: bool = True) -> list[Metric]:
    """Return the metrics that match ``patterns``, in the order of the catalogue.

    ``*`` in a pattern matches any text, and a leading "!" removes matches. Without ``facts``,
    metrics of the instrument Info are left out unless a pattern has their full name. ConfigError
    names ``table`` and each pattern without a match, or an empty selection.
    """
    kept: set[str] = set()
    unknown: list[str] = []
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        fitting = {
            metric.name: facts or metric.instrument is not Instrument.INFO or metric.name == bare
            for metric in CATALOGUE
            if fnmatch.fnmatchcase(metric.name, bare)
        }
        if not fitting:
            unknown.append(_unknown(bare, table))
        if pattern != bare:
            kept -= fitting.keys()
        else:
            kept |= {name for name, wanted in fitting.items() if wanted}
    if unknown:
        raise ConfigError("\n".join(unknown))
    if not kept:
        raise ConfigError(f'[{table}] metrics leaves none; write ["*"] for all.')
    return [metric for metric in CATALOGUE if metric.name in kept]


def _unknown(pattern: str, table: str) -> str:
    near = difflib.get_close_matches(pattern, [metric.name for metric in CATALOGUE], n=1)
    hint = f"{quoted(near[0])} is near, and " if near else ""
    return located_pages(
        f"No metric is called {quoted(pattern)}, which [{table}] metrics names; {hint}"
        "docs/reference/metrics.md lists all by their OpenTelemetry names."
    )
