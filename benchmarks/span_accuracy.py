"""Accuracy of span energy: against the known truth of an emulated host, and next to Zeus.

A real agent, real processes with real load, spans over a real socket; the agent's figures are read
from the spans it forwards. The emulated host's model gives the energy of a CPU second, its boards
the energy of each process, so the truth about every span is known.

    .venv/bin/python -m benchmarks.span_accuracy [--quick] [--no-zeus] [--all]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence

from testbed.machine import describe
from testbed.spans.accuracy import (
    CLIENTS,
    KINDS,
    LENGTHS,
    PROFILE,
    QUICK,
    REPEATS,
    WANDERING,
    Judged,
    judged_host,
    measure,
    neighbour,
    quantile,
)

SHOWN = (0.1, 1.0)  # seconds

# ------------------------------------------------------------------------------------ the table


def table(found: Mapping[str, Sequence[Judged]], lengths: Sequence[float]) -> Iterator[str]:
    """One row for each kind of span and length, one column for each device of ``found``."""
    groups = {
        (kind, seconds): [
            [one for one in judged if (one.kind, one.seconds) == (kind, seconds)]
            for judged in found.values()
        ]
        for kind in KINDS
        for seconds in lengths
    }
    sizes = [len(those) for group in groups.values() for those in group if those]
    yield (
        "Truth: equal costs of CPU-seconds; emulated boards know each process's energy. p95 of "
        f"errors of {min(sizes)} to {max(sizes)} spans; in brackets: within stated, if below 95 %."
        "\n"
    )
    heads = ["spans", *found, "Zeus: CPU, GPU"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---|" + "---:|" * (len(heads) - 1)
    for (kind, seconds), group in groups.items():
        if any(group):
            cells = [f"{kind}, {seconds:g} s", *map(_cell, group), _zeus(group)]
            yield "| " + " | ".join(cells) + " |"


def _cell(those: Sequence[Judged]) -> str:
    if not those:
        return "–"
    within = sum(one.within for one in those) / len(those)
    error = _p95([one.error for one in those])
    return error if within >= 0.95 else f"{error} ({within:.0%})"


def _zeus(group: Sequence[Sequence[Judged]]) -> str:
    known = [[one.zeus for one in those if one.zeus is not None] for those in group]
    return ", ".join(_p95(errors) for errors in known if errors) or "–"


def _p95(errors: Sequence[float]) -> str:
    value = quantile([abs(error) for error in errors], 0.95)
    return f"{value:.{2 if value < 0.1 else 1 if value < 1 else 0}%}"


def report(
    repeats: Mapping[str, Sequence[int]], lengths: Sequence[float], *, zeus: bool
) -> Iterator[str]:
    """Everything, in Markdown."""
    yield f"{describe()}\n"
    found: dict[str, list[Judged]] = {}
    with judged_host(PROFILE) as (agent, collector):
        with neighbour(agent, None):
            known = {kind: repeats[kind] for kind in KINDS if kind != "recurring"}
            found["CPU"] = measure(agent, collector, gpu=None, repeats=known, zeus=zeus)
        alone = measure(agent, collector, gpu=0, repeats=repeats, zeus=zeus, seed=2)
        found["GPU"] = [one for one in alone if one.device == "gpu"]
        with neighbour(agent, 0):
            shared = measure(agent, collector, gpu=0, repeats=repeats, seed=3)
        found["shared GPU"] = [one for one in shared if one.device == "gpu"]
    with judged_host(WANDERING) as (agent, collector), neighbour(agent, None):
        some = {kind: repeats[kind] for kind in ("single", "inside")}
        found["two CPU sockets"] = measure(agent, collector, gpu=None, repeats=some, seed=4)
    yield from table(found, lengths)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer spans, none of 5 s")
    options.add_argument("--no-zeus", action="store_true")
    options.add_argument("--all", action="store_true", help="all lengths")
    chosen = options.parse_args()
    zeus = not chosen.no_zeus and CLIENTS.exists() and os.geteuid() == 0
    lengths = LENGTHS if chosen.all else SHOWN
    for line in report(QUICK if chosen.quick else REPEATS, lengths, zeus=zeus):
        print(line, flush=True)


if __name__ == "__main__":
    main()
